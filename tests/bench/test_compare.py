"""`akunu bench compare` and the rank test behind it: by simulated clocks, never by wall time."""

import json
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.compare import Pair, rank_test_p, smallest_p
from akunu_py.bench.result import half_range, median
from tests.support.bench_fakes import PLAIN, Simulated, simulate
from tests.support.command import assert_one_line_error, run_here


def values(count: int, seed: int, shift: float = 0.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.random() + shift for _ in range(count)]


@pytest.mark.parametrize("pairs", [
    [(values(1, 1), values(1, 2))],
    [(values(5, 3), values(4, 4, 0.3))],
    [(values(2, 5), values(9, 6, 2.0))],
    [([1.0, 2.0], [1.5, 4.0]), ([5.0, 9.0], [6.0, 10.0])],
])  # fmt: skip
def test_rank_test_equals_all_ways_to_deal_the_values(pairs: list[Pair]) -> None:
    def u(left: Sequence[float], right: Sequence[float]) -> float:
        return sum((a < b) + (a == b) / 2 for a in left for b in right)

    sums = [0.0]
    for left, right in pairs:
        both = {*left, *right}
        dealt = [u(chosen, [*both - {*chosen}]) for chosen in combinations(both, len(left))]
        sums = [a + b for a in sums for b in dealt]
    middle = sum(len(left) * len(right) for left, right in pairs) / 2
    seen = abs(sum(u(*pair) for pair in pairs) - middle)
    extreme = sum(abs(total - middle) >= seen for total in sums)
    assert rank_test_p(pairs) == pytest.approx(extreme / len(sums))


def test_equal_values_and_missing_sides_are_insignificant() -> None:
    assert rank_test_p([([1.0, 1.0], [1.0, 1.0])]) == 1
    assert rank_test_p([([], [1.0]), ([2.0], [])]) == 1
    assert smallest_p([([0.0] * 3, [0.0] * 3)]) == pytest.approx(0.1)
    assert smallest_p([([0.0] * 3, [0.0] * 3)] * 3) < 0.001
    assert (median([3, 1, 2]), half_range([3, 1, 2]), median([]), half_range([])) == (2, 1, 0, 0)


def save(path: Path, seed: int, *, auto: float = 200, plain: float = 100, **more: Any) -> str:
    runners = [Simulated(PLAIN, plain, seed=seed), Simulated("auto", auto, seed=seed)]
    simulate(runners, **more).save(path)
    return str(path)


def compare(*args: str) -> tuple[int, dict[str, Any]]:
    done = run_here("bench", "compare", *args, "--format", "json")
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_two_runs_of_the_same_loop_do_not_differ(tmp_path: Path) -> None:
    for seed in range(4):
        a = save(tmp_path / "a.json", seed)
        b = save(tmp_path / "b.json", seed + 100)
        code, found = compare(a, b)
        assert code == 0
        assert {row["verdict"] for row in found["comparisons"]} == {"no difference"}


def test_a_planted_slowdown_of_a_tenth_is_found(tmp_path: Path) -> None:
    a, b = save(tmp_path / "a.json", 1), save(tmp_path / "b.json", 2, auto=180)
    code, found = compare(a, b)
    assert code == 1
    rows = {(row["runner"], row["test"]): row for row in found["comparisons"]}
    assert rows["auto", "all of them"]["verdict"] == "slower"
    assert rows["auto", "all of them"]["ratio"] == pytest.approx(0.9, abs=0.02)
    assert rows[PLAIN, "all of them"]["verdict"] == "no difference"
    assert compare(b, a)[0] == 0  # faster is no failure
    done = run_here("bench", "compare", a, b)
    assert "B is slower than A: yes" in done.stdout
    assert done.returncode == 1


def test_a_slower_machine_is_not_slower_drafting(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", 1)
    b = save(tmp_path / "b.json", 2, auto=160, plain=80)  # everything takes a quarter longer
    code, found = compare(a, b)
    assert code == 1
    assert any(row["plain"] and row["verdict"] == "slower" for row in found["comparisons"])
    assert "--against-baseline" in run_here("bench", "compare", a, b).stdout
    code, found = compare(a, b, "--against-baseline")
    assert code == 0
    assert {row["verdict"] for row in found["comparisons"]} == {"no difference"}


def test_few_repetitions_are_reported_as_too_few(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", 1, repeats=2, workloads=("edit",))
    b = save(tmp_path / "b.json", 2, repeats=2, workloads=("edit",), auto=150)
    code, found = compare(a, b)
    assert code == 0
    verdicts = {row["runner"]: row["verdict"] for row in found["comparisons"]}
    assert verdicts == {PLAIN: "no difference", "auto": "too few repetitions"}
    assert compare(a, b, "--threshold", "40", "--alpha", "5%")[1]["slower"] is False


def test_incomparable_results_are_rejected(tmp_path: Path) -> None:
    a = save(tmp_path / "a.json", 1, repeats=2)
    other = save(tmp_path / "other.json", 1, repeats=2, workloads=("story",))
    damaged = tmp_path / "damaged.json"
    damaged.write_text(Path(a).read_text().replace('"repeats"', '"wibble"'))
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"curve": 1}')
    for args, word in (
        ((a, other), "share no test"),
        ((a, str(tmp_path / "none")), "none"),
        ((a, str(foreign)), "akunu bench -o"),
        ((a, str(damaged)), "damaged"),
        ((a, a, "--threshold", "0"), "percentage"),
    ):
        assert_one_line_error(run_here("bench", "compare", *args), 2, word)
