"""One completion as a job for a `ModelHost`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akunu_py.completion.request import CompletionRequest, EndCheck
from akunu_py.decoding.generate.job import RunningJob

if TYPE_CHECKING:  # a second or two, which the thread of the model spends
    from akunu_py.completion.completer import Completer
    from akunu_py.decoding.generate.session import Session


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The job of a completion, which comes with the last event, in `Finished.details`."""

    request: CompletionRequest
    get_completer: Callable[[Session], Completer]  # called in the session's thread
    ended: EndCheck  # polled, instead of the request's time limit
    on_text: Callable[[str], None] = lambda text: None  # gets new text before the next poll

    def __call__(self, session: Session) -> RunningJob:
        return self.get_completer(session).begin(session, self.request, self.ended, self.on_text)
