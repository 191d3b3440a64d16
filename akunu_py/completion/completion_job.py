"""One completion as a job for a `ModelHost`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akunu_py.completion.request import FINISH_REASONS, Completion, CompletionRequest, EndCheck
from akunu_py.decoding.events import Event, Finished, TextDelta
from akunu_py.types import Stats

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.completion.completer import Completer, CompletionRun
    from akunu_py.decoding.generate.session import Request, Session, Step


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The job of a completion, which comes with the last event, in `Finished.details`."""

    request: CompletionRequest
    get_completer: Callable[[Session], Completer]  # called in the session's thread
    ended: EndCheck  # polled, instead of the request's time limit
    on_text: Callable[[str], None] = lambda text: None  # gets new text before the next poll

    def __call__(self, session: Session) -> CompletionEvents:
        from akunu_py.completion.completer import CompletionRun

        new: list[str] = []

        def add(text: str) -> None:
            new.append(text)
            self.on_text(text)

        def drain(step: Event | None) -> list[Event]:
            text = "".join(new)
            new.clear()
            return [TextDelta(text)] if text else []

        if self.ended() == "cancelled":
            run = CompletionRun(Completion("", "cancelled", Stats()), crlf=False)
        else:
            run = self.get_completer(session).begin(session, self.request, self.ended, add)
        return CompletionEvents(run, drain, lambda completion: [finished(completion)])


def finished(completion: Completion) -> Finished:
    """Return the last event of a completion."""
    reason = FINISH_REASONS[completion.finish_reason]
    return Finished(reason, completion.stats, details=completion)


class CompletionEvents:
    """A running `CompletionJob`: turns the steps of the model into events."""

    def __init__(
        self,
        run: CompletionRun,
        drain: Callable[[Event | None], Sequence[Event]],
        end: Callable[[Completion], Sequence[Event]],
    ) -> None:
        """drain: called after each step; returns the new text. end: returns the last events."""
        self._run = run
        self._drain = drain
        self._end = end

    @property
    def request(self) -> Request | None:
        return self._run.request

    def add(self, steps: Sequence[Step]) -> list[Event]:
        events: list[Event] = []
        for step in self._run.add(steps):
            events += [step, *self._drain(step)]
        events += self._drain(None)
        if self._run.request is None:
            completion = self._run.completion()
            events += [*self._drain(None), *self._end(completion)]
        return events
