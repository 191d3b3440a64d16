"""What our own clients ask for, as jobs that tell all that they show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import (
    FINISH_REASONS,
    Completion,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.events import Ended, Event, Told
from akunu_py.decoding.job import Job
from akunu_py.decoding.session import Session


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
