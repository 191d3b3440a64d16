"""Answers for akunu's chat: text annotated with draft tokens, statistics and gauges."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from akunu_py.engine.events import (
    AnnotatedEnd,
    AnnotatedPiece,
    Call,
    Event,
    Finished,
    Gauges,
    PrefillProgress,
    TextDelta,
)
from akunu_py.engine.job import BeginJob, RunningJob
from akunu_py.types import (
    FinishReason,
    GenerateOptions,
    Message,
    Piece,
    TextPiece,
    Tool,
    ToolChoice,
)

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.loop import StepLoop
    from akunu_py.engine.request import Step

_GAUGES_INTERVAL_S = 1 / 16  # between two updates
_PARAGRAPH = "\n\n"


@dataclass(frozen=True, slots=True)
class AnnotatedAnswerJob:
    """A job that answers the last of `messages`, or continues it if it is an answer."""

    messages: Sequence[Message]
    options: GenerateOptions
    stop_requested: Callable[[], bool] = lambda: False  # polled; True ends the answer
    tools: Sequence[Tool] = ()  # that the answer may call

    def prepare(self, engine: Engine) -> BeginJob:
        """Encode the conversation, and compile the grammar of the answer."""
        from akunu_py.engine.answer_jobs import chat_job, thinking_for

        thinking = thinking_for(engine, self.options)
        options = replace(self.options, thinking_budget=thinking.budget, loop_guard=True)
        choice = ToolChoice("none") if options.side_request else None
        job = chat_job(
            engine,
            self.messages,
            options,
            self.tools,
            choice,
            variables=thinking.variables,
            enforce=True,
        )
        return lambda loop: AnnotatedAnswer(loop, self, job(loop))


class AnnotatedAnswer:
    """A running `AnnotatedAnswerJob`."""

    def __init__(self, loop: StepLoop, job: AnnotatedAnswerJob, answer: RunningJob) -> None:
        assert answer.request is not None
        self._loop, self._job, self.request = loop, job, answer.request
        self._tool_answer = ToolCallSplitter(answer) if job.tools else None
        self._rows: Counter[int] = Counter()  # passes by rows
        self._gauges_time = 0.0

    def add(self, steps: Sequence[Step]) -> list[Event]:
        if self._job.stop_requested():
            self.request.cancel()
        calls: list[Event] = []
        if self._tool_answer is not None:
            steps, calls = self._tool_answer.add(steps)
        events: list[Event] = [
            step if isinstance(step, PrefillProgress) else self._annotate(step) for step in steps
        ]
        events += calls
        return events if self.request.finish_reason is None else [*events, self._end()]

    def _annotate(self, step: TextPiece) -> AnnotatedPiece:
        stats, gauges = replace(self.request.stats), None
        first = not stats.target_passes
        if step.piece.tokens and not first:
            self._rows[1 + step.piece.drafted] += 1
        if time.monotonic() - self._gauges_time >= _GAUGES_INTERVAL_S:
            self._gauges_time = time.monotonic()
            gauges = self._gauges()
        return AnnotatedPiece(step, stats, self._rejected_text(step), first, gauges)

    def _end(self) -> Finished:
        tool_answer = self._tool_answer
        reason = (tool_answer and tool_answer.reason) or self.request.finish_reason or "cancelled"
        end = AnnotatedEnd(reason, self._gauges())
        if reason == "cancelled" and self._job.stop_requested():
            reason = "stop"  # "cancelled" would mean that the server is stopping
        return Finished(reason, replace(self.request.stats), details=end)

    def _rejected_text(self, piece: TextPiece) -> str:
        """Return the rejected draft as text after the accepted tokens."""
        drafted = piece.piece.rejected
        if not drafted:
            return ""
        tokenizer, tokens = self._loop.engine.tokens.tokenizer, self.request.tokens
        # A draft may reach beyond the end of the answer.
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        before = len(tokens) - len(piece.piece.tokens) + piece.piece.accepted
        anchor = tokens[before - 1 : before]
        return str(decode([*anchor, *drafted]))[len(decode(anchor)) :]

    def _gauges(self) -> Gauges:
        """Return memory and speedup: plain cost of the tokens over the cost of the passes."""
        stats = self.request.stats
        curve, speedup = self._loop.runner.curve, None
        if curve.measured(1) and stats.drafted:
            costs = curve.table(stats.prompt_tokens + stats.generated_tokens)
            spent = sum(
                costs[min(each, len(costs)) - 1] * count for each, count in self._rows.items()
            )
            spent += self.request.drafter.neural_seconds
            speedup = stats.decoded_tokens * costs[0] / spent
        return Gauges(memory(), speedup)


class ToolCallSplitter:
    """Separates the text of an answer from its tool calls."""

    def __init__(self, answer: RunningJob) -> None:
        self._answer = answer
        self._raw: deque[tuple[str, bool]] = deque()  # characters not shown yet; True: drafted
        self._after_call = False
        self.reason: FinishReason | None = None  # "stop" if the model may call once and did

    def add(self, steps: Sequence[Step]) -> tuple[list[Step], list[Event]]:
        """Return the steps with the answer's text only, and the events of the calls."""
        events = self._answer.add(steps)
        text = ""
        for event in events:
            if isinstance(event, TextDelta):
                text += _PARAGRAPH + event.text if self._after_call else event.text
            elif isinstance(event, Finished):
                self.reason = event.reason
            self._after_call = isinstance(event, Call)
        shown: list[Step] = []
        for step in steps:
            if isinstance(step, TextPiece):
                self._record(step)
                step = replace(step, text="", drafted=())
            shown.append(step)
        if text and not (shown and isinstance(shown[-1], TextPiece)):
            shown.append(TextPiece("", Piece(())))
        if text and isinstance(last := shown[-1], TextPiece):
            shown[-1] = replace(last, text=text, drafted=self._drafted(text))
        return shown, [event for event in events if isinstance(event, Call)]

    def _record(self, piece: TextPiece) -> None:
        drafted = {at for start, end in piece.drafted for at in range(start, end)}
        self._raw.extend((letter, at in drafted) for at, letter in enumerate(piece.text))

    def _drafted(self, text: str) -> tuple[tuple[int, int], ...]:
        """Return the ranges of `text` that were drafted, skipping the markup of calls."""
        spans: list[tuple[int, int]] = []
        for at, letter in enumerate(text):
            raw = self._raw
            if not any(each == letter for each, _ in raw):
                continue  # a remark of the parser
            while raw[0][0] != letter:
                raw.popleft()
            if raw.popleft()[1]:
                start = spans.pop()[0] if spans and spans[-1][1] == at else at
                spans.append((start, at + 1))
        return tuple(spans)


def memory() -> int:
    """Return the bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
