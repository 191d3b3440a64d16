"""What Leviathan et al. (2023) predict from acceptance and costs, beside what was measured.

Their tables 1 and 4 for our system. They assume that each drafted token is accepted with the same
chance a, whatever happened before (section 3.1), that a draft always has g tokens, and that a pass
over g + 1 positions takes as long as one over a single position. The first holds for no text, the
others not for n-grams on small machines, which is why the prediction is given twice: theirs, and
with the measured cost of passes of the lengths that were drafted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from akunu_py.bench.curve import Curve, expected_tokens
from akunu_py.bench.result import Result, Series

LONGEST = 32
TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
"""(a, g) of the paper's table 1."""

Cost = Callable[[int], float]
"""Of a pass over so many rows, where one row costs 1."""


def improvement(chance: float, drafted: int, c: float, cost: Cost = lambda rows: 1.0) -> float:
    """Times as fast as plain decoding: theorem 3.8, where `cost` is 1 for any number of rows.

    c: what drafting a token costs, where a plain step costs 1.
    """
    return expected_tokens(chance, drafted) / (cost(drafted + 1) + drafted * c)


def operations(chance: float, drafted: int) -> float:
    """Times as many arithmetic operations as plain decoding: theorem 3.11, with none for drafting,
    as an n-gram table has none."""
    return (drafted + 1) / expected_tokens(chance, drafted)


def best_length(chance: float, c: float, cost: Cost) -> int:
    """The number of drafted tokens up to LONGEST with the greatest improvement, 0 for none."""
    return max(range(LONGEST + 1), key=lambda drafted: improvement(chance, drafted, c, cost))


@dataclass(frozen=True, slots=True)
class Prediction:
    """A row of their table 4.

    chance: a, the share of tested tokens that were accepted; a position for which nothing was
    drafted counts as a rejection. c: of drafting a token. yielded, measured: tokens a pass, as
    predicted and as measured. by_paper, by_curve, found: times as fast as plain decoding, as
    predicted by theorem 3.8, the same with measured costs, and as measured. more_work: positions
    computed a token, as measured. best: the fixed length with the greatest improvement.
    """

    workload: str
    temperature: float
    drafted: int
    chance: float
    c: float
    yielded: float
    measured: float
    by_paper: float
    by_curve: float
    found: float | None
    more_work: float
    best: int


def predict(result: Result) -> list[Prediction]:
    """A prediction for each series of `fixed` in `result`, if its cost curve was measured."""
    found = []
    for series in result.runs:
        match = re.fullmatch(r"fixed (\d+)", series.runner)
        if match and series.drafted and 1 in result.curve_s:
            found.append(_predict(result, series, int(match[1])))
    return found


def _predict(result: Result, series: Series, drafted: int) -> Prediction:
    curve = relative_curve(result)
    passes, accepted = len(series.drafted), sum(series.accepted)
    failures = sum(count < drafted for count in series.accepted)
    chance = accepted / (accepted + failures) if accepted + failures else 0.0
    # Per pass, not per drafted token: a draft that finds nothing takes time too.
    c = series.draft_s / passes / drafted / result.curve_s[1]
    rows = sum(curve(1 + count) for count in series.drafted) / passes
    yielded = expected_tokens(chance, drafted)
    return Prediction(
        series.workload,
        series.temperature,
        drafted,
        chance,
        c,
        yielded,
        series.tokens_per_pass,
        improvement(chance, drafted, c),
        yielded / (rows + drafted * c),
        result.speedup(series),
        (passes + sum(series.drafted)) / (passes + accepted),
        best_length(chance, c, curve),
    )


def relative_curve(result: Result) -> Curve:
    """The measured curve, where one row costs 1."""
    plain = result.curve_s[1]
    return Curve({rows: seconds / plain for rows, seconds in result.curve_s.items()})


def as_dict(result: Result) -> dict[str, Any]:
    """Both tables, ready for JSON."""
    curve = relative_curve(result)
    return {
        "model": result.model,
        "machine": result.machine,
        "command": result.command,
        "table_1": [
            {
                "chance": chance,
                "drafted": drafted,
                "operations": operations(chance, drafted),
                "speed_by_paper": improvement(chance, drafted, 0.0),
                "speed_by_curve": improvement(chance, drafted, 0.0, curve),
                "best": best_length(chance, 0.0, curve),
            }
            for chance, drafted in TABLE_1
        ],
        "table_4": [asdict(row) for row in predict(result)],
    }
