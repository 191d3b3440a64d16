"""Prompts, answers and errors; Esc and Ctrl+C lose nothing; chats answer in the background."""

import os
from pathlib import Path
from typing import NoReturn

import pytest
from textual.widgets import OptionList

from akunu_py import paths
from akunu_py.tui.open_conversation import Conversation
from akunu_py.tui.screens.conversation_list import ConversationsScreen
from akunu_py.tui.status import MessageLine
from akunu_py.tui.transcript.turn import PromptView
from akunu_py.tui.workers.chat_client import AnswerFailed, ModelLoaded, PrefillUpdate
from akunu_py.tui.workers.downloads import DownloadEnded
from akunu_py.types import Constraint, Message
from tests.support.tui_chat import Chat, chat


async def test_the_status_follows_a_request_from_prefill_to_its_end(it: Chat) -> None:
    assert it.phase() == "ready"
    await it.press(*"why", "enter")
    assert (it.prompts, it.text(), it.phase()) == (["why"], "", "prefill")
    await it.post(PrefillUpdate(1, 40, 100))
    assert "processing the prompt 40%" in it.status_line
    await it.piece("Be")
    await it.piece("cause")
    assert it.markdown == ["Because"]
    assert it.status_line == "◐ answering · 20 tokens/s"
    await it.finish()
    assert it.status_line == "● ready · 20 tokens/s"


async def test_escape_stops_at_once_and_keeps_the_text(it: Chat) -> None:
    await it.send("go")
    await it.piece("Once upon")
    await it.press("escape")
    assert it.phase() == "stopped"
    await it.answer(" a time")
    assert (it.markdown, it.feet) == (["Once upon"], ["■ stopped; F9 continues"])
    await it.send("more")
    assert it.phase() == "prefill"
    assert it.history == [
        Message("user", "go"), Message("assistant", "Once upon"), Message("user", "more"),
    ]  # fmt: skip


async def test_escape_before_an_answer_puts_the_prompts_back_in_order(it: Chat) -> None:
    await it.send("first")
    await it.send("second")
    await it.press("escape")
    assert (it.text(), it.prompts) == ("second", ["first"])
    await it.press("escape")
    assert (it.text(), it.prompts, it.phase()) == ("first\n\nsecond", [], "ready")
    await it.press("enter", *"third", "escape")
    assert (it.text(), it.prompts) == ("first\n\nsecond\n\nthird", [])


@pytest.mark.parametrize("key", ["escape", "up"])
async def test_escape_and_up_take_back_queued_prompts_first(it: Chat, key: str) -> None:
    for prompt in ("one", "two", "three"):
        await it.send(prompt)
    assert it.feet == ["", *["… queued; Esc takes it back"] * 2]
    await it.piece("1")
    for text in ("three", "two"):
        await it.press(key)
        assert (it.text(), it.phase()) == (text, "answering")
        it.box.clear()
    await it.press(key)
    assert it.prompts == ["one"]
    expected = ("stopped", "") if key == "escape" else ("answering", "three")
    assert (it.phase(), it.text()) == expected, "Up: then the earlier prompts"


async def test_prompts_wait_for_the_model_and_for_earlier_answers() -> None:
    async with chat(loaded=False) as it:
        await it.send("one")
        await it.send("two")
        assert (it.prompts, it.phase()) == (["one", "two"], "loading")
        note = "starter gets 2,048 of its 8,192 tokens of context"
        await it.post(ModelLoaded("starter", 2048, None, note))
        assert (it.notices, it.phase()) == ([note], "prefill")
        await it.answer("1")
        assert (it.phase(), it.feet) == ("prefill", ["", ""])
        await it.answer("2")
        assert (it.markdown, it.phase()) == (["1", "2"], "ready")
        await it.send("three")
        await it.app.answering._load("another")
        assert it.phase() == "prefill", "by the model before"
        await it.finish("cancelled")
        assert (it.phase(), it.feet[-1]) == ("loading", "… no answer; F5 tries again")


async def test_an_error_returns_the_prompt_and_keeps_the_text(it: Chat) -> None:
    await it.send("too long")
    await it.post(AnswerFailed(1, "the prompt is too long"))
    assert (it.text(), it.notices) == ("too long", ["the prompt is too long"])
    assert it.phase() == "failed"
    it.box.clear()
    await it.send("short")
    assert it.phase() == "prefill"
    await it.piece("half of")
    await it.post(AnswerFailed(2, "RuntimeError: out of memory"))
    assert (it.markdown, it.text()) == (["half of"], "")
    assert it.notices[-1] == "RuntimeError: out of memory"


