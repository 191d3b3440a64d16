"""A completion as a job: a completer makes it, which recalls, reads files, finds the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import (
    FINISH_REASONS,
    Completion,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.generate.events import Begun, Ended, Event, Text
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.text.stop_sequences import StopText
from akunu_py.types import SamplingOptions


def completion_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    sampling: SamplingOptions,
    stop: tuple[str, ...] = (),
    seconds: float | None = None,
) -> Job:
    """completer: for a session, called in its thread. stop: texts that end the completion, and are
    no part of it. seconds: from its first token on, after which it ends if it has a line."""

    def events(session: Session) -> Iterator[Event | None]:
        making = _Making(session, stop, seconds)
        made = completer(session)
        steps = made.steps(made.share(session), request, making.ended, making.add, sampling)
        completion: Completion | None = None
        while completion is None:
            try:
                step = next(steps)
            except StopIteration as last:
                completion = last.value
            else:
                if isinstance(step, Begun):
                    making.since = time.monotonic()
                yield step
            yield from making.new()
        assert completion is not None
        yield from making.rest()
        reason = "stop" if making.found else FINISH_REASONS[completion.finish_reason]
        yield Ended(reason, completion.stats, making.found)

    return events


class _Making:
    """A completion while it is made. since: its first token, by the monotonic clock."""

    def __init__(self, session: Session, stop: tuple[str, ...], seconds: float | None) -> None:
        self._session, self._seconds = session, seconds
        self._stops = StopText(stop)
        self._new: list[str] = []
        self._has_line = False
        self.since: float | None = None

    @property
    def found(self) -> str:
        """The stop sequence that ended it, "" for none."""
        return self._stops.found or ""

    def add(self, text: str) -> None:
        """More of it."""
        self._new += [run.text for run in self._stops.add(text)]
        self._has_line = self._has_line or "\n" in text

    def ended(self) -> CompletionReason | None:
        """Why to end now."""
        # What a stop sequence of this request ended is no completion to be kept for others.
        if self.found or self._session.turn.cancelled:
            return "cancelled"
        if self._seconds is None or self.since is None or not self._has_line:
            return None
        return "time" if time.monotonic() - self.since > self._seconds else None

    def new(self) -> list[Text]:
        """What is certain now."""
        text, self._new = "".join(self._new), []
        return [Text(text)] if text else []

    def rest(self) -> list[Text]:
        """What was held back because a stop sequence might have begun with it."""
        text = "".join(run.text for run in self._stops.finish())
        return [Text(text)] if text else []
