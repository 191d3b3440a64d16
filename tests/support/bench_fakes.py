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
from tests.support.tiny import write_tiny_llama

PLAIN = "plain"


def write_quick_model(directory: Path, starter: Path) -> str:
    """A llama of random weights with the starter's tokens: it has all that the bench needs of a
    model, and a pass takes a millisecond. Returns the path of its directory."""
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((starter / name).read_bytes())
    sizes = {"vocab_size": 49152, "max_position_embeddings": 2048}
    write_tiny_llama(directory, 1, **sizes, eos_token_id=2, tie_word_embeddings=True)
    return str(directory)


class Simulated:
    """The same output each time, at `rate` tokens per second give or take its noise."""

    baseline = PLAIN
    foreign = True

    def __init__(
        self, name: str, rate: float = 100.0, *, seed: int = 0, noise: float = 0.01,
        tokens: Sequence[int] = tuple(range(41)),
        before: Callable[[Conditions], None] = lambda conditions: None,
    ) -> None:  # fmt: skip
        self.name = name
        self.tokens = list(tokens)
        self.conditions: list[Conditions] = []
        self._rate, self._noise, self._before = rate, noise, before
        self._random = random.Random(f"{name} {seed}")

    def reference(self, temperature: float) -> str | None:
        return None if self.name == PLAIN else PLAIN

    def run(self, workload: Workload, conditions: Conditions) -> Run:
        self.conditions.append(conditions)
        self._before(conditions)
        run = Run()
        seconds = 40 / (self._rate * self._random.gauss(1, self._noise))
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


def drafted_series(runner: str = "auto", workload: str = "edit", **more: Any) -> Series:
    """Four passes: 4 of 4 drafted tokens accepted, 1 of 4, a plain step, 0 of 2."""
    fields: dict[str, Any] = {
        "repeats": [Repeat(9, 0.1, 0.05, 1000), Repeat(9, 0.09, 0.05, 1000)], "identical": True,
        "reference": "mlx-lm", "drafted": [4, 4, 0, 2], "accepted": [4, 1, 0, 0],
        "answer": "said & <done>",
    }  # fmt: skip
    return Series(workload, 0.0, runner, "mlx-lm", **(fields | more))


def plain_series(workload: str = "edit", rate: float = 50.0) -> Series:
    repeats = [Repeat(9, 9 / rate, 0.05), Repeat(9, 9.1 / rate, 0.06)]
    return Series(workload, 0.0, "mlx-lm", "mlx-lm", repeats=repeats, answer="said")
