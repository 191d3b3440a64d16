"""Progress of a pull or an import; `ProgressMeter` turns callbacks into `Progress` values."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from akunu_py.text import human_size

ProgressCallback = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the bytes in total (0 if unknown)."""

_WINDOW_S = 5.0  # the rate covers the last seconds, so that a stalled connection shows
_SHORTEST_S = 0.2  # a shorter measurement shows buffers instead of the network
_LONGEST_S = 24 * 3600.0  # a longer time left is not shown
_STALLED_RATE = 1000.0  # bytes/s; a slower transfer has no useful time left


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a pull at one moment."""

    phase: str  # "look up", "download", "check", "unpack", "import", "record", "waiting for ..."
    done: int = 0  # bytes of this phase
    total: int = 0  # bytes of this phase, 0 if unknown
    rate: float | None = None  # bytes/s over the last seconds, None if unknown
    seconds_left: float | None = None  # of this phase, None if unknown

    @property
    def share(self) -> float:
        """The finished share of the download, from 0 to 1; 0 in other phases."""
        is_download = self.phase == "download" and self.total
        return min(1.0, self.done / self.total) if is_download else 0.0

    @property
    def stalled(self) -> bool:
        """True if almost nothing arrived in the last seconds."""
        return self.rate is not None and self.rate < _STALLED_RATE and self.done < self.total

    def describe(self, separator: str = " · ") -> str:
        """Return text such as "download: 120 MB of 2.3 GB · 12.4 MB/s · 3:05 left"."""
        whole = f": {human_size(self.done)} of {human_size(self.total)}" if self.total else ""
        parts = [self.phase + whole]
        if self.rate is not None:
            parts.append("stalled" if self.stalled else f"{human_size(self.rate)}/s")
        left = self.seconds_left
        if left is not None and left < _LONGEST_S and not self.stalled:
            minutes, seconds = divmod(round(left), 60)
            hours, minutes = divmod(minutes, 60)
            clock = f"{hours}:{minutes:02}" if hours else f"{minutes}"
            parts.append(f"{clock}:{seconds:02} left")
        return separator.join(parts)


class ProgressMeter:
    """A ProgressCallback that adds rate and time left and passes a Progress on."""

    def __init__(
        self, on_progress: Callable[[Progress], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_progress, self._clock = on_progress, clock
        self._phase = ""
        self._samples: deque[tuple[float, int]] = deque()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Pass on a Progress with the recent rate and the time left, None while unknown."""
        now = self._clock()
        # A phase that starts over (a restarted download) gets a new rate.
        if phase != self._phase or (self._samples and done < self._samples[-1][1]):
            self._phase = phase
            self._samples.clear()
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()
        seconds = now - self._samples[0][0]
        moved = done - self._samples[0][1]
        # Without any bytes, wait longer before reporting a rate.
        shortest = _SHORTEST_S if moved else _WINDOW_S / 2
        rate = moved / seconds if seconds >= shortest else None
        left = (total - done) / rate if rate and total else None
        self._on_progress(Progress(phase, done, total, rate, left))


def counting(progress: ProgressCallback, phase: str, total: int) -> Callable[[int], None]:
    """Return a callback for the bytes of each block of files, which reports their sum."""
    done = 0

    def count(length: int) -> None:
        nonlocal done
        done += length
        progress(phase, done, total)

    return count


def no_callback(*_: object) -> None:
    """Ignore all arguments."""
