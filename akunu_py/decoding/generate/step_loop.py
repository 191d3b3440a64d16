"""The step loop: schedule, run, and turn results into events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.job import BeginJob, DeferredJob, JobHandle, PromptJob, RunningJob
from akunu_py.decoding.generate.model_host import LoadedModelFacts, SharedPasses, facts_of
from akunu_py.decoding.generate.model_runner import ModelRunner
from akunu_py.decoding.generate.scheduler import Scheduler, Slot, StepPlan
from akunu_py.decoding.generate.session import Request, Session, Step
from akunu_py.decoding.model.engine import Engine

Results = list[Step] | Exception
DEFAULT_SLOTS = 16
_PREPARING_S = 0.02  # wait for a job's preparation, until other jobs can begin


class StepLoop:
    """Runs the jobs of one model."""

    def __init__(
        self,
        session: Session,
        slots: int = DEFAULT_SLOTS,
        clock: Callable[[], float] = time.perf_counter,
        scheduler: Scheduler | None = None,
    ) -> None:
        self._clock = clock
        self.slots = slots
        self._sessions = [session]
        self._preparing: list[tuple[JobHandle, Future[BeginJob]]] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="prepare")
        self._running: list[_ScheduledJob] = []
        self._scheduler = scheduler or Scheduler(clock)
        self.runner = ModelRunner(session.engine, session.drafting.curve)

    @property
    def engine(self) -> Engine:
        return self._sessions[0].engine

    @property
    def facts(self) -> LoadedModelFacts:
        return replace(facts_of(self.engine), not_batched=self.runner.not_batched)

    @property
    def shared(self) -> SharedPasses:
        return SharedPasses(self.runner.passes, self.runner.requests)

    def close(self) -> None:
        """Save the learned costs for the next run."""
        self._threads.shutdown()
        self._sessions[0].learned.close()

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        return self._sessions[0].save_idle(stopped, seconds)

    def begin(self, handle: JobHandle) -> None:
        """Start or prepare a job."""
        if isinstance(handle.job, DeferredJob):
            self._preparing.append((handle, self._threads.submit(handle.job.prepare, self.engine)))
        else:
            self._start(handle, handle.job)

    def _start(self, handle: JobHandle, job: BeginJob) -> None:
        """Start a job in a free session, or else in a new one."""
        session = self._free_session(job)
        spent, now = min((each.spent for each in self._running), default=0.0), self._clock()
        self._running.append(
            _ScheduledJob(handle.short, now, spent, handle=handle, job=job, session=session)
        )

    def _start_prepared(self) -> list[tuple[JobHandle, list[Event]]]:
        """Start the prepared jobs; return the events of those that failed.

        If no other job runs, wait a moment until one is prepared.
        """
        if self._preparing and not self._running:
            futures = [future for _, future in self._preparing]
            wait(futures, _PREPARING_S, return_when=FIRST_COMPLETED)
        done = [each for each in self._preparing if each[1].done()]
        failed: list[tuple[JobHandle, list[Event]]] = []
        for handle, future in done:
            self._preparing.remove((handle, future))
            try:
                self._start(handle, future.result())
            except Exception as error:  # noqa: BLE001 - one bad request must not end the others
                failed.append((handle, [Failed(error)]))
        return failed

    def _free_session(self, job: BeginJob) -> Session:
        """Return the free session whose drafter has the fewest tokens to learn and to lose."""
        used = [each.session for each in self._running]
        free = [session for session in self._sessions if session not in used]
        if not free:
            first = self._sessions[0]
            free = [Session(first.engine, sibling=first)]
            self._sessions += free
        if len(free) == 1 or not isinstance(job, PromptJob):
            return free[0]
        return max(free, key=lambda each: each.drafting.overlap(job.prompt))

    def step(self) -> list[tuple[JobHandle, list[Event]]]:
        """Start the prepared jobs, then run a step of the jobs that the scheduler chooses.

        Returns their events, or only those of failed starts. A last event frees the slot.
        """
        if (failed := self._start_prepared()) or not self._running:
            return failed
        ready = self._ready()
        rate = self._sessions[0].drafting.curve.prefill_rate
        plan = self._scheduler.schedule(ready, rate)
        members = [each for each in ready if each in plan.slots]
        for each in members:
            each.apply_plan(plan)
        requests = [each.request for each in members if each.request is not None]
        started = self._clock()
        if len(requests) > 1:
            results = self.runner.run(requests, ahead=plan.alone)
        else:
            results = [members[0].step_alone()]
        events = [
            (each.handle, each.add(result)) for each, result in zip(members, results, strict=True)
        ]
        self._scheduler.charge(plan, self._clock() - started)
        self._running = [each for each in self._running if not each.ended]
        return events

    def _ready(self) -> list[_ScheduledJob]:
        """Update all jobs and return the runnable ones, or the first job if none is runnable.

        Once one job is blocked, later jobs with a wait condition are blocked too. Cancelled jobs
        are always runnable, so that they can end.
        """
        ready = list[_ScheduledJob]()
        for number, each in enumerate(self._running):
            if each.update(crowded=len(ready) < number):
                ready.append(each)
        ready = ready or self._running[:1]
        if len(ready) > 1 and self.runner.can_batch():
            self._mark_shareable(ready)
        return ready

    def _mark_shareable(self, ready: Sequence[_ScheduledJob]) -> None:
        """Find the jobs whose next decode pass may be shared."""
        sharing = [
            (each, each.request)
            for each in ready
            if each.request is not None and each.request.can_share and not each.cancelled
        ]
        for each, request in sharing:
            alone = not each.is_running and self.runner.prefers_alone(request, len(sharing))
            each.can_share = not alone


@dataclass(slots=True, eq=False, kw_only=True)
class _ScheduledJob(Slot):
    """A running job and its session."""

    handle: JobHandle
    job: BeginJob
    session: Session
    ended: bool = False
    _running_job: RunningJob | None = None

    @property
    def request(self) -> Request | None:
        """The request that runs now."""
        return None if self._running_job is None else self._running_job.request

    def update(self, *, crowded: bool) -> bool:
        """Update it before a step; return whether it can run. crowded: an earlier one cannot."""
        request, self.cancelled = self.request, self.handle.cancelled
        self.can_share = self.is_running = False
        self.prompt_tokens_left = self.joining_tokens = 0
        if request is None:
            return True
        request.crowded = crowded
        self.prompt_tokens_left = request.prompt_tokens_left
        self.joining_tokens = request.joining_tokens
        self.is_running = request.is_running
        blocked = request.blocked
        return blocked is None or self.cancelled or not (crowded or blocked())

    def apply_plan(self, plan: StepPlan) -> None:
        """Prepare the next step."""
        self.begun, self.session.target.alone = True, plan.alone
        if (request := self.request) is not None:
            request.chunk_seconds = plan.chunk_seconds or self.session.chunk_seconds

    def step_alone(self) -> Results:
        """Begin the job, or run a step of its request."""
        try:
            if self._running_job is None:
                self._running_job = self.job(self.session)
            if (request := self.request) is None:
                return []
            if self.cancelled:
                request.cancel()
            return request.step()
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            return error

    def add(self, results: Results) -> list[Event]:
        """Return the events for the results. An exception becomes the final `Failed` event."""
        try:
            if isinstance(results, Exception):
                raise results
            assert self._running_job is not None
            events = list(self._running_job.add(results))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            events = [Failed(error)]
        self.ended = bool(events) and isinstance(events[-1], Finished | Failed)
        if self.ended:
            self._close()
        return events

    def _close(self) -> None:
        """Make the session ready for another job."""
        try:
            self.session.release()
        except Exception:  # noqa: BLE001 - a failing device
            self.session.target.reset()
