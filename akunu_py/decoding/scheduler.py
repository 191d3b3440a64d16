"""Several requests on one model: one thread makes all their answers, a step of one after the other.

A job makes one answer: it is called with a session and gives the events of its request, at most one
pass or one chunk of a prompt from one to the next, so that another job can be given a turn there.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from akunu_py.decoding.events import Ended, Event, Failed
from akunu_py.decoding.thread import ModelThread
from akunu_py.errors import AkunuError
from akunu_py.types import Stats

if TYPE_CHECKING:  # a second or two, which `load` spends in the thread, not who starts it
    from akunu_py.decoding.engine import Engine
    from akunu_py.decoding.session import Session

Result = TypeVar("Result")
State = Literal["loading", "ready", "failed"]
# The events of an answer, Ended the last of them; None where a step has nothing to tell.
Job = Callable[["Session"], Iterator[Event | None]]

_RETRY_S = 1.0, 60.0  # until a model that did not load is tried again, doubled each time, at most
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


class JobHandle:
    """One job on its way."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        client: str,
        wake: Callable[[], None],
        *,
        short: bool,
    ) -> None:
        self.job = job
        self.client = client
        self.short = short
        self._on_event = on_event
        self._wake = wake
        self._cancelled = threading.Event()
        self.ended = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends it after the step that is running, or before it begins: with Ended, the reason
        "cancelled". May be called from any thread, at any time."""
        self._cancelled.set()
        self._wake()

    def tell(self, event: Event) -> None:
        """Hands on an event. A reader that fails wants no more."""
        self.ended = isinstance(event, Ended | Failed)
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - whoever it was: the other jobs go on
            self._cancelled.set()


class Scheduler:
    """The thread of a model, and the jobs that wait for it. All methods may be called from any
    thread.

    load: called in the thread, gives the session of the model. Where it fails, the jobs that wait
    do with its exception; later ones have it tried again, some seconds apart.
    """

    def __init__(
        self,
        load: Callable[[], Session],
        *,
        on_state: Callable[[State], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._on_state = on_state
        self._clock = clock
        self.state: State = "loading"
        self._error: Exception = AkunuError("the model was not loaded yet")
        self._failures = 0
        self._retry_at = 0.0
        self._session: Session | None = None
        self._lock = threading.Lock()
        self._waiting: list[JobHandle] = []
        self._running: list[_Running] = []
        self._questions: list[Callable[[Engine | None], None]] = []
        self._counts = Counts()
        self._closing = False
        self._thread = ModelThread[bool](
            "model", load=self._try_to_load, serve=self._serve, unload=self._unload
        )

    @property
    def engine(self) -> Engine | None:
        """The loaded engine, None where there is none. Its arrays belong to the thread."""
        session = self._session
        return session.engine if session else None

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
        for handle in waiting:
            handle.tell(Failed(closed()))
        if self._thread.close(finish_s, drain=True):
            return True
        with self._lock:
            running = list(self._running)
        for each in running:
            each.handle.cancel()
        return self._thread.close(_CANCEL_S)

    def _wake(self) -> None:
        self._thread.put(True)

    def _try_to_load(self) -> None:
        self._tell_state("loading")
        try:
            self._session = self._load()
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
        self._on_state(state)

    def _unload(self) -> None:
        self._session = None
        gc.collect()
        if "mlx.core" in sys.modules:
            import mlx.core as mx

            mx.clear_cache()

    def _serve(self, wake: bool) -> None:
        while self._turn():
            pass

    def _turn(self) -> bool:
        """What is to do between two steps, then a step; False where nothing is to do."""
        with self._lock:
            gone = [handle for handle in self._waiting if handle.cancelled]
            self._waiting = [handle for handle in self._waiting if not handle.cancelled]
            questions, self._questions = self._questions, []
            wanted = bool(self._waiting or questions)
        for handle in gone:
            self._end(handle, Ended("cancelled", Stats()))
        if wanted and self._session is None and self._clock() >= self._retry_at:
            self._try_to_load()
        for answer in questions:
            answer(self.engine)
        self._admit()
        if not self._running:
            return False
        self._step(self._running[0])
        return True

    def _admit(self) -> None:
        """Begins jobs that wait, as far as there are sessions for them."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
            if self._session is not None:
                free = 1 - len(self._running)
                waiting, self._waiting = waiting[:free], waiting[free:]
                self._running += [_Running(handle, self._session) for handle in waiting]
                return
        for handle in waiting:
            self._end(handle, Failed(self._error))

    def _step(self, running: _Running) -> None:
        event = running.step()
        if isinstance(event, Ended | Failed):
            with self._lock:
                self._running.remove(running)
            self._end(running.handle, event)
        elif event is not None:
            running.handle.tell(event)

    def _end(self, handle: JobHandle, event: Ended | Failed) -> None:
        with self._lock:
            if isinstance(event, Failed):
                self._counts.failed += 1
            else:
                self._counts.cancelled += event.reason == "cancelled"
                self._counts.ended += event.reason != "cancelled"
                self._counts.stats.include(event.stats)
        handle.tell(event)


class _Running:
    """A job that was begun."""

    def __init__(self, handle: JobHandle, session: Session) -> None:
        self.handle = handle
        self._session = session
        self._events: Iterator[Event | None] | None = None

    def step(self) -> Event | None:
        """Its next event. An exception is one, too: the last."""
        self._session.turn.cancelled = self.handle.cancelled
        try:
            if self._events is None:
                self._events = iter(self.handle.job(self._session))
            event = next(self._events)
        except StopIteration:
            event = Failed(RuntimeError("a job ended without a last event"))
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            event = Failed(error)
        if isinstance(event, Ended | Failed):
            self._close()
        return event

    def _close(self) -> None:
        """Leaves the session as one that another job may begin with."""
        events: Any = self._events
        if hasattr(events, "close"):
            events.close()
