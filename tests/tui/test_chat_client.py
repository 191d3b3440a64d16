"""The chat's client of the model's thread, on the starter: answers, errors, titles, loading."""

import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from akunu_py.engine.answer import ChatJob
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Finished, TextDelta
from akunu_py.engine.job import JobHandle
from akunu_py.engine.loop import StepLoop
from akunu_py.errors import DamagedModel
from akunu_py.tui.workers.chat_client import (
    AnswerFailed,
    AnswerFinished,
    ModelLoaded,
    PieceArrived,
    TitleWritten,
)
from akunu_py.types import GenerateOptions, Message, Stats, Tool
from tests.support.chat_client import RecordedClient
from tests.support.command import until
from tests.support.engines import altered
from tests.support.jobs import chat_answer

QUESTION = [Message("user", "Say the word sea three times, then tell me about the sea.")]
OPTIONS = GenerateOptions(max_tokens=24)


class RecordedLoop(StepLoop):
    """Appends the statistics of finished answers to `answered`."""

    def __init__(self, engine: Engine, answered: list[Stats]) -> None:
        super().__init__(engine, slots=1)
        self._answered = answered

    def step(self, jobs: Sequence[JobHandle]) -> list[tuple[JobHandle, list[Event]]]:
        found = super().step(jobs)
        for _, events in found:
            self._answered += [each.stats for each in events if isinstance(each, Finished)]
        return found


class Recorder(RecordedClient):
    """A chat client whose model cannot be loaded while it is `broken`."""

    def __init__(self, starter: Engine) -> None:
        super().__init__("starter", self.load)
        self.broken = True
        self.starter = starter
        self.answered: list[Stats] = []
        self.loading: list[bool] = []  # at each load

    def load(self, name: str) -> StepLoop:
        self.loading.append(self.thread.is_loading)
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if self.broken:
            raise DamagedModel("model 'starter' is damaged")
        return RecordedLoop(altered(self.starter, name=name), self.answered)

    def answer(
        self, turn: int, messages: list[Message], options: GenerateOptions
    ) -> tuple[str, Any]:
        """Send a request; return the text of its answer and the message that ended it."""
        self.thread.request(turn, ChatJob(messages, options))
        *found, end = self.until_end()
        assert {message.request for message in (*found, end)} == {turn}
        pieces = [message.delta for message in found if isinstance(message, PieceArrived)]
        for piece in pieces:
            assert all(0 <= a < b <= len(piece.text) for a, b in piece.drafted)
            assert all(0 <= place <= len(piece.text) and text for place, text in piece.rejected)
        return "".join(piece.text for piece in pieces), end


@pytest.fixture(scope="module")
def recorder(shallow_starter: Engine) -> Iterator[Recorder]:
    """Its model cannot be loaded at first; the second attempt, at the first question, succeeds."""
    recorder = Recorder(shallow_starter)
    recorder.thread.start(recorder.messages.put)
    failed = recorder.next()
    assert (failed.request, failed.error) == (None, "model 'starter' is damaged")
    recorder.broken = False
    recorder.thread.request(0, ChatJob(QUESTION, GenerateOptions(max_tokens=1)))
    loaded = recorder.next()
    assert isinstance(loaded, ModelLoaded)
    assert (loaded.model, loaded.context_length, loaded.no_draft) == ("starter", 8192, None)
    recorder.until_end()
    yield recorder
    assert recorder.thread.close(timeout=60)


@pytest.mark.long
def test_the_answer_is_that_of_the_engine(recorder: Recorder, shallow_starter: Engine) -> None:
    text, end = recorder.answer(1, QUESTION, OPTIONS)
    expected = chat_answer(StepLoop(shallow_starter), QUESTION, OPTIONS)
    assert (text, end.reason) == (expected.text, expected.finish_reason)
    assert end.stats.generated_tokens == len(expected.tokens)


async def test_pasted_text_is_counted_by_the_model(
    recorder: Recorder, shallow_starter: Engine
) -> None:
    text = "1, 22, 333\n" * 90
    assert await recorder.thread.count_tokens(text) == len(shallow_starter.tokens.encode_text(text))


