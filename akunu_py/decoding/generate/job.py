"""What front ends submit to a `ModelHost`: jobs, and the handles to cancel them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from akunu_py.decoding.events import Event, Failed, Finished, PrefillProgress, PromptProcessed

if TYPE_CHECKING:  # front ends without a model never import MLX
    from akunu_py.decoding.generate.request import Request, Step
    from akunu_py.decoding.model.engine import Engine


class RunningJob(Protocol):
    """A job that has begun: turns the results of its steps into events."""

    @property
    def request(self) -> Request | None:
        """The request that runs now; a job may have several, one after the other."""

    def add(self, steps: Sequence[Step]) -> Sequence[Event]:
        """Return the events for the results of a step; the last one at the end is Finished."""


BeginJob = Callable[[Any], RunningJob]  # called with the `StepLoop` in its thread


@runtime_checkable
class DeferredJob(Protocol):
    """A job whose slow setup (encode the prompt, compile a grammar) runs in a worker thread."""

    def prepare(self, engine: Engine) -> BeginJob:
        """Return the function that starts the job. Called in a worker thread, once per attempt."""


Job = BeginJob | DeferredJob


class JobHandle:
    """A submitted job: cancels it, and passes its events to the front end."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        client: str,
        wake: Callable[[], None],
        *,
        short: bool,
        idle: bool = False,
    ) -> None:
        self.job = job
        self.client = client
        self.short = short
        self.idle = idle  # runs while no other job does, which cancel it
        self._on_event = on_event
        self._wake = wake
        self._cancelled = threading.Event()
        self.ended = False
        self.has_output = False
        self.retried = False  # begun again because its server was lost

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Cancel the job after its current step. Callable from any thread at any time."""
        self._cancelled.set()
        self._wake()

    def deliver(self, event: Event) -> None:
        """Deliver an event, unless the job is finished. A failing callback cancels the job."""
        if self.ended:
            return
        self.ended = isinstance(event, Finished | Failed)
        self.has_output |= not isinstance(event, PrefillProgress | PromptProcessed)
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - a failing callback must not stop other jobs
            self._cancelled.set()
