"""The cost model: priors, learning from noisy times, saving, prefill slices."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.ngram.cost import BANDS, MAX_ROWS, PIPELINED, CostCurve, SliceCost


def test_given_points_are_interpolated_and_extended() -> None:
    table = CostCurve({1: 1.0, 3: 1.5, 5: 2.5}).table(0)
    assert len(table) == MAX_ROWS
    assert table[:6] == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 3.0])
    assert CostCurve({1: 2.0}).table(0) == [2.0] * MAX_ROWS


@pytest.mark.parametrize("points", [{}, {2: 1.0}, {1: 0.0}, {1: float("nan")}, {-1: 1.0, 1: 1.0}])
def test_impossible_points_are_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="positive costs"):
        CostCurve(points)


def measured(times: int, seconds: dict[int, float]) -> CostCurve:
    """A curve that saw passes over each number of rows take `seconds`, in turns."""
    curve = CostCurve()
    for _ in range(times):
        for rows, each in seconds.items():
            curve.observe(rows, each, 10)
    return curve


def test_measured_rows_bend_the_curve_and_outliers_do_not() -> None:
    curve = measured(9, {1: 0.010, 5: 0.040})
    table = curve.table(10)
    assert table[0] == pytest.approx(0.010)
    assert table[4] == pytest.approx(0.040, rel=0.05)
    assert table[0] < table[2] < table[4]
    curve = measured(5, {1: 0.010})
    before = curve.table(10)
    curve.observe(1, 3.0, 10)
    assert curve.table(10) == pytest.approx(before)
    curve.observe(4, 0.150, 10)
    assert curve.table(10)[3] < 4 * before[3]
    curve.observe(4, 0.015, 10)
    assert curve.table(10)[3] == pytest.approx(before[3], rel=0.1)


def test_what_was_learned_on_a_busy_machine_is_unlearned_at_once() -> None:
    busy = measured(9, {1: 0.040, 2: 2.0, 5: 2.0})
    curve = CostCurve.from_dict(busy.to_dict())
    assert curve.table(10)[4] > 10 * curve.table(10)[0]
    curve.observe(5, 0.060, 10)
    assert curve.table(10)[4] == pytest.approx(0.060, rel=0.2)
    assert curve.table(10)[1] <= curve.table(10)[4]


def test_one_time_shows_what_else_was_measured_on_a_busy_machine() -> None:
    slow = dict.fromkeys(range(3, MAX_ROWS), 60.0)
    curve = measured(3, {1: 1.0, 2: 1.1} | slow)
    curve.observe(5, 1.6, 2000)
    assert curve.table(2000)[31] < 5
    assert curve.table(10)[1] == pytest.approx(1.1, rel=0.05)
    curve = measured(9, {1: 1.0, 2: 1.4, 16: 5.0})
    before = curve.table(10)
    for cost in (40.0, 2.0):  # an outlier says nothing of others
        curve.observe(8, cost, 10)
    assert curve.table(10)[15:] == pytest.approx(before[15:], rel=0.05)


def test_a_fast_row_count_makes_others_look_faster_and_a_slow_one_only_its_neighbours() -> None:
    before = CostCurve().table(0)
    for rows in range(4, 33, 4):
        fast, last = measured(9, {1: 1.0}), before
        for _ in range(4):  # each time makes it surer
            fast.observe(rows, 0.6 * before[rows - 1], 10)
            table = fast.table(10)
            assert all(new <= old for new, old in zip(table, last, strict=True))
            assert table[32] < last[32]
            last = table
        # No cliff beyond it: what looks too slow is never tried.
        assert rows == 32 or last[rows] < 0.75 * before[rows]
        slow = measured(9, {1: 1.0, rows: 1.5 * before[rows - 1]}).table(10)
        assert slow[rows - 1] == pytest.approx(1.5 * before[rows - 1], rel=0.02)
        assert slow[: rows // 3] == pytest.approx(before[: rows // 3], rel=0.01)


def test_what_more_rows_did_in_less_time_holds_for_row_counts_that_were_never_measured() -> None:
    assert max(measured(1, {1: 1.0, 33: 1.5}).table(10)[:33]) <= 1.5


def test_a_longer_context_begins_with_the_costs_of_the_shorter() -> None:
    curve = measured(9, {1: 1.3, 2: 1.45, 4: 1.8, 8: 1.97})
    before = curve.table(10)
    curve.observe(33, 2.97, BANDS[0])
    assert curve.table(BANDS[0])[:8] == pytest.approx(before[:8], rel=0.05)


def test_noise_is_averaged_out_and_change_is_followed() -> None:
    rng = random.Random(1)
    curve = CostCurve()
    for _ in range(200):
        curve.observe(1, 0.010 * rng.uniform(0.8, 1.3), 10)
    assert curve.table(10)[0] == pytest.approx(0.010, rel=0.2)
    for _ in range(20):
        curve.observe(1, 0.020, 10)
    assert curve.table(10)[0] == pytest.approx(0.020, rel=0.03)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_ignored(seconds: float) -> None:
    curve = CostCurve()
    before = curve.table(0)
    curve.observe(1, seconds, 0)
    curve.observe(MAX_ROWS + 1, 0.1, 0)
    assert curve.table(0) == before
    assert not curve.measured(1)


@pytest.mark.parametrize("band", [0, 3, len(BANDS) - 1])
def test_each_band_of_context_has_its_own_times(band: int) -> None:
    context = BANDS[band]
    curve = CostCurve()
    curve.observe(1, 0.010, 0)
    curve.observe(4, 0.015, 0)
    assert curve.table(context) == pytest.approx(curve.table(0))
    curve.observe(1, 0.030, context)
    assert curve.table(0)[0] == pytest.approx(0.010)
    assert curve.table(context)[0] == pytest.approx(0.030)
    # Other rows follow in proportion.
    assert curve.table(context)[3] == pytest.approx(0.045, rel=0.05)


@settings(max_examples=20)
@given(
    st.lists(
        st.tuples(st.integers(1, MAX_ROWS), st.floats(1e-4, 1.0), st.integers(0, 40000)),
        max_size=40,
        unique_by=lambda times: times[0],  # of many times for a row count, few are saved
    )
)
def test_tables_never_fall_and_survive_saving(observed: list[tuple[int, float, int]]) -> None:
    curve = CostCurve()
    for rows, seconds, context in observed:
        curve.observe(rows, seconds, context)
    saved = CostCurve.from_dict(json.loads(json.dumps(curve.to_dict())))
    for context in (0, *BANDS):
        table = curve.table(context)
        assert table == sorted(table)
        assert saved.table(context) == pytest.approx(table)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"points": {"1": 1.0}, "given": True, "bands": [{}] * len(BANDS)},
        {"points": {"1": "x"}, "given": True, "bands": [{}] * (len(BANDS) + 1)},
        {"points": {"1": 1.0}, "given": True, "bands": [{"1": 0.5}] * (len(BANDS) + 1)},
    ],
)
def test_foreign_dicts_are_refused(content: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        CostCurve.from_dict({"prefill_rate": None, "load_rate": None} | content)


def test_a_tile_of_32_rows_says_nothing_of_the_next() -> None:
    curve = measured(9, {1: 1.0, 31: 3.1, 32: 3.2})
    assert curve.table(10)[32] < 4
    for _ in range(9):
        curve.observe(33, 6.4, 10)
    assert curve.table(10)[31:33] == pytest.approx([3.2, 6.4], rel=0.02)


def test_pipelined_steps_cost_their_share_of_the_nearest_band() -> None:
    curve = CostCurve()
    assert curve.pipelined(10) == pytest.approx(0.9 * curve.table(10)[0])
    for rows, seconds in ((1, 0.010), (PIPELINED, 0.006)):
        for _ in range(3):
            curve.observe(rows, seconds, 10)
    assert curve.pipelined(10) == pytest.approx(0.006)
    curve.observe(1, 0.020, BANDS[-1])
    assert curve.pipelined(BANDS[-1]) == pytest.approx(0.012)
    curve.observe(PIPELINED, 0.5, BANDS[-1])
    assert curve.pipelined(BANDS[-1]) == pytest.approx(0.020)  # never above a plain step
    assert CostCurve({1: 2.0}).pipelined(0) == 2.0
    assert CostCurve({0: 1.5, 1: 2.0}).pipelined(0) == 1.5


@given(st.floats(0.0, 0.05), st.floats(1e-4, 1e-2), st.floats(0.05, 2.0))
def test_prefill_slices_take_the_requested_time(fixed: float, each: float, seconds: float) -> None:
    slices = SliceCost()
    assert slices.tokens_in(seconds) is None
    slices.observe(64, fixed + 64 * each)
    first = slices.tokens_in(seconds)
    assert first is not None
    assert first <= 4 * 64
    slices.observe(64, fixed + 64 * each)
    assert slices.tokens_in(seconds) == 128  # another size shows the fixed cost
    slices.observe(128, fixed + 128 * each)
    tokens = slices.tokens_in(seconds)
    assert tokens is not None
    expected = max(seconds, 4 * fixed) - fixed
    assert tokens == 4 * 128 or tokens * each == pytest.approx(expected, abs=2 * each, rel=0.01)
