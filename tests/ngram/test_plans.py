"""Planned draft lengths against brute force: of one request, of several, with neural drafters."""

import itertools
import json
import math
import random
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.ngram.cost import BANDS, MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.neural_plan import (
    DraftChooser,
    LearnedDrafter,
    PlannedDrafter,
    PlanningLimits,
    remaining_values,
)
from akunu_py.ngram.planner import JointPlanner, Pipelining, SharedPass, best_draft

CHANCES = st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4)
INCREMENTS = st.lists(st.floats(0.0, 0.6), min_size=9, max_size=9)


def simulate(
    probabilities: list[float], costs: list[float], rate: float, lengths: tuple[int, ...]
) -> float:
    """Return the gain of these lengths, pass after pass, while the predictions are right."""
    value, reached, start = 0.0, 1.0, 0
    for length in lengths:
        if start >= len(probabilities):
            break
        value += reached * (1 - rate * costs[length])
        for step in range(length):
            reached *= probabilities[start + step]
            value += reached
        start += length
        reached *= probabilities[start] if start < len(probabilities) else 0.0
        start += 1
    return value


@given(CHANCES, INCREMENTS, st.floats(0.5, 2.0))
def test_the_length_has_the_highest_gain(
    probabilities: list[float], increments: list[float], rate: float
) -> None:
    costs = list(accumulate(increments, initial=1.0))
    count = len(probabilities)
    plans = [
        plan
        for plan in product(range(count + 1), repeat=count)
        if all(length <= max(0, count - sum(plan[:i]) - i) for i, length in enumerate(plan))
    ]
    chosen, values = best_draft(probabilities, costs, rate, count)
    best = max(simulate(probabilities, costs, rate, plan) for plan in plans)
    achieved = max(
        simulate(probabilities, costs, rate, plan) for plan in plans if plan[0] == chosen
    )
    assert achieved == pytest.approx(best)
    assert values[0] == pytest.approx(best)


def test_an_ongoing_copy_is_not_cut_short() -> None:
    # Two drafts of 16 cost less than one of 32: the last row is cheap only up to 16.
    costs = [1.0 + 0.05 * min(rows, 16) + 0.5 * max(0, rows - 16) for rows in range(33)]
    sure = [0.995] * 33
    assert best_draft(sure, costs, 4.0, 32, ongoing=True)[0] == 16


def test_a_rerun_makes_rejections_more_expensive() -> None:
    costs = [1.0, 1.1, 1.2]
    assert best_draft([0.15], costs, 1.0, 2)[0] == 1
    assert best_draft([0.15], costs, 1.0, 2, rerun_on_reject=True)[0] == 0


