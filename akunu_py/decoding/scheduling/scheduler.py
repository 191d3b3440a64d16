"""Several requests on one model: one thread makes all answers, a step of one after the other.

Time is shared: prefill takes no more of it than decoding, so that no running answer takes more than
twice as long for that; answers get the same time each (stride scheduling: Waldspurger and Weihl,
1995); and the prompt with the least left is prefilled first, so that most answers begin early, but
none waits for ever. All passes are of one answer each.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from akunu_py.decoding.events import Ended, Event, Failed
from akunu_py.decoding.generate.model_thread import Idle, ModelThread, release_memory
from akunu_py.decoding.generate.session import Session, Turn
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.scheduling.job import Job, JobHandle
from akunu_py.errors import AkunuError
from akunu_py.types import Stats

if TYPE_CHECKING:
    from akunu_py.decoding.generate.session import Session
    from akunu_py.decoding.model.engine import Engine

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


_MOMENT_S = 5.0  # of work that need not be known to the system: it waits a minute at least


class Awake:
    """macOS's own `caffeinate`, run while there is work: its assertion against idle sleep ends with
    it, and with this process at the latest. Elsewhere it does nothing."""

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
        """Whether the system was told."""
        return self._process is not None

    def work(self) -> None:
        """There is work; to be called again and again while there is."""
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if self._command and not self.held and now - self._since >= _MOMENT_S:
            try:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            except OSError:
                self._command = ()

    def rest(self) -> None:
        """There is no more work."""
        self._since = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None


_CHUNK_S = 0.2  # about how long reading may keep an answer waiting that is being written,
_CHUNK_PASSES = 2.0  # in passes of that answer,
_PATIENCE_S = 1.0  # and another prompt
_SHORT_WEIGHT = 4.0  # of a short job's claim to time
# How long a prompt waits for shorter ones: seconds, and times what reading it takes.
_LATE_S, _LATE = 2.0, 2.0
_PREFILL_RATE = 500.0  # tokens of a prompt in a second, before any was measured


class Slots:
    """`count` jobs run at most, and one more that is short.

    session: of the model; those of the other slots are made beside it when they are needed.
    """

    def __init__(
        self, session: Session, count: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._count = count
        self._sessions = [session]
        self._running: list[_Running] = []
        self._ahead: _Running | None = None  # of which a pass may be under way
        self._read_ahead_s = 0.0  # that reading took beyond what writing did

    @property
    def caches(self) -> PromptCaches:
        """Those that all slots share."""
        return self._sessions[0].target.caches

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """See `Session.save_idle`."""
        return self._sessions[0].save_idle(stopped, seconds)

    def has_room(self, *, short: bool) -> bool:
        """Whether a job can begin."""
        return len(self._running) < self._count + short

    def begin(self, handle: JobHandle) -> None:
        """Makes it one of those that are stepped."""
        used = [each.session for each in self._running]
        free = [session for session in self._sessions if session not in used]
        if not free:
            first = self._sessions[0]
            free = [Session(first.engine, first.learned, first)]
            self._sessions += free
        spent = min((each.spent for each in self._running), default=0.0)
        self._running.append(_Running(handle, free[0], spent, self._clock()))

    def step(self) -> tuple[JobHandle, Event | None]:
        """A step of one of those that run: whose it was, and the event. After the last event of a
        job its slot is free."""
        ready = self._ready()
        each = self._ahead if self._ahead in ready else self._next(ready)
        assert each is not None
        others = [other.writes for other in ready if other is not each]
        each.turn.alone = len(ready) == 1
        each.turn.chunk_seconds = self._chunk_seconds(ready, each)
        self._ahead = each if each.turn.alone else None
        reads, started = not each.writes, self._clock()
        event = each.step()
        self._charge(each, self._clock() - started, reads=reads, shared=reads in others)
        if isinstance(event, Ended | Failed):
            self._running.remove(each)
            self._ahead = None
        return each.handle, event

    def _ready(self) -> list[_Running]:
        """Those that there is something to do for. Where one waits for others to end, no later one
        gets what it waits for."""
        ready, crowded = [], False
        for each in self._running:
            each.turn.crowded = crowded
            each.turn.cancelled = each.handle.cancelled
            blocked = each.turn.blocked
            if blocked is None or each.turn.cancelled or not (crowded or blocked()):
                ready.append(each)
            else:
                crowded = True
        return ready

    def _next(self, ready: list[_Running]) -> _Running:
        for each in ready:
            if each.turn.cancelled or not each.begun:  # which costs next to nothing
                return each
        writers = [each for each in ready if each.writes]
        readers = [each for each in ready if not each.writes]
        if readers and (not writers or self._read_ahead_s <= 0.0):
            return self._reader(readers)
        return min(writers, key=lambda each: each.spent)

    def _reader(self, readers: list[_Running]) -> _Running:
        """The one with least to read, or one that waited too long for that."""
        now, rate = self._clock(), self._sessions[0].drafting.curve.prefill_rate or _PREFILL_RATE
        waited = {each: now - each.since - each.stepped_s for each in readers}
        late = [each for each in readers if waited[each] > _LATE_S + _LATE * each.turn.left / rate]
        if late:
            return max(late, key=waited.__getitem__)
        return min(readers, key=lambda each: each.turn.left)

    def _chunk_seconds(self, ready: list[_Running], reader: _Running) -> float | None:
        """How long reading may take: a wait that hardly shows, or that of some passes where those
        take longer, as a chunk of few tokens takes hardly less than one of many."""
        if reader.turn.alone:
            return None
        passes = [each.pass_s for each in ready if each.writes and each is not reader]
        return (
            min(_PATIENCE_S, max(_CHUNK_S, _CHUNK_PASSES * max(passes))) if passes else _PATIENCE_S
        )

    def _charge(self, each: _Running, seconds: float, *, reads: bool, shared: bool) -> None:
        """shared: whether some read while others write."""
        weighed = seconds / (_SHORT_WEIGHT if each.handle.short else 1.0)
        each.stepped_s += seconds
        if not reads:
            each.spent += weighed
            each.pass_s = seconds
        if shared:
            self._read_ahead_s += weighed if reads else -seconds
        else:
            self._read_ahead_s = 0.0


class _Running:
    """A job that was begun. spent: its time of writing, weighed, from where the others were when it
    came; stepped_s: all time that it was given since `since`; pass_s: what its last pass took."""

    def __init__(self, handle: JobHandle, session: Session, spent: float, since: float) -> None:
        self.handle = handle
        self.session = session
        self.spent = spent
        self.since = since
        self.stepped_s = 0.0
        self.pass_s = 0.0
        self.begun = False
        self._events: Iterator[Event | None] | None = None

    @property
    def turn(self) -> Turn:
        return self.session.turn

    @property
    def writes(self) -> bool:
        """Whether its prompt is read."""
        return self.begun and self.turn.left == 0

    def step(self) -> Event | None:
        """Its next event. An exception is one, too: the last."""
        self.begun = True
        try:
            if self._events is None:
                self._events = iter(self.handle.job(self.session))
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
        with contextlib.suppress(Exception):  # what it was making is given up in any case
            if hasattr(events, "close"):
                events.close()
        try:
            self.session.release()
        except Exception:  # noqa: BLE001 - a device that fails
            self.session.target.reset()
