"""What our own clients ask for, as jobs that tell all that they show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import (
    FINISH_REASONS,
    Completion,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.generate.chat_model import LoadedAnswer
from akunu_py.decoding.generate.events import Ended, Event, Reading, Told
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.scheduling.job import Job
from akunu_py.types import GenerateOptions, Message

_GAUGES_S = 1 / 16  # a chat shows them no oftener


def complete_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    ending: Callable[[], bool],
) -> Job:
    """A completion; in the end all of it is told again. completer: for a session, called in its
    thread. ending: whether it shall end as if its time was over."""

    def events(session: Session) -> Iterator[Event | None]:
        def ended() -> CompletionReason | None:
            if session.turn.cancelled:
                return "cancelled"
            return "time" if ending() else None

        made, new = completer(session), list[str]()
        steps = made.steps(made.share(session), request, ended, new.append)
        completion: Completion | None = None
        while completion is None:
            try:
                yield next(steps)
            except StopIteration as last:
                completion = last.value
            if new:
                text = "".join(new)
                new.clear()
                yield Told(text, {"text": text})
        if completion.finish_reason != "cancelled":
            yield Told("", {"completion": asdict(completion)})
        yield Ended(FINISH_REASONS[completion.finish_reason], completion.stats)

    return events


def chat_job(
    messages: Sequence[Message], options: GenerateOptions, ending: Callable[[], bool]
) -> Job:
    """The answer to a conversation: its pieces, each with the counts until then, and from time to
    time the gauges. ending: whether it shall end with what it has."""

    def events(session: Session) -> Iterator[Event | None]:
        answer, measured = LoadedAnswer(session, messages, options), 0.0
        for step in answer.steps():
            if ending():
                answer.cancel()
            if isinstance(step, Reading):
                yield step
                continue
            told = {"piece": asdict(step), "stats": asdict(answer.stats)}
            if time.monotonic() - measured >= _GAUGES_S:
                measured = time.monotonic()
                told["gauges"] = asdict(answer.gauges())
            yield Told(step.piece.thinking + step.piece.text, told)
        stats, reason = replace(answer.stats), answer.finish_reason or "cancelled"
        if not session.turn.cancelled:
            gauges = asdict(answer.gauges())
            yield Told("", {"ended": reason, "stats": asdict(stats), "gauges": gauges})
            # It was not the server that gave it up.
            reason = "stop" if reason == "cancelled" else reason
        yield Ended(reason, stats)

    return events
