"""The step loop of a model: schedule, run, and turn results into events."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import mlx.core as mx

from akunu_py.engine.constraint.answer_limits import compile_rules
from akunu_py.engine.drafters.drafter import describe_drafters
from akunu_py.engine.drafters.learned_state import UnsavedState
from akunu_py.engine.engine import Engine, facts_of
from akunu_py.engine.events import Event, Failed, Finished, LoadedModelFacts, SharedPasses
from akunu_py.engine.job import DeferredJob, JobHandle
from akunu_py.engine.model import wired
from akunu_py.engine.prefill import release_under_pressure
from akunu_py.engine.request import Request, Status, Step
from akunu_py.engine.runner import ModelRunner, Results
from akunu_py.engine.scheduler import Scheduler
from akunu_py.engine.target import Target
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
        chunk_seconds: float | None = None,
    ) -> None:
        """learned: what to learn into. slots: for `ModelHost`. chunk_seconds: see `ModelRunner`."""
        self.engine = engine
        self.learned = learned or UnsavedState()
        self.slots = slots
        self.runner = ModelRunner(engine, self.learned, chunk_seconds)
        self.scheduler = Scheduler()
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
        return self.runner.shared

    # Requests

    def request(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> Request:
        """Return a new request; see `Request`, also for errors."""
        target = Target(self.engine.model, self.engine.plan.kv_bits, self.runner.caches)
        return Request(self.engine, target, prompt, options, draft_context, stable)

    def answer(
        self,
        prompt: Sequence[int],
        options: GenerateOptions,
        draft_context: Sequence[Sequence[int]] = (),
        stable: int | None = None,
    ) -> Answer:
        """Answer `prompt` (token ids) and return the whole answer; see `request`."""
        compile_rules(self.engine.tokens, options)
        request = self.request(prompt, options, draft_context, stable)
        for _ in self.stream(request):
            pass
        return request.answer

    def stream(self, request: Request) -> Generator[Step]:
        """Yield prefill progress, then pieces. Closing ends the answer; prefilled tokens stay."""
        try:
            while request.status is not Status.FINISHED:
                (results,) = self.advance([request]).values()
                if isinstance(results, Exception):
                    raise results
                yield from results
        finally:
            self.runner.close(request)

    def advance(self, requests: Sequence[Request]) -> dict[Request, Results]:
        """Run a step of the requests that the scheduler chooses; return their results.

        Once one request is blocked, later ones with a condition wait too. Cancelled requests never
        wait, so that they can end.
        """
        ready, crowded = list[Request](), list[Request]()
        for number, each in enumerate(requests):
            is_crowded = len(ready) < number
            if is_crowded:
                crowded.append(each)
            if each.cancelled or not each.waits_for or not (is_crowded or each.waits_for[0]()):
                ready.append(each)
        ready = ready or list(requests[:1])  # which then reports its progress only
        rate = self.runner.curve.prefill_rate
        plan = self.scheduler.schedule(ready, self.runner.sharing(ready), rate)
        for each in plan.requests:
            each.begun = True
        started = self.scheduler.clock()
        results = self.runner.run(plan, crowded)
        self.scheduler.charge(plan, self.scheduler.clock() - started)
        return dict(zip(plan.requests, results, strict=True))

    # Jobs

    def step(self, jobs: Sequence[JobHandle]) -> list[tuple[JobHandle, list[Event]]]:
        """Start prepared jobs, then run a step; return its events, or those of failed starts."""
        starts = ((each, self._start(each, jobs)) for each in jobs if each.running is None)
        if failed := [(each, [failure]) for each, failure in starts if failure is not None]:
            return failed
        requests = dict[Request, JobHandle]()
        for job in jobs:
            if job.running is not None and job.request is None:
                return [(job, self._add(job, jobs, []))]
            if job.request is not None:
                requests[job.request] = job
                if job.cancelled:
                    job.request.cancel()
        results = self.advance(list(requests)) if requests else {}
        return [
            (requests[each], self._add(requests[each], jobs, found))
            for each, found in results.items()
        ]

    def _start(self, job: JobHandle, jobs: Sequence[JobHandle]) -> Event | None:
        """Prepare a job, or start it if it is prepared; return the event of a failed start."""
        try:
            if not isinstance(job.job, DeferredJob):
                job.running = job.job(self)
            elif job.prepared is None:
                job.prepared = self._threads.submit(job.job.prepare, self.engine)
                job.prepared.add_done_callback(lambda _: job.wake())
            elif job.prepared.done():
                job.running = job.prepared.result()(self)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            return Failed(error)
        if job.running is not None:
            self._admit(job, jobs)
        return None

    def _admit(self, job: JobHandle, jobs: Sequence[JobHandle]) -> None:
        assert job.running is not None
        request = job.request = job.running.request
        if request is not None:
            spent = (each.request.spent for each in jobs if each is not job and each.request)
            request.short, request.since = job.short, self.scheduler.clock()
            request.spent = min(spent, default=0.0)

    def _add(self, job: JobHandle, jobs: Sequence[JobHandle], results: Results) -> list[Event]:
        """Return the events for the results. An exception becomes the final `Failed` event."""
        assert job.running is not None
        try:
            if isinstance(results, Exception):
                raise results
            events = list(job.running.add(results))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            events = [Failed(error)]
        if events and isinstance(events[-1], Finished | Failed):
            if job.request is not None:
                self.runner.close(job.request)
        elif job.running.request is not job.request:
            self._admit(job, jobs)
        return events

    # State that outlives requests

    def idle_step(
        self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None
    ) -> bool:
        """Do idle work: save one prompt cache to disk, release memory, try batching.

        stopped: polled; True skips the trial of batching and aborts the save. seconds: time limit
        of the save, set before an unload or exit; only without it is batching tried, if token
        trees wait for that. Returns True if a cache was saved (there may be more to save).
        """
        self.learned.flush()
        if self.runner.wants_trial and seconds is None and not stopped():
            self.runner.try_batching()
        caches, disk_caches = self.runner.caches, self.runner.disk_caches
        self.runner.drafters.trim(1)
        release_under_pressure(caches)
        mx.clear_cache()  # MLX keeps the buffers of every prompt length
        histories = [*caches.in_use, *caches.histories()]
        wired.adjust(self.engine.model, sum(each.nbytes for each in histories))
        return disk_caches is not None and disk_caches.write(histories, stopped, seconds)

    def close(self) -> None:
        """Save the learned costs for the next run."""
        self._threads.shutdown()
        self.learned.close()
