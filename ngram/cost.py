"""What a pass over M rows costs on this device with this model: a prior shape, corrected by
measured times, per band of context length."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp, inf, log
from statistics import median_low
from typing import Any

MAX_ROWS = 33
# A band ends before this many tokens of context; attention makes passes dearer as they grow.
BANDS = (1024, 4096, 16384, 32768, 65536, 131072)
_FEWEST_BANDS = 4  # of a saved curve: earlier versions had no more
KEPT = 9  # measured times per row count: their lower quartile ignores outliers, which are slow
_SAVED_COSTS = 1e-9, 1e9  # what a saved cost may be, in either unit
_KEPT_SAVED = 3  # of them are taken from a saved curve: it may have been a busy machine's
_TOLERANCE = 0.02  # a smaller change of what is typical is not worth a new table
_CHANGED = 3.0  # times faster than known: the machine was busy when that was measured
_FEW = 4  # times of a row count: one more makes it surer, which is worth a new table
# How far a measured row count counts for others: 1/e at this difference of their logarithms.
# Small ones stand alone (kernels change between them), 30 and 33 are as good as one. But one that
# is faster than assumed makes all others look faster: what looks too fast is tried and corrected,
# what looks too slow is never tried.
_REACH, _FASTER_REACH = 0.1, 1.0
# Matrix and attention kernels of GPUs compute tiles of 32 rows: a slow one tells nothing of others.
_TILE = 32
_PRIOR_WEIGHT = 1.0  # of the prior shape, against the square of the number of times measured

PIPELINED = 0  # in the place of a number of rows: a plain step behind another
_GAP = 0.1  # of a plain step, assumed to be hidden by that before it was measured

# The shape assumed before anything was measured: between a fast and a slow machine.
PRIOR_SHAPE: Mapping[int, float] = {1: 1.0, 2: 1.15, 4: 1.5, 5: 1.7, 8: 2.4, 16: 3.2, 32: 3.8}


class CostCurve:
    """Cost of a pass by rows. Costs are in seconds once times were observed; before that they
    are in units of the points given (1 = a plain step for the built-in shape).

    points: a curve known beforehand, by rows; 1 row must be among them, and PIPELINED may.
        ValueError where a cost is not positive and finite.
    given: whether the curve was known beforehand, so that there is nothing to probe.
    prefill_rate: how many tokens of a prompt are read in a second, None before any were.
    load_rate: how many bytes of a prompt cache are read from disk in a second, None as well.
    """

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        self.given = points is not None
        points = dict(sorted((PRIOR_SHAPE if points is None else points).items()))
        if 1 not in points or any(rows < 0 or not 0.0 < points[rows] < inf for rows in points):
            raise ValueError(f"expected positive costs by rows, 1 row among them, got {points}")
        self._points = points
        self._hidden = (
            points.get(PIPELINED, points[1] * (1 if self.given else 1 - _GAP)) / points[1]
        )
        shape = {rows: points[rows] for rows in points if rows}
        self._prior = [interpolate(shape, rows) for rows in range(1, MAX_ROWS + 1)]
        if not all(0.0 < cost < inf for cost in self._prior):
            raise ValueError(f"expected costs that stay finite and positive, got {points}")
        self._times: list[dict[int, list[float]]] = [{} for _ in range(len(BANDS) + 1)]
        self._typical: list[dict[int, float]] = [{} for _ in range(len(BANDS) + 1)]
        self._tables: list[list[float] | None] = [None] * (len(BANDS) + 1)
        self._pipelined: list[float | None] = [None] * (len(BANDS) + 1)
        self._used: set[int] = set()
        self.prefill_rate: float | None = None
        self.load_rate: float | None = None

    def table(self, context: int) -> list[float]:
        """The costs of 1 to MAX_ROWS rows at `context` tokens: never falling. Not to be changed."""
        band = bisect(BANDS, context)
        table = self._tables[band]
        if table is None:
            table = self._tables[band] = self._make_table(band)
        return table

    def pipelined(self, context: int) -> float:
        """The cost of a plain step that is launched behind another, so that building it is hidden;
        at most that of 1 row in the table."""
        band = bisect(BANDS, context)
        cost = self._pipelined[band]
        if cost is None:
            shares = [
                typical[PIPELINED] / typical[1]
                for _, typical in self._by_distance(band)
                if PIPELINED in typical and 1 in typical
            ]
            cost = self.table(context)[0] * min(1.0, shares[0] if shares else self._hidden)
            self._pipelined[band] = cost
        return cost

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """A pass over `rows` rows took `seconds`, a PIPELINED one behind another plain step. Times
        that cannot be are ignored."""
        if not 0.0 < seconds < inf or not 0 <= rows <= MAX_ROWS:
            return
        band = bisect(BANDS, context)
        if rows > 1 and self.measured(rows):
            believed = self.table(context)[rows - 1]
            if seconds * _CHANGED < believed:
                self._forget(believed / self._prior[rows - 1] / _CHANGED)
        times = self._times[band].setdefault(rows, [])
        times.append(seconds)
        del times[:-KEPT]
        typical = sorted(times)[(len(times) - 1) // 4]
        known = self._typical[band].get(rows)
        if known is None or len(times) < KEPT or abs(typical - known) > _TOLERANCE * known:
            self._typical[band][rows] = typical
            table = self._tables[band]
            surer = len(times) <= _FEW and not self.given
            if rows and (
                table is None or surer or abs(typical - table[rows - 1]) > _TOLERANCE * typical
            ):
                self._tables = [None] * len(self._tables)
            self._pipelined = [None] * len(self._pipelined)

    def _forget(self, slowest: float) -> None:
        """Forgets the times of drafts that took more than `slowest` times what was assumed."""
        for typical, times in zip(self._typical, self._times, strict=True):
            for rows in [rows for rows in typical if rows > 1]:
                if typical[rows] > slowest * self._prior[rows - 1]:
                    del typical[rows], times[rows]
        self._tables = [None] * len(self._tables)

    def first_use(self, rows: int) -> bool:
        """Whether no pass over `rows` rows ran before in this process: devices compile kernels
        then, and one such time would put the row count out of use, in the saved curve too."""
        first = rows not in self._used
        self._used.add(rows)
        return first

    def measured(self, rows: int) -> bool:
        """Whether the cost of `rows` rows is known: given beforehand, or observed in any band."""
        return self.given or any(rows in typical for typical in self._typical)

    @property
    def timed(self) -> bool:
        """Whether its costs are those of this device: given beforehand, or times."""
        return self.given or any(self._typical)

    def to_dict(self) -> dict[str, Any]:
        """Everything learned, ready for JSON."""
        return {
            "points": {str(rows): cost for rows, cost in self._points.items()},
            "given": self.given,
            "prefill_rate": self.prefill_rate,
            "load_rate": self.load_rate,
            "bands": [
                {str(rows): [time, len(times[rows])] for rows, time in typical.items()}
                for typical, times in zip(self._typical, self._times, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostCurve:
        """The curve that `to_dict` described. Raises ValueError when it is not such a dict."""
        try:
            curve = cls({int(rows): float(cost) for rows, cost in content["points"].items()})
            curve.given = bool(content["given"])
            bands = [
                {
                    int(rows): [float(time)] * min(_KEPT_SAVED, int(count))
                    for rows, (time, count) in band.items()
                }
                for band in content["bands"]
            ]
            for name in ("prefill_rate", "load_rate"):  # earlier versions had none
                rate = content.get(name)
                setattr(curve, name, None if rate is None else float(rate))
            low, high = _SAVED_COSTS
            rates = [curve.prefill_rate, curve.load_rate and curve.load_rate / 1000]  # in kB
            costs = [
                *(rate for rate in rates if rate is not None),
                *curve._points.values(),
                *(cost for band in bands for times in band.values() for cost in times),
            ]
            if not all(low <= cost <= high for cost in costs):
                raise ValueError("a cost beyond all bounds")
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as err:
            raise ValueError(f"expected a saved cost curve, found {content!r:.80}") from err
        if not _FEWEST_BANDS <= len(bands) <= len(BANDS) + 1:
            raise ValueError(f"expected {len(BANDS) + 1} bands of a cost curve, found {len(bands)}")
        for band, context in zip(bands, (0, *BANDS), strict=False):
            for rows, times in band.items():
                for time in times:
                    curve.observe(rows, time, context)
        return curve

    def _make_table(self, band: int) -> list[float]:
        """The prior shape, scaled to the time of 1 row, times how the measured rows differ from
        that. What more rows did in less time a row count can do too: times err on the slow side
        only."""
        measured = self._nearest(band)
        if not measured:
            return list(self._prior)
        least = [inf] * MAX_ROWS  # that as many rows or more took
        for rows, (time, _) in measured.items():
            least[:rows] = [min(time, known) for known in least[:rows]]
        scales = {rows: least[rows - 1] / self._prior[rows - 1] for rows in measured}
        scale = scales[1] if 1 in scales else median_low(scales.values())
        costs = [scale * cost for cost in self._prior]
        times = [(rows, least[rows - 1], count * count) for rows, (_, count) in measured.items()]
        costs = _corrected(costs, times, _FASTER_REACH, faster=True)
        costs = _corrected(costs, times, _REACH)
        highest = 0.0
        for place, cost in enumerate(costs):
            highest = costs[place] = min(max(cost, highest), least[place])
        return costs

    def _nearest(self, band: int) -> dict[int, tuple[float, int]]:
        """(time, how often measured) by rows: the band's own, and for rows that it never saw
        those of the nearest other band, in proportion."""
        result = {
            rows: (time, len(self._times[band][rows])) for rows, time in self._typical[band].items()
        }
        for other, theirs in self._by_distance(band)[1:]:
            shared = [result[rows][0] / theirs[rows] for rows in result.keys() & theirs.keys()]
            scale = median_low(shared) if shared else 1.0
            for rows, time in theirs.items():
                result.setdefault(rows, (time * scale, len(self._times[other][rows])))
        result.pop(PIPELINED, None)
        return result

    def _by_distance(self, band: int) -> list[tuple[int, dict[int, float]]]:
        """(band, its typical times), nearest first, itself at the start."""
        return sorted(enumerate(self._typical), key=lambda each: abs(each[0] - band))


_NEARNESS = {
    reach: [
        [exp(-abs(log(rows / other)) / reach) for other in range(1, MAX_ROWS + 1)]
        for rows in range(1, MAX_ROWS + 1)
    ]
    for reach in (_REACH, _FASTER_REACH)
}


def _corrected(
    costs: Sequence[float],
    times: Sequence[tuple[int, float, int]],
    reach: float,
    *,
    faster: bool = False,
) -> list[float]:
    """`costs` times an average of how `times` (rows, time, weight) differ from them, in logarithms:
    of rows within `reach`, and no difference at all, as one slow outlier must not put a row count
    out of use. 1 row, which all are relative to, is left as it is. faster: only down."""
    found = list(costs)
    differences = [
        (other, log(time / costs[other - 1]), weight) for other, time, weight in times if other > 1
    ]
    for rows in range(2, MAX_ROWS + 1):
        nearness = _NEARNESS[reach][rows - 1]
        tile = (rows - 1) // _TILE
        total, count = 0.0, _PRIOR_WEIGHT
        for other, difference, weight in differences:
            if (other - 1) // _TILE == tile or (faster and difference < 0.0):
                near = weight * nearness[other - 1]
                total += near * difference
                count += near
        difference = total / count
        found[rows - 1] *= exp(min(0.0, difference) if faster else difference)
    return found


def interpolate(points: Mapping[int, float], rows: int) -> float:
    """Linear between the points, whose rows rise; beyond the last its slope continues."""
    segments = list(pairwise(points.items()))
    if not segments:
        return points[1]
    (left, low), (right, high) = next((s for s in segments if rows <= s[1][0]), segments[-1])
    return low + (high - low) * (rows - left) / (right - left)
