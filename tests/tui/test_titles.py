"""Titles by the model: requested after an answer, never against the user, usable or none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.generate.annotated_answer import AnnotatedAnswerJob
from akunu_py.decoding.model.engine import Engine
from akunu_py.settings import Settings
from akunu_py.tui.controllers.titles import TITLE_PROMPT, usable_title
from akunu_py.tui.screens.conversation_list import ConversationRenamed
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished, ChatClient, TitleWritten
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import GenerateOptions, Message
from tests.support.tiny_fim import byte_level, write_model
from tests.support.tui_chat import STATS, Chat, chat, until


class Titles:
    """Records the requested titles."""

    def __init__(self, it: Chat) -> None:
        self.requests: list[tuple[str, list[Message], GenerateOptions, Any]] = []
        it.app.titles._client = self  # type: ignore[assignment]

    def request_title(self, *request: Any) -> None:
        self.requests.append(request)


def name_of(it: Chat) -> str:
    return it.app.conversation.tree.conversation


async def written(it: Chat, text: str, conversation: str = "") -> None:
    await it.post(TitleWritten(conversation or name_of(it), text))
    await it.app.workers.wait_for_complete()
    await it.pilot.pause()


@contextlib.asynccontextmanager
async def answered_chat(tmp_path: Path) -> AsyncIterator[tuple[Chat, Titles, StoreThread]]:
    """A saved chat, titled "one", whose first prompt is answered."""
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store) as it:
        titles = Titles(it)
        await it.send("one")
        await it.answer("Yes.")
        yield it, titles, store
    store.close(10)


async def stored(store: StoreThread) -> list[str]:
    return [info.title for info in await store.call(lambda each: each.list())]


async def test_the_first_answer_gets_a_title(tmp_path: Path) -> None:
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store, settings=Settings(system_prompt="Be brief.")) as it:
        titles = Titles(it)
        await it.send("how do I undo a commit?")
        assert not titles.requests
        await it.answer("With git reset.")
        ((name, messages, options, tools),) = titles.requests
        assert (name, tools) == (name_of(it), [])
        assert messages == [
            Message("system", "Be brief."),
            Message("user", "how do I undo a commit?"),
            Message("assistant", "With git reset."),
            Message("user", TITLE_PROMPT),
        ]
        assert (options.conversation, options.side_request) == (name_of(it), True)
        assert await stored(store) == ["how do I undo a commit?"]
        stats, saved = it.app.conversation.turns[0].stats, len(it.app.conversation.tree)
        await written(it, "Undo a git commit")
        assert await stored(store) == ["Undo a git commit"]
        assert "Undo a git commit" in it.screen_text().splitlines()[0]
        assert (it.app.conversation.turns[0].stats, len(it.app.conversation.tree)) == (stats, saved)
        found = await store.call(lambda each: each.search("undo git commit"))
        assert len(found) == 1
        await it.send("next")
        await it.answer("Yes.", turn=2)
        assert len(titles.requests) == 1
        assert TITLE_PROMPT not in [message.content for message in messages_of(it)]
    assert store.close(10)


def messages_of(it: Chat) -> list[Message]:
    return it.app.conversation.history(it.app.conversation.turns[-1])


@pytest.mark.parametrize("end", ["off", "stopped", "failed", "empty", "queued"])
async def test_no_title_is_requested(end: str) -> None:
    async with chat(settings=Settings(model_titles=end != "off")) as it:
        titles = Titles(it)
        await it.send("one")
        if end == "queued":
            await it.send("two")
        if end != "empty":
            await it.piece("An answer")
        if end == "stopped":
            await it.press("escape")
        elif end == "failed":
            await it.post(AnswerFailed(1, "the device is gone"))
        else:
            await it.post(AnswerFinished(1, "cancelled" if end == "empty" else "stop", STATS))
        assert not titles.requests
        if end == "queued":
            await it.answer("Another", turn=2)
            assert len(titles.requests) == 1


async def test_a_cancelled_title_is_requested_again_a_few_times() -> None:
    async with chat() as it:
        titles = Titles(it)
        for number in range(1, 6):
            await it.send(f"prompt {number}")
            await it.answer("Yes.", turn=number)
        assert len(titles.requests) == 3


@pytest.mark.parametrize("where", ["command", "list", "store"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_title_of_the_user_stays(tmp_path: Path, where: str, when: str) -> None:
    """Even if it equals the title from the prompt. where: "store": another program."""
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store) as it:
        titles, title = Titles(it), "one" if where == "list" else "Mine"
        await it.send("one")
        if when == "after":
            await it.answer("Yes.")
        name = name_of(it)
        if where == "command":
            await it.act(f"rename_chat({title!r})")
        else:
            await store.call(lambda each: each.rename(name, title))
        if where == "list":
            await it.post(ConversationRenamed(name, title))
        if when == "before":
            await it.answer("Yes.")
            assert len(titles.requests) == (where == "store")
        await written(it, "By the model")
        assert await stored(store) == [title]
    assert store.close(10)


async def test_a_title_arrives_in_another_conversation(tmp_path: Path) -> None:
    async with answered_chat(tmp_path) as (it, _, store):
        name = name_of(it)
        await it.press("ctrl+n")
        await it.send("two")
        await written(it, "The first", name)
        await written(it, "Never requested", "another")
        assert sorted(await stored(store)) == ["The first", "two"]
        assert it.app.conversation.tree.title == "two"
        await store.call(lambda each: each.delete(name))
        await written(it, "Again", name)


async def test_a_resumed_chat_keeps_its_title(tmp_path: Path) -> None:
    async with answered_chat(tmp_path) as (it, titles, _):
        await written(it, "The first")
        name = name_of(it)
        await it.press("ctrl+n")
        await it.app.open_chat(name)
        await it.send("next")
        await it.answer("Yes.", turn=2)
        assert len(titles.requests) == 1


async def test_a_broken_store_keeps_the_title(tmp_path: Path) -> None:
    async with answered_chat(tmp_path) as (it, _, store):
        await stored(store)
        assert store.close(10)
        await written(it, "By the model")
        assert it.app.conversation.tree.title == "one"


async def test_a_summary_gets_no_title() -> None:
    async with chat() as it:
        titles = Titles(it)
        for number in (1, 2):
            await it.send(f"prompt {number}")
            await it.piece("answer " * 500, turn=number)
            await it.post(AnswerFinished(number, "stop", replace(STATS, prompt_tokens=900)))
        await it.send("/compact")
        await it.answer("They talked.", turn=3)
        await until(it.pilot, lambda: not it.app.answering.is_busy)
        assert len(titles.requests) == 2


def test_a_model_that_may_think_writes_a_title_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Qwen 3: its template adds an empty thought where thinking is off."""
    markers = ("<|im_end|>", "<think>", "<|im_start|>", "</think>")
    write_model(tmp_path / "m", byte_level(markers), end=markers[0])
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
        "<|im_start|>{% if enable_thinking is false %}<think></think>{% endif %}"
    )
    jobs: list[AnnotatedAnswerJob] = []
    client = ChatClient("m", lambda name: pytest.fail("no model is needed"))
    monkeypatch.setattr(client._host, "submit", lambda job, *_, **__: jobs.append(job))
    client.request_title("a chat", [Message("user", "one")], GenerateOptions(thinking="on"))
    engine = Engine.load(tmp_path / "m", name="m")
    prompt = engine.tokens.decode(jobs[0].prepare(engine).prompt)
    assert prompt == "<|im_start|>one<|im_end|><|im_start|><think></think>"


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Here's a title for the conversation", ""),
        ("I'm here to help with your writing", ""),
        ("Sure", ""),
        ("Title: rice", ""),
        ("A title of this conversation", ""),
        ("Iced tea", "Iced tea"),
        ("Paris is the capital.", "Paris is the capital"),
        ("...", ""),
        ("Undo a git commit", "Undo a git commit"),
        (" Rice,\n how  to ", "Rice, how to"),
        ("one two three four five six seven eight", "one two three four five six seven eight"),
        ("one two three four five six seven eight nine", ""),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("", ""),
        (" \n", ""),
    ],
)
def test_what_is_usable_as_a_title(text: str, title: str) -> None:
    assert usable_title(text) == title
