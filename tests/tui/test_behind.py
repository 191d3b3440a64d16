"""Answers go on while other conversations are on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import OptionList

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.tui.screens.conversation_list import ChosenConversation, ConversationsScreen
from akunu_py.tui.screens.dialog import QuestionScreen
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished
from akunu_py.tui.workers.store_thread import StoreThread
from tests.support.tui_chat import STATS, Chat, chat, until


async def rows(it: Chat, count: int) -> list[str]:
    """The rows of the open list, as soon as there are so many."""
    screen = it.app.screen
    assert isinstance(screen, ConversationsScreen)
    await until(it.pilot, lambda: len(screen._found) == count)
    screen._show_progress()
    return [str(option.prompt) for option in screen.query_one(OptionList).options]


@pytest.mark.long
async def test_looking_at_chats_does_not_end_the_answer(tmp_path: Path) -> None:
    store_thread = StoreThread(tmp_path / "conversations.db")
    async with chat(store=store_thread) as it:
        await it.send("first chat")
        await it.piece("Once upon")
        await it.press("ctrl+o")
        (row,) = await rows(it, 1)
        assert "▶ 11 tokens" in row
        await it.press("enter")  # the same conversation
        await until(it.pilot, lambda: not isinstance(it.app.screen, ConversationsScreen))
        await it.piece(" a time")
        assert (it.markdown, it.feet, it.phase()) == (["Once upon a time"], [""], "answering")

        await it.press("ctrl+n")
        assert (it.prompts, it.text()) == ([], "")
        assert "answering another chat: first chat" in str(it.status.render())
        await it.piece(", far away")
        await it.press("ctrl+o")
        assert "▶ 11 tokens" in (await rows(it, 1))[0]
        await it.press("escape")
        await it.post(AnswerFinished(1, "stop", STATS))
        assert it.notifications[-1] == "Answered: first chat. Ctrl+O opens it."
        assert it.phase() == "ready"
        await it.press("ctrl+o")
        assert "• new" in (await rows(it, 1))[0]
        await it.press("enter")
        await until(it.pilot, lambda: it.markdown == ["Once upon a time, far away"])
        assert (it.prompts, it.feet) == (["first chat"], [""])
        await it.press("ctrl+o")
        assert "• new" not in (await rows(it, 1))[0], "it was read"
        await it.press("escape")
    assert store_thread.close(10)
    store = ConversationStore.open(tmp_path / "conversations.db")
    (info,) = store.list()
    answer = store.load(info.id).active_branch()[-1]
    assert (answer.text, answer.finish_reason) == ("Once upon a time, far away", "stop")
    store.close()


@pytest.mark.long
async def test_a_second_answer_waits_or_the_first_one_ends() -> None:
    async with chat() as it:
        await it.send("one")
        first = it.app.conversation.tree.conversation
        await it.piece("1")
        await it.press("ctrl+n")
        for keys, sent in ((["escape"], True), (["end", "enter"], False)):
            await it.send("two")
            assert isinstance(it.app.screen, QuestionScreen)
            await it.press(*keys)
            assert (it.prompts == ["two"], it.text() == "two") == (sent, not sent)
            await it.press("escape")
            assert it.text() == "two", "Esc takes back what waits here and stops nothing else"
            it.box.clear()
        await it.piece("2")
        await it.send("three")
        await it.post(AnswerFinished(1, "stop", STATS))
        assert not isinstance(it.app.screen, QuestionScreen), "there is nothing left to ask"
        assert it.history[-1].content == "three"

        await it.press("ctrl+n")
        await it.send("four")
        await it.press("down", "enter")  # stop that answer
        assert it.history[-1].content == "four"
        await it.piece("late", turn=2)
        await it.answer("4", turn=3)
        assert it.markdown == ["4"]
        assert first in it.app.answering._background
        await it.app.library.open(
            ChosenConversation(first)
        )  # without a store there is nothing to open


@pytest.mark.long
@pytest.mark.usefixtures("own_directories")
async def test_what_fails_or_is_deleted_behind() -> None:
    async with chat() as it:
        await it.send("one")
        await it.send("one more")
        behind = it.app.conversation.tree
        await it.press("ctrl+n")
        await it.send("two")
        await it.press("escape")  # it waits
        await it.post(AnswerFailed(None, "the model is damaged"))
        assert (it.text(), it.prompts) == ("two", [])
        prompts = [each.text for each in behind.active_branch() if each.role == "user"]
        assert prompts == ["one", "one more"], "what waited behind is still there"

        it.box.clear()
        await it.send("three")
        await it.press("ctrl+n")
        await it.app.library.on_deleted(next(reversed(it.app.answering._background)))
        assert (it.app.answering.active, it.app.answering.progress()) == (None, {})
