"""Chats are saved as they are made, and opened again with their branches; and when not."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.database import DatabaseFile
from akunu_py.chats.tree import ChatMessage
from akunu_py.decoding.prompt_cache import cache_file
from akunu_py.decoding.prompt_cache.cache_file import CacheMetadata
from akunu_py.tui.screens.conversation_list import ConversationsScreen
from akunu_py.tui.workers import store_thread as store_module
from akunu_py.tui.workers.chat_client import AnswerFinished, ChatClient
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import GenerateOptions, Message, Tool
from tests.support.tui_chat import STATS, at_rest, chat, until


def saved(path: Path) -> list[ChatMessage]:
    """The active branch of the only conversation."""
    store = ConversationStore.open(path)
    (info,) = store.list()
    branch = store.load(info.id).active_branch()
    store.close()
    return branch


class Listening(ChatClient):
    """One that is never started. asked: for which conversations it was."""

    def request(
        self,
        number: int,
        messages: Sequence[Message],
        options: GenerateOptions,
        tools: Sequence[Tool] = (),
    ) -> None:
        self.asked = [options.conversation]


def write_cache(name: str, conversation: str) -> Path:
    """What a model has read of it."""
    path = paths.prompt_caches_dir() / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    about = CacheMetadata("m", "i", "t", "w", None, True, [1], [], [], conversation, 0.0)
    with path.open("wb") as file:
        cache_file.write(file, about, {}, [], lambda: False)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.db"


@pytest.mark.long
async def test_a_chat_is_saved_as_it_is_made_and_opens_again(path: Path) -> None:
    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        await it.send("one")
        await it.piece("half")
        await it.post(AnswerFinished(1, "length", STATS))
        await it.press("ctrl+g")
        await it.answer("whole", turn=2)
        await it.press("tab", "left", "escape")
        await it.send("waits for ever")
        await store_thread.call(lambda store: None)
        assert [message.text for message in saved(path)] == ["one", "half", "waits for ever", ""]
        assert saved(path)[1].stats == STATS
        await it.press("escape")
    assert store_thread.close(10)
    assert [message.text for message in saved(path)] == ["one", "half"]

    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        await store_thread.call(lambda store: None)
        await it.pilot.pause()
        await it.press("up")
        assert it.text() in ("one", "waits for ever"), "prompts of earlier chats are recalled"
        it.box.clear()
        await it.press("ctrl+o")
        assert isinstance(it.app.screen, ConversationsScreen)
        await store_thread.call(lambda store: None)
        await at_rest(it.pilot)
        await it.press("enter")
        await store_thread.call(lambda store: None)
        await it.post()
        assert (it.prompts, it.markdown) == (["one"], ["half"])
        assert "‹ 1/2 ›" in it.feet[0]
        await it.press("tab", "right")
        assert it.markdown == ["whole"]
        await it.press("escape")
        await it.act("rename_chat('Numbers')")
        assert await store_thread.call(lambda store: store.list()[0].title) == "Numbers"
        await it.press("ctrl+n")
        assert it.prompts == []
    assert store_thread.close(10)
    assert [message.text for message in saved(path)] == ["one", "whole"]


@pytest.mark.long
async def test_a_database_that_refuses_stops_nothing(path: Path) -> None:
    path.mkdir()
    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        await it.send("one")
        await it.answer("first")
        await until(it.pilot, lambda: any("not saved" in notice for notice in it.notices))
        assert it.markdown == ["first"]
        await it.press("ctrl+n")
        await it.send("two")
        await it.answer("second", turn=2)
        assert it.markdown == ["second"]
    assert not store_thread.close(1)


async def test_a_locked_database_is_written_to_later(path: Path) -> None:
    ConversationStore.open(path).close()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        await it.send("one")
        await it.answer("first")
        assert it.markdown == ["first"], "nothing waits for the lock"
        other.execute("ROLLBACK")
        other.close()
        await store_thread.call(lambda store: None)
    assert store_thread.close(10)
    assert [message.text for message in saved(path)] == ["one", "first"]


@pytest.mark.long
async def test_a_full_disk_stops_nothing_and_loses_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite itself refuses: the database may not become larger than it is."""
    monkeypatch.setattr(store_module, "_RETRY_S", 0.1)
    monkeypatch.setattr(store_module, "_INTERVAL_S", 0.05)
    is_full = False
    init = DatabaseFile.__init__

    def open_on_small_disk(file: DatabaseFile, path: Path) -> None:
        init(file, path)
        if is_full:
            file.database.execute("PRAGMA max_page_count = 1")  # no more than there are

    monkeypatch.setattr(DatabaseFile, "__init__", open_on_small_disk)
    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        await it.send("one")
        await it.piece("It begins")
        is_full = True
        await store_thread.call(lambda store: store._database.execute("PRAGMA max_page_count = 1"))
        words = " and goes on" * 2000  # more than the pages that are there can take
        await it.piece(words)
        await until(it.pilot, lambda: it.notices)
        assert it.markdown == ["It begins" + words], "the answer goes on"
        (notice,) = it.notices
        assert notice.startswith("This chat is not saved for now: ")
        assert "full" in notice
        await it.post(AnswerFinished(1, "stop", STATS))
        await it.send("two")
        await it.answer("second" * 2000, turn=2)
        assert [message.text for message in saved(path)] == ["one", "It begins"]
        is_full = False
        await until(it.pilot, lambda: "Everything is saved again." in it.notifications)
        expected = ["one", "It begins" + words, "two", "second" * 2000]
        assert [message.text for message in saved(path)] == expected
    assert store_thread.close(10)


@pytest.mark.long
@pytest.mark.usefixtures("own_directories")
async def test_deleting_the_chat_on_the_screen_clears_it(path: Path) -> None:
    """And deletes what models have read of it."""
    store_thread = StoreThread(path)
    async with chat(store=store_thread) as it:
        session = it.app.answering._session = Listening("starter", lambda name: None)  # type: ignore[arg-type,return-value]
        await it.send("one")
        (conversation,) = session.asked
        read = [write_cache("read.safetensors", conversation), write_cache("b.safetensors", "b")]
        await it.answer("first")
        await it.press("ctrl+o")
        await store_thread.call(lambda store: None)
        await at_rest(it.pilot)
        await it.press("ctrl+d")
        await store_thread.call(lambda store: None)
        await at_rest(it.pilot)
        await it.press("escape")
        assert it.prompts == []
        assert it.app.conversation.turns == []
        await until(it.pilot, lambda: [path.exists() for path in read] == [False, True])
    assert store_thread.close(10)


@pytest.mark.long
async def test_a_chat_is_saved_as_a_file(tmp_path: Path) -> None:
    async with chat(directory=tmp_path) as it:
        await it.act("export()")
        assert "empty" in it.notifications[-1]
        await it.send("One, two?")
        await it.answer("Three.")
        for file in ("", "", "chat.json"):
            await it.act(f"export({file!r})")
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["chat.json", "one-two-2.md", "one-two.md"]
        assert "Three." in (tmp_path / "one-two.md").read_text("utf-8")
        await it.act("export('chat.json')")
        assert "exists" in it.notifications[-1]


@pytest.mark.long
async def test_earlier_prompts_are_searched() -> None:
    async with chat() as it:
        await it.press("ctrl+r")
        assert "no earlier" in it.notifications[-1]
        it.box.extend_history(["a red fox", "a blue\nwhale"])
        await it.press("ctrl+r", *"whale blue", "enter")
        assert it.text() == "a blue\nwhale"
        await it.press("ctrl+r", *"nothing", "enter")
        assert it.text() == "a blue\nwhale"
