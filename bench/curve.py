"""What a pass over M positions costs on this machine, and what the planner makes of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from akunu_py.bench.theory import expected_tokens
from akunu_py.decoding import device, kvcache
from akunu_py.decoding.decode import verify
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.target import Target, prefill
from akunu_py.ngram.planner import choose_length

CONTEXT = 256  # tokens in the cache while measuring
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # of a drafted token to be accepted


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


def planned_length(costs: Mapping[int, float], chance: float) -> int:
    """The draft length that the planner ends up with when every token has the same chance.

    The rate that the planner charges with is the one that its own choice earns: a fixed point.
    """
    table = [costs[count] / costs[1] for count in sorted(costs)]
    chances = [chance] * len(table)
    rate, length = 1.0, 0
    for _ in range(20):
        length = choose_length(chances, table, rate, len(table) - 1)
        rate = max(1.0, expected_tokens(chance, length) / table[length])
    return length


def describe_setup(engine: Engine) -> dict[str, str]:
    """What the costs depend on."""
    return {
        "model": engine.name,
        "weights": engine.weights,
        "device": device.device_name(),
        "blas": device.blas_name(),
    }


def as_dict(engine: Engine, costs: Mapping[int, float], context: int) -> dict[str, Any]:
    """Ready for JSON."""
    return describe_setup(engine) | {
        "context": context,
        "curve_s": {str(count): round(seconds, 6) for count, seconds in costs.items()},
        "draft_tokens_at_acceptance": {
            str(chance): planned_length(costs, chance) for chance in CHANCES
        },
    }