class Head:
    """A `NeuralDrafter` that drafts nothing, with figures to plan by."""

    key = "head"
    prefilled = 0

    def __init__(self, cost: float, longest: int) -> None:
        self.relative_cost, self.longest, self.parallel = cost, longest, False


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.2, 1.0), max_size=3), INCREMENTS,
    st.lists(st.floats(0.3, 1.0), min_size=8, max_size=8), st.floats(0.02, 0.4),
    st.floats(0.5, 2.0), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_a_neural_plan_has_the_highest_value_of_all_splits(
    chances: list[float], increments: list[float], expected: list[float], cost: float, rate: float,
    longest: int, rerun: bool,
) -> None:  # fmt: skip
    """Compared with every number of predictions and of neural tokens after them."""
    costs = list(accumulate(increments, initial=1.0))
    head: Any = Head(cost, longest)
    learned = LearnedDrafter.of(head)
    learned.expected = expected
    drafter = PlannedDrafter(head, learned)
    most = len(chances) + 2
    limits = PlanningLimits(costs, rate, costs[0], False, 1, 99, False, rerun)
    _, values = best_draft(chances, costs, rate, most, rerun_on_reject=rerun)
    upcoming = [*remaining_values(chances, values), *[0.0] * 9]

    def value(predictions: int, count: int) -> float:
        rows = predictions + count
        reached = list(accumulate([1.0, *chances[:predictions], *expected[:count]], mul))
        neural = list(accumulate([1.0, *expected[:count]], mul))
        spent = learned.curve.table(1)[predictions] + (count - 1) * learned.curve.table(1)[0]
        total = sum(reached) - rate * (costs[rows] + spent * costs[0])
        for place in range(rows if rerun else 0):
            rejected = reached[place] - reached[place + 1]
            total -= rejected * rate * (costs[place + 1] - costs[0])
        for place in range(count):  # after a wrong neural token, predictions remain
            total += (neural[place] - neural[place + 1]) * upcoming[predictions + place + 1]
        return float(total + neural[-1] * upcoming[rows + 1])

    splits = [
        (predictions, count)
        for predictions in range(len(chances) + 1)
        for count in range(1, min(longest, most - predictions) + 1)
    ]
    plan = drafter.plan(chances, upcoming, most, limits)
    best = max(itertools.starmap(value, splits))
    assert plan.value == pytest.approx(best, abs=0.02)  # negligible chances are left out
    assert plan.reached == pytest.approx(math.prod(chances[: plan.predictions]))
    assert plan.max_after == most - plan.predictions
    achieved = max(value(plan.predictions, count) for at, count in splits if at == plan.predictions)
    assert achieved == pytest.approx(best, abs=0.02)
    plain = best_draft((), costs, rate, most)[1][0]
    alone = drafter.plan((), (), most, limits).value
    assert drafter.would_draft(most, limits) == (alone > plain)


def test_trials_of_a_drafter_that_looks_unprofitable_become_rare() -> None:
    head: Any = Head(0.5, 4)
    drafter = PlannedDrafter(head)
    chooser, costs = DraftChooser([drafter]), [1.0, 3.0, 5.0, 7.0, 9.0]
    limits = PlanningLimits(costs, 1.0, 1.0, False, 1, 99, False, False)
    trials = 0
    for _ in range(200):
        choice = chooser.choose((), limits, 4, stops=False)
        if choice is not None:
            plan, _ = choice
            assert (plan.predictions, plan.max_after) == (0, 2)
            trials += 1
            drafter.learned.saved = 0.0  # as a draft does
    assert trials == 200 // 20  # 5 % of the time, until the first measured cost
    drafter.learned.timed = True
    for _ in range(200):
        chooser.choose((), limits, 4, stops=False)
    assert drafter.learned.saved == pytest.approx(200 * 0.01)


OFFER = st.lists(st.floats(0.0, 1.0), max_size=5)


def planner(curve: str) -> JointPlanner:
    return JointPlanner(CostCurve(parse_curve(curve).points))


@pytest.mark.parametrize("curve", sorted(CURVES))
@settings(max_examples=60, deadline=None)
@given(offers=st.lists(OFFER, min_size=1, max_size=3), pending=st.integers(0, 3))
def test_joint_plan_has_the_highest_value_of_all_lengths(
    curve: str, offers: list[list[float]], pending: int
) -> None:
    """Compared with every combination of lengths, by the rule in the planner's docstring."""
    rows = len(offers) + pending
    costs = CostCurve(parse_curve(curve).points).table(0)
    rate = len(offers) / costs[rows - 1]

    def value(lengths: Sequence[int]) -> float:
        gained = sum(
            sum(accumulate(offer[:length], mul))
            for offer, length in zip(offers, lengths, strict=True)
        )
        return gained - rate * (costs[rows + sum(lengths) - 1] - costs[rows - 1])

    planned = planner(curve).lengths(offers, rows, 0)
    best = max(map(value, product(*(range(len(offer) + 1) for offer in offers))))
    assert value(planned) == pytest.approx(best, abs=0.08)  # negligible chances are left out


