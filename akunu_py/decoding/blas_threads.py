"""Threads for matrix products on the CPU: one for each idle core.

A product waits for its slowest thread. On a busy core that takes several times as long as the
product on the remaining threads.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from akunu_py.workarounds import openblas

_INTERVAL_S = 0.25  # the kernel counts hundredths of a second
_IDLE = 0.25  # of a core, in use although nothing runs for long


class BlasThreads:
    """Adapts the number of threads to the load of other processes."""

    def __init__(
        self,
        stat: Path = Path("/proc/stat"),
        own_s: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stat: file with the times of each core. own_s: CPU seconds of this process."""
        self._stat, self._own_s, self._clock = stat, own_s, clock
        self._most = openblas.threads()
        self._last = self._sample()

    def adapt(self) -> None:
        """Set the number of threads by the load since the last call. Cheap; call before a pass."""
        if self._most < 2 or self._clock() < self._last[0] + _INTERVAL_S:
            return
        then, busy, own = self._last
        self._last = now, busy_now, own_now = self._sample()
        others = ((busy_now - busy) - (own_now - own)) / (now - then)
        openblas.set_threads(max(1, self._most - math.ceil(others - _IDLE)))

    def _sample(self) -> tuple[float, float, float]:
        """Return the time, and the CPU seconds of all processes and of this one so far."""
        return self._clock(), _busy_seconds(self._stat), self._own_s()


def describe() -> str:
    """Return the number of threads for `akunu info`, "" without OpenBLAS."""
    threads = openblas.threads()
    return f"{threads} threads (completions use only idle cores)" if threads else ""


def _busy_seconds(stat: Path) -> float:
    """Return the CPU seconds of all processes on the cores of this one; 0 if unknown."""
    ticks = 0
    with contextlib.suppress(OSError, ValueError):
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in stat.read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in ours:
                user, nice, system, _idle, _wait, *interrupts = map(int, columns[:8])
                ticks += user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")
