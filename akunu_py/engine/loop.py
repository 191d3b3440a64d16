"""The step loop of a model: schedule, run, and turn results into events."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from akunu_py.engine.constraint.answer_limits import compile_rules
from akunu_py.engine.drafters.drafter import describe_drafters
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine, facts_of
from akunu_py.engine.events import Event, Failed, Finished, LoadedModelFacts, SharedPasses
from akunu_py.engine.histories import disk
from akunu_py.engine.job import (
    BeginJob,
    DeferredJob,
    JobHandle,
    RunningJob,
)
from akunu_py.engine.model import wired
from akunu_py.engine.prefill import release_under_pressure
from akunu_py.engine.request import Request, Status, Step
from akunu_py.engine.runner import ModelRunner, Results
from akunu_py.engine.scheduler import Scheduler
from akunu_py.types import Answer, GenerateOptions

DEFAULT_SLOTS = 16


class StepLoop:
    """Runs the requests to one model, step by step. It belongs to one thread."""

    def __init__(
        self,
        engine: Engine,
        learned: UnsavedState | None = None,
        slots: int = DEFAULT_SLOTS,
        *,
        clock: Callable[[], float] = time.perf_counter,
        scheduler: Scheduler | None = None,
        **options: Any,
    ) -> None:
        """learned: what to learn into. slots: jobs that may run at a time. options: of `runner`."""
        self.engine = engine
        self.learned = learned or UnsavedState()
        self.slots = slots
        self.runner = ModelRunner(engine, self.learned, **options)
        self._clock = clock
        self._scheduler = scheduler or Scheduler(clock)
        self._starting: list[tuple[JobHandle, Future[BeginJob]]] = []
        self._jobs: list[_RunningJob] = []
        self._threads = ThreadPoolExecutor(thread_name_prefix="prepare")

    @property
    def facts(self) -> LoadedModelFacts:
        drafter, acceptance = describe_drafters(self.engine, self.learned)
        return replace(
            facts_of(self.engine),
            not_batched=self.runner.not_batched,
            drafter=drafter,
            acceptance=acceptance,
        )

    @property
    def shared(self) -> SharedPasses:
        return SharedPasses(self.runner.shared_passes, self.runner.shared_requests)

    # Requests

    def request(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
        rules: Sequence[object] = (),
    ) -> Request:
        """Return a new request; see `Request`, also for errors."""
        target = self.runner.new_target()
        return Request(self.engine, target, prompt, options, draft_context, stable, rules)

    def answer(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> Answer:
        """Answer `prompt` (token ids) and return the whole answer; see `request`."""
        rules = compile_rules(self.engine.tokens, options)
        request = self.request(prompt, options, draft_context, stable, rules)
        for _ in self.stream(request):
            pass
        return request.answer

    def stream(self, request: Request) -> Generator[Step]:
        """Run a request: yield prefill progress, then pieces, some of them empty.

        Closing the generator ends the answer and keeps the prefilled tokens.
        """
        try:
            while request.status is not Status.FINISHED:
                (results,) = self.advance([request]).values()
                if isinstance(results, Exception):
                    raise results
                yield from results
        finally:
            self.close_request(request)

    def advance(self, requests: Sequence[Request]) -> dict[Request, Results]:
        """Run a step of the requests that the scheduler chooses; return their results.

        Once one request is blocked, later ones with a condition wait too. Cancelled requests never
        wait, so that they can end.
        """
        ready, crowded = list[Request](), list[Request]()
        for number, each in enumerate(requests):
            behind = len(ready) < number
            if behind:
                crowded.append(each)
            if each.cancelled or not each.conditions or not (behind or each.blocked):
                ready.append(each)
        ready = ready or list(requests[:1])
        rate = self.runner.curve.prefill_rate
        plan = self._scheduler.schedule(ready, self.runner.sharing(ready), rate)
        for each in plan.requests:
            each.begun = True
        started = self._clock()
        results = self.runner.run(plan, crowded)
        self._scheduler.charge(plan, self._clock() - started)
        return dict(zip(plan.requests, results, strict=True))

    def close_request(self, request: Request) -> None:
        """End an answer between two steps and keep the prefilled tokens."""
        self.runner.close(request)

    def reach(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of `prompt` need no prefill."""
        return self.runner.new_target().reach(prompt)

    # Jobs

    def begin(self, handle: JobHandle) -> None:
        """Start or prepare a job."""
        if isinstance(handle.job, DeferredJob):
            future = self._threads.submit(handle.job.prepare, self.engine)
            future.add_done_callback(lambda _: handle.wake())
        else:
            future = Future()
            future.set_result(handle.job)
        self._starting.append((handle, future))

    def step(self) -> list[tuple[JobHandle, list[Event]]]:
        """Start the prepared jobs, then run a step of the jobs that the scheduler chooses.

        Returns their events, or only those of failed starts; none while jobs are being prepared.
        A last event frees the slot.
        """
        if (failed := self._start_prepared()) or not self._jobs:
            return failed
        for job in self._jobs:
            if job.request is None:
                return [(job.handle, self._add(job, []))]
            if job.handle.cancelled:
                job.request.cancel()
        jobs = {job.request: job for job in self._jobs if job.request is not None}
        results = self.advance(list(jobs))
        return [
            (jobs[each].handle, self._add(jobs[each], found)) for each, found in results.items()
        ]

    def _start_prepared(self) -> list[tuple[JobHandle, list[Event]]]:
        """Start the prepared jobs; return the events of those that failed."""
        failed: list[tuple[JobHandle, list[Event]]] = []
        for each in [each for each in self._starting if each[1].done()]:
            self._starting.remove(each)
            handle, future = each
            try:
                job = _RunningJob(handle, future.result()(self))
            except Exception as error:  # noqa: BLE001 - one bad request must not end the others
                failed.append((handle, [Failed(error)]))
            else:
                self._jobs.append(job)
                self._admit(job)
        return failed

    def _admit(self, job: _RunningJob) -> None:
        """Schedule the next request of a job."""
        request = job.request = job.running.request
        if request is not None:
            others = [each.request for each in self._jobs if each is not job]
            spent = (each.spent for each in others if each is not None)
            request.short, request.since = job.handle.short, self._clock()
            request.spent = min(spent, default=0.0)

    def _add(self, job: _RunningJob, results: Results) -> list[Event]:
        """Return the events for the results. An exception becomes the final `Failed` event."""
        try:
            if isinstance(results, Exception):
                raise results
            events = list(job.running.add(results))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            events = [Failed(error)]
        if events and isinstance(events[-1], Finished | Failed):
            self._jobs.remove(job)
            if job.request is not None:
                self.close_request(job.request)
        elif job.running.request is not job.request:
            self._admit(job)
        return events

    # State that outlives requests

    def save_idle(
        self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> bool:
        """Save one prompt cache to disk and release memory. Call only when idle.

        stopped: polled during the save; returning True aborts it. seconds: time limit. Returns True
        if a cache was saved (there may be more to save).
        """
        self.learned.flush()
        caches, disk_caches = self.runner.caches, self.runner.disk_caches
        self.runner.drafters.trim(1)
        release_under_pressure(caches)
        mx.clear_cache()  # MLX keeps the buffers of every prompt length
        histories = [*caches.in_use, *caches.histories()]
        wired.adjust(self.engine.model, sum(each.nbytes for each in histories))
        return disk_caches is not None and disk_caches.write(histories, stopped, seconds)

    def save_prompt_cache(self, path: Path) -> None:
        """Write the KV cache of the last request to a file in mlx-lm's prompt cache format.

        Raises UsageError if nothing can be saved, StoreError on disk errors; an older file stays
        intact.
        """
        disk.save(self.runner.caches.last, self.engine, path)

    def load_prompt_cache(self, path: Path) -> None:
        """Continue from the prompt cache in a file that `save_prompt_cache` wrote.

        Raises StoreError, DamagedCache, or UsageError for another model's file; nothing has changed
        then.
        """
        self.runner.caches.release(disk.load(self.engine, path))

    def close(self) -> None:
        """Save the learned costs for the next run."""
        self._threads.shutdown()
        self.learned.close()


@dataclass(slots=True, eq=False)
class _RunningJob:
    """A running job, and its request that is scheduled."""

    handle: JobHandle
    running: RunningJob
    request: Request | None = None
