"""Chats are saved as they grow, and resumed; errors of the database stop nothing."""

import contextlib
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from textual.message import Message as TextualMessage
from textual.widgets import Input, OptionList

from akunu_py import paths
from akunu_py.chats import database
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.engine.histories import cache_file
from akunu_py.engine.histories.cache_file import CacheMetadata
from akunu_py.errors import ConversationError
from akunu_py.tui.app import load_state, save_state
from akunu_py.tui.controllers.library import Resume
from akunu_py.tui.screens.conversation_list import ConversationsScreen
from akunu_py.tui.screens.main import Welcome
from akunu_py.tui.workers.chat_client import AnswerFinished
from akunu_py.tui.workers.store_thread import SavingFailed, SavingResumed, StoreThread
from tests.support.chats import T0, add_answer, add_prompt, branched, exchange_of
from tests.support.command import until as until_now
from tests.support.tui_chat import STATS, Chat, chat


def saved(path: Path) -> list[ChatMessage]:
    """What another program finds: the active branches of all conversations."""
    store = ConversationStore.open(path)
    chats = [store.load(info.id) for info in store.list()]
    store.close()
    return [message for chat in chats for message in chat.active_branch()]


def texts_in(path: Path) -> list[str]:
    return [message.text for message in saved(path)]


def write_cache(name: str, conversation: str) -> Path:
    """Write the prompt cache of a conversation."""
    path = paths.prompt_caches_dir() / "model" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    about = CacheMetadata("m", "i", "t", "w", None, True, [1], [], [], conversation, 0.0)
    with path.open("wb") as file:
        cache_file.write(file, about, {}, [], "0", lambda: False)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conversations.db"


@pytest.mark.long
async def test_a_chat_is_saved_while_it_grows_and_opens_again(path: Path) -> None:
    async with chat(store=path) as it:
        await it.send("one")
        await it.piece("half")
        await it.finish("length")
        await it.press("f5")
        await it.answer("whole")
        await it.press("tab", "left", "escape")
        await it.send("waits for ever")
        await it.store.call(lambda store: None)
        assert texts_in(path) == ["one", "half", "waits for ever", ""]
        assert saved(path)[1].stats == STATS
        await it.press("escape")
    assert texts_in(path) == ["one", "half"]

    async with chat(store=path) as it:
        await it.store.call(lambda store: None)
        await it.pilot.pause()
        await it.press("up")
        assert it.text() in ("one", "waits for ever"), "prompts of earlier chats are recalled"
        it.box.clear()
        await it.open((await it.store.call(lambda store: store.list()))[0].id)
        assert (it.prompts, it.markdown) == (["one"], ["half"])
        await it.press("tab", "right")
        assert it.markdown == ["whole"]
        await it.press("escape")
        await it.act("rename_chat('Numbers')")
        assert await it.store.call(lambda store: store.list()[0].title) == "Numbers"
    assert texts_in(path) == ["one", "whole"]


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
        await it.act("export('chat.json')")
        assert "exists" in it.notifications[-1]


OFTEN = exchange_of("01234567-89ab", "Write a haiku about the sea", "Waves.", T0 - 100)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreThread]:
    path = tmp_path / "conversations.db"
    kept = ConversationStore.open(path)
    for tree in (OFTEN, exchange_of("walrus", "Sing of a walrus", "I will.", T0), branched()):
        kept.save_tree(tree)
    kept.close()
    thread = StoreThread(path)
    yield thread
    assert thread.close(60)


@pytest.mark.parametrize(("resume", "opened", "listed"), [
    (Resume(last=True), "queue", None), (Resume("walrus"), "walrus", None),
    (Resume("01234567-8"), OFTEN.conversation, None), (Resume("a"), None, "a"),
    (Resume(), None, ""), (Resume("hippopotamus"), None, None),
])  # fmt: skip
async def test_resuming_opens_or_lists_chats(
    store: StoreThread, resume: Resume, opened: str | None, listed: str | None
) -> None:
    async with chat(store=store, resume=resume) as it:
        if opened:
            await it.until(lambda: it.conversation == opened)
        elif listed is not None:
            await it.until(lambda: isinstance(it.app.screen, ConversationsScreen))
            await it.until(lambda: it.app.screen.query(OptionList))  # its widgets are mounted
            rows = it.app.screen.query_one(OptionList)
            await it.until(lambda: rows.options[1:])
            assert it.app.screen.query_one("#words", Input).value == listed
        else:
            await it.until(lambda: it.notifications)
            assert it.notifications == ["No earlier chat matches: hippopotamus"]


