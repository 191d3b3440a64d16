"""For the tests of the bench: simulated runners with a clock of their own, made-up results, and
a model that is quick to measure."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from akunu_py.bench.result import Repeat, Result, Series
from akunu_py.bench.runners import Conditions, Run, Runner
from akunu_py.bench.speed import SpeedPlan, measure
from akunu_py.bench.workloads import Workload, WorkloadTurn
from tests.support.tiny import write_like_starter

PLAIN = "plain"
LOOP = {"prompt": list(range(50)) * 2, "output": list(range(50)) * 2}
FRESH = {"prompt": list(range(100, 150)), "output": list(range(200, 290))}
# A trace with a repetitive workload and one without repetition.
TRACE = {"tokenizer": "none", "workloads": {"loop": [LOOP, LOOP], "fresh": [FRESH]}}


def write_quick_model(directory: Path, starter: Path) -> str:
    """Write a model with all that the bench needs, whose pass takes a millisecond."""
    more = {"max_position_embeddings": 2048, "tie_word_embeddings": True}
    return str(write_like_starter(directory, starter, 1, **more))


class Simulated:
    """The same output each time, at `rate` tokens per second give or take 1 %."""

    baseline = PLAIN
    foreign = True

    def __init__(
        self, name: str, rate: float = 100.0, *, seed: int = 0,
        tokens: Sequence[int] = tuple(range(41)),
        before: Callable[[Conditions], None] = lambda conditions: None,
    ) -> None:  # fmt: skip
        self.name = name
        self.tokens = list(tokens)
        self.conditions: list[Conditions] = []
        self._rate, self._before = rate, before
        self._random = random.Random(f"{name} {seed}")

    def reference(self, temperature: float) -> str | None:
        return None if self.name == PLAIN else PLAIN

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        self.conditions.append(conditions)
        self._before(conditions)
        run = Run()
        seconds = 40 / (self._rate * self._random.gauss(1, 0.01))
        run.add([1, 2, 3], self.tokens[: conditions.max_tokens], 0.1, seconds)
        run.text = "said"
        return run


def simulate(
    runners: Sequence[Simulated], *, workloads: Sequence[str] = ("chat", "edit"), repeats: int = 5,
    runs: list[Series] | None = None,
) -> Result:  # fmt: skip
    """A result as the bench itself measures it, by the runners' own clocks."""
    result = fake_result([] if runs is None else runs)
    made = [Workload(name, (WorkloadTurn("hello"),), 64) for name in workloads]
    plan = SpeedPlan(made, [0.0], 64, repeats)
    engine = cast(Any, None)  # used only where a runner works on its weights
    measure(engine, cast(Sequence[Runner], runners), plan, result.runs)
    return result


def fake_result(runs: list[Series]) -> Result:
    return Result(
        command="akunu bench --made-up",
        date="2026-11-21",
        model={"name": "starter", "weights": "float32", "params": 135_000_000,
               "size_bytes": 540_000_000, "kv_bits": None},
        machine={"device": "a <machine>", "backend": "CPU, BLAS", "cores": 2,
                 "memory_bytes": 2**34, "system": "Linux-6", "python": "3.11.7",
                 "versions": {"akunu": "0.1.0", "mlx": "0.32.4"}},
        complete=True,
        curve_context=256,
        curve_s={1: 0.01, 5: 0.02},
        runs=runs,
    )  # fmt: skip


def drafted_series(loop: int | None = None) -> Series:
    """Four passes: 4 of 4 drafted tokens accepted, 1 of 4, a plain step, 0 of 2."""
    return Series(
        "edit", 0.0, "auto", "mlx-lm", reference="mlx-lm", identical=True, loop=loop,
        repeats=[Repeat(9, 0.1, 0.05, 1000), Repeat(9, 0.09, 0.05, 1000)],
        drafted=[4, 4, 0, 2], accepted=[4, 1, 0, 0], answer="said & <done>",
    )  # fmt: skip


def plain_series(workload: str = "edit") -> Series:
    repeats = [Repeat(9, 0.18, 0.05), Repeat(9, 0.182, 0.06)]
    return Series(workload, 0.0, "mlx-lm", "mlx-lm", repeats=repeats, answer="said")
