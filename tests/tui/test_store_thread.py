"""The store thread: what is written when, and what happens while nothing can be written."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from textual.message import Message as TextualMessage

from akunu_py.chats import database
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.errors import ConversationError
from akunu_py.tui.workers import store_thread
from akunu_py.tui.workers.store_thread import SavingFailed, SavingResumed, StoreThread, StoreWarning
from tests.support.chats import add_answer, add_prompt, branched
from tests.support.command import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.db"


@contextlib.asynccontextmanager
async def started(path: Path) -> AsyncIterator[tuple[StoreThread, list[TextualMessage]]]:
    messages: list[TextualMessage] = []
    it = StoreThread(path)
    it.start(messages.append)
    try:
        yield it, messages
    finally:
        it.close(10)


def in_file(path: Path) -> list[str]:
    """What another program finds, in the order of the active branch."""
    store = ConversationStore.open(path)
    try:
        return [
            message.text for info in store.list() for message in store.load(info.id).active_branch()
        ]
    finally:
        store.close()


def begun() -> tuple[ChatMessage, ChatMessage]:
    """A prompt and an answer that grows."""
    tree = ConversationTree("c")
    asked = add_prompt(tree, "Why?")
    return asked, add_answer(tree, "Be", asked.id, finish=None)


async def test_new_messages_and_ends_are_written_now_and_the_rest_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_thread, "_INTERVAL_S", 1000.0)
    async with started(path) as (it, _):
        asked, answer = begun()
        it.save("c", asked)
        it.save("c", answer)
        until(lambda: in_file(path) == ["Why?", "Be"])
        it.save("c", replace(answer, text="Because"))
        time.sleep(0.2)
        assert in_file(path) == ["Why?", "Be"]
        it.save("c", replace(answer, text="Because.", finish_reason="stop"))
        until(lambda: in_file(path) == ["Why?", "Because."])


async def test_an_answer_that_grows_is_written_all_the_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_thread, "_INTERVAL_S", 0.2)
    written: list[str] = []
    save = ConversationStore.save

    def counted(
        store: ConversationStore, conversation: str, message: ChatMessage, title: str
    ) -> None:
        written.append(message.text)
        save(store, conversation, message, title)

    monkeypatch.setattr(ConversationStore, "save", counted)
    async with started(path) as (it, _):
        asked, answer = begun()
        it.save("c", asked)
        begin, size = time.monotonic(), 0
        while len(written) < 5:  # the prompt, and four states of the answer
            size += 1
            it.save("c", replace(answer, text="x" * size))
            time.sleep(0.002)
        assert time.monotonic() - begin >= 3 * 0.2
    assert in_file(path) == ["Why?", "x" * size]


async def test_questions_find_what_was_handed_over_before(path: Path) -> None:
    async with started(path) as (it, _):
        tree = branched()
        for message in tree.messages:
            it.save("queue", message)
        it.activate_branch("queue", "queue-5")
        saved = await it.call(lambda store: store.load("queue"))
        assert saved.active_branch() == tree.active_branch()
        it.remove("queue", "queue-4")
        saved = await it.call(lambda store: store.load("queue"))
        assert len(saved) == 4
        assert len(await it.call(lambda store: store.search("thanks"))) == 1
        with pytest.raises(ConversationError, match="akunu chats list"):
            await it.call(lambda store: store.load("nowhere"))
    with pytest.raises(ConversationError, match="closed"):
        await it.call(lambda store: store.list())


async def test_closing_writes_what_is_left(path: Path) -> None:
    async with started(path) as (it, messages):
        asked, answer = begun()
        it.save("c", asked)
        for size in range(100):
            it.save("c", replace(answer, text="x" * size))
        assert it.close(10)
        assert in_file(path) == ["Why?", "x" * 99]
        assert messages == []


async def test_a_locked_database_is_written_when_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store_thread, "_RETRY_S", 0.1)
    async with started(path) as (it, messages):
        asked, answer = begun()
        it.save("c", asked)
        assert len(await it.call(lambda store: store.list())) == 1
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        it.save("c", answer)
        it.activate_branch("c", answer.id)
        until(lambda: messages)
        time.sleep(0.4)  # it is tried again, and told once
        other.execute("ROLLBACK")
        other.close()
        until(lambda: len(messages) == 2)
        assert in_file(path) == ["Why?", "Be"]
    told, again = messages
    assert isinstance(told, SavingFailed)
    assert "another program is writing" in told.error
    assert isinstance(again, SavingResumed)


async def test_the_chat_goes_on_without_a_database(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    async with started(path) as (it, messages):
        until(lambda: messages)
        (told,) = messages
        assert isinstance(told, SavingFailed)
        assert "newer akunu" in told.error
        for message in branched().messages:
            it.save("queue", message)
        with pytest.raises(ConversationError, match="newer akunu"):
            await it.call(lambda store: store.list())
        assert not it.close(10)
        assert it.error == told.error


async def test_a_damaged_database_is_told_of(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)
    async with started(path) as (it, messages):
        asked, _ = begun()
        it.save("c", asked)
        until(lambda: messages)
        until(lambda: in_file(path) == ["Why?"])
        (told,) = messages
        assert isinstance(told, StoreWarning)
        assert "was set aside" in told.text


async def test_a_disk_that_does_not_answer_holds_nobody_up(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ConversationStore, "save", lambda *arguments: answers.wait(30))
    async with started(path) as (it, _):
        for message in branched().messages:
            it.save("queue", message)
        assert not it.close(0.1)
        answers.set()
