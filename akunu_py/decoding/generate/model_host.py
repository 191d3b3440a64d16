"""The one thread that owns a model: it loads it, runs its jobs step by step, and unloads it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.job import Job, JobHandle
from akunu_py.decoding.generate.model_thread import Idle, ModelThread, release_memory
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError
from akunu_py.types import Stats

Result = TypeVar("Result")
State = Literal["loading", "ready", "failed", "unloaded"]

DEFAULT_SLOTS = 16
_RETRY_S = 1.0, 60.0  # first and longest delay before a failed load is retried; doubles
_LAST_SAVE_S = 0.5  # time limit for saving a prompt cache on shutdown
_CANCEL_S = 10.0  # time limit for cancelled passes to end


@dataclass(slots=True)
class RequestCounts:
    """Counters of the requests."""

    running: int = 0
    waiting: int = 0
    ended: int = 0
    cancelled: int = 0
    failed: int = 0
    shared_passes: int = 0  # decode passes of several requests
    shared_requests: int = 0  # sum of the requests in these passes
    stats: Stats = field(default_factory=Stats)  # sum over all finished answers


def closed() -> AkunuError:
    """Return the error for requests after closing."""
    return AkunuError("no more requests are answered: the model's thread is closing")


class ModelHost:
    """A model and its queued jobs. All methods may be called from any thread."""

    def __init__(
        self,
        load: Callable[[], Session],  # called in the thread; after a failure retried later
        *,
        slots: int = DEFAULT_SLOTS,  # concurrent jobs
        idle_s: float | None = None,  # idle time after which the model is unloaded; None: never
        awake: SleepBlocker | None = None,  # notified while there is work
        on_state: Callable[[State], None] = lambda state: None,  # called in the thread
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._count = slots
        self._awake = awake or SleepBlocker()
        self.on_state = on_state
        self._clock = clock
        self.state: State = "loading"
        self._error: Exception = AkunuError("the model was not loaded yet")
        self._failures = 0
        self._retry_at = 0.0
        self._engine: Engine | None = None
        self._loop: StepLoop | None = None
        self._lock = threading.Lock()
        self._waiting: list[JobHandle] = []
        self._running: list[JobHandle] = []
        self._questions: list[Callable[[Engine | None], None]] = []
        self._counts = RequestCounts()
        self._closing = self._abandoned = False
        self._thread = ModelThread[bool](
            "model",
            load=self._try_to_load,
            serve=self._serve,
            unload=self._end_thread,
            idle=Idle(lambda: self._save(lambda: self._thread.wanted), self._rest, idle_s),
        )

    @property
    def engine(self) -> Engine | None:
        """The loaded engine, or None. Its arrays belong to the thread."""
        return self._engine

    def start(self) -> None:
        """Start loading the model, once. Jobs may be submitted before."""
        self._thread.start()

    def submit(
        self, job: Job, on_event: Callable[[Event], None], *, client: str = "", short: bool = False
    ) -> JobHandle:
        """Queue a job; `on_event` gets its events in the model's thread and must return soon.

        The last event is Ended or Failed, exactly once. client: jobs of one client wait for each
        other. short: small prompt and few tokens; runs before other jobs.
        """
        handle = JobHandle(job, on_event, client, self._wake, short=short)
        with self._lock:
            closing = self._closing
            if not closing:
                self._waiting.append(handle)
        if closing:
            handle.tell(Failed(closed()))
        self._wake()
        return handle

    def ask(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call `function` with the loaded engine in the thread, between two steps."""
        future: Future[Result] = Future()

        def answer(engine: Engine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise self._error
                future.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        with self._lock:
            closing = self._closing
            if not closing:
                self._questions.append(answer)
        if closing:
            future.set_exception(closed())
        self._wake()
        return future

    def counts(self) -> RequestCounts:
        """Return the current counters."""
        with self._lock:
            counts = replace(self._counts, stats=replace(self._counts.stats))
            counts.waiting, counts.running = len(self._waiting), len(self._running)
        self._add_shared(counts)
        return counts

    def close(self, finish_s: float = 0.0) -> bool:
        """Stop the thread; return False if it is still busy.

        Running answers get `finish_s` seconds and are then cancelled; waiting jobs fail at once.
        """
        with self._lock:
            self._closing = True
            waiting, self._waiting = self._waiting, []
        if self._abandoned:
            return False
        for handle in waiting:
            handle.tell(Failed(closed()))
        if self._thread.close(finish_s, drain=True):
            return True
        with self._lock:
            running = list(self._running)
        for handle in running:
            handle.cancel()
        return self._thread.close(_CANCEL_S)

    def abandon(self, why: AkunuError) -> None:
        """Fail all jobs now, because a step may never end; `close` does not wait then."""
        with self._lock:
            self._closing = self._abandoned = True
            handles, self._waiting = [*self._running, *self._waiting], []
            questions, self._questions = self._questions, []
        self._error = why
        for handle in handles:
            handle.tell(Failed(why))
        for answer in questions:
            answer(None)

    def _wake(self) -> None:
        self._thread.put(True)

    def _try_to_load(self) -> None:
        self._tell_state("loading")
        try:
            session = self._load()
            self._loop = StepLoop(session, self._count)
            self._engine = session.engine
        except Exception as error:  # noqa: BLE001 - shown to the user
            first, most = _RETRY_S
            self._retry_at = self._clock() + min(most, first * 2**self._failures)
            self._failures += 1
            self._error = error
            self._tell_state("failed")
        else:
            self._failures = 0
            self._tell_state("ready")

    def _tell_state(self, state: State) -> None:
        self.state = state
        self.on_state(state)

    def _rest(self) -> None:
        """Unload the idle model until the next request."""
        if self._loop is not None:
            self._unload()
            self._tell_state("unloaded")

    def _save(self, stopped: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            return self._loop is not None and self._loop.save_idle(stopped, seconds)
        except Exception:  # noqa: BLE001 - saving only helps speed and must not end the thread
            return False

    def _end_thread(self) -> None:
        self._awake.rest()
        self._save(lambda: False, _LAST_SAVE_S)
        self._unload()

    def _add_shared(self, counts: RequestCounts) -> None:
        if (loop := self._loop) is not None:
            counts.shared_passes += loop.runner.passes
            counts.shared_requests += loop.runner.requests

    def _unload(self) -> None:
        self._add_shared(self._counts)
        self._loop = self._engine = None
        release_memory()

    def _serve(self, wake: bool) -> None:
        while self._turn():
            self._awake.work()
        self._awake.rest()

    def _turn(self) -> bool:
        """Handle questions and cancellations, then run one step. False if idle."""
        with self._lock:
            gone = [handle for handle in self._waiting if handle.cancelled]
            self._waiting = [handle for handle in self._waiting if not handle.cancelled]
            questions, self._questions = self._questions, []
            wanted = bool(self._waiting or questions)
        for handle in gone:
            self._end(handle, Finished("cancelled", Stats()))
        if wanted and self._loop is None and self._clock() >= self._retry_at:
            self._try_to_load()
        for answer in questions:
            answer(self._engine)
        self._begin()
        if self._loop is None or not self._running:
            return False
        for handle, events in self._loop.step():
            for event in events:
                if isinstance(event, Finished | Failed):
                    with self._lock:
                        self._running.remove(handle)
                    self._end(handle, event)
                else:
                    handle.tell(event)
        return True

    def _begin(self) -> None:
        """Start waiting jobs while slots are free."""
        loop = self._loop
        while loop is not None and (handle := self._next_waiting(loop)) is not None:
            loop.begin(handle)
        if loop is None:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for handle in waiting:
                self._end(handle, Failed(self._error))

    def _next_waiting(self, loop: StepLoop) -> JobHandle | None:
        """Take the next job: short ones first, then clients with few running jobs, then FIFO."""
        with self._lock:
            clients = Counter(handle.client for handle in self._running if handle.client)
            waiting = [each for each in self._waiting if loop.has_room(short=each.short)]
            chosen = min(
                waiting, key=lambda each: (not each.short, clients[each.client]), default=None
            )
            if chosen is not None:
                self._waiting.remove(chosen)
                self._running.append(chosen)
        return chosen

    def _end(self, handle: JobHandle, event: Finished | Failed) -> None:
        with self._lock:
            if isinstance(event, Failed):
                self._counts.failed += 1
            else:
                self._counts.cancelled += event.reason == "cancelled"
                self._counts.ended += event.reason != "cancelled"
                self._counts.stats.include(event.stats)
        handle.tell(event)


_MOMENT_S = 5.0  # shorter work does not start `caffeinate`; macOS waits at least a minute


class SleepBlocker:
    """Prevents idle sleep with macOS's `caffeinate` while there is work; no-op elsewhere."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if command is None:
            mac = sys.platform == "darwin"
            command = ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())) if mac else ()
        self._command = command
        self._clock = clock
        self._since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether `caffeinate` is running."""
        return self._process is not None

    def work(self) -> None:
        """Note that there is work. Call repeatedly."""
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if self._command and not self.held and now - self._since >= _MOMENT_S:
            try:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            except OSError:
                self._command = ()

    def rest(self) -> None:
        """Note that the work is done."""
        self._since = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
