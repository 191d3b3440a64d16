"""The chat's keys and states, driven by pilots. What a session would tell is posted by hand."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from textual import events
from textual.message import Message as Note
from textual.pilot import Pilot
from textual.widgets import Markdown

from akunu_py.tui.app import ChatApp
from akunu_py.tui.conversation import Conversation, Turn
from akunu_py.tui.messages import Failed, Finished, Loaded, PieceArrived, Prefilling
from akunu_py.tui.prompt import PromptBox
from akunu_py.tui.status import StatusLine
from akunu_py.tui.text import displayable, typeable
from akunu_py.tui.transcript import AnswerView, DraftedText, Notice, Stretch, Transcript, UserPrompt
from akunu_py.types import GenerateOptions, Message, Stats

STATS = Stats(generated_tokens=11, target_passes=5, drafted=10, accepted=5, decode_s=0.5)


class Chat:
    """An app under test, with the parts that tests look at."""

    def __init__(self, pilot: Pilot[None]) -> None:
        assert isinstance(pilot.app, ChatApp)
        self.pilot, self.app = pilot, pilot.app
        self.box = self.app.query_one(PromptBox)
        self.status = self.app.query_one(StatusLine)

    def phase(self) -> str:
        """A method, because a type checker believes that an attribute stays what it was."""
        return self.status.phase

    @property
    def prompts(self) -> list[str]:
        return [str(widget.content) for widget in self.app.query(UserPrompt)]

    @property
    def notices(self) -> list[str]:
        return [str(widget.content) for widget in self.app.query(Notice)]

    @property
    def markdown(self) -> list[str]:
        return [widget.source for widget in self.app.query(Markdown)]

    @property
    def drafted(self) -> list[str]:
        """The texts of the drafting view, an answer each."""
        return [
            "\n".join(str(stretch.render()) for stretch in view.query(Stretch))
            for view in self.app.query(DraftedText)
        ]

    async def post(self, *notes: Note) -> None:
        for note in notes:
            self.app.post_message(note)
        for _ in range(3):
            await self.pilot.pause(0.01)

    async def say(self, text: str) -> None:
        self.box.insert(text)
        await self.press("enter")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def piece(self, text: str, *drafted: tuple[int, int], turn: int = 1) -> None:
        await self.post(PieceArrived(turn, text, drafted, STATS))


@contextlib.asynccontextmanager
async def chat(*, loaded: bool = True, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Chat]:
    async with ChatApp("starter", GenerateOptions()).run_test(size=size) as pilot:
        chat = Chat(pilot)
        if loaded:
            await chat.post(Loaded("starter", "float32", 8192))
        yield chat


async def test_a_question_and_its_answer() -> None:
    async with chat() as it:
        assert it.phase() == "ready"
        await it.press(*"why", "enter")
        assert (it.prompts, it.box.text, it.phase()) == (["why"], "", "reading")
        await it.post(Prefilling(1, 40, 100))
        assert "reading 40%" in str(it.status.render())
        await it.piece("Be")
        await it.piece("cause")
        assert it.phase() == "answering"
        assert it.markdown == ["Because"]
        for number in ("20.0", "50%", "2.00"):
            assert number in str(it.status.render())
        await it.post(Finished(1, "stop", STATS))
        assert it.phase() == "ready"
        assert "20.0" in str(it.status.render())


async def test_the_status_line_never_jumps() -> None:
    async with chat() as it:
        places = []
        for stats in (None, STATS, Stats(9000, 0, 9001, 1000, 4000, 4000, decode_s=2)):
            it.status.stats = stats
            line = str(it.status.render())
            places.append([len(line), *(line.index(unit) for unit in ("/s", "accepted", "/pass"))])
        assert places[0] == places[1] == places[2]


async def test_enter_sends_and_other_keys_break_the_line() -> None:
    async with chat() as it:
        await it.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert it.box.text == "a\nb\nc"
        await it.press("enter")
        assert it.prompts == ["a\nb\nc"]
        await it.press("enter")
        await it.press("space", "enter")
        assert len(it.prompts) == 1, "an empty prompt is not sent"


async def test_a_paste_of_many_lines_is_one_harmless_prompt() -> None:
    async with chat() as it:
        it.app.post_message(events.Paste("one\r\ntwo\x1b[2J\rthree\x07\ttab\x00"))
        await it.pilot.pause()
        assert it.box.text == "one\ntwo[2J\nthree\ttab"
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
            await it.say(prompt)
        await it.press("up")
        assert it.box.text == "second"
        await it.press("up")
        assert it.box.text == "first"
        await it.press("up")
        assert it.box.text == "first"
        await it.press("down")
        assert it.box.text == "second"
        await it.press("down")
        assert it.box.text == ""
        await it.press(*"mine", "up")
        assert it.box.text == "mine", "what was typed is not lost"


async def test_escape_stops_at_once_and_keeps_what_was_said() -> None:
    async with chat() as it:
        await it.say("go")
        await it.piece("Once upon")
        await it.press("escape")
        assert it.phase() == "stopped"
        await it.piece(" a time")
        await it.post(Finished(1, "cancelled", STATS))
        assert it.markdown == ["Once upon"]
        assert "stopped" in str(it.app.query_one(".ending").render())
        await it.say("more")
        assert it.phase() == "reading"
        assert it.app._active is not None
        history = it.app._conversation.history(it.app._active)
        assert history == [
            Message("user", "go"),
            Message("assistant", "Once upon"),
            Message("user", "more"),
        ]


async def test_escape_before_an_answer_gives_the_prompt_back() -> None:
    async with chat() as it:
        await it.say("first")
        await it.say("second")
        await it.press(*"third", "escape")
        assert it.box.text == "first\n\nsecond\n\nthird"
        assert (it.prompts, it.phase()) == ([], "ready")


async def test_prompts_wait_while_the_model_loads_and_answers() -> None:
    async with chat(loaded=False) as it:
        await it.say("one")
        await it.say("two")
        assert (it.prompts, it.phase()) == (["one", "two"], "loading")
        await it.post(Loaded("starter", "float32", 8192))
        assert it.phase() == "reading"
        await it.piece("1")
        await it.post(Finished(1, "stop", STATS))
        assert it.phase() == "reading"
        await it.piece("2", turn=2)
        await it.post(Finished(2, "stop", STATS))
        assert (it.markdown, it.phase()) == (["1", "2"], "ready")


@pytest.mark.parametrize("new", ["ctrl+n", "/new"])
async def test_a_new_conversation(new: str) -> None:
    async with chat() as it:
        await it.say("old")
        await it.piece("answer")
        if new == "/new":
            await it.say(new)
        else:
            await it.press(new)
        await it.piece(" that comes late")
        assert (it.prompts, it.markdown, it.phase()) == ([], [], "ready")
        await it.say("fresh")
        assert it.app._active is not None
        assert it.app._conversation.history(it.app._active) == [Message("user", "fresh")]


@pytest.mark.parametrize("key", ["f2", "ctrl+t"])
async def test_the_drafting_view_of_all_answers_and_back(key: str) -> None:
    async with chat() as it:
        await it.say("one")
        await it.piece("Hello world", (0, 5))
        await it.post(Finished(1, "stop", STATS))
        await it.say("two")
        await it.piece("And ", turn=2)
        await it.press(key)
        await it.piece("on and", (0, 2), (2, 4), turn=2)
        assert it.drafted == ["Hello world", "And on and"]
        spans = [stretch.render().spans for stretch in it.app.query(Stretch)]
        assert [[(span.start, span.end) for span in each] for each in spans] == [[(0, 5)], [(4, 8)]]
        assert not any(markdown.display for markdown in it.app.query(Markdown))
        await it.press(key)
        await it.piece(" on", turn=2)
        assert it.drafted == []
        assert it.markdown == ["Hello world", "And on and on"]
        assert all(markdown.display for markdown in it.app.query(Markdown))


async def test_a_long_drafting_view_is_cut_into_stretches_with_all_spans() -> None:
    async with chat() as it:
        await it.say("go")
        await it.press("f2")
        for number in range(200):
            it.app.post_message(PieceArrived(1, f"line {number}\nand on", ((3, 9),), STATS))
        await it.post()
        turn = it.app._conversation.turns[0]
        stretches = list(it.app.query(Stretch))
        assert len(stretches) > 1
        assert it.drafted == [turn.answer]
        marked = "".join(
            content.plain[span.start : span.end]
            for content in (stretch.render() for stretch in stretches)
            for span in content.spans
        )
        expected = "".join(turn.answer[start:end] for start, end in turn.spans)
        assert marked.replace("\n", "") == expected.replace("\n", "")


async def test_a_failed_prompt_goes_back_to_the_box() -> None:
    async with chat() as it:
        await it.say("too long")
        await it.post(Failed(1, "the prompt is too long"))
        assert (it.box.text, it.notices) == ("too long", ["the prompt is too long"])
        assert it.phase() == "failed"
        it.box.clear()
        await it.say("short")
        assert it.phase() == "reading"


async def test_an_answer_that_fails_halfway_is_kept() -> None:
    async with chat() as it:
        await it.say("go")
        await it.piece("half of")
        await it.post(Failed(1, "RuntimeError: out of memory"))
        assert (it.markdown, it.box.text) == (["half of"], "")
        assert it.notices == ["RuntimeError: out of memory"]


async def test_a_model_that_cannot_be_loaded_loses_no_prompt() -> None:
    async with chat(loaded=False) as it:
        await it.say("hello")
        await it.post(Failed(None, "the model is damaged"))
        assert (it.box.text, it.notices) == ("hello", ["the model is damaged"])
        await it.press("enter")
        assert it.phase() == "loading", "sending tries again to load"
        await it.post(Loaded("starter", "float32", 8192))
        await it.piece("Hi", turn=2)
        assert it.markdown == ["Hi"]


async def test_ctrl_c_neither_stops_nor_quits() -> None:
    async with chat() as it:
        await it.say("go")
        await it.piece("still")
        await it.press("ctrl+c")
        await it.piece(" here")
        assert it.markdown == ["still here"]
        assert "Ctrl+Q" in next(iter(it.app._notifications)).message


@pytest.mark.parametrize("quit_by", ["ctrl+q", "/quit"])
async def test_quitting_while_answering(quit_by: str) -> None:
    async with chat() as it:
        await it.say("go")
        await it.piece("on and on")
        if quit_by == "/quit":
            await it.say(quit_by)
        else:
            await it.press(quit_by)
        assert it.app.return_code == 0


async def test_the_transcript_follows_its_end_unless_scrolled_up() -> None:
    async with chat() as it:
        transcript = it.app.query_one(Transcript)
        await it.say("go")
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


async def test_the_box_keeps_the_focus() -> None:
    async with chat() as it:
        await it.say("go")
        await it.piece("```\ncode\n```\n")
        await it.pilot.click(AnswerView)
        await it.press("tab", "x")
        assert it.box.text.strip() == "x"


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (200, 60)])
async def test_any_size(size: tuple[int, int]) -> None:
    async with chat(size=size) as it:
        await it.say("go " * 50)
        await it.piece("# Title\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\n```\n" + "x" * 300)
        await it.press("f2")
        await it.pilot.resize_terminal(30, 8)
        await it.press("f2", "escape")
        assert it.phase() == "stopped"


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
    turns = [
        Turn(1, "a", "A", state="done", finish="stop"),
        Turn(2, "b", "", state="failed"),
        Turn(3, "c", "C", state="done", finish="cancelled"),
        Turn(4, "d"),
        Turn(5, "e"),
    ]
    contents = [message.content for message in Conversation(turns).history(turns[3])]
    assert contents == ["a", "A", "c", "C", "d"]


def test_spans_that_touch_become_one() -> None:
    turn = Turn(1, "")
    turn.add("abc", ((0, 1), (2, 3)))
    turn.add("def", ((0, 2),))
    assert turn.spans == [(0, 1), (2, 5)]
