"""The jobs that are answered at the same time, each on a session of its own, and which is next.

Time is shared: reading prompts takes no more of it than writing answers, so that no running answer
takes more than twice as long for that; writers get the same time each (stride scheduling:
Waldspurger and Weihl, 1995); and of the prompts the one is read of which least is left, so that
most answers begin early, but none waits for ever. All passes are of one answer each: a pass over
the rows of several would be launched in `Slots.step`, instead of that of the next writer alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from akunu_py.decoding.events import Ended, Event, Failed
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.scheduling.job import JobHandle
from akunu_py.decoding.session import Session, Turn

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
