"""The session's thread on the real starter: answering, stopping, failing, closing."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.message import Message as Note

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.session import Generation, Session
from akunu_py.errors import DamagedModel
from akunu_py.tui.session.messages import Failed, Finished, Gauges, Loaded, PieceArrived, Prefilling
from akunu_py.tui.session.pacing import Held
from akunu_py.tui.session.worker import SessionThread
from akunu_py.types import GenerateOptions, Message, Piece, Stats, TextPiece
from tests.support.tiny_fim import write_chat_model

QUESTION = [Message("user", "Say the word sea three times, then tell me about the sea.")]
OPTIONS = GenerateOptions(max_tokens=24)
ENDLESS = GenerateOptions(max_tokens=4000)


class Ear:
    """A session thread and what it says."""

    def __init__(self, starter: Engine) -> None:
        self.notes: queue.Queue[Note] = queue.Queue()
        self.broken = True
        self.starter = starter
        self.answered: list[str] = []
        self.thread = SessionThread("starter", self.load, answered=self.hear)

    def load(self, name: str) -> Engine:
        if self.broken:
            raise DamagedModel("model 'starter' is damaged")
        return replace(self.starter, name=name)

    def hear(self, engine: Engine, generation: Generation) -> None:
        self.answered.append(generation.text)

    def next(self) -> Any:
        return self.notes.get(timeout=60)

    def until_end(self, turn: int) -> tuple[str, Any]:
        """The text of an answer, and the message that ended it."""
        text = ""
        while True:
            note = self.next()
            assert note.turn == turn
            if isinstance(note, (Finished, Failed)):
                return text, note
            if isinstance(note, PieceArrived):
                assert all(0 <= a < b <= len(note.text) for a, b in note.drafted)
                text += note.text
            else:
                assert isinstance(note, Prefilling)


@pytest.fixture(scope="module")
def ear(starter_engine: Engine) -> Iterator[Ear]:
    """Its model cannot be loaded at first; the second attempt, at the first question, succeeds."""
    ear = Ear(starter_engine)
    ear.thread.start(ear.notes.put)
    failed = ear.next()
    assert (failed.turn, failed.error) == (None, "model 'starter' is damaged")
    ear.broken = False
    ear.thread.ask(0, QUESTION, GenerateOptions(max_tokens=1))
    loaded = ear.next()
    assert isinstance(loaded, Loaded)
    assert (loaded.model, loaded.context_length, loaded.no_draft) == ("starter", 8192, None)
    ear.until_end(0)
    yield ear
    assert ear.thread.close(timeout=30)


def test_the_answer_is_that_of_the_engine(ear: Ear, starter_engine: Engine) -> None:
    ear.thread.ask(1, QUESTION, OPTIONS)
    text, end = ear.until_end(1)
    expected = Session(starter_engine).chat(QUESTION, OPTIONS).answer()
    assert (text, end.reason) == (expected.text, expected.finish_reason)
    assert end.stats.generated_tokens == len(expected.tokens)


def test_stopping_keeps_what_was_said(ear: Ear) -> None:
    ear.thread.ask(2, QUESTION, ENDLESS)
    while not isinstance(ear.next(), PieceArrived):
        pass
    ear.thread.stop(2)
    _, end = ear.until_end(2)
    assert end.reason == "cancelled"
    assert 0 < end.stats.generated_tokens < 1000


def test_stopping_before_it_begins(ear: Ear) -> None:
    ear.thread.ask(3, QUESTION, OPTIONS)
    ear.thread.ask(4, QUESTION, ENDLESS)
    ear.thread.stop(4)
    assert ear.until_end(3)[1].reason in ("stop", "length")
    _, end = ear.until_end(4)
    assert end.reason == "cancelled"
    assert end.stats.generated_tokens <= 1


def test_errors_are_told_and_the_next_question_is_answered(ear: Ear) -> None:
    ear.thread.ask(5, [Message("user", "too long " * 9000)], OPTIONS)
    _, end = ear.until_end(5)
    assert isinstance(end, Failed)
    assert "8192" in end.error
    ear.thread.ask(6, [None], OPTIONS)  # type: ignore[list-item]
    _, end = ear.until_end(6)
    assert isinstance(end, Failed)
    assert end.error.startswith("AttributeError: ")
    ear.thread.ask(7, QUESTION, OPTIONS)
    before = len(ear.answered)
    text, end = ear.until_end(7)
    assert isinstance(end, Finished)
    ear.thread.ask(70, QUESTION, GenerateOptions(max_tokens=1))
    ear.until_end(70)
    assert ear.answered[before:][:1] == [text], "of failed ones nothing is told"


def test_an_answer_goes_on_where_it_was_cut_off(ear: Ear) -> None:
    ear.thread.ask(8, QUESTION, GenerateOptions(max_tokens=10))
    begun, end = ear.until_end(8)
    assert end.reason == "length"
    ear.thread.ask(9, [*QUESTION, Message("assistant", begun)], GenerateOptions(max_tokens=20))
    rest, end = ear.until_end(9)
    assert end.stats.cached_tokens > 0
    ear.thread.ask(10, QUESTION, GenerateOptions(max_tokens=30))
    whole, _ = ear.until_end(10)
    assert begun + rest == whole, "greedy: as if it had not been cut off"


def test_rejected_drafts_and_gauges_are_told(ear: Ear) -> None:
    ear.thread.ask(11, QUESTION, GenerateOptions(max_tokens=60, draft="fixed"))
    rejected, passes = 0, 0
    while not isinstance(note := ear.next(), Finished):
        if isinstance(note, PieceArrived):
            assert all(0 <= place <= len(note.text) and text for place, text in note.rejected)
            rejected += len(note.rejected)
            passes += len(note.passes)
    assert rejected > 0
    assert passes == note.stats.target_passes
    assert note.gauges.memory > 90_000_000


def test_switching_models(ear: Ear) -> None:
    ear.thread.switch("another")
    loaded = ear.next()
    assert isinstance(loaded, Loaded)
    assert loaded.model == "another"
    ear.broken = True
    ear.thread.switch("third")
    assert isinstance(ear.next(), Failed)
    ear.broken = False
    ear.thread.ask(12, QUESTION, GenerateOptions(max_tokens=1))
    assert ear.next().model == "third", "tried again with the next question"
    ear.until_end(12)


def test_closing_in_the_middle_of_an_answer(starter_engine: Engine) -> None:
    ear = Ear(starter_engine)
    ear.broken = False
    ear.thread.start(ear.notes.put)
    ear.thread.ask(1, QUESTION, ENDLESS)
    while not isinstance(ear.next(), PieceArrived):
        pass
    assert ear.thread.close(timeout=10)
    assert ear.until_end(1)[1].reason == "cancelled"


QUIT = """
import queue
import sys
from pathlib import Path
from akunu_py.decoding.engine import Engine
from akunu_py.tui.session.messages import PieceArrived
from akunu_py.tui.session.worker import SessionThread
from akunu_py.types import GenerateOptions, Message

