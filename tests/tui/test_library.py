"""The conversations screen on a real database: keys, and snapshots.

To accept new snapshots: pytest tests/tui/test_library.py --snapshot-update, then look at them.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from textual.content import Content
from textual.message import Message
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.tui.screens.conversation_list import (
    MATCH,
    ChosenConversation,
    ConversationDeleted,
    ConversationRenamed,
    ConversationsScreen,
    format_time,
)
from akunu_py.tui.screens.help import HelpScreen
from akunu_py.tui.workers.store_thread import StoreThread
from tests.support.chats import T0, branched, exchange_of
from tests.support.tui_chat import at_rest, chat, until
from tests.support.tui_host import Compare, Host

pytestmark = pytest.mark.usefixtures("utc")

DAY = 86400.0
NOW = T0 + 1000
HAIKU = "Waves fold into foam,\nthe moon pulls at every thread,\nsalt remembers all."
REVERSE = "How do I reverse a list in Python without changing it, and what does that cost?"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Five conversations; the working directory is empty."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data" / "conversations.db"
    store = ConversationStore.open(path)
    store.save_tree(branched())
    store.save_tree(exchange_of("haiku", "Write a haiku about the sea", HAIKU, T0 - DAY))
    store.save_tree(exchange_of("list", REVERSE, "Use `xs[::-1]`; it copies.", T0 - 3 * DAY))
    store.save_tree(exchange_of("html", "Say [red]<b>\x1b[31m", "It is text.", T0 - 20 * DAY))
    store.save_tree(exchange_of("dinner", "Plan a week of dinners", "Soup.", T0 - 400 * DAY))
    store.close()
    return path


class LibraryHost(Host):
    """Starts the store's thread, and keeps the messages of the screen."""

    def __init__(self, path: Path, theme: str = "dark") -> None:
        self.store_thread = StoreThread(path)
        self.list = ConversationsScreen(self.store_thread, "haiku", clock=lambda: NOW)
        self.messages: list[Message] = []
        super().__init__(self.list, theme)

    async def on_mount(self) -> None:
        self.store_thread.start(self.post_message)
        await super().on_mount()

    def on_unmount(self) -> None:
        self.store_thread.close(10)

    def on_conversation_deleted(self, message: ConversationDeleted) -> None:
        self.messages.append(message)

    def on_conversation_renamed(self, message: ConversationRenamed) -> None:
        self.messages.append(message)

    def lines(self) -> list[str]:
        """The first line of each row."""
        rows = self.list.query_one(OptionList)
        return [str(option.prompt).splitlines()[0].rstrip() for option in rows.options]

    def titles(self) -> list[str]:
        return [each.info.title for each in self.list._found.values()]

    def highlighted(self) -> str | None:
        option = self.list.query_one(OptionList).highlighted_option
        return option.id if option else None

    def notices(self) -> list[str]:
        return [f"{each.title}: {each.message}" for each in self._notifications]


def previewed(app: LibraryHost) -> str:
    return str(app.list.query_one("#text", Static).render())


@contextlib.asynccontextmanager
async def shown(
    path: Path, size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[LibraryHost, Pilot[None]]]:
    app = LibraryHost(path)
    async with app.run_test(size=size, notifications=True) as pilot:
        await until(pilot, lambda: app.lines())
        yield app, pilot


async def test_the_latest_come_first(path: Path) -> None:
    async with shown(path) as (app, _):
        assert [line.split("  ")[-1].strip() for line in app.lines()] == [
            "05:50",
            "yesterday",
            "Wed",
            "1 Nov",
            "17 Oct 2025",
        ]
        assert app.lines()[1].startswith("● Write a haiku about the sea")
        assert app.lines()[3].startswith("  Say [red]<b>␛[31m ")
        assert app.highlighted() == "queue"


