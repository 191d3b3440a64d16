"""Messages are chosen, edited, regenerated, continued, copied and unfolded, by keys."""

from pathlib import Path

import pytest

from akunu_py.engine.events import TextDelta
from akunu_py.tui.controllers.turns import code_blocks
from akunu_py.tui.terminal import clipboard_command, copy_with
from akunu_py.tui.transcript.turn import PromptView
from akunu_py.tui.transcript.view import HiddenTurns
from akunu_py.tui.workers.chat_client import AnswerFailed, PieceArrived
from akunu_py.types import Message
from tests.support.tui_chat import Chat, chat, tree_of

TWO_TURNS = ("one", "first", "two", "second")


@pytest.mark.long
async def test_an_edited_prompt_is_a_branch_and_the_old_one_stays(it: Chat) -> None:
    await it.talk(*TWO_TURNS)
    it.box.insert("a draft")
    await it.press("tab", "up", "up", "up", "e")
    assert (it.text(), it.app.focused) == ("one", it.box)
    await it.press(*"!", "enter")
    assert it.prompts == ["one!\n‹ 2/2 ›"]
    assert it.history == [Message("user", "one!")]
    assert it.text() == "a draft", "the unsent text is back"
    await it.answer("other")
    assert it.markdown == ["other"]
    await it.press("tab", "up", "left")
    assert (it.prompts, it.markdown) == (["one\n‹ 1/2 ›", "two"], ["first", "second"])
    await it.press("left")
    assert "Branch 1 of 2" in it.notifications[-1]
    await it.press("right")
    assert it.markdown == ["other"]


async def test_escape_ends_editing_and_restores_the_unsent_text(it: Chat) -> None:
    await it.talk(*TWO_TURNS)
    it.box.insert("a draft")
    await it.press("f6")
    assert (it.text(), it.app.turns.unsent_text) == ("two", "a draft")
    edited = [view.has_class("-edited") for view in it.app.query(PromptView)]
    assert edited == [False, True]
    await it.press("x")
    assert it.app.turns.unsent_text == "twox", "quitting now keeps the edited text"
    await it.press("escape")
    assert not it.app.query("PromptView.-edited")
    assert it.text() == "a draft"
    await it.press("enter")
    assert it.prompts == ["one", "two", "a draft"]
    await it.press("f6", "!", "escape")
    assert (it.prompts[-1], it.text()) == ("a draft", ""), "it still waits for an answer"
    assert it.box.sent_prompts[-1] == "a draft!"
    await it.press("escape")
    assert (it.prompts, it.text()) == (["one", "two"], "a draft")


@pytest.mark.long
async def test_escape_after_an_edited_prompt_brings_the_old_branch_back(it: Chat) -> None:
    await it.talk(*TWO_TURNS)
    await it.press("f6", "!", "enter", "escape")
    assert (it.prompts, it.markdown) == (["one", "two"], ["first", "second"])
    assert it.text() == "two!"
    await it.press("ctrl+u", "f6", "?", "f5", "enter")
    assert it.prompts == ["one", "two?\n‹ 2/2 ›"]


async def test_editing_while_it_answers_stops_the_answer(it: Chat) -> None:
    await it.send("one")
    await it.send("waits")
    await it.piece("half")
    await it.press("tab", "home", "up", "up", "up", "e", "!", "enter")
    assert it.history == [Message("user", "one!")]
    assert it.text() == "waits"


@pytest.mark.long
async def test_another_answer_is_a_branch(it: Chat) -> None:
    await it.talk(*TWO_TURNS)
    await it.press("f5")
    assert it.history[-1] == Message("user", "two")
    await it.answer("third")
    assert (it.markdown, it.feet) == (["first", "third"], ["", "‹ 2/2 ›"])
    await it.press("tab", "left")
    assert (it.markdown, it.feet) == (["first", "second"], ["", "‹ 1/2 ›"])
    await it.press("up", "up", "r")
    assert it.prompts == ["one"]
    await it.post(AnswerFailed(4, "no memory"))
    assert (it.markdown, it.text()) == (["first", "second"], "")
    assert it.notices == ["no memory"]


@pytest.mark.long
async def test_f9_continues_the_last_answer_only(it: Chat) -> None:
    await it.send("one")
    await it.piece("half of")
    await it.press("escape", "f9")
    assert it.history == [Message("user", "one"), Message("assistant", "half of")]
    await it.post(PieceArrived(1, TextDelta(" late words of the first request")))
    assert it.markdown == ["half of"]
    await it.answer(" it")
    assert (it.markdown, it.feet) == (["half of it"], [""])
    await it.press("f9")
    assert "complete" in it.notifications[-1]
    await it.send("two")
    await it.piece("half")
    await it.press("escape")
    await it.talk("three", "third")
    await it.press("tab", "up", "up", "g")
    assert "Only the last" in it.notifications[-1]


