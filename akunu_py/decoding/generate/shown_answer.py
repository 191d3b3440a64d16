"""Answers as akunu's chat shows them: with their drafts, statistics and gauges."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from akunu_py.decoding.events import (
    Event,
    Finished,
    Gauges,
    PrefillProgress,
    ShownEnd,
    ShownPiece,
)
from akunu_py.decoding.generate.job import PromptJob
from akunu_py.types import GenerateOptions, Message, TextPiece

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.decoding.generate.session import Request, Session, Step
    from akunu_py.decoding.model.engine import Engine

_GAUGES_INTERVAL_S = 1 / 16  # between two updates


@dataclass(frozen=True, slots=True)
class ShownJob:
    """A job that answers the last of `messages`, or continues it if it is an answer."""

    messages: Sequence[Message]
    options: GenerateOptions
    stop_requested: Callable[[], bool] = lambda: False  # polled; True ends the answer

    def prepare(self, engine: Engine) -> PromptJob:
        """Encode the conversation, and compile the grammar of the answer."""
        from akunu_py.decoding.constraint.answer_limits import compile_rules
        from akunu_py.decoding.generate.answer_jobs import ChatPrompt

        compile_rules(engine.tokens, self.options)
        prompt = ChatPrompt.encode(engine, self.messages, self.options)

        def begin(session: Session) -> ShownAnswer:
            return ShownAnswer(session, self, prompt.begin(session, self.options))

        return PromptJob(begin, prompt.tokens)


class ShownAnswer:
    """The events of an answer, as an `Answering`."""

    def __init__(self, session: Session, job: ShownJob, request: Request) -> None:
        self._session, self._job, self.request = session, job, request
        self._before = session.drafting.neural_seconds
        self._rows: Counter[int] = Counter()  # passes by rows
        self._gauges_time = 0.0

    def add(self, steps: Sequence[Step]) -> list[Event]:
        if self._job.stop_requested():
            self.request.cancel()
        events: list[Event] = [
            step if isinstance(step, PrefillProgress) else self._shown(step) for step in steps
        ]
        return events if self.request.finish_reason is None else [*events, self._end()]

    def _shown(self, step: TextPiece) -> ShownPiece:
        stats, gauges = replace(self.request.stats), None
        first = not stats.target_passes
        if step.piece.tokens and not first:
            self._rows[1 + step.piece.accepted + len(step.piece.rejected)] += 1
        if time.monotonic() - self._gauges_time >= _GAUGES_INTERVAL_S:
            self._gauges_time = time.monotonic()
            gauges = self._gauges()
        return ShownPiece(step, stats, self._rejected_text(step), first, gauges)

    def _end(self) -> Finished:
        reason = self.request.finish_reason or "cancelled"
        end = ShownEnd(reason, self._gauges())
        if reason == "cancelled" and not self._session.cancelled:
            reason = "stop"  # "cancelled" would mean that the server is stopping
        return Finished(reason, replace(self.request.stats), details=end)

    def _rejected_text(self, piece: TextPiece) -> str:
        """Return the rejected draft as text after the accepted tokens."""
        drafted = piece.piece.rejected
        if not drafted:
            return ""
        tokenizer, tokens = self._session.engine.tokens.tokenizer, self.request.tokens
        # A draft may reach beyond the end of the answer.
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        before = len(tokens) - len(piece.piece.tokens) + piece.piece.accepted
        anchor = tokens[before - 1 : before]
        return str(decode([*anchor, *drafted]))[len(decode(anchor)) :]

    def _gauges(self) -> Gauges:
        """Return memory and speedup: plain cost of the tokens over the cost of the passes."""
        stats = self.request.stats
        costs = self._session.drafting.costs(stats.prompt_tokens + stats.generated_tokens)
        speedup = None
        if costs is not None and stats.drafted:
            spent = sum(
                costs[min(each, len(costs)) - 1] * count for each, count in self._rows.items()
            )
            spent += max(0.0, self._session.drafting.neural_seconds - self._before)
            speedup = stats.decoded_tokens * costs[0] / spent
        return Gauges(memory(), speedup)


def memory() -> int:
    """Return the bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
