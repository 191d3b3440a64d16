"""Titles and summaries that the model writes."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from akunu_py.chats.options import ChatOptions
from akunu_py.engine.events import TextDelta
from akunu_py.settings import Settings
from akunu_py.tui.controllers.side_requests import TITLE_PROMPT, usable_title
from akunu_py.tui.open_conversation import SUMMARY_PROMPT
from akunu_py.tui.prompt.attachments import title_text
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    PieceArrived,
    TitleWritten,
)
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import Message
from tests.support.tui_chat import STATS, Chat, chat


def record_titles(it: Chat) -> Any:
    """Return the list of the titles that are requested from now on, as calls."""
    it.app.titles._client = client = Mock()
    return client.request_title.call_args_list


async def written(it: Chat, text: str, conversation: str = "") -> None:
    await it.post(TitleWritten(conversation or it.conversation, text))
    await it.app.workers.wait_for_complete()
    await it.pilot.pause()


async def stored(store: StoreThread) -> list[str]:
    return [info.title for info in await store.call(lambda each: each.list())]


async def test_the_first_answer_gets_a_title(tmp_path: Path) -> None:
    settings = Settings(system_prompt="Be brief.")
    async with chat(store=tmp_path / "conversations.db", settings=settings) as it:
        titles = record_titles(it)
        await it.send("how do I undo a commit?")
        assert not titles
        await it.answer("With git reset.")
        ((name, job),) = [call.args for call in titles]
        assert (name, job.tools) == (it.conversation, [])
        assert job.messages == [
            Message("system", "Be brief."), Message("user", "how do I undo a commit?"),
            Message("assistant", "With git reset."), Message("user", TITLE_PROMPT),
        ]  # fmt: skip
        assert (job.options.conversation, job.options.side_request) == (it.conversation, True)
        assert await stored(it.store) == ["how do I undo a commit?"]
        await it.press("ctrl+n")
        await written(it, "Undo a git commit", name)
        await written(it, "Never requested", "another")
        assert await stored(it.store) == ["Undo a git commit"]
        await it.open(name)
        await it.talk("next", "Yes.")
        assert "Undo a git commit" in it.screen.splitlines()[0]
        assert len(titles) == 1
        assert TITLE_PROMPT not in [message.text for message in it.app.conversation.tree.messages]


@pytest.mark.long
async def test_a_title_is_requested_after_the_first_complete_answers_only() -> None:
    async with chat(settings=Settings(model_titles=False)) as it:
        titles = record_titles(it)
        await it.talk("one", "Off.")
        it.app.settings.current = Settings()
        for end in ("stopped", "failed", "empty"):
            await it.act("new_chat")
            it.box.clear()
            await it.send("one")
            if end != "empty":
                await it.piece("An answer")
            if end == "stopped":
                await it.press("escape")
            elif end == "failed":
                await it.post(AnswerFailed(it.request(), "the device is gone"))
            else:
                await it.finish("cancelled")
        await it.act("new_chat")
        it.box.clear()
        await it.send("one")
        await it.send("two")
        await it.answer("Another prompt waits.")
        assert not titles
        await it.answer("Yes.")
        await it.talk("three", "Yes.", "four", "Yes.")
        assert len(titles) == 2, "again, because a prompt cancels a title"


async def test_the_title_of_a_user_stays(tmp_path: Path) -> None:
    async with chat(store=tmp_path / "conversations.db") as it:
        titles = record_titles(it)
        await it.send("one")
        await it.act("rename_chat('Mine')")
        await it.answer("Yes.")
        assert not titles
        await written(it, "By the model")
        await it.act("new_chat")
        await it.talk("two", "Yes.")
        name = it.conversation
        await it.store.call(lambda each: each.rename(name, "Also mine"))  # by another program
        await written(it, "By the model")
        assert await stored(it.store) == ["Also mine", "Mine"]


@pytest.mark.parametrize(("text", "title"), [
    *((text, "") for text in ("Here's a title for the conversation", "Sure", "...", " \n")),
    ("I'm here to help with your writing", ""), ("Title: rice", ""),
    ("A title of this conversation", ""), ("Iced tea", "Iced tea"),
    ("Paris is the capital.", "Paris is the capital"), (" Rice,\n how  to ", "Rice, how to"),
    ("one two three four five six seven eight", "one two three four five six seven eight"),
    ("one two three four five six seven eight nine", ""), ("\x1b[31mred\x1b[0m", "[31mred[0m"),
])  # fmt: skip
def test_usable_titles(text: str, title: str) -> None:
    assert usable_title(text) == title


@pytest.mark.parametrize(("prompt", "title"), [
    ("Say hello in one word.", "Say hello in one word"),
    ("What is a hash table? Show a short Python example.", "What is a hash table?"),
    ("Please explain queues.\nBriefly.", "Explain queues"),
    ("# Fix `x`: it fails, e.g. here. Thanks!", "Fix `x`: it fails, e.g. here"),
    ("3. one", "3. one"),
])  # fmt: skip
def test_the_first_sentence_of_the_question_is_the_first_title(prompt: str, title: str) -> None:
    assert title_text(prompt) == title


async def talk(it: Chat, count: int = 3) -> list[str]:
    """Turns, of which a quarter of the context holds the last only."""
    for number in range(1, count + 1):
        await it.send(f"prompt {number}")
        stats = replace(STATS, prompt_tokens=800 * number)
        text = TextDelta(f"answer {number} " * 300)
        await it.post(PieceArrived(number, text), AnswerFinished(number, "stop", stats))
    return it.prompts


NOTE = "/compact\n‹ 2/2 ›"


@pytest.mark.long
async def test_older_turns_become_a_note(tmp_path: Path) -> None:
    async with chat(store=tmp_path / "conversations.db") as it:
        before = await talk(it, 4)
        original = [turn.answer for turn in it.app.conversation.turns]
        it.app.conversation.set_options(ChatOptions(max_tokens=7))
        await it.send("/compact")
        assert it.prompts == [NOTE]
        active = it.app.answering.active
        assert active is not None
        await it.send("next")
        assert (it.prompts, it.text()) == ([NOTE], "next"), "sent after the summary"
        assert [message.content for message in it.history] == [
            before[0], original[0], before[1], original[1], SUMMARY_PROMPT,
        ]  # fmt: skip
        options = it.app.answering.job_for(it.app.conversation, active).options
        assert (options.max_tokens, options.thinking_budget) == (8192 // 5, 8192 // 10)
        await it.answer("They talked.")
        await it.rest()
        assert it.prompts == [NOTE, *before[2:]]
        assert "← on it shows the original chat" in it.notifications[0]
        assert "context" not in str(it.app.view.title_row.render()), "unknown until the next answer"
        await it.press("enter")
        assert [message.content for message in it.history] == [
            SUMMARY_PROMPT, "They talked.", before[2], original[2], before[3], original[3], "next",
        ]  # fmt: skip
        await it.answer("Yes.")
        await it.press("tab", "home", "left")
        before[0] += "\n‹ 1/2 ›"
        assert it.prompts == before
        await it.press("right", "r")
        assert "Press ← on this summary for the original chat" in it.notifications[0]
        assert it.app.answering.active is None


@pytest.mark.long
@pytest.mark.parametrize("end", ["stopped", "failed early", "empty"])
async def test_a_missing_summary_changes_nothing(it: Chat, end: str) -> None:
    before = await talk(it)
    await it.send("/compact")
    if "early" not in end:
        await it.piece("They") if end != "empty" else None
    if "stopped" in end:
        await it.press("escape")
    elif "failed" in end:
        await it.post(AnswerFailed(4, "the device is gone"))
    else:
        await it.post(AnswerFinished(4, "stop", STATS))
    await it.rest()
    assert (it.prompts, it.text()) == (before, "")
    assert len(it.app.conversation.tree.messages) == 6
    await it.send("next")
    assert [message.content for message in it.history][::2] == [*before, "next"]


async def test_compact_needs_finished_answers_and_cuts_what_does_not_fit(it: Chat) -> None:
    await it.send("/compact")
    assert it.notifications == ["There is nothing to summarize yet."]
    await it.send(long := "word " * 2000)
    await it.send("/compact")
    assert it.notifications == ["The model is still answering. Esc stops it."]
    await it.piece("1")
    await it.finish(stats=replace(STATS, prompt_tokens=8100))
    await it.send("/compact")
    assert it.prompts == [NOTE], "one turn is enough"
    assert " characters left out ...]" in it.history[0].content
    assert len(it.history[0].content) < 0.8 * len(long)


@pytest.mark.long
async def test_compact_cuts_an_answer_that_fills_the_context() -> None:
    whole = "".join(f"number {number}\n" for number in range(1500))
    async with chat() as it:
        await it.send("count")
        stats = replace(STATS, prompt_tokens=100, generated_tokens=8092)
        finished = AnswerFinished(it.request(), "context", stats)
        await it.post(PieceArrived(it.request(), TextDelta(whole)), finished)
        assert it.notifications == ["The context is 100% full. /compact makes room."]
        assert it.feet[-1] == "… the context is full; /compact makes room"
        await it.send("/compact")
        await it.rest()
        assert it.notifications == [
            "Cut the middle of the longest answer. ← on it shows all of it."
        ]
        assert it.feet[-1] == "■ stopped; F9 continues   ‹ 2/2 ›"
        assert "context" not in str(it.app.view.title_row.render())
        await it.send("and now?")
        cut = it.history[-2].content
        assert len(cut) < len(whole) / 3
        assert cut.startswith("number 0\n")
        assert cut.endswith("number 1499\n")
        assert " characters left out ...]" in cut
        await it.answer("Done.")
        await it.press("tab", "up", "up", "left")
        assert it.app.conversation.turns[-1].answer == whole


@pytest.mark.long
async def test_compact_is_proposed_once_when_the_context_is_nearly_full() -> None:
    proposed = "The context is 90% full. /compact makes room."
    async with chat() as it:
        for number, used in enumerate((100, 6900, 7361, 7362, 7400), 1):
            await it.send(f"{number}")
            stats = replace(STATS, prompt_tokens=used)
            await it.post(
                PieceArrived(number, TextDelta("x", stats=stats)),
                AnswerFinished(number, "stop", stats),
            )
            assert it.notifications == ([proposed] if number == 3 else [])
            it.app.view.message.clear()
