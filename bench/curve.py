"""`akunu bench curve`: the cost of a pass by its rows: measured, published or given as points."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from akunu_py.bench.command import add_count, add_model, progress, show
from akunu_py.errors import UsageError
from akunu_py.ngram.cost import interpolate
from akunu_py.ngram.planner import best_draft
from akunu_py.parser import add_format
from akunu_py.types import LoadOptions

if TYPE_CHECKING:
    from akunu_py.engine.engine import Engine

CONTEXT = 256  # tokens in the cache while measuring
CHANCES = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)  # acceptance rates of the printed plan
_BAR_WIDTH = 40  # characters
CURVES: dict[str, str] = {
    "m5max": "1:1 3:1.11 5:1.42 8:2.2 16:2.6 32:3.2",
    "m4pro": "1:1 2:1.2 3:1.4 4:1.6 5:1.8 6:2.2 10:3.2 16:3.9 32:3.9",
    "m4pro-kernels": "1:1 2:1.2 3:1.4 4:1.58 8:1.58 9:2.95 10:3.16 16:3.16 17:3.9 32:3.9",
    "m2pro": "1:1 2:1.5 5:3.0 6:4.1 32:4.5",
    "m2pro-kernels": "1:1 2:1.1 5:1.4 8:2.0 9:2.7 12:3.2 16:4.0 17:4.2 32:4.5",
    "m1": "1:1 2:1.5 5:3.0 6:3.4 16:4.0 32:4.5",
    "m1-kernels": "1:1 2:1.1 5:1.3 8:1.8 9:2.5 12:3.0 16:3.6 17:4.0 32:4.5",
    "cpu": "1:1 2:1.15 3:1.36 4:1.5 5:1.55 6:1.58 8:1.67 9:1.71",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    add_count(parser, "--repeats", 7, "Number of repetitions")
    add_count(parser, "--context", CONTEXT, "Number of tokens in the cache")
    add_model(parser)
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    """Time passes of 1 to 32 rows at one context; show the costs and planned draft lengths."""
    from akunu_py.engine.load import load_engine
    from akunu_py.engine.model import device
    from akunu_py.workarounds.openblas import load_openblas

    engine = load_engine(options.model, LoadOptions(options.weights))
    costs = measure_curve(engine, range(1, 33), options.repeats, options.context)
    found = {
        "model": engine.name,
        "weights": engine.plan.weights,
        "device": device.device_name(),
        "blas": load_openblas(),
        "context": options.context,
        "curve_s": {str(count): round(seconds, 6) for count, seconds in costs.items()},
        "draft_tokens_at_acceptance": {
            str(chance): planned_length(costs, chance) for chance in CHANCES
        },
    }
    show(options, found, lambda: print_curve(costs, found))
    return 0


class Curve:
    """Cost of a pass by its rows, linear between the points and beyond."""

    def __init__(self, points: dict[int, float]) -> None:
        if sorted(points)[:1] != [1]:
            raise UsageError("a curve must start with the cost of 1 row, such as 1:1,3:1.11,5:1.42")
        self.points = dict(sorted(points.items()))

    def __call__(self, rows: int) -> float:
        return interpolate(self.points, rows)

    def with_latency(self, latency: float) -> Curve:
        """Return the curve with a network latency in plain steps; a plain step costs 1 again."""
        points = {rows: (cost + latency) / (1 + latency) for rows, cost in self.points.items()}
        return Curve(points)


def parse_curve(text: str) -> Curve:
    """Parse a name, points such as `1:1,3:1.11`, or both (`m5max,33:7`). Raises UsageError."""
    points: dict[int, float] = {}
    name, _, more = text.replace(",", " ").partition(" ")
    for part in f"{CURVES.get(name, name)} {more}".split():
        rows_text, colon, cost_text = part.partition(":")
        try:
            rows, cost = int(rows_text), float(cost_text)
        except ValueError:
            colon = ""
        if not colon:
            raise UsageError(
                f"expected a curve ({', '.join(CURVES)}) or points such as 1:1,3:1.11,5:1.42, "
                f"found {text!r}"
            )
        if rows < 1 or not 0 < cost < float("inf") or rows in points:
            raise UsageError(
                f"expected different rows from 1 up with positive costs, found {part!r} in {text!r}"
            )
        points[rows] = cost
    return Curve(points)


def measure_curve(
    engine: Engine, rows: Sequence[int], repeats: int, context: int = CONTEXT
) -> dict[int, float]:
    """Return the median seconds of a pass by rows, interleaved over `repeats` rounds."""
    import mlx.core as mx

    from akunu_py.engine import kv_cache
    from akunu_py.engine.prefill import ChunkSizes, prefill
    from akunu_py.engine.sampling import sample_together
    from akunu_py.engine.target import Target

    target = Target(engine.model)
    target.reuse_prefix([index % 1000 for index in range(context + 1)])
    for _ in prefill(target, ChunkSizes(largest=engine.plan.fit.prefill_rows)):
        pass
    seconds: dict[int, list[float]] = {count: [] for count in rows}
    for round_ in range(-1, repeats):  # the first round warms up
        progress(f"cost of passes: {'warming up' if round_ < 0 else f'{round_ + 1}/{repeats}'}")
        for count in rows:
            before = kv_cache.pass_state(target.cache)
            started = time.perf_counter()
            tokens = mx.arange(count)
            part = target.to_sample(target.forward(tokens), tokens, [0] * (count - 1))
            mx.eval(sample_together([part]))
            elapsed = time.perf_counter() - started
            kv_cache.roll_back(target.cache, before, count, 0)
            if round_ >= 0:
                seconds[count].append(elapsed)
    progress("")
    target.pause_workers()
    mx.clear_cache()
    return {count: statistics.median(times) for count, times in seconds.items()}


def planned_length(costs: Mapping[int, float], chance: float) -> int:
    """Return the planner's draft length for a constant chance: a fixed point of rate and length."""
    table = [costs[count] / costs[1] for count in sorted(costs)]
    chances = [chance] * len(table)
    rate, length = 1.0, 0
    for _ in range(20):
        length, _ = best_draft(chances, table, rate, len(table) - 1)
        tokens = (1 - chance ** (length + 1)) / (1 - chance)  # equation 1 of Leviathan et al.
        rate = max(1.0, tokens / table[length])
    return length


def print_curve(costs: Mapping[int, float], found: Mapping[str, Any]) -> None:
    """Print the curve and the plan. found: the values that `--format json` prints."""
    print(" · ".join(f"{name} {found[name]}" for name in ("model", "weights", "device", "blas")))
    print(f"\none pass over N positions, {found['context']} tokens in the cache:")
    most = max(costs.values())
    for count, seconds in costs.items():
        bar = "█" * round(_BAR_WIDTH * seconds / most)
        print(f"  {count:>2}  {seconds * 1e3:>7.1f} ms  {seconds / costs[1]:>5.2f}  {bar}")
    lengths = found["draft_tokens_at_acceptance"]
    print("\nplanned draft length by the acceptance rate of each token:")
    print("  chance  " + "".join(f"{float(chance):>6.0%}" for chance in lengths))
    print("  tokens  " + "".join(f"{length:>6}" for length in lengths.values()))
