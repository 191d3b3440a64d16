"""`akunu bench compare`: whether result B is slower than result A, beyond the noise.

Compares each series, and each runner over all its series. A verdict needs a significant rank test
and a sufficient difference. The test assumes no normal distribution: times have a long tail.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path
from statistics import geometric_mean
from typing import Literal

from akunu_py.bench.command import FAILED, show
from akunu_py.bench.result import Result, load_result, median
from akunu_py.bench.tables import to_text
from akunu_py.errors import UsageError
from akunu_py.parser import add_flags, add_format, number

Verdict = Literal["slower", "faster", "no difference", "too few repetitions"]
ALL = "all of them"

Pair = tuple[Sequence[float], Sequence[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="A.json", help="First result file")
    parser.add_argument("after", metavar="B.json", help="Second result file")
    for name, default, what in (
        ("--threshold", 0.05, "Smallest difference that counts (default: 5)"),
        ("--alpha", 0.01, "Significance level of the rank test (default: 1)"),
    ):
        parser.add_argument(name, type=_percent, default=default, metavar="PERCENT", help=what)
    what = "Compare speedups over the plain loop of the same round, for unsteady machines"
    add_flags(parser, ("--against-baseline", what))
    add_format(parser)


def _percent(text: str) -> float:
    expected = "a percentage above 0 and below 100"
    return number(text.removesuffix("%"), lambda value: 0 < value < 100, expected) / 100


def run(options: argparse.Namespace) -> int:
    comparisons = compare(
        load_result(Path(options.before)),
        load_result(Path(options.after)),
        threshold=options.threshold,
        alpha=options.alpha,
        against_baseline=options.against_baseline,
    )
    if not comparisons:
        raise UsageError(
            f"{options.before} and {options.after} share no test of the same loop; "
            "measure both with the same options of akunu bench"
        )
    # A slower baseline means a slower machine.
    slower = any(each.verdict == "slower" and not each.plain for each in comparisons)
    rows = [asdict(comparison) for comparison in comparisons]
    unit = "x plain" if options.against_baseline else "t/s"
    show(
        options,
        {"slower": slower, "comparisons": rows},
        lambda: print_comparisons(comparisons, unit, slower),
    )
    return FAILED if slower else 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One runner on one test, or on all tests, before and after."""

    runner: str
    test: str
    before: float
    after: float
    ratio: float  # after / before
    p: float  # probability of such a difference by chance
    verdict: Verdict
    plain: bool  # a baseline; its speed depends on the machine only


def compare(
    a: Result, b: Result, *, threshold: float, alpha: float, against_baseline: bool
) -> list[Comparison]:
    """Compare the tests of both results, then each runner over all its tests.

    alpha: significance level, shared among all comparisons (Holm 1979). against_baseline: divide
    each repetition by the baseline of the same round.
    """
    left, right = (_rates(side, against_baseline) for side in (a, b))
    shared = {key: (left[key], right[key]) for key in left if right.get(key) and left[key]}
    groups: dict[tuple[str, str], list[Pair]] = {key: [pair] for key, pair in shared.items()}
    for (runner, _), pair in shared.items():
        groups.setdefault((runner, ALL), []).append(pair)
    single = {key: pairs for key, pairs in groups.items() if key[1] != ALL}
    groups = single | {key: pairs for key, pairs in groups.items() if len(pairs) > 1}
    p_values = {key: rank_test_p(pairs) for key, pairs in groups.items()}
    significant = _significant(p_values, alpha)
    baselines = {series.baseline for series in (*a.runs, *b.runs)}
    found = []
    for (runner, test), pairs in groups.items():
        before, after = (geometric_mean(median(pair[side]) for pair in pairs) for side in (0, 1))
        ratio = after / before
        verdict: Verdict = "no difference"
        if abs(log(ratio)) > log(1 + threshold):
            if (runner, test) in significant:
                verdict = "slower" if ratio < 1 else "faster"
            elif smallest_p(pairs) > alpha / len(groups):
                verdict = "too few repetitions"
        p = p_values[runner, test]
        plain = runner in baselines
        found.append(Comparison(runner, test, before, after, ratio, p, verdict, plain))
    return found


def _rates(result: Result, against_baseline: bool) -> dict[tuple[str, str], list[float]]:
    found: dict[tuple[str, str], list[float]] = {}
    for series in result.runs:
        test = f"{series.workload}, temperature {series.temperature:g}"
        rates = series.rates
        if against_baseline:
            plain = result.baseline(series)
            others = plain.rates if plain and plain is not series else []
            rates = [r / other for r, other in zip(rates, others, strict=False) if other]
        found[series.runner, test] = rates
    if not against_baseline:
        found |= {(row.runner, row.test): row.rates for row in result.throughput}
    return {key: [rate for rate in rates if rate > 0] for key, rates in found.items()}


def _significant(p_values: dict[tuple[str, str], float], alpha: float) -> set[tuple[str, str]]:
    """Return the keys that pass Holm's step-down test."""
    significant = set()
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p > alpha / (len(p_values) - rank):
            break
        significant.add(key)
    return significant


def rank_test_p(pairs: Sequence[Pair]) -> float:
    """Return the probability that chance alone causes the difference of the two sides.

    pairs: the values of both sides by condition; a pair with an empty side does not count.
    Two-sided and exact: the sum of the pairs' Mann-Whitney statistics (Mann and Whitney 1947;
    summed over strata as van Elteren 1960 does, with equal weights).
    """
    import numpy as np  # not needed to show options

    pairs = [(left, right) for left, right in pairs if left and right]
    # Twice U, so that ties, which count one half, are integers.
    statistic = sum(2 * (a < b) + (a == b) for left, right in pairs for a in left for b in right)
    middle = sum(len(left) * len(right) for left, right in pairs)
    counts = np.array([1], object)  # Python's integers, which do not overflow
    for left, right in pairs:
        counts = np.convolve(counts, np.array(_u_counts(len(left), len(right)), object))
    distance = abs(statistic - middle)
    extreme = sum(count for u, count in enumerate(counts) if abs(2 * u - middle) >= distance)
    return extreme / sum(counts)


def smallest_p(pairs: Sequence[Pair]) -> float:
    """Return the smallest result of `rank_test_p` for sides of these sizes."""
    separated = [([0.0] * len(left), [1.0] * len(right)) for left, right in pairs]
    return rank_test_p(separated)


def _u_counts(m: int, n: int) -> list[int]:
    """Return the number of orders of m and n values by U: Gaussian binomial coefficients."""
    counts = [1] + [0] * (m * n)
    for i in range(1, m + 1):
        for u in range(m * n, n + i - 1, -1):  # times 1 - q^(n + i)
            counts[u] -= counts[u - n - i]
        for u in range(i, m * n + 1):  # over 1 - q^i
            counts[u] += counts[u - i]
    return counts


def print_comparisons(comparisons: Sequence[Comparison], unit: str, slower: bool) -> None:
    cells = [
        [c.runner, c.test, f"{c.before:.2f}", f"{c.after:.2f}", f"{c.ratio - 1:+.1%}",
         f"{c.p:.2g}", c.verdict]
        for c in comparisons
    ]  # fmt: skip
    headings = ["loop", "test", f"A, {unit}", f"B, {unit}", "change", "p", "verdict"]
    print(to_text((headings, cells)))
    if any(c.plain and c.verdict in ("slower", "faster") for c in comparisons):
        print("The speed of a foreign plain loop changed too: try --against-baseline.")
    print(f"B is slower than A: {'yes' if slower else 'no'}")
