"""`akunu bench compare` and the rank test behind it: by simulated clocks, never by wall time."""

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.compare import rank_test_p, smallest_p
from akunu_py.bench.result import half_range, median
from tests.support.bench_fakes import PLAIN, Simulated, simulate
from tests.support.command import assert_one_line_error, run_here


@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 3), (5, 4), (2, 9), (8, 8)])
def test_rank_test_equals_the_exact_mann_whitney_test(m: int, n: int) -> None:
    from scipy.stats import mannwhitneyu  # takes longer to import than the tests to run

    draw = random.Random(m * 100 + n)
    for shift in (0.0, 0.3, 2.0):
        left = [draw.random() for _ in range(m)]
        right = [draw.random() + shift for _ in range(n)]
        expected = mannwhitneyu(left, right, method="exact").pvalue
        assert rank_test_p([(left, right)]) == pytest.approx(expected)


def test_strata_are_summed_exactly() -> None:
    """Compare with all permutations of the values within each pair."""
    pairs = [([1.0, 2.0], [1.5, 4.0]), ([5.0, 9.0], [6.0, 10.0])]

    def u(left: tuple[float, ...], right: tuple[float, ...]) -> float:
        return sum((a < b) + (a == b) / 2 for a in left for b in right)

    def dealt(left: list[float], right: list[float]) -> list[float]:
        return [u(p[:2], p[2:]) for p in permutations([*left, *right])]

    first, second = (dealt(*pair) for pair in pairs)
    seen = sum(u(tuple(left), tuple(right)) for left, right in pairs)
    sums = [a + b for a in first for b in second]
    extreme = sum(abs(total - 4) >= abs(seen - 4) for total in sums)
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