async def test_keys_of_the_chosen_message_do_not_type(it: Chat) -> None:
    await it.talk(*TWO_TURNS)
    await it.press("tab", "up", "j", "k")
    assert it.transcript.chosen == (it.app.conversation.turns[1], "prompt")
    assert [view.styles.border_left[0] for view in it.app.query(".-chosen")] == ["thick"]
    assert "e edit" in str(it.box.border_subtitle)
    await it.press("escape", "k")
    assert it.text() == "k"
    await it.press("backspace", "tab", "down", "down")
    assert it.app.focused is it.box, "down from the last message leads to the box"


@pytest.mark.long
async def test_a_long_chat_opens_at_its_end_and_pages_back() -> None:
    async with chat(size=(80, 15)) as it:
        await it.show(tree_of(*((f"prompt {number}", f"answer {number}") for number in range(24))))
        assert (it.prompts[0], it.prompts[-1]) == ("prompt 14", "prompt 23")
        assert "14 earlier" in str(it.app.query_one(HiddenTurns).render())
        for _ in range(60):
            if it.prompts[0] == "prompt 0" and it.transcript.scroll_y == 0:
                break
            await it.press("pageup")
        assert (it.prompts[0], len(it.app.query(HiddenTurns))) == ("prompt 0", 1)
        assert len(it.prompts) <= 20, "later turns are unmounted"
        assert f"{24 - len(it.prompts)} later" in str(it.app.query_one(HiddenTurns).render())
        await it.send("more")
        assert len(it.history) == 49
        hidden = [str(each.render()) for each in it.app.query(HiddenTurns)]
        assert (it.prompts[-1], len(hidden), "earlier" in hidden[0]) == ("more", 1, True)
        assert len(it.prompts) <= 11


async def test_answers_prompts_and_code_are_copied(it: Chat) -> None:
    await it.talk("one", "Look:\n\n```python\na = 1\n```\n\n```\nb\n```\n")
    await it.press("f7")
    assert it.app.clipboard.startswith("Look:")
    await it.press("f8")
    assert it.app.clipboard == "a = 1\n"
    await it.press("f8")
    assert (it.app.clipboard, "block 2 of 2" in it.notifications[-1]) == ("b\n", True)
    await it.press("tab", "up", "c")
    assert it.app.clipboard == "one"
    await it.press("enter")
    assert it.prompts == ["one"], "only long prompts have more to unfold"


async def test_a_program_of_the_system_copies_the_text(tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    async with chat(copy_program=["sh", "-c", f"cat > {copied}"]) as it:
        await it.talk("one", "grüße 中")
        await it.press("f7")
        await it.app.workers.wait_for_complete()
        assert copied.read_text("utf-8") == "grüße 中"
    assert copy_with(["true"], "x")
    assert not copy_with(["false"], "x")
    assert not copy_with(["no-such-program"], "x")


@pytest.mark.parametrize(("environ", "platform", "there", "expected"), [
    ({}, "darwin", ["pbcopy"], "pbcopy"),
    ({"SSH_TTY": "/dev/pts/1"}, "darwin", ["pbcopy"], None),
    ({"SSH_TTY": "x", "TMUX": "/tmp/x"}, "linux", ["tmux", "xclip"], "tmux"),
    ({"DISPLAY": ":0"}, "linux", ["xsel"], "xsel"),
    ({"DISPLAY": ":0", "WAYLAND_DISPLAY": "w"}, "linux", ["xclip", "wl-copy"], "wl-copy"),
    ({"WAYLAND_DISPLAY": "w"}, "linux", ["xclip"], None),
    ({}, "linux", ["xclip", "wl-copy", "tmux"], None),
])  # fmt: skip
def test_the_clipboard_program_of_each_system(
    environ: dict[str, str], platform: str, there: list[str], expected: str | None
) -> None:
    command = clipboard_command(environ, platform, lambda name: name if name in there else None)
    assert (command[0] if command else None) == expected


def test_code_blocks() -> None:
    text = "a\n\n```py title\nx\n```\n- b\n  ```\n  y\n  ```\n\n~~~\nunclosed"
    assert code_blocks(text) == [("x\n", "py"), ("y\n", ""), ("unclosed", "")]
