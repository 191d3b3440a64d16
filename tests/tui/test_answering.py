"""Asking and being answered, driven by pilots. What a session would tell is posted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from textual import events

from akunu_py import paths
from akunu_py.text import displayable, typeable
from akunu_py.tui.open_conversation import ChatTurn, Conversation
from akunu_py.tui.prompt.box import PromptBox
from akunu_py.tui.status import MessageLine
from akunu_py.tui.transcript.turn import AnswerView, PromptView
from akunu_py.tui.transcript.view import Transcript
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    ModelLoaded,
    PrefillUpdate,
)
from akunu_py.tui.workers.downloads import DownloadEnded
from akunu_py.types import Constraint, Message
from tests.support.tui_chat import STATS, at_rest, chat, until


async def test_a_question_and_its_answer() -> None:
    async with chat() as it:
        assert it.phase() == "ready"
        await it.press(*"why", "enter")
        assert (it.prompts, it.text(), it.phase()) == (["why"], "", "prefill")
        await it.post(PrefillUpdate(1, 40, 100))
        assert "processing the prompt 40%" in str(it.status.render())
        await it.piece("Be")
        await it.piece("cause")
        assert it.phase() == "answering"
        assert it.markdown == ["Because"]
        assert str(it.status.render()) == "◐ answering · 11 of 8k context · 20 tokens/s"
        await it.post(AnswerFinished(1, "stop", STATS))
        assert it.phase() == "ready"
        assert str(it.status.render()) == "● ready · 11 of 8k context · 20 tokens/s"


async def test_enter_sends_and_other_keys_break_the_line() -> None:
    async with chat() as it:
        await it.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert it.text() == "a\nb\nc"
        await it.press("enter")
        assert it.prompts == ["a\nb\nc"]
        await it.press("enter")
        await it.press("space", "enter")
        assert len(it.prompts) == 1, "an empty prompt is not sent"


async def test_a_paste_of_many_lines_is_one_harmless_prompt() -> None:
    async with chat() as it:
        it.app.post_message(events.Paste("one\r\ntwo\x1b[2J\rthree\x07\ttab\x00"))
        await it.pilot.pause()
        assert it.text() == "one\ntwo[2J\nthree\ttab"
        await it.press("enter")
        assert it.prompts == ["one\ntwo[2J\nthree\ttab"]


async def test_the_box_grows_and_stays_small() -> None:
    async with chat() as it:
        heights = [it.box.size.height]
        for lines in (3, 100):
            it.box.text = "\n".join("x" * lines)
            await it.pilot.pause()
            heights.append(it.box.size.height)
        assert heights == [1, 3, 8]


async def test_up_and_down_browse_earlier_prompts() -> None:
    async with chat() as it:
        for prompt in ("first", "second"):
            await it.send(prompt)
        await it.press("up")
        assert it.text() == "second"
        await it.press("up")
        assert it.text() == "first"
        await it.press("up")
        assert it.text() == "first"
        await it.press("down")
        assert it.text() == "second"
        await it.press("down")
        assert it.text() == ""
        await it.press(*"mine", "up")
        assert it.text() == "mine", "what was typed is not lost"


async def test_escape_stops_at_once_and_keeps_what_was_said() -> None:
    async with chat() as it:
        await it.send("go")
        await it.piece("Once upon")
        await it.press("escape")
        assert it.phase() == "stopped"
        await it.piece(" a time")
        await it.post(AnswerFinished(1, "cancelled", STATS))
        assert it.markdown == ["Once upon"]
        assert it.feet == ["■ stopped"]
        await it.send("more")
        assert it.phase() == "prefill"
        assert it.history == [
            Message("user", "go"),
            Message("assistant", "Once upon"),
            Message("user", "more"),
        ]


@pytest.mark.long
async def test_escape_before_an_answer_gives_the_prompt_back() -> None:
    async with chat() as it:
        await it.send("first")
        await it.send("second")
        await it.press("escape")
        assert (it.text(), it.prompts) == ("second", ["first"])
        await it.press("escape")
        assert it.text() == "first\n\nsecond", "both return, in order"
        assert (it.prompts, it.phase()) == ([], "ready")
        await it.press("enter")
        await it.press(*"third", "escape")
        assert (it.text(), it.prompts) == ("first\n\nsecond\n\nthird", [])


async def test_prompts_wait_while_the_model_loads_and_answers() -> None:
    async with chat(loaded=False) as it:
        await it.send("one")
        await it.send("two")
        assert (it.prompts, it.phase()) == (["one", "two"], "loading")
        await it.post(ModelLoaded("starter", 8192))
        assert it.phase() == "prefill"
        await it.piece("1")
        await it.post(AnswerFinished(1, "stop", STATS))
        assert it.phase() == "prefill"
        await it.piece("2", turn=2)
        await it.post(AnswerFinished(2, "stop", STATS))
        assert (it.markdown, it.phase()) == (["1", "2"], "ready")


@pytest.mark.parametrize("new", ["ctrl+n", "/new"])
async def test_a_new_conversation(new: str) -> None:
    async with chat() as it:
        await it.send("old")
        await it.piece("answer")
        if new == "/new":
            await it.send(new)
        else:
            await it.press(new)
        await it.piece(" that comes late")
        assert (it.prompts, it.markdown, it.phase()) == ([], [], "answering")
        await it.post(AnswerFinished(1, "stop", STATS))
        await it.send("fresh")
        assert it.history == [Message("user", "fresh")]


async def test_a_failed_prompt_goes_back_to_the_box() -> None:
    async with chat() as it:
        await it.send("too long")
        await it.post(AnswerFailed(1, "the prompt is too long"))
        assert (it.text(), it.notices) == ("too long", ["the prompt is too long"])
        assert it.phase() == "failed"
        it.box.clear()
        await it.send("short")
        assert it.phase() == "prefill"


async def test_an_answer_that_fails_halfway_is_kept() -> None:
    async with chat() as it:
        await it.send("go")
        await it.piece("half of")
        await it.post(AnswerFailed(1, "RuntimeError: out of memory"))
        assert (it.markdown, it.text()) == (["half of"], "")
        assert it.notices == ["RuntimeError: out of memory"]


@pytest.mark.long
@pytest.mark.parametrize(
    "broken",
    [
        "akunu_py.tui.transcript.blocks.natural_widths",
        "akunu_py.tui.transcript.markdown_parser.to_unicode",
    ],
)
async def test_a_bug_in_drawing_hides_nothing(
    broken: str, monkeypatch: pytest.MonkeyPatch, own_directories: None
) -> None:
    """What cannot be drawn as Markdown is shown as it was written, while it comes and later; where
    the details are is told."""

    def fail(*_: object) -> NoReturn:
        raise ZeroDivisionError("in drawing")

    async with chat() as it:
        await it.send("go")
        await it.piece("**one**\n\n")
        monkeypatch.setattr(broken, fail)
        await it.piece("| a | b |\n|--|--|\n| two | $x^2$ |\n\n")
        await until(it.pilot, lambda: it.notifications)
        assert "shown as plain text; the details are in" in it.notifications[0]
        await it.answer("```py\nthree\n```")
        written = ["**one**", "| a ", "| two | $x^2$ |", "```py", "three"]
        for keys in ((), ("f2",), ("f2",), ("f8",)):
            await it.press(*keys)
            await at_rest(it.pilot)
            assert [line for line in written if line not in it.screen_text()] == []
        it.app.view.message.clear()
        await it.app.view.show_conversation()  # as when it is opened later
        await until(it.pilot, lambda: it.notifications)
        await at_rest(it.pilot)
        assert [line for line in written if line not in it.screen_text()] == []
        await it.send("and a prompt after it")
        assert (it.phase(), len(it.prompts)) == ("prefill", 2)
    details = [file.read_text() for file in (paths.cache_dir() / "crashes").iterdir()]
    assert len(details) == 2
    assert all("in drawing" in each and "transcript/" in each for each in details)


async def test_a_model_that_cannot_be_loaded_loses_no_prompt() -> None:
    async with chat(loaded=False) as it:
        await it.send("hello")
        await it.post(AnswerFailed(None, "the model is damaged"))
        assert (it.text(), it.notices) == ("hello", ["the model is damaged"])
        await it.press("enter")
        assert it.phase() == "loading", "sending tries again to load"
        await it.post(ModelLoaded("starter", 8192))
        await it.piece("Hi")
        assert it.markdown == ["Hi"]


async def test_what_is_to_know_of_a_model_stays_on_the_screen() -> None:
    async with chat(loaded=False) as it:
        note = "starter gets 2,048 of its 8,192 tokens of context"
        await it.post(ModelLoaded("starter", 2048, None, note))
        assert it.notices == [note]


@pytest.mark.long
async def test_ctrl_c_does_what_it_does_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akunu_py.tui.app.clipboard_command", lambda: None)
    async with chat() as it:
        await it.send("go")
        await it.piece("still")
        it.app.query_one(PromptView).text_select_all()
        await it.press("ctrl+c")
        assert (it.app.clipboard, it.phase()) == ("go", "answering")
        it.app.screen.clear_selection()
        await it.press("ctrl+c")
        assert (it.phase(), it.feet) == ("stopped", ["■ stopped"])
        await it.press("a", "ctrl+j", "b", "ctrl+c")
        assert it.text() == "", "more than one line too"
        await it.press("up")
        assert it.text() == "a\nb", "nothing is lost"
        await it.press("ctrl+d")
        assert it.app.return_code != 0, "the box is not empty"
        await it.press("ctrl+c")
        await it.press("ctrl+c")
        assert it.notifications == ["Press Ctrl+C again to quit."]
        await it.press("ctrl+c")
        assert it.app.return_code == 0
    async with chat() as it:
        await it.press("ctrl+d")
        assert it.app.return_code == 0


@pytest.mark.long
async def test_one_message_line_above_the_prompt() -> None:
    """It covers nothing, shows one message at a time, and refusals in red."""
    async with chat() as it:
        line = it.app.view.message
        height = it.transcript.size.height
        await it.send("/temperature 0.5")
        assert (line.text, line.has_class("-error")) == ("Temperature of this chat: 0.5", False)
        assert line.region.bottom == it.box.region.y == it.transcript.region.bottom + 1
        await it.send("/temperature 9")
        assert "expected a number from 0 to 5" in line.text
        assert line.has_class("-error")
        assert len(it.notifications) == 1
        assert it.text() == "/temperature 9", "it can be corrected"
        it.box.clear()
        await it.press("f4")
        await it.pilot.pause()
        it.app.notify("while a dialog is open")
        assert it.app.screen.query_one(MessageLine).text == "while a dialog is open"
        await it.press("escape")
        await it.post(DownloadEnded("good-4b", error="the hub does not answer"))
        assert it.notifications == ["the hub does not answer"], "though the list is closed"
        line.clear()
        await it.pilot.pause()
        assert (line.display, it.transcript.size.height) == (False, height)


@pytest.mark.long
async def test_what_is_told_waits_and_is_edited_is_marked() -> None:
    async with chat() as it:
        await it.send("/system You are a pirate.")
        assert it.box.border_title == "starter · system prompt"
        await it.send("one")
        await it.send("two")
        assert it.feet == ["", "… queued; Esc takes it back"]
        await it.answer("1")
        assert it.feet == ["", ""]
        await it.answer("2", turn=2)
        await it.press("f6")
        assert [view.has_class("-edited") for view in it.app.query(PromptView)] == [False, True]
        await it.press("escape")
        assert not it.app.query("PromptView.-edited")
        await it.send("/export chat.pdf")
        assert it.notifications == ["unknown file type .pdf; use .md or .json"]
        assert it.text() == "/export chat.pdf"


@pytest.mark.parametrize("quit_by", ["ctrl+q", "/quit"])
async def test_quitting_while_answering(quit_by: str) -> None:
    async with chat() as it:
        await it.send("go")
        await it.piece("on and on")
        if quit_by == "/quit":
            await it.send(quit_by)
        else:
            await it.press(quit_by)
        assert it.app.return_code == 0


@pytest.mark.long
async def test_the_transcript_follows_its_end_unless_scrolled_up() -> None:
    async with chat() as it:
        transcript = it.app.query_one(Transcript)
        await it.send("go")
        assert transcript.scroll_y == 0
        await it.piece("line\n\n" * 40)
        assert transcript.max_scroll_y > 20
        assert transcript.scroll_y == transcript.max_scroll_y
        await it.press("pageup")
        above = transcript.scroll_y
        assert above < transcript.max_scroll_y
        await it.piece("line\n\n" * 40)
        assert transcript.scroll_y == above
        await it.press(*["pagedown"] * 20)
        await it.piece("line\n\n" * 40)
        assert transcript.scroll_y == transcript.max_scroll_y


@pytest.mark.long
async def test_the_box_keeps_the_focus() -> None:
    async with chat() as it:
        await it.press("tab", "a")
        assert it.text().strip() == "a", "there is no message to go to yet"
        await it.press("enter")
        await it.piece("```\ncode\n```\n")
        await it.pilot.click(AnswerView)
        await it.press("b", "tab", "tab", "c")
        assert it.text() == "bc"


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("size", [(20, 5), (40, 10), (200, 60)])
async def test_any_size(size: tuple[int, int]) -> None:
    async with chat(size=size) as it:
        await it.send("go " * 50)
        await it.piece("# Title\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n```\n" + "x" * 300)
        await it.press("f2")
        await it.pilot.resize_terminal(30, 8)
        await it.press("f2", "escape")
        assert it.phase() == "stopped"


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("rows", [5, 6, 8, 12, 30])
async def test_the_line_that_is_typed_is_seen(rows: int) -> None:
    async with chat(size=(90, 30)) as it:
        await it.press(*"a", *["ctrl+j"] * 12, *"b")
        await it.pilot.resize_terminal(20, rows)
        await it.pilot.pause()
        prompt = it.app.query_one(PromptBox)
        seen = prompt.content_region.intersection(it.app.screen.region)
        assert seen.contains_point(prompt.cursor_screen_offset)
        assert prompt.region.bottom == it.status.region.y == rows - 1


def test_what_is_shown_is_as_long_as_what_was_said() -> None:
    text = "".join(map(chr, range(0x2100))) + "\ud800 \u2028 "
    shown = displayable(text)
    assert len(shown) == len(text)
    assert shown.encode()
    assert not [char for char in shown if ord(char) < 32 and char not in "\n\t"]
    assert len(shown.splitlines()) == len(shown.split("\n"))
    assert displayable("a\x1b[1m\tb\r\n") == "a␛[1m\tb \n"
    assert typeable("a\x1b[1m\r\nb\rc\x85d\x9b") == "a[1m\nb\nc\nd"


def test_history_leaves_out_what_was_not_answered() -> None:
    conversation = Conversation()
    for prompt, answer, finish_reason in (
        ("a", "A", "stop"),
        ("b", "", None),
        ("c", "C", "cancelled"),
    ):
        turn = conversation.ask(prompt)
        turn.answer, turn.finish_reason = answer, finish_reason  # type: ignore[assignment]
    asked = conversation.ask("d")
    conversation.ask("e")
    contents = [message.content for message in conversation.history(asked, "Be kind.")]
    assert contents == ["Be kind.", "a", "A", "c", "C", "d"]


@pytest.mark.long
async def test_the_next_answer_can_be_asked_for_in_json(tmp_path: Path) -> None:
    """Once: any JSON, of a schema in the prompt or in a file; and answered again likewise."""
    (tmp_path / "schema.json").write_text('{"type": "integer"}')

    def constraint(turn: ChatTurn | None) -> Constraint | None:
        assert turn is not None
        return turn.constraint

    async with chat() as it:
        answering = it.app.answering
        await it.send("/json")
        assert it.notifications == ["The next answer will be JSON. /json off cancels."]
        await it.send("one")
        assert constraint(answering.active) == Constraint("json")
        await it.answer("1")
        await it.send("two")
        assert constraint(answering.active) is None
        await it.answer("2", turn=2)
        await it.send('/json {"type": "null"}')
        await it.send("three")
        asked = Constraint("json_schema", '{"type": "null"}')
        assert constraint(answering.active) == asked
        await it.answer("null", turn=3)
        await it.press("f5")
        assert constraint(answering.active) == asked
        await it.answer("null", turn=4)
        await it.send(f"/json {tmp_path / 'schema.json'}")
        await it.send("/json off")
        assert it.notifications == ["The next answer is unconstrained."]
        await it.send(f"/json {tmp_path / 'schema.json'}")
        await it.send("four")
        assert constraint(answering.active) == Constraint("json_schema", '{"type": "integer"}')
        await it.answer("4", turn=5)
        for wrong, why in (("{1}", "is not valid JSON"), ("/no/such", "cannot read /no/such")):
            await it.send(f"/json {wrong}")
            assert why in it.notifications[-1]
            it.box.clear()
        await it.send("five")
        assert constraint(answering.active) is None


async def test_a_server_that_answers_is_named() -> None:
    url = "http://127.0.0.1:8012"
    async with chat(loaded=False) as it:
        await it.post(ModelLoaded("starter", 8192, server=url))
        assert it.notices == [f"starter runs in akunu serve at {url}; none is loaded here."]
        assert "ready: akunu serve answers" in it.screen_text()
        await it.post(ModelLoaded("starter", 8192, server=url))
        await it.send("Hello.")
        await it.answer("Hi.")
        assert "ready: akunu serve answers" in it.screen_text()
        assert len(it.notices) == 1
        await it.post(ModelLoaded("another", 8192))
        assert it.notices[1:] == ["another is loaded here; no server answers from now on."]
        assert "akunu serve answers" not in it.screen_text().splitlines()[-1]
