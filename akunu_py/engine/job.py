"""What front ends and a `ModelHost` exchange: jobs and their handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from akunu_py.engine import events

if TYPE_CHECKING:  # front ends without a model never import MLX
    from akunu_py.engine.engine import Engine
    from akunu_py.engine.request import Request, Step


class RunningJob(Protocol):
    """A job that has begun: turns the results of its steps into events."""

    @property
    def request(self) -> Request | None:
        """The request that runs now; a job may have several, one after the other."""

    def add(self, steps: Sequence[Step]) -> Sequence[events.Event]:
        """Return the events for the results of a step; the last one at the end is Finished."""


BeginJob = Callable[[Any], RunningJob]  # called with the `StepLoop` in its thread


@runtime_checkable
class DeferredJob(Protocol):
    """A job whose slow setup (encode the prompt, compile a grammar) runs in a worker thread."""

    def prepare(self, engine: Engine) -> BeginJob:
        """Return the function that starts the job. Called in a worker thread, once per attempt."""


Job = BeginJob | DeferredJob


@dataclass(eq=False)
class JobHandle:
    """A submitted job: cancels it, and passes its events to the front end."""

    job: Job
    on_event: Callable[[events.Event], None]
    client: str
    wake: Callable[[], None]
    _: KW_ONLY
    short: bool
    idle: bool = False  # runs while no other job does, which cancel it
    cancelled: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)
    has_output: bool = field(default=False, init=False)
    retried: bool = field(default=False, init=False)  # begun again because its server was lost
    prepared: Future[BeginJob] | None = field(default=None, init=False)
    running: RunningJob | None = field(default=None, init=False)  # once the job began
    request: Request | None = field(default=None, init=False)  # the scheduled one

    def cancel(self) -> None:
        """Cancel the job after its current step. Callable from any thread at any time."""
        self.cancelled = True
        self.wake()

    def deliver(self, event: events.Event) -> None:
        """Deliver an event, unless the job is finished. A failing callback cancels the job."""
        if self.ended:
            return
        self.ended = isinstance(event, events.Finished | events.Failed)
        self.has_output |= not isinstance(event, events.PrefillProgress | events.PromptProcessed)
        try:
            self.on_event(event)
        except Exception:  # noqa: BLE001 - a failing callback must not stop other jobs
            self.cancelled = True


@runtime_checkable
class ModelLoop(Protocol):
    """Runs the jobs of a model step by step: `StepLoop` here, `RemoteLoop` on a server."""

    slots: int  # how many jobs may run at a time; one more may if it is short

    @property
    def engine(self) -> Engine | None:
        """The loaded engine, None on a server."""

    @property
    def facts(self) -> events.LoadedModelFacts: ...

    @property
    def shared(self) -> events.SharedPasses: ...

    def step(self, jobs: Sequence[JobHandle]) -> list[tuple[JobHandle, list[events.Event]]]:
        """Start new jobs, run a step, return its events; none if all wait for `JobHandle.wake`."""

    def idle_step(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """Do idle work; return whether there may be more. See `StepLoop.idle_step`."""

    def close(self) -> None:
        """Save what was learned."""
