"""The first screen, and going on where one left."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Input

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.commands import chat as command
from akunu_py.tui.app import ChatApp, ChatConfig, SavedUiState, load_ui_state, save_ui_state
from akunu_py.tui.controllers.library import Resume
from akunu_py.tui.screens.conversation_list import ConversationsScreen
from akunu_py.tui.screens.main import Welcome, describe_offer
from akunu_py.tui.screens.model_picker import model_rows
from akunu_py.tui.workers.chat_client import AnswerFinished, ModelLoaded
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import GenerateOptions
from tests.support.chats import T0, branched, exchange_of
from tests.support.tui_chat import STATS, Chat, until

OFTEN = exchange_of("0123456789abcdef", "Write a haiku about the sea", "Waves.", T0 - 100)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreThread]:
    path = tmp_path / "conversations.db"
    kept = ConversationStore.open(path)
    for tree in (OFTEN, exchange_of("walrus", "Sing of a walrus", "I will.", T0), branched()):
        kept.save_tree(tree)
    kept.close()
    thread = StoreThread(path)
    yield thread
    assert thread.close(10)


def app_with(store: StoreThread, resume: Resume | None, unsent: str = "") -> ChatApp:
    ui_state = SavedUiState(unsent)
    config = ChatConfig("starter", GenerateOptions(), store=store)
    return ChatApp(replace(config, resume=resume, ui_state=ui_state))


async def test_the_first_screen_at_80x24(store: StoreThread) -> None:
    """Title, offers, and keys, whatever comes; Enter continues the last chat."""
    app = app_with(store, None)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.view.offers_last_chat)
        welcome = app.query_one(Welcome)
        (row,) = [each for each in model_rows(None) if each.name == "qwen3-30b-a3b"]
        offer = welcome.query_one(".offer")
        offer.update(describe_offer(replace(row, tokens_per_s=100)))  # type: ignore[attr-defined]
        offer.display = True
        welcome.show_download("download: 40.0 MB of 100 MB · 3.1 MB/s · 0:20 left")
        await pilot.pause()
        await pilot.pause()
        screen = app.screen.region
        for name in (".title", ".offer", ".download", ".last", ".keys"):
            assert screen.contains_region(welcome.query_one(name).region), name
            assert app.view.transcript.region.contains_region(welcome.query_one(name).region)
        assert str(welcome.query_one(".title").render()).startswith("akunu · starter")
        for key, offered in (("x", "hidden"), ("backspace", "visible")):
            await pilot.press(key)
            assert welcome.query_one(".last").styles.visibility == offered, "what Enter does now"
        await pilot.press("enter")
        await until(pilot, lambda: len(app.conversation.turns) == 2)
        assert app.title == "What is a queue?"


@pytest.mark.parametrize(
    ("resume", "opened", "listed"),
    [
        (Resume(last=True), "queue", None),
        (Resume("walrus"), "walrus", None),
        (Resume("01234567"), OFTEN.conversation, None),
        (Resume("a"), None, "a"),
        (Resume(), None, ""),
        (Resume("hippopotamus"), None, None),
    ],
)
async def test_what_is_opened_at_the_start(
    store: StoreThread, resume: Resume, opened: str | None, listed: str | None
) -> None:
    app = app_with(store, resume)
    async with app.run_test(size=(80, 24)) as pilot:
        if opened:
            await until(pilot, lambda: app.conversation.tree.conversation == opened)
        elif listed is not None:
            await until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
            screen = app.screen
            assert isinstance(screen, ConversationsScreen)
            await until(pilot, lambda: len(screen._found) > 1)
            assert screen.query_one("#words", Input).value == listed
        else:
            await until(pilot, lambda: app.view.message.text)
            assert app.view.message.text == "No earlier chat matches: hippopotamus"


def test_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    for line, latest, resume in (
        ("", False, None), ("--continue", True, None), ("--resume", False, []),
        ("--resume the sea", False, ["the", "sea"]),
    ):  # fmt: skip
        args = parser.parse_args(line.split())
        assert (args.latest, args.resume) == (latest, resume)


def test_what_was_not_sent_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chat.json"
    assert load_ui_state(path) == SavedUiState()
    for text in ("half a\nthought", "\ud800", ""):
        save_ui_state(path, SavedUiState(text, explained=True))
        assert load_ui_state(path) == SavedUiState(text, explained=True)
    assert path.stat().st_mode & 0o077 == 0
    for damaged in ("", "[1]", '{"unsent": 3, "explained": "yes"}', "{" * 9000):
        path.write_text(damaged)
        assert load_ui_state(path) == SavedUiState()


async def test_unsent_text_is_in_the_box_and_the_bell_rings_for_who_looks_away(
    store: StoreThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_with(store, None, "half a thought")
    async with app.run_test(size=(80, 24)) as pilot:
        it = Chat(pilot)
        assert it.text() == app.ui_state.unsent_text == "half a thought"
        rung: list[bool] = []
        monkeypatch.setattr(app, "bell", lambda: rung.append(True))
        await it.post(ModelLoaded("starter", 8192))
        for number, (seconds, focus, rings) in enumerate(
            ((99.0, True, 0), (1.0, False, 0), (99.0, False, 1)), 1
        ):
            await it.send("more")
            app.app_focus = focus
            await it.post(AnswerFinished(number, "stop", replace(STATS, decode_s=seconds)))
            assert len(rung) == rings