async def test_a_model_that_cannot_be_loaded_loses_no_prompt() -> None:
    async with chat(loaded=False) as it:
        await it.send("hello")
        await it.post(AnswerFailed(None, "the model is damaged"))
        assert (it.text(), it.notices) == ("hello", ["the model is damaged"])
        await it.press("enter")
        assert it.phase() == "loading", "sending loads it again"
        await it.post(ModelLoaded("starter", 8192))
        await it.piece("Hi")
        assert it.markdown == ["Hi"]


@pytest.mark.long
async def test_a_bug_in_drawing_shows_plain_text(
    monkeypatch: pytest.MonkeyPatch, own_directories: None
) -> None:
    """While the answer streams and when the chat is opened later; a crash file has the details."""

    def fail(*_: object) -> NoReturn:
        raise ZeroDivisionError("in drawing")

    async with chat() as it:
        await it.send("go")
        await it.piece("**one**\n\n")
        monkeypatch.setattr("akunu_py.tui.transcript.blocks.natural_widths", fail)
        await it.answer("| a | b |\n|--|--|\n| two | $x^2$ |\n\n")
        for _ in range(2):
            await it.until(lambda: it.notifications)
            assert "shown as plain text; the details are in" in it.notifications[0]
            await it.rest()
            assert "**one**" in it.screen
            assert "| two | $x^2$ |" in it.screen
            it.app.view.message.clear()
            await it.app.view.show_conversation()
    details = [file.read_text() for file in (paths.cache_dir() / "crashes").iterdir()]
    assert all("in drawing" in each and "transcript/" in each for each in details)
    assert details


async def test_ctrl_c_copies_then_stops_then_clears_then_quits(it: Chat) -> None:
    await it.send("go")
    await it.piece("still")
    it.app.query_one(PromptView).text_select_all()
    await it.press("ctrl+c")
    assert (it.app.clipboard, it.phase()) == ("go", "answering")
    it.app.screen.clear_selection()
    await it.press("ctrl+c")
    assert (it.phase(), it.feet) == ("stopped", ["■ stopped; F9 continues"])
    await it.press("a", "ctrl+j", "b", "ctrl+c")
    assert it.text() == "", "more than one line, too"
    await it.press("up")
    assert it.text() == "a\nb", "nothing is lost"
    await it.press("ctrl+d")
    assert it.app.return_code != 0, "the box is not empty"
    await it.press("ctrl+c", "ctrl+c")
    assert it.notifications == ["Press Ctrl+C again to quit."]
    await it.press("ctrl+c")
    assert it.app.return_code == 0


@pytest.mark.parametrize("command", ["/quit", "ctrl+d"])  # test_terminal.py: Ctrl+Q
async def test_quitting_while_answering(it: Chat, command: str) -> None:
    await it.send("go")
    await it.piece("on and on")
    await (it.send if command == "/quit" else it.press)(command)
    assert it.app.return_code == 0


async def test_the_message_line_shows_one_message_above_the_prompt(it: Chat) -> None:
    line, height = it.app.view.message, it.transcript.size.height
    await it.send("/json")
    assert (line.text.partition(".")[0], line.has_class("-error")) == (
        "The next answer will be JSON",
        False,
    )
    assert line.region.bottom == it.box.region.y == it.transcript.region.bottom + 1
    await it.send("/json {1}")
    assert "is not valid JSON" in line.text
    assert line.has_class("-error")
    assert it.text() == "/json {1}", "it can be corrected"
    await it.press("f4")
    it.app.notify("while a dialog is open")
    assert it.app.screen.query_one(MessageLine).text == "while a dialog is open"
    await it.press("escape")
    await it.post(DownloadEnded("good-4b", error="the hub does not answer"))
    assert it.notifications == ["the hub does not answer"], "though the list is closed"
    line.clear()
    await it.pilot.pause()
    assert (line.display, it.transcript.size.height) == (False, height)


@pytest.mark.long
async def test_the_transcript_follows_its_end_unless_scrolled_up(it: Chat) -> None:
    transcript = it.transcript
    await it.send("go")
    assert transcript.scroll_y == 0
    await it.piece("line\n\n" * 25)
    for back in ("end", "click"):
        assert transcript.scroll_y == transcript.max_scroll_y > 20
        await it.press("pageup", "pageup")
        await it.rest()
        above = transcript.scroll_y
        assert above < transcript.max_scroll_y
        await it.piece("line\n\n" * 9)
        assert transcript.scroll_y == above
        assert "↓ more below · End" in it.screen
        await (it.press(back) if back == "end" else it.click_on("more below"))
        await it.until(lambda: "more below" not in it.screen)
        await it.piece("line\n\n" * 9)