@pytest.mark.long
def test_errors_are_reported_and_the_next_prompt_is_answered(recorder: Recorder) -> None:
    long = Message("user", "too long " * 9000)
    _, end = recorder.answer(5, [long], OPTIONS)
    assert isinstance(end, AnswerFailed)
    assert "8192" in end.error
    assert end.error.endswith("shorten the prompt"), "there is nothing to compact"
    short = [Message("user", "Hi"), Message("assistant", "Hello.")]
    _, end = recorder.answer(8, [*short, long], OPTIONS)
    assert end.error.endswith("shorten the prompt"), "it is too long without the others"
    _, end = recorder.answer(9, [short[0], Message("assistant", long.content), short[0]], OPTIONS)
    assert end.error.endswith("shorten the prompt, or /compact")
    _, end = recorder.answer(6, [None], OPTIONS)  # type: ignore[list-item]
    assert end.error.startswith("AttributeError: ")
    before = len(recorder.answered)
    _, end = recorder.answer(7, QUESTION, OPTIONS)
    assert isinstance(end, AnswerFinished)
    recorder.answer(70, QUESTION, GenerateOptions(max_tokens=1))
    assert recorder.answered[before:][:1] == [end.stats], "failed answers report no statistics"


WORDS = re.compile(r"[^\W_][^\s\"`*<>]*(?:[,:]? [^\W_][^\s\"`*<>]*){0,7}\??")


@pytest.mark.long
def test_a_title_is_words_and_leaves_the_cached_prompt(recorder: Recorder) -> None:
    tools = (Tool("switch", "Switch a lamp."),)
    text, end = recorder.answer(12, QUESTION, OPTIONS)
    turn = [*QUESTION, Message("assistant", text)]
    prompt, title_options = Message("user", "Reply with yes."), replace(OPTIONS, side_request=True)
    while True:  # until the model with random layers ends a title
        recorder.answered.clear()
        recorder.thread.request_title("a chat", ChatJob([*turn, prompt], title_options, tools))
        until(lambda: recorder.thread._host.call(lambda _: bool(recorder.answered)).result(60))
        if not recorder.messages.empty():
            break
        prompt = Message("user", f"{prompt.content} Really.")
    title = recorder.next()
    assert isinstance(title, TitleWritten)
    assert title.conversation == "a chat"
    assert WORDS.fullmatch(title.text), title.text
    _, following = recorder.answer(13, [*turn, Message("user", "And the land?")], OPTIONS)
    assert following.stats.cached_tokens >= end.stats.prompt_tokens + end.stats.generated_tokens - 1


def test_switching_models(recorder: Recorder) -> None:
    recorder.thread.switch("another")
    loaded = recorder.next()
    assert isinstance(loaded, ModelLoaded)
    assert loaded.model == "another"
    recorder.broken = True
    recorder.thread.switch("third")
    assert isinstance(recorder.next(), AnswerFailed)
    recorder.broken = False
    recorder.thread.request(12, ChatJob(QUESTION, GenerateOptions(max_tokens=1)))
    assert recorder.next().model == "third", "tried again with the next question"
    recorder.until_end()
    lower = 4 if sys.platform == "linux" else 0  # so that keys go before computations
    assert recorder.niceness == os.getpriority(os.PRIO_PROCESS, os.getpid()) + lower


@pytest.mark.parametrize("broken", [False, True])
def test_is_loading_is_true_during_a_load_only(shallow_starter: Engine, broken: bool) -> None:
    """The chat must not exit while MLX's threads load a model."""
    recorder = Recorder(shallow_starter)
    assert recorder.thread.close(timeout=0), "a thread that never started"
    recorder = Recorder(shallow_starter)
    recorder.broken = broken
    assert not recorder.thread.is_loading
    recorder.thread.start(recorder.messages.put, load=not broken)
    if broken:  # a model that is installed later is loaded once
        recorder.thread.switch("starter")
    assert isinstance(recorder.next(), AnswerFailed if broken else ModelLoaded)
    assert recorder.thread.close(timeout=60)
    assert recorder.messages.empty()
    assert recorder.loading == [True]
    assert not recorder.thread.is_loading


def test_deltas_are_merged_with_their_spans() -> None:
    first = TextDelta("cd", ((1, 2),), ((2, " dog"),), (2,), Stats(), 1.5)
    merged = first + TextDelta(
        "ef", ((0, 1),), ((1, "x"),), (3,), last := Stats(generated_tokens=5)
    )
    assert merged == TextDelta("cdef", ((1, 3),), ((2, " dog"), (3, "x")), (2, 3), last, 1.5)
