"""Draft lengths for several requests in one pass."""

from __future__ import annotations

from itertools import accumulate, product
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.bench.curve import CURVES, parse_curve
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.joint_plan import JointPlanner, SharedPass

OFFER = st.lists(st.floats(0.0, 1.0), max_size=5)


def planner(curve: str) -> JointPlanner:
    return JointPlanner(CostCurve(parse_curve(curve).points))


@pytest.mark.parametrize("curve", sorted(CURVES))
@given(offers=st.lists(OFFER, min_size=1, max_size=3), pending=st.integers(0, 3))
def test_plan_has_the_highest_value_of_all_lengths(
    curve: str, offers: list[list[float]], pending: int
) -> None:
    """Compared with every combination of lengths, by the rule in the planner's docstring."""
    rows = len(offers) + pending
    costs = CostCurve(parse_curve(curve).points).table(0)
    rate = len(offers) / costs[rows - 1]

    def value(lengths: tuple[int, ...]) -> float:
        gained = sum(
            sum(accumulate(offer[:length], mul))
            for offer, length in zip(offers, lengths, strict=True)
        )
        return gained - rate * (costs[rows + sum(lengths) - 1] - costs[rows - 1])

    planned = planner(curve).lengths(offers, rows, 0)
    best = max(map(value, product(*(range(len(offer) + 1) for offer in offers))))
    assert value(tuple(planned)) == pytest.approx(best, abs=0.08)  # negligible chances are left out


@given(st.lists(st.lists(st.just(1.0), max_size=40), min_size=1, max_size=20))
def test_pass_never_exceeds_the_rows_of_the_cost_model(offers: list[list[float]]) -> None:
    lengths = planner("m5max").lengths(offers, len(offers), 0)
    assert len(offers) + sum(lengths) <= MAX_ROWS
    assert all(length <= len(offer) for length, offer in zip(lengths, offers, strict=True))


def test_likely_drafts_of_one_request_take_the_rows_of_others() -> None:
    steep = {rows: 1.0 + 0.6 * (rows - 1) / 8 + 0.4 * max(0, rows - 8) for rows in range(1, 65)}
    plan = JointPlanner(CostCurve(steep))
    assert plan.lengths([[0.5], [0.5]], 2, 0) == [1, 1]
    assert plan.lengths([[0.5]] * 7 + [[0.99]], 8, 0)[-1] >= plan.lengths([[0.5]] * 8, 8, 0)[-1]
    assert plan.lengths([[0.3]] * 8, 8, 0) == [0] * 8


def test_drafts_end_where_each_row_costs_what_a_token_does() -> None:
    plan, lengths = JointPlanner(CostCurve()), [1]
    for _ in range(200):
        lengths = plan.lengths([[0.9] * 8] * 4, 4, 100)
        rows = 4 + sum(lengths)
        plan.observe(SharedPass(4, rows, sum(lengths), 100, pipelined=False), 4, 0.01 * rows)
    assert lengths == [0, 0, 0, 0]
    assert plan.curve.table(100)[3] == pytest.approx(0.04, rel=0.05)


def test_drafts_must_also_gain_what_pipelining_hides() -> None:
    """A draft ends the pipeline: its pass starts only after the one before is read."""
    curve = {rows: 0.1 + 0.002 * rows for rows in range(1, MAX_ROWS + 1)}
    plan = JointPlanner(CostCurve(curve))
    assert plan.lengths([[0.3]] * 4, 4, 0, pipelined=True) == [1, 1, 1, 1]
    for _ in range(100):
        plan.observe(SharedPass(4, 4, 0, 0, pipelined=True), 4, 0.7 * curve[4])
    assert plan.lengths([[0.3]] * 4, 4, 0, pipelined=True) == [0, 0, 0, 0]
    assert plan.lengths([[0.3]] * 4, 4, 0) == [1, 1, 1, 1]
    assert plan.lengths([[0.9]] * 4, 4, 0, pipelined=True) == [1, 1, 1, 1]


def test_prompts_that_join_a_pass_say_nothing_of_drafts() -> None:
    curve = {rows: 0.1 + 0.002 * rows for rows in range(1, MAX_ROWS + 1)}
    plan = JointPlanner(CostCurve(curve))
    expected = [plan.lengths([[chance]] * 4, 4, 0) for chance in (0.02, 0.3, 0.9)]
    for _ in range(50):
        plan.observe(SharedPass(4, 63, 0, 0, pipelined=False, joined=True), 4, 0.226)
    assert [plan.lengths([[chance]] * 4, 4, 0) for chance in (0.02, 0.3, 0.9)] == expected
