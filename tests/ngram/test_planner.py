"""The planner against brute force, and by example."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.planner import best_draft


def simulate(
    probabilities: list[float], costs: list[float], rate: float, lengths: tuple[int, ...]
) -> float:
    """What drafting these lengths earns, pass after pass, as long as the predictions hold."""
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


@given(
    st.lists(st.floats(0.02, 1.0), min_size=1, max_size=4),
    st.lists(st.floats(0.0, 0.6), min_size=4, max_size=4),
    st.floats(0.5, 2.0),
)
def test_the_planner_is_optimal(
    probabilities: list[float], increments: list[float], rate: float
) -> None:
    costs = list(itertools.accumulate(increments, initial=1.0))
    count = len(probabilities)
    plans = [
        plan
        for plan in itertools.product(range(count + 1), repeat=count)
        if all(length <= max(0, count - sum(plan[:i]) - i) for i, length in enumerate(plan))
    ]
    chosen, _ = best_draft(probabilities, costs, rate, count)
    best = max(simulate(probabilities, costs, rate, plan) for plan in plans)
    achieved = max(
        simulate(probabilities, costs, rate, plan) for plan in plans if plan[0] == chosen
    )
    # Chains below 1 % are cut off, which may cost that much.
    assert achieved >= best - 0.05


def test_planner_examples() -> None:
    flat = [1.0] * 33
    steep = [float(rows) for rows in range(1, 34)]
    sure = [0.99] * 40
    assert best_draft(sure, flat, 1.0, 32)[0] == 32
    assert best_draft(sure, flat, 1.0, 5)[0] == 5
    assert best_draft(sure, steep, 1.0, 32)[0] == 0
    assert best_draft([], flat, 1.0, 32)[0] == 0
    assert best_draft(sure, flat, 1.0, 0)[0] == 0
    # One more row for a fifth of a pass: worth it above a chance of one in five.
    costs = [1.0, 1.2, 1.4]
    assert best_draft([0.3], costs, 1.0, 2)[0] == 1
    assert best_draft([0.1], costs, 1.0, 2)[0] == 0


def test_an_ongoing_copy_is_not_cut_short() -> None:
    # Two drafts of 16 cost less than one of 32: the last row is cheap only up to 16.
    costs = [1.0 + 0.05 * min(rows, 16) + 0.5 * max(0, rows - 16) for rows in range(33)]
    sure = [0.995] * 33
    assert best_draft(sure, costs, 4.0, 32, ongoing=True)[0] == 16
    # Where every row is as cheap as the one before, the longest draft is best.
    assert best_draft(sure, [1.0 + 0.05 * i for i in range(33)], 4.0, 32, ongoing=True)[0] == 32


def test_a_rerun_makes_rejections_dearer() -> None:
    costs = [1.0, 1.1, 1.2]
    assert best_draft([0.15], costs, 1.0, 2)[0] == 1
    assert best_draft([0.15], costs, 1.0, 2, rerun_on_reject=True)[0] == 0


@pytest.mark.parametrize("limit", range(33))
def test_the_limit_is_kept(limit: int) -> None:
    assert best_draft([0.999] * 40, [1.0 + 0.01 * i for i in range(33)], 1.0, limit)[0] == limit
