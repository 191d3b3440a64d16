"""The one thread that owns a model: it loads it, runs its jobs step by step, and unloads it.

MLX's streams are thread-local, so only values leave the thread.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from akunu_py.engine.events import Event, Failed, Finished, LoadedModelFacts, SharedPasses
from akunu_py.engine.job import Job, JobHandle, ModelLoop
from akunu_py.errors import AkunuError, ServerGone, one_line
from akunu_py.types import Stats

if TYPE_CHECKING:  # a second or two, which the thread spends
    from akunu_py.engine.engine import Engine

Result = TypeVar("Result")
State = Literal["loading", "ready", "failed", "unloaded"]

_RETRY_S = 1.0, 60.0  # first and longest delay before a failed load is retried; doubles
_LAST_SAVE_S = 0.5  # time limit for saving prompt caches on shutdown
# Of threads. With Python's 5 ms, a busy thread makes each pass 6 ms longer; with this, 1 ms.
_SWITCH_S = 0.0005
_CANCEL_S = 10.0  # time limit for cancelled passes to end
_WATCH_S = 5.0 if sys.platform == "darwin" else None  # only macOS reports memory pressure


_busy = set["ModelHost"]()  # run a job


_CLOSING = "the request was refused because akunu is closing the model"


class ModelHost:
    """A model and its queued jobs. All methods may be called from any thread.

    If the model's server is gone, the model is loaded again; a job without output begins again.
    """

    save_after_s = 2.0  # idle time before prompt caches are saved

    def __init__(
        self,
        load: Callable[[], ModelLoop],  # called in the thread; after a failure retried later
        *,
        idle_s: float | None = None,  # idle time after which the model is unloaded; None: never
        retry_s: tuple[float, float] = _RETRY_S,
        on_state: Callable[[State], None] = lambda state: None,  # called in the thread
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._idle_s = idle_s
        self._retry_s = retry_s
        self._awake = SleepBlocker()
        self.on_state = on_state
        self._clock = clock
        self.state: State = "unloaded"
        self.error: Exception = AkunuError("the model was not loaded yet")  # of the last load
        self._failures = 0
        self._retry_at = 0.0
        self._loop: ModelLoop | None = None
        self._lock = threading.Lock()
        self._waiting: list[JobHandle] = []
        self._running: list[JobHandle] = []
        self._calls: list[Callable[[Engine | None], None]] = []
        self._shared = SharedPasses()  # of unloaded models
        self._closing = self._abandoned = False
        self._unloads: list[Future[None]] = []  # requested, but not done yet
        self._reload = False  # load the model again after that
        self._save_s = _LAST_SAVE_S
        self._is_frozen = True  # garbage collection ignores the loaded model
        self._wake = threading.Event()  # set when there is something to do
        # A daemon, because loading a model cannot be interrupted.
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    @property
    def engine(self) -> Engine | None:
        """The engine loaded here, or None. Its arrays belong to the thread."""
        loop = self._loop
        return loop.engine if loop is not None else None

    @property
    def facts(self) -> LoadedModelFacts | None:
        """The facts of the model, None unless it is loaded."""
        loop = self._loop
        return loop.facts if loop is not None else None

    def start(self) -> None:
        """Start loading the model, once. Jobs may be submitted before."""
        if self._thread.ident is None:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self.state = "loading"
            self._thread.start()

    def unload(self, save_s: float = _LAST_SAVE_S) -> Future[None]:
        """Unload the model after all jobs; a later job reloads it. save_s: time limit for saves."""
        future: Future[None] = Future()
        with self._lock:
            idle = self._closing or self._thread.ident is None
            if not idle:
                self._save_s = save_s
                self._unloads.append(future)
        if idle:
            future.set_result(None)
        self._wake.set()
        return future

    def reload(self) -> None:
        """Unload the model and load it again, after all submitted jobs; `start` if needed."""
        if self._thread.ident is None:
            self.start()
        else:
            self._reload = True
            self.unload()

    def submit(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        *,
        client: str = "",
        short: bool = False,
        idle: bool = False,
    ) -> JobHandle:
        """Queue a job; `on_event` gets its events in the model's thread and must return soon.

        The last event is Finished or Failed, exactly once. client: jobs of one client wait for each
        other. short: small prompt and few tokens; runs before other jobs. idle: runs only while no
        other job does; the next one cancels it.
        """
        handle = JobHandle(job, on_event, client, self._wake.set, short=short, idle=idle)
        with self._lock:
            closing = self._closing
            for each in () if idle else (*self._waiting, *self._running):
                if each.idle:
                    each.cancel()
            if not closing:
                self._waiting.append(handle)
        if closing:
            handle.deliver(Failed(self.error if self._abandoned else AkunuError(_CLOSING)))
        self._wake.set()
        return handle

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Call `function` with the loaded engine in the thread, between two steps."""
        future: Future[Result] = Future()

        def answer(engine: Engine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise self.error
                future.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        with self._lock:
            closing = self._closing
            if not closing:
                self._calls.append(answer)
        if closing:
            future.set_exception(AkunuError(_CLOSING))
        self._wake.set()
        return future

    @property
    def shared(self) -> SharedPasses:
        """The counters of shared passes, also of models that were unloaded."""
        loop = self._loop
        return self._shared if loop is None else self._shared + loop.shared

    def close(self, finish_s: float = 0.0, cancel_s: float | None = _CANCEL_S) -> bool:
        """Stop the thread; return False if it is still busy.

        Running answers get `finish_s` seconds and are then cancelled, which may take `cancel_s`
        (None: no limit); waiting jobs fail at once.
        """
        with self._lock:
            self._closing, self._save_s = True, _LAST_SAVE_S
            waiting, self._waiting = self._waiting, []
        if self._abandoned:
            return False
        for handle in waiting:
            handle.deliver(Failed(AkunuError(_CLOSING)))
        if self._has_ended(finish_s):
            return True
        for handle in list(self._running):
            handle.cancel()
        return self._has_ended(cancel_s)

    def _has_ended(self, seconds: float | None) -> bool:
        """Wait for the end of the closing thread; return False on timeout."""
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def abandon(self, why: AkunuError) -> None:
        """Fail all jobs now, because a step may never end; `close` does not wait then."""
        with self._lock:
            self._closing = self._abandoned = True
            handles, self._waiting = [*self._running, *self._waiting], []
            calls, self._calls = self._calls, []
            unloads, self._unloads = self._unloads, []
        self.error = why
        for handle in handles:
            handle.deliver(Failed(why))
        _end(unloads)
        for answer in calls:
            answer(None)

    def _run(self) -> None:
        """Load the model, run jobs until closing, then save prompt caches and unload."""
        try:
            self._try_to_load()
            closing = False
            while not closing or self._running:
                closing = self._closing  # then no more jobs come
                while self._run_once():
                    self._awake.keep_awake()
                self._awake.allow_sleep()
                if not closing or self._running:
                    self._wait()
        except BaseException as error:
            # A failing callback or device; without this, clients would wait for ever.
            self.abandon(AkunuError(f"the model's thread ended: {one_line(error)}"))
            raise
        finally:
            _busy.discard(self)
            try:
                self._save_and_unload()
            finally:
                release_streams()

    def _wait(self) -> None:
        """Do idle work until there is something to do. While jobs are prepared, only wait."""
        since = time.monotonic()
        while not self._wake.wait(None if self._running else self._idle(time.monotonic() - since)):
            pass
        self._wake.clear()

    def _idle(self, seconds: float) -> float | None:
        """Save prompt caches, then unload; return the next call's delay. seconds: idle time."""
        _busy.discard(self)
        if seconds < self.save_after_s:
            return self.save_after_s - seconds
        if not self._is_frozen:
            self._release_memory()
        if self._save(self._wake.is_set):
            return 0.0
        if self._idle_s is not None and seconds >= self._idle_s:
            self._unload()
            return None
        left = None if self._idle_s is None else self._idle_s - seconds
        return min((each for each in (left, _WATCH_S) if each is not None), default=None)

    def _try_to_load(self) -> None:
        self._report_state("loading")
        try:
            self._loop = self._load()
        except Exception as error:  # noqa: BLE001 - shown to the user
            first, most = self._retry_s
            self._retry_at = self._clock() + min(most, first * 2**self._failures)
            self._failures += 1
            self.error = error
            self._report_state("failed")
        else:
            self._failures = 0
            self._release_memory()
            self._report_state("ready")

    def _release_memory(self) -> None:
        """Free unreachable objects and MLX's unused buffers.

        Garbage collection ignores the rest until the next call, if no other model runs a job. With
        the objects of a loaded model, it would stop all threads for 0.1 s.
        """
        self._is_frozen = not _busy - {self}
        gc.unfreeze()
        gc.collect()
        if self._is_frozen:
            gc.freeze()
        if (mx := sys.modules.get("mlx.core")) is not None:
            mx.clear_cache()

    def _report_state(self, state: State) -> None:
        self.state = state
        self.on_state(state)

    def _save(self, stopped: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            return self._loop is not None and self._loop.idle_step(stopped, seconds)
        except Exception:  # noqa: BLE001 - saving only helps speed and must not end the thread
            return False

    def _save_and_unload(self) -> None:
        """Save prompt caches, up to the time limit, and unload the model."""
        end = time.monotonic() + self._save_s
        while (left := end - time.monotonic()) > 0 and self._save(lambda: False, left):
            pass
        self._unload()
        with self._lock:
            unloads, self._unloads = self._unloads, []
        _end(unloads)

    def _unload(self) -> None:
        if (loop := self._loop) is not None:
            self._shared += loop.shared
            self._loop = None
            loop.close()
            del loop
            self._release_memory()
            self._report_state("unloaded")

    def _run_once(self) -> bool:
        """Handle calls and cancellations, then run one step. Return False if nothing can run."""
        with self._lock:
            gone = [handle for handle in self._waiting if handle.cancelled]
            self._waiting = [handle for handle in self._waiting if not handle.cancelled]
            calls, self._calls = self._calls, []
            known = list(self._waiting)  # later ones may still need a load
            needs_model = any(not handle.idle for handle in known) or calls
            wanted = bool(needs_model) and not self._closing
            idle = not (known or self._running)
            reloads_only = self._reload and self._loop is None  # for the waiting jobs, too
            # Not the list itself: `unload` may add to it after the lock is released.
            unload = bool(self._unloads) and (idle or reloads_only) and not self._closing
        for handle in gone:
            handle.deliver(Finished("cancelled", Stats()))
        if unload:
            self._failures, self._retry_at = 0, 0.0
            self._save_and_unload()
        retry = wanted and self._loop is None and self._clock() >= self._retry_at
        if retry or (unload and self._reload):
            self._reload = False
            self._try_to_load()
        for answer in calls:
            answer(self.engine)
        self._begin(known)
        if self._loop is None or not self._running:
            return False
        _busy.add(self)
        stepped = self._step(self._loop)
        for handle, events in stepped:
            for event in events:
                if isinstance(event, Finished | Failed):
                    self._finish(handle, event)
                else:
                    handle.deliver(event)
        return bool(stepped)

    def _step(self, loop: ModelLoop) -> Sequence[tuple[JobHandle, Sequence[Event]]]:
        """Run one step. A failing loop fails its jobs; the next job loads the model again."""
        try:
            return loop.step(self._running)
        except Exception as error:  # noqa: BLE001 - the thread must not end while clients wait
            failed = [(handle, [Failed(error)]) for handle in self._running]
            self._unload()
            return failed

    def _finish(self, handle: JobHandle, event: Finished | Failed) -> None:
        """End a running job, or queue it again if its server is gone."""
        gone = isinstance(event, Failed) and isinstance(event.error, ServerGone)
        handle.prepared = handle.running = handle.request = None  # they refer to the model
        with self._lock:
            self._running.remove(handle)
            ended = handle.has_output or handle.cancelled or self._closing
            again = gone and not (ended or handle.retried or handle.idle)
            if again:
                handle.retried = True
                self._waiting.insert(0, handle)
        if gone:
            self._unload()
        if not again:
            handle.deliver(event)

    def _begin(self, known: Sequence[JobHandle]) -> None:
        """Start waiting jobs while slots are free; without a model, fail those in `known`."""
        failed = list[JobHandle]()
        with self._lock:
            if self._loop is None:
                failed = [handle for handle in known if handle in self._waiting]
                self._waiting = [handle for handle in self._waiting if handle not in failed]
            else:
                while (chosen := self._next_job(self._loop.slots)) is not None:
                    self._waiting.remove(chosen)
                    self._running.append(chosen)
        for handle in failed:
            handle.deliver(Failed(self.error))

    def _next_job(self, slots: int) -> JobHandle | None:
        """Return the next job to start, None if there is none or no slot is free.

        Short jobs are first, then clients with few running jobs, then FIFO; idle ones start last,
        and only alone.
        """
        clients = Counter(handle.client for handle in self._running if handle.client)
        waiting = [
            each
            for each in self._waiting
            if len(self._running) < slots + each.short and not (each.idle and self._running)
        ]
        return min(
            waiting,
            key=lambda each: (each.idle, not each.short, clients[each.client]),
            default=None,
        )


def _end(unloads: Sequence[Future[None]]) -> None:
    for each in unloads:
        if each.set_running_or_notify_cancel():
            each.set_result(None)


_MOMENT_S = 5.0  # shorter work does not start `caffeinate`; macOS waits at least a minute
_CAFFEINATE = ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))


@dataclass(eq=False)
class SleepBlocker:
    """Prevents idle sleep with macOS's `caffeinate` while there is work; no-op elsewhere."""

    command: Sequence[str] = _CAFFEINATE if sys.platform == "darwin" else ()
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None  # start of the work
    process: subprocess.Popen[bytes] | None = None  # while `caffeinate` runs

    def keep_awake(self) -> None:
        """Start `caffeinate` once there was work for some seconds. Call repeatedly."""
        if self._since is None:
            self._since = self.clock()
        is_long = self.clock() - self._since >= _MOMENT_S
        if is_long and self.command and self.process is None:
            try:
                self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL)
            except OSError:
                self.command = ()

    def allow_sleep(self) -> None:
        """Stop `caffeinate`: the work is done."""
        self._since = None
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


def release_streams() -> None:
    """Free MLX's state for this thread, or the process may abort at exit (mlx PR 4373)."""
    if (mx := sys.modules.get("mlx.core")) is not None:
        mx.clear_streams()
