"""Planned draft lengths against brute force: of one request, of several, with neural drafters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from itertools import accumulate, product
from operator import mul
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.joint_plan import JointPlanner, SharedPass
from akunu_py.ngram.neural_plan import (
    DraftChooser,
    LearnedDrafter,
    PlannedDrafter,
    PlanningLimits,
    remaining_values,
)
from akunu_py.ngram.pipelining import Pipelining
from akunu_py.ngram.planner import best_draft

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


@pytest.mark.parametrize("limit", [0, 1, 16, 32])
def test_sure_drafts_fill_the_limit_if_rows_are_cheap(limit: int) -> None:
    assert best_draft([0.999] * 40, [1.0 + 0.01 * i for i in range(33)], 1.0, limit)[0] == limit


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

    name = key = "head"
    prefilled = 0

    def __init__(self, cost: float, longest: int, reused: float) -> None:
        self.relative_cost, self.longest, self.reused = cost, longest, reused


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.2, 1.0), max_size=3),
    INCREMENTS,
    st.lists(st.floats(0.3, 1.0), min_size=8, max_size=8),
    st.floats(0.02, 0.4),
    st.floats(0.5, 2.0),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.5]),
)
def test_a_neural_plan_has_the_highest_value_of_all_splits(
    chances: list[float],
    increments: list[float],
    expected: list[float],
    cost: float,
    rate: float,
    longest: int,
    rerun: bool,
    reused: float,
) -> None:
    """Compared with every number of predictions and of neural tokens after them."""
    costs = list(accumulate(increments, initial=1.0))
    head: Any = Head(cost, longest, reused)
    learned = LearnedDrafter.of(head)
    learned.expected = expected
    drafter = PlannedDrafter(head, learned)
    most = len(chances) + 2
    limits = PlanningLimits(costs, rate, costs[0], False, 1, 99, False, rerun)
    _, values = best_draft(chances, costs, rate, most, rerun_on_reject=rerun)
    upcoming = [*remaining_values(chances, values), *[0.0] * 9]
    shown = [each - reused * (each - costs[0]) for each in costs]

    def value(predictions: int, count: int) -> float:
        rows = predictions + count
        reached = list(accumulate([1.0, *chances[:predictions], *expected[:count]], mul))
        neural = list(accumulate([1.0, *expected[:count]], mul))
        spent = learned.curve.table(1)[predictions] + (count - 1) * learned.curve.table(1)[0]
        total = sum(reached) - rate * (shown[rows] + spent * costs[0])
        for place in range(rows if rerun else 0):
            rejected = reached[place] - reached[place + 1]
            total -= rejected * rate * (shown[place + 1] - shown[0])
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
    head: Any = Head(0.5, 4, 0.0)
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
