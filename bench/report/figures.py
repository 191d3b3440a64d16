"""What the charts of a report show, as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from akunu_py.bench.result import Result, Series

Points = list[tuple[float, float]]

_LEAST_TESTED = 5  # drafted tokens; a share of fewer says nothing
_WINDOW = 4  # passes to either side
_SOURCES = ("match", "copy", "correction", "leap", "memory")  # the order of their bars


@dataclass(frozen=True, slots=True)
class Bar:
    """low, high: the ends of the spread of `value`. note: shown at the end of the bar."""

    label: str
    value: float
    low: float
    high: float
    note: str = ""


def drafting_series(result: Result) -> list[Series]:
    """The series whose passes were recorded, and that drafted."""
    return [series for series in result.runs if sum(series.drafted)]


def auto_series(result: Result) -> list[Series]:
    """Those of `auto` at the lowest temperature that was measured."""
    found = [series for series in drafting_series(result) if series.runner == "auto"]
    lowest = min((series.temperature for series in found), default=0.0)
    return [series for series in found if series.temperature == lowest]


def speed_bars(result: Result) -> list[tuple[str, list[Bar]]]:
    """By workload and temperature: the median of each runner, and its range."""
    groups: dict[str, list[Bar]] = {}
    for series in result.runs:
        if series.rates:
            speedup = result.speedup(series)
            note = "" if speedup is None else f"{speedup:.2f}x"
            loop = "*" if series.loop is not None else ""
            bar = Bar(series.runner, series.tokens_per_s, min(series.rates), max(series.rates),
                      note)  # fmt: skip
            title = f"{series.workload}{loop}, temperature {series.temperature:g}"
            groups.setdefault(title, []).append(bar)
    return list(groups.items())


def curve_points(result: Result) -> Points:
    """Cost of a pass by its positions, where one position costs 1."""
    curve = result.curve_s
    return [(rows, seconds / curve[1]) for rows, seconds in curve.items()] if 1 in curve else []


def acceptance_by_position(series: Sequence[Series]) -> Points:
    """(position in the draft from 1, share accepted of the tokens tested there): a token is tested
    where all before it were accepted."""
    tested: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for one in series:
        for drafted, kept in zip(one.drafted, one.accepted, strict=True):
            for position in range(min(drafted, kept + 1)):
                tested[position + 1] += 1
                accepted[position + 1] += position < kept
    return [(p, accepted[p] / tested[p]) for p in sorted(tested) if tested[p] >= _LEAST_TESTED]


def acceptance_by_source(series: Sequence[Series]) -> list[Bar]:
    """The share accepted of the tokens tested, by what they came from; matches by their order."""
    counts: dict[str, list[int]] = {}
    for one in series:
        for name, (tested, accepted) in one.sources.items():
            total = counts.setdefault(name, [0, 0])
            total[0] += tested
            total[1] += accepted

    def order(name: str) -> tuple[int, int]:
        kind, _, size = name.partition(" ")
        first = int(size.partition("-")[0]) if size else 0
        return _SOURCES.index(kind) if kind in _SOURCES else len(_SOURCES), first

    return [
        Bar(name, kept / tested, kept / tested, kept / tested, f"{kept / tested:.0%} of {tested}")
        for name, (tested, kept) in sorted(counts.items(), key=lambda item: order(item[0]))
    ]


def passes_by_length(series: Sequence[Series]) -> Points:
    """(tokens that a pass yielded, share of passes)."""
    return _shares(1 + kept for one in series for kept in one.accepted)


def chosen_lengths(series: Sequence[Series]) -> Points:
    """(tokens drafted, share of passes): what the planner chose."""
    return _shares(drafted for one in series for drafted in one.drafted)


def _shares(values: Iterable[int]) -> Points:
    counts = Counter(values)
    total = sum(counts.values())
    last = max(counts, default=-1)
    return [(value, counts[value] / total) for value in range(min(counts, default=0), last + 1)]


def along(series: Series) -> Points:
    """(token of the answer, tokens per pass thereabouts)."""
    yields = [1 + kept for kept in series.accepted]
    points: Points = []
    before = 0
    for index, count in enumerate(yields):
        near = yields[max(0, index - _WINDOW) : index + _WINDOW + 1]
        points.append((before + count / 2, sum(near) / len(near)))
        before += count
    return points
