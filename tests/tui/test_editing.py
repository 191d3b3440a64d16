"""Choosing a message, editing, answering again, going on, branches, copying."""

from __future__ import annotations

from pathlib import Path

import pytest

from akunu_py.chats.tree import ChatMessage, ConversationTree
from akunu_py.tui import app
from akunu_py.tui.controllers.turns import code_blocks
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.terminal import clipboard_command, copy_with
from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.turn import AnswerView, PromptView
from akunu_py.tui.transcript.view import EarlierTurns, LaterTurns
from akunu_py.tui.workers.chat_client import AnswerFailed, AnswerFinished
from akunu_py.types import Message
from tests.support.tui_chat import STATS, Chat, chat, until


async def two_turns(it: Chat) -> None:
    await it.send("one")
    await it.answer("first")
    await it.send("two")
    await it.answer("second", turn=2)


@pytest.mark.long
async def test_an_edited_prompt_is_a_branch_and_the_old_one_stays() -> None:
    async with chat() as it:
        await two_turns(it)
        it.box.insert("a draft")
        await it.press("tab", "up", "up", "up", "e")
        assert (it.text(), it.app.focused) == ("one", it.box)
        await it.press(*"!", "enter")
        assert it.prompts == ["one!\n‹ 2/2 ›"]
        assert it.history == [Message("user", "one!")]
        assert it.text() == "a draft", "what was written before is back"
        await it.answer("other", turn=3)
        assert it.markdown == ["other"]
        await it.press("tab", "up", "left")
        assert (it.prompts, it.markdown) == (["one\n‹ 1/2 ›", "two"], ["first", "second"])
        await it.press("left")
        assert "Branch 1 of 2" in it.notifications[-1]
        await it.press("right")
        assert it.markdown == ["other"]


async def test_quitting_while_editing_keeps_what_was_typed() -> None:
    async with chat() as it:
        await it.send("one")
        await it.answer("1")
        it.box.insert("mine")
        await it.press("f6")
        assert (it.text(), it.app.ui_state.unsent_text) == ("one", "mine")
        await it.press("x")
        assert it.app.ui_state.unsent_text == "onex", "that is lost nowhere else"


@pytest.mark.long
async def test_editing_can_be_left() -> None:
    async with chat() as it:
        await two_turns(it)
        it.box.insert("a draft")
        await it.press("f6")
        assert it.text() == "two"
        await it.press("x", "escape")
        assert it.text() == "a draft"
        await it.press("enter")
        assert it.prompts == ["one", "two", "a draft"]


async def test_an_edited_prompt_that_is_stopped_at_once_brings_the_old_branch_back() -> None:
    async with chat() as it:
        await two_turns(it)
        await it.press("f6", "!", "enter", "escape")
        assert (it.prompts, it.markdown) == (["one", "two"], ["first", "second"])
        assert it.text() == "two!"


@pytest.mark.long
async def test_editing_while_it_answers_stops_the_answer() -> None:
    async with chat() as it:
        await it.send("one")
        await it.send("waits")
        await it.piece("half")
        await it.press("tab", "home", "up", "up", "up", "e")
        await it.press("!", "enter")
        assert it.history == [Message("user", "one!")]
        assert it.text() == "waits"


@pytest.mark.long
async def test_another_answer_is_a_branch() -> None:
    async with chat() as it:
        await two_turns(it)
        await it.press("ctrl+g")
        assert it.history[-1] == Message("user", "two")
        await it.answer("third", turn=3)
        assert (it.markdown, it.feet) == (["first", "third"], ["", "‹ 2/2 ›"])
        await it.press("tab", "left")
        assert (it.markdown, it.feet) == (["first", "second"], ["", "‹ 1/2 ›"])
        await it.press("up", "up", "r")
        assert it.prompts == ["one"]
        await it.post(AnswerFailed(4, "no memory"))
        assert (it.markdown, it.text()) == (["first", "second"], "")
        assert it.notices == ["no memory"]


async def test_a_stopped_answer_goes_on() -> None:
    async with chat() as it:
        await it.send("one")
        await it.piece("half of")
        await it.press("escape")
        assert it.feet == ["■ stopped"]
        await it.press("f9")
        assert it.history == [Message("user", "one"), Message("assistant", "half of")]
        await it.piece(" late words of the first request")
        assert it.markdown == ["half of"]
        await it.piece(" it", turn=2)
        await it.post(AnswerFinished(2, "stop", STATS))
        assert (it.markdown, it.feet) == (["half of it"], [""])
        await it.press("f9")
        assert "complete" in it.notifications[-1]


@pytest.mark.long
async def test_only_the_last_answer_goes_on() -> None:
    async with chat() as it:
        await it.send("one")
        await it.piece("half")
        await it.press("escape")
        await it.send("two")
        await it.answer("second", turn=2)
        await it.press("tab", "up", "up", "g")
        assert "Only the last" in it.notifications[-1]


@pytest.mark.long
async def test_keys_of_the_chosen_message_do_not_type() -> None:
    async with chat() as it:
        await two_turns(it)
        await it.press("tab", "up", "j", "k")
        assert it.transcript.chosen == (it.app.conversation.turns[1], "prompt")
        assert "e edit" in str(it.box.border_subtitle)
        await it.press("escape", "k")
        assert it.text() == "k"
        await it.press("backspace", "tab", "down", "down")
        assert it.app.focused is it.box, "down from the last message leads to the box"


