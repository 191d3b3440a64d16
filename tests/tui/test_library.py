"""The list of conversations, and /find in the open one."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from textual.widgets import Input, OptionList

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.tree import ToolRound, ToolUse
from akunu_py.tui.screens.conversation_list import format_time
from akunu_py.tui.transcript.find import plain_text
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import ToolCall
from tests.support.chats import T0, branched, exchange_of
from tests.support.tui_chat import Chat, Compare, chat, has_picture, tree_of

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("utc")]

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


@contextlib.asynccontextmanager
async def library(path: Path) -> AsyncIterator[Chat]:
    """The list of conversations over the haiku, which is open."""
    async with chat(store=path, size=(90, 24)) as it:
        await it.open("haiku")
        await it.press("ctrl+o")
        await it.until(lambda: lines(it))
        yield it


def lines(it: Chat) -> list[str]:
    """The first line of each row."""
    rows = it.app.screen.query_one(OptionList)
    return [str(option.prompt).splitlines()[0].rstrip() for option in rows.options]


def highlighted(it: Chat) -> str | None:
    option = it.app.screen.query_one(OptionList).highlighted_option
    return option.id if option else None


async def test_words_find_a_chat_and_enter_opens_the_message(path: Path) -> None:
    async with library(path) as it:
        words = it.app.screen.query_one("#words", Input)
        words.value = "line"  # no time between the last key
        await words.action_submit()  # and Enter
        await it.until(lambda: it.markdown == ["A line of people."])  # on an inactive branch
        await it.press("ctrl+o")
        await it.until(lambda: lines(it))
        await it.press("down", "down", "down", "up", "enter")
        await it.until(lambda: it.conversation == "list")


async def test_keys_do_nothing_without_a_chat(path: Path, tmp_path: Path) -> None:
    async with library(path) as it:
        await it.press(*"zzz")
        await it.until(lambda: lines(it) == ["Nothing found for: zzz"])
        await it.press("enter", "ctrl+r", "ctrl+d", "ctrl+s", "down")
        assert lines(it) == ["Nothing found for: zzz"]
        await it.press("f1")
        assert "Undo" in it.screen
    async with library(tmp_path / "none.db") as it:
        assert lines(it)[0].startswith("No conversations yet.")
        await it.press("enter", "ctrl+z")
        await it.until(lambda: "There is no recent deletion to undo." in it.notifications)


@pytest.mark.usefixtures("own_directories")
async def test_delete_and_undo(path: Path) -> None:
    async with library(path) as it:
        await it.press("down", "ctrl+d")
        await it.until(lambda: highlighted(it) == "list")
        await it.press("ctrl+d")
        await it.until(lambda: highlighted(it) == "html")
        assert "What is a queue?" in lines(it)[0]
        assert "Say [red]<b>␛[31m" in lines(it)[1]
        assert f"Deleted (Ctrl+Z to undo): {REVERSE}" in it.notifications
        assert it.conversation != "haiku", "it was open"
        for name in ("list", "haiku"):
            await it.press("ctrl+z")
            await it.until(lambda name=name: highlighted(it) == name)  # type: ignore[misc]
        assert len(lines(it)) == 5


async def test_rename(path: Path) -> None:
    async with library(path) as it:
        await it.press("down", "ctrl+r")
        name = it.app.screen.query_one("#name", Input)
        assert (name.value, name.has_focus) == ("Write a haiku about the sea", True)
        name.value = ""
        await it.press(*"Sea", "enter")
        await it.until(lambda: "● Sea" in lines(it)[1])
        assert highlighted(it) == "haiku"
        await it.press("ctrl+r", *"XYZ", "ctrl+d", "down", "escape")
        assert it.app.screen.query_one("#words", Input).has_focus
        assert highlighted(it) == "haiku"
        await it.press("escape")
        assert "Sea" in it.screen.splitlines()[0]


async def test_export(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "what-is-a-queue.md"
    async with library(path) as it:
        await it.press("ctrl+s")
        await it.until(lambda: f"Exported: {file}" in it.notifications)
        assert "You are welcome." in file.read_text("utf-8")


async def test_the_preview_opens_at_the_found_words_and_they_stay_marked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ConversationStore.open(path)
    answer = "\n\n".join(["a line of **words**"] * 60 + ["the `nEEdle` and hÁy", "more\n\n" * 30])
    tree = exchange_of("long", "Go on", answer, T0)
    tree.title = "Needles"  # the preview opens at words in the message, not in the title
    store.save_tree(tree)
    store.close()
    async with chat(store=path, size=(120, 30)) as it:
        await it.press("ctrl+o")
        it.app.screen.query_one("#words", Input).value = "hay needle"
        await it.until_shown("the nEEdle and hÁy")
        marked = [text for row in it.strips() for text, style, _ in row if style and style.bold]
        assert {"nEEdle", "hÁy"} <= {text.strip() for text in marked}
        delayed, call = list[tuple[Callable[..., object], ...]](), it.transcript.call_after_refresh
        monkeypatch.setattr(it.transcript, "call_after_refresh", lambda *each: delayed.append(each))
        await it.press("enter")
        await it.until(lambda: it.notifications)
        assert it.notifications[0].startswith("Found 1 of 2: hay needle")
        for each in reversed(delayed):  # as on a busy machine, where the list closes late
            call(*each)
        await it.rest()
        assert "the nEEdle and hÁy" in it.screen
        await it.press("escape")
        assert not it.app.find.is_active


def test_moments() -> None:
    seconds_ago = (0, -7200, DAY, 6 * DAY, 7 * DAY, 365 * DAY)  # -7200: another machine's clock
    words = ["06:03", "08:03", "yesterday", "Sun", "14 Nov", "21 Nov 2025"]
    assert [format_time(NOW - ago, NOW) for ago in seconds_ago] == words


def test_picture(snap_compare: Compare, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: NOW)
    monkeypatch.setattr("akunu_py.tui.screens.conversation_list.time", clock)
    store = StoreThread(path)

    async def opened(it: Chat) -> None:
        await it.open("haiku")
        await it.press("ctrl+o")
        await it.until(lambda: lines(it))
        await it.until(lambda: it.app.screen.query("#preview AnswerMarkdown"))
        await it.rest()
        store.close(60)

    assert has_picture(snap_compare, opened, (120, 40), store=store)


ANSWER = """\
A **queue** is a *line*; see `Queue` and [the queue](http://q).

- first queue
- second

  ```py
  queue = []  # Queue
  ```

> a quoted queue

| queue | b |
|-------|---|
| 1     | queue |

# A QUEUE heading
"""
HITS = 10


@pytest.fixture
def sixteen_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colors have names in the terminal's own theme."""
    monkeypatch.setenv("COLORTERM", "")
    monkeypatch.setenv("TERM", "xterm")


def colored(it: Chat, color: str) -> list[str]:
    """The texts on the screen with a background color."""
    return [
        text
        for strip in it.strips()
        for text, style, _ in strip
        if style and style.bgcolor and style.bgcolor.name == color
    ]


async def found(it: Chat, what: str) -> None:
    await it.until(lambda: it.notifications and what in it.notifications[0])
    await it.rest()


@pytest.mark.usefixtures("sixteen_colors")
async def test_every_hit_is_marked_and_reached_in_order() -> None:
    assert plain_text(ANSWER).lower().count("queue") == HITS
    assert plain_text("*a* un**believ**able\nend") == "a unbelievable\nend"
    async with chat(size=(80, 60)) as it:
        await it.show(tree_of(("Which queue?", ANSWER), ("no", "nothing")))
        await it.send("/find queue")
        await found(it, f"Found {HITS + 1} of {HITS + 1}: queue")
        assert colored(it, "bright_cyan") == ["QUEUE"]
        assert len(colored(it, "yellow")) == HITS
        for number in range(1, HITS + 2):
            await it.press("n")
            await it.until(lambda words=f"Found {number} of": words in it.notifications[0])  # type: ignore[misc]
            await it.until(lambda: [*map(str.lower, colored(it, "bright_cyan"))] == ["queue"])
        await it.press("N")
        await found(it, f"Found {HITS} of")
        assert colored(it, "bright_cyan") == ["queue"]
        await it.press("escape")
        await it.rest()
        assert not colored(it, "yellow") + colored(it, "bright_cyan")
        assert it.app.focused is it.box


@pytest.mark.usefixtures("sixteen_colors")
async def test_a_hit_far_away_is_scrolled_to() -> None:
    """In turns and sections that are not mounted, in a folded prompt, across a line's end."""
    long = "\n\n".join(f"paragraph {number}" for number in range(100))
    pairs = [(f"prompt {number}", f"answer {number}") for number in range(16)]
    pairs[1] = ("x\n" * 200 + "a needle in the prompt", "yes")
    pairs[3] = ("where?", long.replace("paragraph 17\n", "another needle\n"))
    pairs[5] = ("and?", "word " * 14 + "this needle\nis " + "word " * 30)
    async with chat() as it:
        await it.show(tree_of(*pairs))
        await it.send("/find NEEDLE")
        for number, text in ((3, "this needle"), (1, "a needle in"), (2, "another needle")):
            await found(it, f"Found {number} of 3")
            assert text in it.screen
            assert colored(it, "bright_cyan") == ["needle"]
            if number != 2:
                await it.press("n")
        for key in ("pagedown", "pageup"):
            await it.press(*6 * [key])
            await it.rest()
        assert colored(it, "bright_cyan") == ["needle"]
        await it.press("escape")
        await it.send("/find needle is  word")
        await found(it, "Found 1 of 1")
        assert "".join(colored(it, "bright_cyan")).split() == ["needle", "is", "word"]
        await it.press("escape")
        tree = tree_of(("look it up", "a needle at last"))
        uses = (ToolUse(ToolCall("needle", "{}", "c"), "", "done", "needle"),)
        text = long.replace("paragraph 70\n", "a needle before\n")
        tree.replace(replace(tree["r0"], rounds=(ToolRound(text, uses), ToolRound("needle", uses))))
        await it.show(tree)
        await it.send("/find needle")
        for number, text in ((3, "at last"), (1, "a needle before"), (2, "needle")):
            await found(it, f"Found {number} of 3")
            assert text in it.screen
            assert colored(it, "bright_cyan") == ["needle"]
            await it.press("n")
        await it.press("home")
        await it.until_shown("paragraph 3")


def test_each_answer_of_a_long_chat_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(return_value=[])
    monkeypatch.setattr("akunu_py.tui.transcript.find.parse", parse)
    plain_text.cache_clear()
    for number in 2 * [*range(1000)]:
        plain_text(f"an answer that only this test has: {number}")
    assert parse.call_count == 1000


@pytest.mark.usefixtures("sixteen_colors")
async def test_missing_words_are_reported_and_only_messages_are_marked() -> None:
    async with chat() as it:
        await it.show(tree_of(("ready settings", "ready")))
        await it.send("/find needle")
        await found(it, "Not found in this chat: needle")
        assert it.app.focused is it.box
        await it.send("/find ready")
        await found(it, "Found 2 of 2")
        assert colored(it, "yellow") == ["ready"], "not in the status line, nor in the message"
        it.app.theme = "dark"  # Textual converts the named colors.
        await it.rest()
        shown = [style for row in it.strips() for text, style, _ in row if text == "ready"]
        assert len({style.bgcolor for style in shown if style}) == 2, "the current hit is distinct"


async def test_a_double_click_selects_a_word_and_a_triple_click_a_line() -> None:
    answer = "Der schöne Wörter-Salat (ja).\n\n```py\nfirst = 1\nsecond = first\n```\n"
    async with chat(size=(60, 24)) as it:
        await it.show(tree_of(("one two\nthree", answer + "\n- a list item\n")))
        await it.rest()
        for at, times, selected in (
            ("schöne", 2, "schöne"),
            ("Salat", 3, "Der schöne Wörter-Salat (ja)."),
            ("(ja", 2, "("),
            ("= first", 3, "second = first"),
            ("list", 2, "list"),
        ):
            await it.click_on(at, times=times)
            assert it.app.screen.get_selected_text() == selected
            await it.press("ctrl+c")
            assert it.app.clipboard == selected
            it.app.screen.clear_selection()