async def test_words_find_and_enter_opens_where_they_are(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press(*"line")
        await until(pilot, lambda: app.highlighted() == "queue")
        await pilot.press("enter")
        await until(pilot, lambda: app.results)
    assert app.results == [ChosenConversation("queue", "queue-2")]  # on a branch that is not active


async def test_enter_waits_for_what_the_words_find(path: Path) -> None:
    async with shown(path) as (app, pilot):
        app.list.query_one("#words", Input).value = "line"  # no time between the last key
        await app.list.query_one("#words", Input).action_submit()  # and Enter
        await until(pilot, lambda: app.results)
    assert app.results == [ChosenConversation("queue", "queue-2")]


async def test_arrows_choose_while_one_types(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press("down", "down", "down", "up", "enter")
    assert app.results == [ChosenConversation("list")]


@pytest.mark.long
async def test_f1_shows_the_keys(path: Path) -> None:
    store = StoreThread(path)
    async with chat(store=store) as it:
        await it.press("ctrl+o", "f1")
        assert isinstance(it.app.screen, HelpScreen)
    store.close(10)


async def test_escape_opens_nothing(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press("down", "escape")
    assert app.results == [None]


async def test_nothing_found(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press(*"zzz")
        await until(pilot, lambda: app.lines() == ["Nothing found for: zzz"])
        await pilot.press("enter", "ctrl+r", "ctrl+d", "ctrl+s", "down")
        assert app.results == []
        await pilot.press("backspace", "backspace", "backspace")
        await until(pilot, lambda: len(app.lines()) == 5)


async def test_no_conversations(tmp_path: Path) -> None:
    async with shown(tmp_path / "none.db") as (app, pilot):
        assert app.lines()[0].startswith("No conversations yet.")
        await pilot.press("enter", "ctrl+z")
        await until(pilot, app.notices)
        assert app.notices() == [": There is no recent deletion to undo."]


async def test_delete_and_undo(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press("down", "ctrl+d")
        await until(pilot, lambda: app.highlighted() == "list")
        await pilot.press("ctrl+d")
        await until(pilot, lambda: app.highlighted() == "html")
        assert app.titles()[:2] == ["What is a queue?", "Say [red]<b>\x1b[31m"]
        deleted = [each for each in app.messages if isinstance(each, ConversationDeleted)]
        assert [each.conversation for each in deleted] == ["haiku", "list"]
        assert "Deleted (Ctrl+Z to undo): Write a haiku about the sea" in app.notices()[0]
        await pilot.press("ctrl+z")
        await until(pilot, lambda: app.highlighted() == "list")
        await pilot.press("ctrl+z")
        await until(pilot, lambda: app.highlighted() == "haiku")
        assert len(app.lines()) == 5
        assert not [line for line in app.lines() if "●" in line], (
            "another chat is on the screen now"
        )


async def test_a_title_is_typed_at_once_and_stays_in_sight(path: Path) -> None:
    """Keys that come right after Ctrl+R belong to the title, and a renamed row does not vanish."""
    async with shown(path) as (app, pilot):
        await pilot.press(*"haiku")
        await until(pilot, lambda: app.titles() == ["Write a haiku about the sea"])
        app.list.action_rename()
        assert app.list.focused is app.list.query_one("#name", Input), "before anything is drawn"
        app.list.query_one("#name", Input).value = "Sea"
        await pilot.press("enter")
        await until(pilot, lambda: app.titles() == ["Sea"])
        assert app.list.query_one("#words", Input).value == "haiku"


async def test_a_huge_prompt_is_previewed_in_part(path: Path) -> None:
    store = ConversationStore.open(path)
    store.save_tree(exchange_of("huge", "x " * 125_000, "Yes.", T0 + 500))
    store.close()
    async with shown(path, (120, 40)) as (app, pilot):
        await until(pilot, lambda: "more characters" in previewed(app))
        assert len(previewed(app)) < 4000


async def test_rename(path: Path) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press("down", "ctrl+r")
        name = app.list.query_one("#name", Input)
        assert (name.value, name.has_focus) == ("Write a haiku about the sea", True)
        name.value = ""
        await pilot.press(*"Sea", "enter")
        await until(pilot, lambda: "Sea" in app.titles())
        assert app.highlighted() == "haiku"
        (renamed,) = app.messages
        assert isinstance(renamed, ConversationRenamed)
        assert (renamed.conversation, renamed.title) == ("haiku", "Sea")
        await pilot.press("ctrl+r", *"XYZ", "ctrl+d", "down", "escape")
        assert app.list.query_one("#words", Input).has_focus
        assert app.highlighted() == "haiku"
        assert "Sea" in app.titles()
        await pilot.press("escape")
    assert app.results == [None]


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ([], "what-is-a-queue.md"),
        (["down"], "what-is-a-queue.json"),
        (["up"], "what-is-a-queue.json"),
    ],
)
async def test_export(path: Path, tmp_path: Path, keys: list[str], name: str) -> None:
    async with shown(path) as (app, pilot):
        await pilot.press("ctrl+s", *keys)
        assert str(app.screen.query_one("#file", Static).render()) == str(tmp_path / name)
        await pilot.press("enter")
        await until(pilot, app.notices)
        assert app.notices() == [f"Exported: {tmp_path / name}"]
        assert "You are welcome." in (tmp_path / name).read_text("utf-8")
        await pilot.press("ctrl+s", "escape")
        assert app.screen is app.list


@pytest.mark.long
async def test_a_wide_screen_shows_a_preview(path: Path) -> None:
    async with shown(path, (120, 40)) as (app, pilot):
        text = app.list.query_one("#text", Static)
        await until(pilot, lambda: "You are welcome." in str(text.render()))
        assert "A line of people." not in str(text.render())
        title = str(text.render()).split("\n")[0]
        assert title in str(app.list.rows.get_option_at_index(0).prompt)
        await pilot.press(*"people")

        def marked() -> set[str]:
            preview = text.render()
            assert isinstance(preview, Content)
            spans = (span for span in preview.spans if span.style == MATCH)
            return {preview.plain[span.start : span.end] for span in spans}

        await until(pilot, lambda: marked() == {"people"})  # and not those of "p"
        assert "A line of people." in str(text.render())
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: not app.list.query_one("#preview").display)


async def test_a_database_that_cannot_be_opened(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    async with shown(path) as (app, pilot):
        await until(pilot, lambda: "newer akunu" in app.lines()[0])
        await pilot.press("enter", "ctrl+z")
        await until(pilot, app.notices)
        assert "newer akunu" in app.notices()[0]
        assert app.results == []


@pytest.mark.parametrize(
    ("then", "words"),
    [
        (NOW, "06:03"),
        (NOW + 7200, "08:03"),  # another machine's clock
        (NOW - DAY, "yesterday"),
        (NOW - 6 * DAY, "Sun"),
        (NOW - 7 * DAY, "14 Nov"),
        (NOW - 365 * DAY, "21 Nov 2025"),
    ],
)
def test_moments(then: float, words: str) -> None:
    assert format_time(then, NOW) == words


SNAPSHOTS: list[tuple[str, tuple[str, ...], tuple[int, int], str]] = [
    ("list", (), (80, 24), "dark"),
    ("list", (), (120, 40), "dark"),
    ("list", (), (40, 10), "dark"),
    ("found", (*"py", "space", *"li"), (120, 40), "light"),
    ("found", tuple("haiku"), (80, 24), "dark"),
    ("nothing", tuple("zzz"), (80, 24), "dark"),
    ("rename", ("down", "ctrl+r"), (80, 24), "dark"),
    ("export", ("ctrl+s",), (80, 24), "dark"),
]


@pytest.mark.parametrize(
    ("keys", "size", "theme"),
    [
        pytest.param(keys, size, theme, id=f"{name}-{size[0]}x{size[1]}-{theme}")
        for name, keys, size, theme in SNAPSHOTS
    ],
)
def test_picture(
    snap_compare: Compare,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keys: tuple[str, ...],
    size: tuple[int, int],
    theme: str,
) -> None:
    monkeypatch.setattr("akunu_py.tui.screens.conversation_list.Path.cwd", lambda: Path("/home/me"))
    app = LibraryHost(path, theme)

    async def press(pilot: Pilot[None]) -> None:
        await until(pilot, app.lines)
        await pilot.press(*keys)
        await at_rest(pilot)  # the list, then the preview

    assert snap_compare(app, terminal_size=size, run_before=press)
