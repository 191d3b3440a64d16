"""Several requests on one model: one thread makes all answers, a step of one after the other."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar

from akunu_py.decoding.events import Ended, Event, Failed
from akunu_py.decoding.scheduling.awake import Awake
from akunu_py.decoding.scheduling.job import Job, JobHandle
from akunu_py.decoding.thread import Idle, ModelThread, release_memory
from akunu_py.errors import AkunuError
from akunu_py.types import Stats

if TYPE_CHECKING:  # a second or two, which `load` spends in the thread, not who starts it
    from akunu_py.decoding.engine import Engine
    from akunu_py.decoding.scheduling.slots import Slots
    from akunu_py.decoding.session import Session

Result = TypeVar("Result")
State = Literal["loading", "ready", "failed", "unloaded"]

DEFAULT_SLOTS = 4
_RETRY_S = 1.0, 60.0  # until a model that did not load is tried again, doubled each time, at most
_LAST_SAVE_S = 0.5  # and at the end, where it takes no longer
_CANCEL_S = 10.0  # for the passes that are running when the time to finish is over


@dataclass(slots=True)
class Counts:
    """What the scheduler did, and has to do. stats: of all answers that ended, added up."""

    running: int = 0
    waiting: int = 0
    ended: int = 0
    cancelled: int = 0
    failed: int = 0
    stats: Stats = field(default_factory=Stats)


def closed() -> AkunuError:
    """Why there is no answer any more."""
    return AkunuError("no more requests are answered: the model's thread is closing")


class Scheduler:
    """The thread of a model, and the jobs that wait for it. All methods may be called from any
    thread.

    load: called in the thread, gives the session of the model. Where it fails, the jobs that wait
    do with its exception; later ones have it tried again, some seconds apart.
    slots: how many jobs are answered at the same time. idle_s: after how long without any the model
    is unloaded, until the next one comes; None for never. awake: told while there is work.
    on_state: called in the thread when the state is another one.
    """

    def __init__(
        self,
        load: Callable[[], Session],
        *,
        slots: int = DEFAULT_SLOTS,
        idle_s: float | None = None,
        awake: Awake | None = None,
        on_state: Callable[[State], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._count = slots
        self._awake = awake or Awake()
        self.on_state = on_state
        self._clock = clock
        self.state: State = "loading"
        self._error: Exception = AkunuError("the model was not loaded yet")
        self._failures = 0
        self._retry_at = 0.0
        self._engine: Engine | None = None
        self._slots: Slots | None = None
        self._lock = threading.Lock()
        self._waiting: list[JobHandle] = []
        self._running: list[JobHandle] = []
        self._questions: list[Callable[[Engine | None], None]] = []
        self._counts = Counts()
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
        """The loaded engine, None where there is none. Its arrays belong to the thread."""
        return self._engine

    def start(self) -> None:
        """Begins to load, unless it has. Jobs may be submitted before."""
        self._thread.start()

    def submit(
        self, job: Job, on_event: Callable[[Event], None], *, client: str = "", short: bool = False
    ) -> JobHandle:
        """Queues a job. `on_event` gets its events, and returns soon: the last is Ended or Failed,
        once, whatever becomes of the job. It is called in the thread of the model.

        client: whose job it is; those of one client wait for each other, not for those of others.
        short: little to read and few tokens to write: it comes before those that are not.
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
        """Has `function` called in the thread between two steps, with the engine, which is loaded
        for it. The future has what it returned or raised, or why there is no engine."""
        future: Future[Result] = Future()

        def answer(engine: Engine | None) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if engine is None:
                    raise self._error
                future.set_result(function(engine))
            except Exception as error:  # noqa: BLE001 - whatever it is, who asked gets it
                future.set_exception(error)

        with self._lock:
            closing = self._closing
            if not closing:
                self._questions.append(answer)
        if closing:
            future.set_exception(closed())
        self._wake()
        return future

    def counts(self) -> Counts:
        """What it did until now."""
        with self._lock:
            counts = replace(self._counts, stats=replace(self._counts.stats))
            counts.waiting, counts.running = len(self._waiting), len(self._running)
        return counts

    def close(self, finish_s: float = 0.0) -> bool:
        """Ends the thread: running answers are finished, but cancelled after `finish_s` seconds;
        jobs that wait fail at once. False where it is still busy, as a load may be."""
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
        """Where a step may never end: all jobs fail now, and `close` waits for nothing."""
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
            from akunu_py.decoding.scheduling.slots import Slots

            self._slots = Slots(session, self._count)
            self._engine = session.engine
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
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
        """Unloads a model that nobody asks for, until somebody does."""
        if self._slots is not None:
            self._unload()
            self._tell_state("unloaded")

    def _save(self, stopped: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            return self._slots is not None and self._slots.save_idle(stopped, seconds)
        except Exception:  # noqa: BLE001 - what is kept for speed must not end the thread
            return False

    def _end_thread(self) -> None:
        self._awake.rest()
        self._save(lambda: False, _LAST_SAVE_S)
        self._unload()

    def _unload(self) -> None:
        """Gives the memory of the model back."""
        self._slots = self._engine = None
        release_memory()

    def _serve(self, wake: bool) -> None:
        while self._turn():
            self._awake.work()
        self._awake.rest()

    def _turn(self) -> bool:
        """What is to do between two steps, then a step; False where nothing is to do."""
        with self._lock:
            gone = [handle for handle in self._waiting if handle.cancelled]
            self._waiting = [handle for handle in self._waiting if not handle.cancelled]
            questions, self._questions = self._questions, []
            wanted = bool(self._waiting or questions)
        for handle in gone:
            self._end(handle, Ended("cancelled", Stats()))
        if wanted and self._slots is None and self._clock() >= self._retry_at:
            self._try_to_load()
        for answer in questions:
            answer(self._engine)
        self._begin()
        if self._slots is None or not self._running:
            return False
        handle, event = self._slots.step()
        if isinstance(event, Ended | Failed):
            with self._lock:
                self._running.remove(handle)
            self._end(handle, event)
        elif event is not None:
            handle.tell(event)
        return True

    def _begin(self) -> None:
        """Begins jobs that wait, as far as there are slots for them."""
        slots = self._slots
        while slots is not None and (handle := self._next_waiting(slots)) is not None:
            slots.begin(handle)
        if slots is None:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for handle in waiting:
                self._end(handle, Failed(self._error))

    def _next_waiting(self, slots: Slots) -> JobHandle | None:
        """The job that runs from now on, None where none can. Short ones come first, then those of
        clients that fewest run of, then those that wait longest."""
        with self._lock:
            clients = Counter(handle.client for handle in self._running if handle.client)
            waiting = [each for each in self._waiting if slots.has_room(short=each.short)]
            chosen = min(
                waiting, key=lambda each: (not each.short, clients[each.client]), default=None
            )
            if chosen is not None:
                self._waiting.remove(chosen)
                self._running.append(chosen)
        return chosen

    def _end(self, handle: JobHandle, event: Ended | Failed) -> None:
        with self._lock:
            if isinstance(event, Failed):
                self._counts.failed += 1
            else:
                self._counts.cancelled += event.reason == "cancelled"
                self._counts.ended += event.reason != "cancelled"
                self._counts.stats.include(event.stats)
        handle.tell(event)
