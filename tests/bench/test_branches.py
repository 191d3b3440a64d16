"""Several candidates per token: the output keeps the target's distribution.

With keyed draws, the output equals that without any candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.bench.curve import parse_curve
from akunu_py.decoding.sampling import draw
from tests.support.branches import Branches, best_shape, follow, multi_round, pick
from tests.support.chi_square import p_value

VOCABULARY, RUNS, DEPTH = 6, 1500, 3
SHAPES = np.random.default_rng(3)
TARGET, FIRST, SECOND = SHAPES.dirichlet([1.0] * VOCABULARY, 3)
GUESS = np.eye(VOCABULARY)[int(TARGET.argmax())]  # all on one token
Candidates = Sequence[tuple[int, np.ndarray]]
Rule = Callable[[np.ndarray, Candidates, np.random.Generator], int]


def test_multi_round_sampling_keeps_the_distribution() -> None:
    assert min(fits(multi_round)) > 1e-3


def unreduced(target: np.ndarray, candidates: Candidates, random: np.random.Generator) -> int:
    """A planted bug: the target is not reduced after a rejected candidate."""
    for token, drafted in candidates:
        if random.random() * drafted[token] < target[token]:
            return token
    return pick(target, random)


def redrawn(target: np.ndarray, candidates: Candidates, random: np.random.Generator) -> int:
    """A planted bug: each candidate gets its own random draw."""
    for token, _ in candidates:
        if token == pick(target, random):
            return token
    return pick(target, random)


def likelier(target: np.ndarray, candidates: Candidates, random: np.random.Generator) -> int:
    """A planted bug: the likelier candidate is always tried first."""
    ordered = sorted(candidates, key=lambda each: -target[each[0]])
    return multi_round(target, ordered, random)


@pytest.mark.parametrize("bug", [unreduced, redrawn, likelier])
def test_planted_bugs_are_found(bug: Rule) -> None:
    assert min(fits(bug)) < 1e-6


def fits(rule: Rule) -> list[float]:
    """Return the p-values of the outcomes, by the source of the two candidates."""
    found = []
    for drafted in ((FIRST, FIRST), (FIRST, SECOND), (GUESS, FIRST), (TARGET, SECOND)):
        random, counts = np.random.default_rng(11), np.zeros(VOCABULARY)
        for _ in range(RUNS):
            candidates = [(pick(q, random), q) for q in drafted]
            counts[rule(TARGET, candidates, random)] += 1
        found.append(p_value(counts, TARGET * RUNS))
    return found


def logits(before: Sequence[int]) -> np.ndarray:
    """Return target probabilities [vocab] that depend on all previous tokens."""
    seed = [len(before), *before]
    return np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)


def drawn(seed: int, before: Sequence[int]) -> int:
    row = logits(before)
    return int(draw(mx.array(row - row.max())[None], seed, len(before)).item())


@settings(max_examples=40)
@given(
    st.integers(0, 2**31),
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=DEPTH), max_size=6),
    st.integers(0, DEPTH),
)
def test_keyed_draws_follow_the_branch_with_the_sampled_token(
    seed: int, drafts: list[list[int]], right: int
) -> None:
    """Return the tokens of plain decoding that the longest branch covers, and one more."""
    truth: list[int] = []
    for _ in range(DEPTH + 1):
        truth.append(drawn(seed, truth))
    drafts, branches = [*drafts, truth[:right]], Branches()
    for draft in drafts:
        branches.add(draft)
    accepted = max(
        count for draft in drafts for count in range(DEPTH + 1) if draft[:count] == truth[:count]
    )
    assert follow(branches, lambda before: drawn(seed, before)) == truth[: accepted + 1]
    prefixes = {tuple(draft[: k + 1]) for draft in drafts for k in range(len(draft))}
    assert branches.rows == 1 + len(prefixes)


@pytest.mark.parametrize("curve", ["m5max", "m4pro", "m1"])
def test_gain_of_second_branches(curve: str) -> None:
    """No gain at the published figures of MTP heads; the full gain if rows are free."""
    costs, accepted = parse_curve(curve), (0.8, 0.65, 0.5)
    assert best_shape(accepted, 0.06, 0.5, costs) == best_shape(
        accepted, 0.06, 0.5, costs, branches=False
    )
    value, length, where = best_shape(accepted, 0.0, 0.5, lambda rows: 1.0)
    assert (length, where) == (3, (1, 2, 3))
    assert value == pytest.approx(1 + 0.8 + 0.65 + 0.5 + 0.5 * (0.2 + 0.15 + 0.15))