def test_the_state_is_kept_between_runs(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "chat.json"
    assert load_state(path) == {}
    for texts in (["half a\nthought"], ["\ud800"], []):
        state = {"unsent": texts, "failed": {"files": "no node"}}
        save_state(path, state, load_state(path))
        assert load_state(path) == state
    assert path.stat().st_mode & 0o077 == 0
    for mine, both in (("one", ["one"]), ("two", ["one", "two"])):  # two chats that started as one
        save_state(path, {"unsent": [mine]}, state)
        assert load_state(path)["unsent"] == both
    save_state(path, {"unsent": []}, load_state(path))
    assert load_state(path)["unsent"] == []
    for damaged in ("", "[1]", '{"unsent": 3}', '{"failed": []}', "{" * 9000):
        path.write_text(damaged)
        assert load_state(path) == {}


async def test_nothing_of_a_private_chat_is_saved(path: Path) -> None:
    async with chat(store=path) as it:
        await it.send("/private")
        assert await it.store.call(lambda store: store.list()) == []
        await it.send("a secret")
        job = it.app.answering.job_for(it.app.conversation, it.app.conversation.turns[0])
        assert not job.options.may_store, "neither prompt caches nor the answer cache"
        assert it.screen.splitlines()[0].split()[:2] == ["private", "chat"]
        await it.answer("an answer")
        await it.act("rename_chat('a title')")
        await it.press("f5")
        await it.piece("another")
        it.box.insert("unsent")
        assert it.app.state["unsent"] == []
        await it.press("ctrl+n")
        assert (it.app.answering.progress(), it.app.answering.background) == ({}, {})
        it.box.clear()
        await it.send("saved")
        infos = await it.store.call(lambda store: store.list())
        assert [info.title for info in infos] == ["saved"]


async def test_the_box_has_the_unsent_text_and_the_bell_rings_without_focus(
    store: StoreThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chat(store=store, state={"unsent": ["half a thought", "more"]}) as it:
        assert it.text() == it.app.turns.unsent_text == "half a thought\n\nmore"
        rung: list[bool] = []
        monkeypatch.setattr(it.app, "bell", lambda: rung.append(True))
        for number, (seconds, focus, rings) in enumerate(
            ((99.0, True, 0), (1.0, False, 0), (99.0, False, 1)), 1
        ):
            await it.send("more")
            it.app.app_focus = focus
            await it.post(AnswerFinished(number, "stop", replace(STATS, decode_s=seconds)))
            assert len(rung) == rings


@contextlib.asynccontextmanager
async def started(
    path: Path, **intervals: float
) -> AsyncIterator[tuple[StoreThread, list[TextualMessage]]]:
    messages: list[TextualMessage] = []
    it = StoreThread(path, **intervals)
    it.start(messages.append)
    try:
        yield it, messages
    finally:
        it.close(60)


def begun() -> tuple[ChatMessage, ChatMessage]:
    """A prompt and an answer that grows."""
    tree = ConversationTree("c")
    prompt = add_prompt(tree, "Why?")
    return prompt, add_answer(tree, "Be", prompt.id, finish=None)


async def test_new_and_finished_messages_are_written_at_once_and_growing_ones_later(
    path: Path,
) -> None:
    async with started(path, interval_s=1000.0) as (it, _):
        prompt, answer = begun()
        it.save("c", prompt)
        it.save("c", answer)
        until_now(lambda: texts_in(path) == ["Why?", "Be"])
        it.save("c", replace(answer, text="Because"))
        time.sleep(0.2)
        assert texts_in(path) == ["Why?", "Be"]
        it.save("c", replace(answer, text="Because.", finish_reason="stop"))
        until_now(lambda: texts_in(path) == ["Why?", "Because."])


async def test_calls_see_all_earlier_writes(path: Path) -> None:
    async with started(path) as (it, _):
        tree = branched()
        for message in tree.messages:
            it.save("queue", message)
        it.activate_branch("queue", "queue-5")
        saved = await it.call(lambda store: store.load("queue"))
        assert saved.active_branch() == tree.active_branch()
        it.remove("queue", "queue-4", "queue-5")
        saved = await it.call(lambda store: store.load("queue"))
        assert len(saved) == 4
        assert len(await it.call(lambda store: store.search("thanks"))) == 1
        with pytest.raises(ConversationError, match="akunu chats list"):
            await it.call(lambda store: store.load("nowhere"))
    with pytest.raises(ConversationError, match="closed"):
        await it.call(lambda store: store.list())


async def test_a_locked_database_is_written_when_it_is_free(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BUSY_TIMEOUT_S", 0.05)
    async with started(path, retry_s=0.1) as (it, messages):
        prompt, answer = begun()
        it.save("c", prompt)
        assert len(await it.call(lambda store: store.list())) == 1
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        it.save("c", answer)
        it.activate_branch("c", answer.id)
        until_now(lambda: messages)
        assert texts_in(path) == ["Why?"]  # reading needs no lock
        time.sleep(0.4)  # it is tried again, and reported once
        other.execute("ROLLBACK")
        other.close()
        until_now(lambda: len(messages) == 2)
        assert texts_in(path) == ["Why?", "Be"]
    failed, resumed = messages
    assert isinstance(failed, SavingFailed)
    assert "another program is writing" in failed.error
    assert isinstance(resumed, SavingResumed)


async def test_without_a_database_saving_fails_with_the_reason(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    async with started(path) as (it, messages):
        until_now(lambda: messages)
        (failed,) = messages
        assert isinstance(failed, SavingFailed)
        assert "newer akunu" in failed.error
        for message in branched().messages:
            it.save("queue", message)
        with pytest.raises(ConversationError, match="newer akunu"):
            await it.call(lambda store: store.list())
        assert not it.close(60)
        assert it.error == failed.error


async def test_a_damaged_database_is_set_aside_with_a_notice(path: Path) -> None:
    path.write_bytes(b"garbage" * 1000)
    async with chat(store=path) as it:
        await it.send("Why?")
        await it.until(lambda: it.notices)
        assert "was set aside" in it.notices[0]
    assert texts_in(path)[:1] == ["Why?"]


async def test_closing_does_not_wait_for_a_disk_that_does_not_respond(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(ConversationStore, "save", lambda *arguments: answers.wait(30))
    async with started(path) as (it, _):
        for message in branched().messages:
            it.save("queue", message)
        assert not it.close(0.1)
        answers.set()


OTHER = """
import sys
from pathlib import Path
from akunu_py.chats.conversation_store import ConversationStore
print(ConversationStore.open(Path(sys.argv[1])).hold(sys.argv[2:]), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
async def test_a_chat_that_another_process_has_open_continues_on_a_branch(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ConversationStore.open(path)
    for name in ("shared", "mine"):
        store.save_tree(exchange_of(name, "go", "half", T0))
    store.close()
    words = [sys.executable, "-c", OTHER, str(path), "shared"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"set()\n"
        async with chat(store=path) as it:
            await it.open("mine")
            assert it.notices == []
            await it.open("shared")
            assert it.notices[0].startswith("Another akunu has this chat open.")
            last = it.app.conversation.turns[-1]
            last.finish_reason = None  # as if the other process were still writing it
            await it.press("f9")
            await it.answer(" and more")
            assert [turn.answer for turn in it.app.conversation.turns] == ["half and more"]
            assert it.app.conversation.branch_number(last.reply_id) == (1, 2)
            other.communicate()
            await it.open("mine")
            await it.open("shared")
            assert it.notices == []
            with monkeypatch.context() as patch:
                patch.setattr(ConversationStore, "save", Mock(side_effect=OSError("disk full")))
                await it.send("again")
                await it.until(lambda: it.store.error)
            await it.until(lambda: it.store.error is None)
            await it.until(lambda: "Everything is saved again." in it.notifications)
            await it.rest()
            again = subprocess.run(words, input=b"", capture_output=True, check=True)
            assert b"shared" in again.stdout, "the chat is marked as open again"


@pytest.mark.long
@pytest.mark.usefixtures("own_directories")
async def test_deleting_the_chat_on_the_screen_clears_it_and_its_prompt_caches(path: Path) -> None:
    async with chat(store=path) as it:
        await it.talk("one", "first")
        caches = [write_cache("a.safetensors", it.conversation), write_cache("b.safetensors", "b")]
        await it.press("ctrl+o")
        await it.store.call(lambda store: None)
        await it.rest()
        await it.press("ctrl+d")
        await it.store.call(lambda store: None)
        await it.rest()
        await it.press("escape")
        assert it.prompts == []
        assert it.app.conversation.turns == []
        await it.until(lambda: [path.exists() for path in caches] == [False, True])


async def test_failures_of_the_database_stop_no_answer(it: Chat) -> None:
    await it.send("one")
    await it.post(SavingFailed("the disk is full"))
    assert it.notices == ["This chat is not saved for now: the disk is full"]
    await it.answer("first")
    await it.post(SavingResumed())
    assert "Everything is saved again." in it.notifications


async def test_the_first_screen_offers_the_last_chat(store: StoreThread) -> None:
    async with chat(store=store) as it:
        await it.until(lambda: it.app.query_one(Welcome).offers_last_chat)
        for key, offered in (("x", "hidden"), ("backspace", "visible")):
            await it.press(key)
            last = it.app.query_one(Welcome).query_one(".last")
            assert last.styles.visibility == offered, "what Enter does now"
        await it.press("enter")
        await it.until(lambda: len(it.app.conversation.turns) == 2)
        assert it.app.title == "What is a queue?"
