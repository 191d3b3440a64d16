"""Threads for matrix products on the CPU: one for each idle core.

A product waits for its slowest thread, which takes several times as long on a busy core.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

from akunu_py.workarounds import openblas

_INTERVAL_S = 0.25  # the kernel counts hundredths of a second


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
        then, busy, own, _ = self._last
        if self._most < 2 or self._clock() < then + _INTERVAL_S:
            return
        self._last = now, busy_now, own_now, running = self._sample()
        load = ((busy_now - busy) - (own_now - own)) / (now - then)
        # The load may have ended since, and the running threads may be those of this process.
        others = min(round(load), running - 1)
        openblas.set_threads(min(self._most, max(1, self._most - others)))

    def _sample(self) -> tuple[float, float, float, int]:
        """Return the time, CPU seconds of all processes and of this one, and runnable threads."""
        busy, running = _read_load(self._stat)
        return self._clock(), busy, self._own_s(), running


_of_process = functools.cache(BlasThreads)


def adapt() -> None:
    """Set the number of threads by the load of other processes. Cheap; call before a pass."""
    _of_process().adapt()


def _read_load(stat: Path) -> tuple[float, int]:
    """Return the CPU seconds used on our cores, and the runnable threads; 0 and 1 if unknown."""
    ticks, running = 0, 1
    with contextlib.suppress(OSError, ValueError):
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        for line in stat.read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in ours:
                user, nice, system, _idle, _wait, *interrupts = map(int, columns[:8])
                ticks += user + nice + system + sum(interrupts)
            elif name == "procs_running":
                running = int(columns[0])
    return ticks / os.sysconf("SC_CLK_TCK"), running
