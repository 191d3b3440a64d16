"""Progress of a pull or an import: bytes done, rate, time left.

What does the work calls a `ProgressCallback`; a `Meter` makes of that the `Progress` values that
front ends show.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from akunu_py.text import human_size

ProgressCallback = Callable[[str, int, int], None]
"""Called with a phase's name, the bytes done and the bytes in all (0 where that is not known)."""

_WINDOW_S = 5.0  # the rate is that of the last seconds: a connection that stalled shows
_SHORTEST_S = 0.2  # below, a rate tells more about buffers than about the network
_LONGEST_S = 24 * 3600.0  # more time left is a guess that helps nobody
# Where a phase ends in the whole of a pull; those before the download take no time to speak of.
_ENDS = {"download": 0.9, "check": 0.94, "unpack": 0.96, "import": 1.0}
_STALLED = 1000.0  # bytes a second, below which there is no time left to speak of


@dataclass(frozen=True, slots=True)
class Progress:
    """One moment of a pull.

    phase: "look up", "download", "check", "unpack", "import", "record", "waiting for ...".
    done, total: bytes of this phase, total 0 where it is not known. rate: bytes a second over the
    last seconds, None before there is one. seconds_left: of this phase, None where nobody can tell.
    """

    phase: str
    done: int = 0
    total: int = 0
    rate: float | None = None
    seconds_left: float | None = None

    @property
    def share(self) -> float:
        """How much of the phase is done, from 0 to 1; 0 where that is not known."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def whole(self) -> float:
        """How much of the whole pull is done, from 0 to 1; 0 where the phase tells nothing."""
        names = list(_ENDS)
        if self.phase not in _ENDS:
            return 0.0
        place = names.index(self.phase)
        start = _ENDS[names[place - 1]] if place else 0.0
        return start + self.share * (_ENDS[self.phase] - start)

    @property
    def stalled(self) -> bool:
        """Whether next to nothing came in the last seconds."""
        return self.rate is not None and self.rate < _STALLED and self.done < self.total

    def describe(self, separator: str = " · ") -> str:
        """In words: "download: 120 MB of 2.3 GB · 12.4 MB/s · 3:05 left"."""
        whole = f": {human_size(self.done)} of {human_size(self.total)}" if self.total else ""
        return separator.join([self.phase + whole, *self.speed()])

    def speed(self) -> list[str]:
        """Rate and time left in words, or that it stalled; nothing before that is known."""
        if self.stalled:
            return ["stalled"]
        parts = [] if self.rate is None else [f"{human_size(self.rate)}/s"]
        if self.seconds_left is not None and self.seconds_left < _LONGEST_S:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            hours, minutes = divmod(minutes, 60)
            left = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
            parts.append(f"{left} left")
        return parts


class Meter:
    """A ProgressCallback that passes on a Progress, with the rate and the time left.

    clock: seconds, for tests.
    """

    def __init__(
        self,
        on_progress: Callable[[Progress], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_progress, self._clock = on_progress, clock
        self._phase = ""
        self._samples: deque[tuple[float, int]] = deque()

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = self._clock()
        # A phase that begins again (a download that started over) has a rate of its own.
        if phase != self._phase or (self._samples and done < self._samples[-1][1]):
            self._phase = phase
            self._samples.clear()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        seconds = now - self._samples[0][0]
        moved = done - self._samples[0][1]
        # Nothing at all is no rate before there was time for something to come.
        shortest = _SHORTEST_S if moved else _WINDOW_S / 2
        rate = moved / seconds if seconds >= shortest else None
        left = (total - done) / rate if rate and total else None
        self._on_progress(Progress(phase, done, total, rate, left))


def no_callback(*_: object) -> None:
    """A callback that shows nothing."""
