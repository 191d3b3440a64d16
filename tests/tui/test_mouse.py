"""Choosing and reading with the mouse and the keys: what is acted on is what is seen."""

from __future__ import annotations

import pytest

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.tui import app
from akunu_py.tui.transcript.turn import AnswerView, shorten
from tests.support.tui_chat import Chat, at_rest, chat, until


@pytest.fixture(autouse=True)
def _no_clipboard_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)


def turns(count: int) -> ConversationTree:
    tree, parent = ConversationTree(), None
    for number in range(count):
        prompt = ChatMessage("user", f"prompt {number}", parent)
        text = f"answer {number}\n\n" * 4
        reply = ChatMessage("assistant", text, prompt.id, finish_reason="stop")
        tree.add(prompt)
        tree.add(reply)
        parent = reply.id
    return tree


@pytest.mark.long
async def test_what_is_copied_is_seen() -> None:
    """After each way of scrolling the chosen message is on the screen."""
    async with chat() as it:
        await it.app.library.show(turns(14))
        await at_rest(it.pilot)
        await it.press("home")
        await at_rest(it.pilot)
        assert it.transcript.scroll_y == 0
        await it.press("end", "pageup", "pageup")
        await at_rest(it.pilot)
        place = it.transcript.scroll_y
        await it.press("tab")
        await at_rest(it.pilot)
        assert it.transcript.scroll_y == place, "what one looks at stays where it is"
        await it.press("c")
        assert it.app.clipboard.splitlines()[0] in it.screen_text()
        for key in ("home", "pagedown", "end", "pageup"):
            await it.press(key)
            await at_rest(it.pilot)
            await it.press("c")
            first = it.app.clipboard.splitlines()[0]
            assert first in it.screen_text(), key
            if key == "home":
                assert first == "prompt 0"
            if key == "end":
                assert first == "answer 13"
        it.transcript.release_anchor()
        it.transcript.scroll_to(y=10, animate=False)  # as the wheel does
        await at_rest(it.pilot)
        await it.press("c")
        assert it.app.clipboard.splitlines()[0] in it.screen_text()


@pytest.mark.long
async def test_a_click_chooses_a_message_and_its_actions_can_be_clicked() -> None:
    async with chat(size=(80, 40)) as it:
        await it.send("one")
        await it.answer("first\n\n```\ncode\n```")
        await it.send("two")
        await it.answer("second", turn=2)
        await it.click_on("first")
        assert it.app.focused is it.box, "typing goes on"
        assert "copy · code · again" in it.screen_text()
        await it.click_on("copy · code")
        assert it.app.clipboard.startswith("first")
        await it.click_on("code · again")
        assert it.app.clipboard == "code\n"
        await it.click_on("one", which=1)  # behind the title
        assert "code · again" not in it.screen_text(), "one message is chosen at a time"
        await it.click_on("edit · again")
        assert it.text() == "one"
        await it.press("escape")
        assert "edit · again" not in it.screen_text()
        await it.click_on("second")
        await it.click_on("again")
        await it.answer("third", turn=3)
        assert it.markdown[-1] == "third"
        await it.click_on("third")
        await it.click_on("‹")
        await at_rest(it.pilot)
        assert it.markdown[-1] == "second"
        assert "‹ 1/2 ›" in it.screen_text(), "and back by another click"
        await it.click_on("second")
        assert "again" not in it.screen_text(), "a second click leaves it"


@pytest.mark.long
async def test_a_folded_prompt_unfolds() -> None:
    text = "\n".join(f"line {number}" for number in range(100))
    async with chat(size=(80, 24)) as it:
        await it.send(text)
        await it.answer("yes")
        assert "more characters" in it.prompts[0]
        await it.press("tab", "up", "home")
        await at_rest(it.pilot)
        await it.click_on("unfold")
        assert "line 99" in it.prompts[0]
        assert "more characters" not in it.prompts[0]
        await it.press("enter")
        assert "line 99" not in it.prompts[0]


def test_unfolding_shows_all_in_a_few_steps() -> None:
    for text in ("x" * 250_000, "x\n" * 125_000, "short", "word " * 400):
        most, steps = 1500, 0
        while shorten(text, most)[1]:
            shown, more = shorten(text, most)
            assert text.startswith(shown)
            assert len(shown) + more == len(text)
            most, steps = 10 * most, steps + 1
        assert steps <= 4


async def scrolled_up(it: Chat) -> None:
    await it.send("go")
    await it.piece("line\n\n" * 40)
    await it.press("pageup", "pageup")
    await at_rest(it.pilot)


@pytest.mark.long
async def test_more_below_is_said_while_it_is_written() -> None:
    async with chat() as it:
        await scrolled_up(it)
        assert "↓ more below · End" in it.screen_text()
        await it.press("end")
        await until(it.pilot, lambda: "more below" not in it.screen_text())
        await it.press("pageup", "pageup")
        await until(it.pilot, lambda: "more below" in it.screen_text())
        await it.click_on("more below")
        await until(it.pilot, lambda: "more below" not in it.screen_text())
        await it.press("pageup", "pageup")
        await it.answer("the end")
        await until(it.pilot, lambda: it.app.query_one(AnswerView).turn.state == "done")
        await until(it.pilot, lambda: "more below" not in it.screen_text())
