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

    def describe(self, separator: str = " · ") -> str:
        """In words: "download: 120 MB of 2.3 GB · 12.4 MB/s · 3:05 left"."""
        parts = [self.phase]
        if self.total:
            parts[0] += f": {human_size(self.done)} of {human_size(self.total)}"
        if self.rate is not None:
            parts.append(f"{human_size(self.rate)}/s")
        if self.seconds_left is not None:
            minutes, seconds = divmod(round(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02} left")
        return separator.join(parts)


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
        rate = moved / seconds if seconds >= _SHORTEST_S else None
        left = (total - done) / rate if rate and total else None
        self._on_progress(Progress(phase, done, total, rate, left))


def no_callback(*_: object) -> None:
    """A callback that shows nothing."""