@given(st.lists(st.lists(st.just(1.0), max_size=40), min_size=1, max_size=20))
def test_pass_never_exceeds_the_rows_of_the_cost_model(offers: list[list[float]]) -> None:
    lengths = planner("m5max").lengths(offers, len(offers), 0)
    assert len(offers) + sum(lengths) <= MAX_ROWS
    assert all(length <= len(offer) for length, offer in zip(lengths, offers, strict=True))


def test_joint_drafts_end_where_each_row_costs_what_a_token_does() -> None:
    plan, lengths = JointPlanner(CostCurve()), [1]
    for _ in range(200):
        lengths = plan.lengths([[0.9] * 8] * 4, 4, 100)
        rows = 4 + sum(lengths)
        plan.observe(SharedPass(4, rows, sum(lengths), 100, pipelined=False), 4, 0.01 * rows)
    assert lengths == [0, 0, 0, 0]


def test_joint_drafts_must_also_gain_what_pipelining_hides() -> None:
    """A draft ends the pipeline: its pass starts only after the one before is read."""
    curve = {rows: 0.1 + 0.002 * rows for rows in range(1, MAX_ROWS + 1)}
    plan = JointPlanner(CostCurve(curve))

    def drafted(pipelined: bool = False) -> list[int]:
        """Return the drafts of four requests by the chance of their token."""
        chances = (0.02, 0.3, 0.9)
        return [sum(plan.lengths([[each]] * 4, 4, 0, pipelined=pipelined)) for each in chances]

    assert drafted(pipelined=True) == drafted() == [0, 4, 4]
    for _ in range(50):  # prompts that join a pass say nothing of drafts
        plan.observe(SharedPass(4, 63, 0, 0, pipelined=False, joined=True), 4, 0.226)
    assert drafted() == [0, 4, 4]
    for _ in range(100):
        plan.observe(SharedPass(4, 4, 0, 0, pipelined=True), 4, 0.7 * curve[4])
    assert drafted(pipelined=True) == [0, 0, 4]
    assert drafted() == [0, 4, 4]


def test_frequent_drafts_after_plain_steps_make_pipelining_expensive() -> None:
    curve = CostCurve({0: 0.8, 1: 1.0, 2: 1.1, 3: 1.2})

    def cost(steps: Pipelining, plain: int) -> float:
        """Return the cost of a plain step after a draft and `plain` such steps."""
        steps.add_pass(drafted=True)
        for _ in range(plain):
            steps.add_pass(drafted=False)
        return steps.plain_cost(curve.table(0), 0.8, 1.5, ())

    fresh, drafting, idle = (Pipelining(curve) for _ in range(3))
    for plain, chance in ((0, 0.35), (1, 0.25), (7, 0.08), (20, 0.08)):
        lost = 0.5 * chance * (1.5 - 1.0 + 0.6)  # tokens
        assert cost(fresh, plain) == pytest.approx(0.8 + lost * 0.8 / 1.5)
    for steps, drafts in ((drafting, True), (idle, False)):
        for _ in range(200):
            steps.add_pass(drafted=True)
            steps.add_pass(drafted=False)
            steps.add_plan(drafts=drafts)
    assert cost(idle, 0) < cost(fresh, 0) < cost(drafting, 0) <= 1.0
    for steps in (drafting, idle):
        assert cost(steps, 1) == pytest.approx(cost(fresh, 1))
    assert cost(fresh, 2) < fresh.plain_cost(curve.table(0), 0.8, 1.5, (1.0, 1.0)) <= 1.0


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


@pytest.mark.parametrize("content", [
    {},
    {"points": {"1": 1.0}, "given": True, "bands": [{}] * len(BANDS)},
    {"points": {"1": "x"}, "given": True, "bands": [{}] * (len(BANDS) + 1)},
    {"points": {"1": 1.0}, "given": True, "bands": [{"1": 0.5}] * (len(BANDS) + 1)},
])  # fmt: skip
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