async def test_history_leaves_out_prompts_without_an_answer() -> None:
    conversation = Conversation()
    for prompt, answer, reason in (("a", "A", "stop"), ("b", "", None), ("c", "C", "cancelled")):
        turn = conversation.ask(prompt)
        turn.answer, turn.finish_reason = answer, reason  # type: ignore[assignment]
    last = conversation.ask("d")
    conversation.ask("e")
    contents = [message.content for message in conversation.history(last, "Be kind.")]
    assert contents == ["Be kind.", "a", "A", "c", "C", "d"]


@pytest.mark.long
async def test_json_constrains_the_next_answer_only(tmp_path: Path) -> None:
    """Any JSON, or a schema in the prompt or in a file; regenerating uses the same schema."""
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    integer = Constraint("json_schema", '{"type": "integer"}')

    async with chat() as it:
        for command, prompt, expected in (
            ("/json", "one", Constraint("json")),
            ("", "two", None),
            (f"/json ~/{os.path.relpath(tmp_path, Path.home())}/schema.json", "three", integer),
            ('/json {"type": "integer"}', "four", integer),
            ("", "f5", integer),
            ("/json off", "five", None),
        ):
            if command:
                await it.send(command)
            await (it.press if prompt == "f5" else it.send)(prompt)
            assert it.app.answering.active is not None
            assert it.app.answering.active.constraint == expected
            await it.answer("1")
        await it.send("/json")
        await it.send("six")
        await it.press("f6", "!", "enter", "escape", "enter")
        assert it.app.answering.active is not None
        assert it.app.answering.active.constraint == Constraint("json"), "still the next answer"
        for wrong, why in (("{1}", "is not valid JSON"), ("/no/such", "cannot read /no/such")):
            await it.send(f"/json {wrong}")
            assert why in it.notifications[-1]
            it.box.clear()


# Chats in the background


@pytest.mark.long
async def test_opening_other_chats_does_not_stop_the_answer(tmp_path: Path) -> None:
    path = tmp_path / "conversations.db"
    async with chat(store=path) as it:
        await it.send("first chat")
        await it.piece("Once upon")
        await it.press("ctrl+o")
        await it.until_shown("▶ 11 tokens")
        await it.press("enter")  # the same conversation
        await it.until(lambda: not isinstance(it.app.screen, ConversationsScreen))
        await it.piece(" a time")
        assert (it.markdown, it.feet, it.phase()) == (["Once upon a time"], [""], "answering")
        await it.press("ctrl+n")
        assert (it.prompts, it.text()) == ([], "")
        assert "answering another chat: first chat" in it.status_line
        await it.answer(", far away")
        assert it.notifications[-1] == "Answered: first chat. Ctrl+O opens it."
        assert it.phase() == "ready"
        await it.press("ctrl+o")
        await it.until_shown("• new")
        await it.press("enter")
        await it.until(lambda: it.markdown == ["Once upon a time, far away"])
        assert (it.prompts, it.feet) == (["first chat"], [""])
        await it.press("ctrl+o")
        options = it.app.screen.query_one(OptionList)
        await it.until(lambda: options.options and options.options[0].id)
        assert "• new" not in str(options.options[0].prompt)


async def test_a_prompt_waits_for_the_answer_in_another_chat(it: Chat) -> None:
    await it.send("one")
    first = it.conversation
    await it.piece("1")
    await it.press("ctrl+n")
    await it.send("two")
    assert it.feet == ["… queued; Esc takes it back"]
    assert "answering another chat: one" in it.screen
    await it.press("escape")
    assert it.text() == "two", "Esc takes back the queued prompt and stops nothing else"
    await it.press("enter")
    await it.finish()
    assert it.history == [Message("user", "two")]
    assert first in it.app.answering.background


@pytest.mark.long
@pytest.mark.usefixtures("own_directories")
async def test_errors_and_deletions_in_the_background(it: Chat) -> None:
    await it.send("one")
    await it.send("one more")
    background = it.app.conversation.tree
    await it.press("ctrl+n")
    await it.send("two")
    await it.post(AnswerFailed(None, "the model is damaged"))
    assert (it.text(), it.prompts) == ("two", [])
    prompts = [each.text for each in background.active_branch() if each.role == "user"]
    assert prompts == ["one", "one more"]

    it.box.clear()
    await it.send("three")
    deleted = it.conversation
    await it.press("ctrl+n")
    await it.app.library.on_deleted(deleted)
    assert (it.app.answering.active, it.app.answering.progress()) == (None, {})