notes = queue.Queue()
thread = SessionThread("tiny", lambda name: Engine.load(Path(sys.argv[1])))
thread.start(notes.put)
thread.ask(1, [Message("user", "Tell me a story.")], GenerateOptions(max_tokens=4000))
while not isinstance(notes.get(timeout=60), PieceArrived):
    pass
assert thread.close(timeout=30)
"""


def test_a_program_that_closes_it_ends_cleanly(tmp_path: Path) -> None:
    """MLX aborts two programs of three here where a thread ends without giving back its streams."""
    write_chat_model(tmp_path)
    for _ in range(3):
        command = [sys.executable, "-c", QUIT, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_model_that_is_not_here_yet_is_loaded_when_it_is(starter_engine: Engine) -> None:
    ear = Ear(starter_engine)
    ear.thread.start(ear.notes.put, load=False)
    ear.thread.switch("starter")
    assert isinstance(ear.next(), Failed)  # it is broken
    assert ear.thread.close(timeout=30)
    assert ear.notes.empty(), "it was tried once"


def test_closing_what_never_started(starter_engine: Engine) -> None:
    assert Ear(starter_engine).thread.close(timeout=0)


def test_pieces_are_held_together_with_their_spans() -> None:
    held, stats, gauges = Held(), Stats(), Gauges()
    assert not held.is_due()
    held.add(TextPiece("ab", Piece((1, 2), accepted=1), ((0, 1),)), from_prefill=True)
    assert held.is_due(), "the first piece goes at once"
    held.release(1, stats, gauges)
    held.add(TextPiece("cd", Piece((3, 4), accepted=1, rejected=(7,)), ((1, 2),)), " dog")
    held.add(TextPiece("ef", Piece((5, 6), accepted=1), ((0, 1),)))
    assert not held.is_due()
    note = held.release(1, stats, gauges)
    assert (note.text, note.drafted, note.rejected) == ("cdef", ((1, 3),), ((2, " dog"),))
    assert note.passes == (2, 2)
    assert note.stats is not stats


def test_rejected_drafts_in_the_thinking_are_not_shown_in_the_answer() -> None:
    held = Held()
    held.add(TextPiece("", Piece((1,), rejected=(2,)), thinking="Hm"), " dog")
    note = held.release(1, Stats(), Gauges())
    assert (note.thinking, note.text, note.rejected) == ("Hm", "", ())
