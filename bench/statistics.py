"""Medians, spread, the rank test that tells a difference from noise, and loops in an output.

No means and no normal distributions: times have a floor and a long tail. Plain Python.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Sample = Sequence[float]

_PERIOD = 64  # tokens; the longest passage that counts as a loop when it comes again and again
_ROUNDS = 3


def median(values: Sample) -> float:
    """The median, 0 for none."""
    return statistics.median(values) if values else 0.0


def half_range(values: Sample) -> float:
    """Half the way from the least to the greatest: what stands behind a ± in every table."""
    return (max(values) - min(values)) / 2 if values else 0.0


def rank_test(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    """How often chance alone would set the two sides of `pairs` as far apart as they are.

    pairs: for each condition (a workload, say) the values of either side; sides may differ in
    number, a pair with an empty side does not count. Two-sided and exact: the sum of the pairs'
    Mann-Whitney statistics against its distribution where both sides are alike (Mann and Whitney
    1947; summed over strata as van Elteren 1960 does, with equal weights).
    """
    pairs = [(left, right) for left, right in pairs if left and right]
    # Twice U, so that ties, which count one half, stay whole numbers.
    seen = sum(
        2 * (a < b) + (a == b) for left, right in pairs for a in left for b in right
    )  # fmt: skip
    middle = sum(len(left) * len(right) for left, right in pairs)
    ways = [1]
    for left, right in pairs:
        ways = _convolve(ways, _ways(len(left), len(right)))
    distance = abs(seen - middle)
    extreme = sum(count for u, count in enumerate(ways) if abs(2 * u - middle) >= distance)
    return extreme / sum(ways)


def least_p(pairs: Sequence[tuple[Sample, Sample]]) -> float:
    """The smallest probability that `rank_test` could give for sides of these sizes."""
    apart = [([0.0] * len(left), [1.0] * len(right)) for left, right in pairs]
    return rank_test(apart)


def _ways(m: int, n: int) -> list[int]:
    """By U, how many orders of m and n values have it: the coefficients of the Gaussian binomial
    (m + n choose m)."""
    ways = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):  # times 1 - q^(n + i)
            ways[u] -= ways[u - n - i]
        for u in range(i, m * n + 1):  # over 1 - q^i
            ways[u] += ways[u - i]
    return ways


def _convolve(left: list[int], right: list[int]) -> list[int]:
    result = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            result[i + j] += a * b
    return result


def loop_start(tokens: Sequence[int]) -> int | None:
    """From where `tokens` only repeat a passage, to their end and at least three times; None where
    they do not. Small models answer in circles, which any drafter follows."""
    for period in range(1, min(_PERIOD, len(tokens) // _ROUNDS) + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= _ROUNDS * period:
            return start
    return None
