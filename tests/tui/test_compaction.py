"""/compact: older turns become a note on a branch of its own; the original is not lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.chats.options import ChatOptions
from akunu_py.chats.tree import ChatMessage
from akunu_py.tui.controllers.compaction import _CUT, _last_that_fit, _messages
from akunu_py.tui.open_conversation import SUMMARY_PROMPT, ChatTurn
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished, PieceArrived
from akunu_py.tui.workers.store_thread import StoreThread
from akunu_py.types import Message
from tests.support.tui_chat import STATS, Chat, at_rest, chat

TURNS = st.lists(st.tuples(st.text(max_size=90), st.text(min_size=1, max_size=90)), min_size=1)


def turns_of(texts: list[tuple[str, str]]) -> list[ChatTurn]:
    return [ChatTurn(ChatMessage("user", prompt), answer) for prompt, answer in texts]


async def talk(it: Chat, count: int = 3) -> list[str]:
    """Turns, of which a quarter of the context holds the last only."""
    for number in range(1, count + 1):
        await it.send(f"prompt {number}")
        await it.piece(f"answer {number} " * 300, turn=number)
        stats = replace(STATS, prompt_tokens=800 * number)
        await it.post(AnswerFinished(number, "stop", stats))
    return it.prompts


NOTE = f"{SUMMARY_PROMPT}\n‹ 2/2 ›"


async def test_older_turns_become_a_note(tmp_path: Path) -> None:
    store = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store) as it:
        before = await talk(it, 4)
        original = [turn.answer for turn in it.app.conversation.turns]
        it.app.conversation.set_options(ChatOptions(max_tokens=7))
        await it.send("/compact")
        assert it.prompts == [NOTE]
        assert it.app.answering.active is not None
        *asked, last = it.history
        assert last == Message("user", SUMMARY_PROMPT)
        assert [each.content for each in asked[::2]] == before[:2]
        assert [each.content for each in asked[1::2]] == original[:2]
        options = it.app.answering._options_of(it.app.conversation, it.app.answering.active)
        assert (options.max_tokens, options.thinking_budget) == (8192 // 5, 8192 // 10)
        await it.answer("They talked.", turn=5)
        await at_rest(it.pilot)
        assert it.prompts == [NOTE, *before[2:]]
        assert "← on it shows the original chat" in it.notifications[0]
        assert "context" not in str(it.status.render()), "unknown until the next answer"
        await it.send("next")
        assert [message.content for message in it.history] == [
            SUMMARY_PROMPT, "They talked.", before[2], original[2], before[3], original[3], "next",
        ]  # fmt: skip
        await it.answer("Yes.", turn=6)
        await it.press("tab", "home", "left")
        before[0] += "\n‹ 1/2 ›"
        assert it.prompts == before
        name = it.app.conversation.tree.conversation
        await it.press("escape", "ctrl+n")
        await it.app.open_chat(name)
        assert it.prompts == before
        await it.press("tab", "home", "right")
        assert it.prompts == [NOTE, *before[2:], "next"]
    assert store.close(10)


@pytest.mark.parametrize("end", ["stopped", "stopped early", "failed", "failed early", "empty"])
async def test_a_summary_that_does_not_come_changes_nothing(end: str) -> None:
    async with chat() as it:
        before = await talk(it)
        await it.send("/compact")
        if "early" not in end:
            await it.piece("They", turn=4) if end != "empty" else None
        if "stopped" in end:
            await it.press("escape")
        elif "failed" in end:
            await it.post(AnswerFailed(4, "the device is gone"))
        else:
            await it.post(AnswerFinished(4, "stop", STATS))
        await at_rest(it.pilot)
        assert (it.prompts, it.text()) == (before, "")
        assert len(it.app.conversation.tree.messages) == 6
        await it.send("next")
        assert [message.content for message in it.history][::2] == [*before, "next"]


async def test_what_cannot_be_summarized_says_so() -> None:
    async with chat() as it:
        await it.send("/compact")
        assert it.notifications == ["There is nothing to summarize yet."]
        await it.send("one")
        await it.send("/compact")
        assert it.notifications == ["The model is still answering. Esc stops it."]
        await it.answer("1")
        await it.send("/compact")
        assert it.notifications == ["There is nothing to summarize yet."]


async def test_a_note_is_not_written_again_without_the_original() -> None:
    async with chat() as it:
        await talk(it, 2)
        await it.send("/compact")
        await it.answer("They talked.", turn=3)
        await at_rest(it.pilot)
        await it.press("tab", "home", "r")
        assert "Press ← on this summary for the original chat" in it.notifications[0]
        assert it.app.answering.active is None


async def test_it_is_proposed_once_when_the_context_is_nearly_full() -> None:
    proposed = "The context is 90% full. /compact replaces older messages with a summary."
    async with chat() as it:
        for number, used in enumerate((100, 6900, 7361, 7362, 7400), 1):
            await it.send(f"{number}")
            stats = replace(STATS, prompt_tokens=used)
            await it.post(
                PieceArrived(number, "x", (), stats), AnswerFinished(number, "stop", stats)
            )
            assert it.notifications == ([proposed] if number == 3 else [])
            it.app.view.message.clear()


@given(texts=TURNS, room=st.integers(0, 9000))
def test_messages_fit_the_room_and_only_long_ones_are_cut(
    texts: list[tuple[str, str]], room: int
) -> None:
    turns = turns_of(texts)
    messages = _messages(turns, room)
    given_texts = [text for turn in texts for text in turn]
    assert sum(len(each.content) for each in messages) <= max(room, len(_CUT) * len(messages))
    cut = [len(old) for old, new in zip(given_texts, messages, strict=True) if new.content != old]
    whole = [len(old) for old, new in zip(given_texts, messages, strict=True) if new.content == old]
    if cut and whole:
        assert max(whole) <= min(cut)
    if sum(map(len, given_texts)) <= room:
        assert not cut


@given(texts=TURNS, room=st.integers(0, 500))
def test_the_last_turns_that_fit_are_kept_and_one_is_left(
    texts: list[tuple[str, str]], room: int
) -> None:
    turns = turns_of(texts)
    count = _last_that_fit(turns, room)
    assert 0 <= count < len(turns)
    sizes = [len(prompt) + len(answer) for prompt, answer in texts]
    assert sum(sizes[len(sizes) - count :]) <= room
    if count < len(turns) - 1:
        assert sum(sizes[len(sizes) - count - 1 :]) > room
