"""One completion, in the thread that calls."""

import math
import time
from collections.abc import Callable, Sequence

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_request import Completion, CompletionRequest, EndCheck
from akunu_py.engine.events import Event, Finished
from akunu_py.types import SamplingOptions


def complete(
    completer: Completer, request: CompletionRequest, ended: EndCheck | None = None,
    on_text: Callable[[str], None] = lambda text: None, sampling: SamplingOptions | None = None,
) -> Completion:  # fmt: skip
    """ended: default: the time limit of the request."""
    end = time.monotonic() + (request.seconds or math.inf)
    ended = ended or (lambda: "time" if time.monotonic() >= end else None)
    sampling = sampling or SamplingOptions()
    run = completer.begin(completer.loop, request, ended, on_text, sampling)
    events: Sequence[Event] = [] if run.request else run.add(())
    while run.request is not None:
        (results,) = completer.loop.advance([run.request]).values()
        if isinstance(results, Exception):
            raise results
        events = run.add(results)
    assert isinstance(events[-1], Finished)
    assert isinstance(events[-1].details, Completion)
    return events[-1].details
