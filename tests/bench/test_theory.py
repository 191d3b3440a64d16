"""The formulas of Leviathan et al. (2023), against their own tables and against simulation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from akunu_py.bench.curve import expected_tokens
from akunu_py.bench.result import Repeat, Series
from akunu_py.bench.theory import best_length, improvement, operations, predict
from tests.support.bench_fakes import fake_result, plain_series
from tests.support.command import assert_one_line_error, run_here


@pytest.mark.parametrize(
    ("chance", "drafted", "more_operations", "speed"),
    [  # their table 1
        (0.6, 2, 1.53, 1.96),
        (0.7, 3, 1.58, 2.53),
        (0.8, 2, 1.23, 2.44),
        (0.8, 5, 1.63, 3.69),
        (0.9, 2, 1.11, 2.71),
        (0.9, 10, 1.60, 6.86),
    ],
)
def test_table_1_of_the_paper(
    chance: float, drafted: int, more_operations: float, speed: float
) -> None:
    assert operations(chance, drafted) == pytest.approx(more_operations, abs=0.006)
    assert improvement(chance, drafted, 0.0) == pytest.approx(speed, abs=0.006)


@pytest.mark.parametrize(
    ("drafted", "chance", "c", "expected"),
    [  # of their table 4: English to German, and summaries of news, T5-small drafting for T5-XXL
        (7, 0.75, 0.02, 3.2),
        (7, 0.62, 0.02, 2.3),
        (5, 0.65, 0.02, 2.4),
        (5, 0.53, 0.02, 1.9),
    ],
)
def test_table_4_of_the_paper(drafted: int, chance: float, c: float, expected: float) -> None:
    assert improvement(chance, drafted, c) == pytest.approx(expected, abs=0.06)


def test_limits() -> None:
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    assert best_length(0.0, 0.0, lambda rows: rows) == 0
    assert best_length(0.9, 0.0, lambda rows: 1.0) == 32
    # A pass over 6 rows is expensive, so 4 draft tokens are best.
    assert best_length(0.8, 0.0, lambda rows: 1.1 if rows <= 5 else 3.0) == 4


def simulated(chance: float, drafted: int, passes: int = 4000) -> Series:
    draw = random.Random(7)
    kept = []
    for _ in range(passes):
        count = 0
        while count < drafted and draw.random() < chance:
            count += 1
        kept.append(count)
    seconds = passes * 0.02  # 5 rows, by the curve of the made-up result
    repeats = [Repeat(passes + sum(kept), seconds, 0.1)]
    return Series(
        "edit", 0.0, f"fixed {drafted}", "mlx-lm", repeats=repeats, drafted=[drafted] * passes,
        accepted=kept, draft_s=0.0,
    )  # fmt: skip


def test_prediction_and_measurement_agree_where_the_assumptions_hold() -> None:
    result = fake_result([plain_series(rate=100.0), simulated(0.8, 4)])
    (row,) = predict(result)
    assert row.chance == pytest.approx(0.8, abs=0.01)
    assert row.measured == pytest.approx(row.yielded, rel=0.02)
    assert row.found == pytest.approx(row.by_curve, rel=0.02)
    assert row.by_paper == pytest.approx(2 * row.by_curve, rel=0.01)
    assert row.more_work == pytest.approx(operations(0.8, 4), rel=0.02)


def test_theory_reads_results_and_prints_both_tables(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    fake_result([plain_series(), simulated(0.7, 4, passes=50)]).save(path)
    done = run_here("bench", "theory", str(path))
    assert done.returncode == 0, done.stderr
    assert "6.86" in done.stdout
    assert "fixed length" in done.stdout
    content = json.loads(run_here("bench", "theory", str(path), "--format", "json").stdout)
    assert len(content["table_1"]) == 6
    assert content["table_4"][0]["drafted"] == 4
    fake_result([plain_series()]).save(path)
    assert_one_line_error(run_here("bench", "theory", str(path)), 2, "akunu bench theory")