@pytest.mark.long
async def test_a_long_conversation_opens_at_its_end_and_pages_back() -> None:
    async with chat() as it:
        tree, parent = ConversationTree(), None
        for number in range(34):
            prompt = ChatMessage("user", f"prompt {number}", parent)
            reply = ChatMessage("assistant", f"answer {number}", prompt.id, finish_reason="stop")
            tree.add(prompt)
            tree.add(reply)
            parent = reply.id
        await it.app.library.show(tree)
        await it.pilot.pause()
        assert (it.prompts[0], it.prompts[-1]) == ("prompt 24", "prompt 33")
        assert "24 earlier" in str(it.app.query_one(EarlierTurns).render())
        for _ in range(60):
            if it.prompts[0] == "prompt 0" and it.transcript.scroll_y == 0:
                break
            await it.press("pageup")
        assert (it.prompts[0], len(it.app.query(EarlierTurns))) == ("prompt 0", 0)
        assert len(it.prompts) <= 32, "a line of the terminal makes room for four thirds of a turn"
        assert f"{34 - len(it.prompts)} later" in str(it.app.query_one(LaterTurns).render())
        assert it.transcript.scroll_y == 0
        for _ in range(60):
            if it.prompts[-1] == "prompt 33":
                break
            await it.press("pagedown")
        assert (it.prompts[-1], len(it.app.query(LaterTurns))) == ("prompt 33", 0)
        assert len(it.prompts) <= 32
        await it.press("tab", "home", "home")
        assert (it.prompts[0], it.transcript.scroll_y) == ("prompt 0", 0)
        await it.press("tab")
        await it.send("more")
        assert len(it.history) == 69
        assert it.prompts[-1] == "more"
        assert len(it.prompts) <= 21


@pytest.mark.long
async def test_answers_and_prompts_and_code_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "clipboard_command", lambda: None)
    monkeypatch.setattr("akunu_py.tui.transcript.view._COPIED_S", 600.0)
    async with chat() as it:
        await it.send("one")
        await it.answer("Look:\n\n```python\na = 1\n```\n\n```\nb\n```\n")
        await it.press("f7")
        assert it.app.clipboard.startswith("Look:")
        (answer,), blocks = it.app.query(AnswerView), list(it.app.query(CodeBlock))
        assert answer.has_class("-copied")
        await it.press("f8")
        assert it.app.clipboard == "a = 1\n"
        assert [block.has_class("-copied") for block in blocks] == [True, False]
        await it.press("f8")
        assert (it.app.clipboard, "block 2 of 2" in it.notifications[-1]) == ("b\n", True)
        assert blocks[1].has_class("-copied")
        await it.press("tab", "up", "c")
        assert it.app.clipboard == "one"
        prompt = it.app.query_one(PromptView)
        assert prompt.has_class("-copied")
        monkeypatch.setattr("akunu_py.tui.transcript.view._COPIED_S", 0.01)
        await it.press("c")
        await until(it.pilot, lambda: not prompt.has_class("-copied"))


async def test_a_program_of_the_system_is_given_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copied = tmp_path / "copied"
    monkeypatch.setattr(app, "clipboard_command", lambda: ["sh", "-c", f"cat > {copied}"])
    async with chat() as it:
        await it.send("one")
        await it.answer("grüße 中")
        await it.press("f7")
        await it.app.workers.wait_for_complete()
        assert copied.read_text("utf-8") == "grüße 中"


@pytest.mark.parametrize(
    ("environ", "platform", "there", "expected"),
    [
        ({}, "darwin", ["pbcopy"], "pbcopy"),
        ({"SSH_TTY": "/dev/pts/1"}, "darwin", ["pbcopy"], None),
        ({"SSH_TTY": "x", "TMUX": "/tmp/x"}, "linux", ["tmux", "xclip"], "tmux"),
        ({"DISPLAY": ":0"}, "linux", ["xsel"], "xsel"),
        ({"DISPLAY": ":0", "WAYLAND_DISPLAY": "w"}, "linux", ["xclip", "wl-copy"], "wl-copy"),
        ({"WAYLAND_DISPLAY": "w"}, "linux", ["xclip"], None),
        ({}, "linux", ["xclip", "wl-copy", "tmux"], None),
    ],
)
def test_the_way_to_the_clipboard(
    environ: dict[str, str], platform: str, there: list[str], expected: str | None
) -> None:
    command = clipboard_command(environ, platform, lambda name: name if name in there else None)
    assert (command[0] if command else None) == expected


def test_a_program_that_fails_is_told() -> None:
    assert copy_with(["true"], "x")
    assert not copy_with(["false"], "x")
    assert not copy_with(["no-such-program"], "x")


def test_code_blocks() -> None:
    text = "a\n\n```py title\nx\n```\n- b\n  ```\n  y\n  ```\n\n~~~\nunclosed"
    assert [(code.text, code.language) for code in code_blocks(text)] == [
        ("x\n", "py"),
        ("y\n", ""),
        ("unclosed", ""),
    ]


def test_what_came_from_elsewhere_may_lack_the_last_answer() -> None:
    tree = ConversationTree()
    tree.add(ChatMessage("user", "one"))
    conversation = Conversation(tree)
    assert [turn.prompt.text for turn in conversation.turns] == ["one"]
    assert conversation.turns[0].reply_id in tree
