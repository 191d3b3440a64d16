"""What a pass over M positions costs on this machine, relative to one position."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.decode import verify
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.target import Target, prefill

CONTEXT = 256  # tokens in the cache while measuring


def measure_curve(
    engine: Engine, rows: Sequence[int], repeats: int, context: int = CONTEXT
) -> dict[int, float]:
    """Median seconds of a pass for each number of rows, interleaved over `repeats` rounds."""
    target = Target(engine.model)
    target.reuse_prefix([index % 1000 for index in range(context + 1)])
    prefill(target, lambda done: True)
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for round_ in range(-1, repeats):  # the first round warms up
        for count in rows:
            before = kvcache.pass_state(target.cache)
            started = time.perf_counter()
            verify(target, list(range(count)), count)
            elapsed = time.perf_counter() - started
            kvcache.roll_back(target.cache, before, count, 0)
            if round_ >= 0:
                seconds[count].append(elapsed)
    mx.clear_cache()
    return {count: statistics.median(times) for count, times in seconds.items()}
