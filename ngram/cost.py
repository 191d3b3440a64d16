"""Cost model: the cost of a pass by rows and context length, from a prior and measured times."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import exp, inf, log
from statistics import linear_regression, median_low
from typing import Any

MAX_ROWS = 64  # of all requests in a pass
BANDS = (1024, 4096, 16384, 32768, 65536, 131072)  # ends of the bands of context length, in tokens
MAX_TIMES = 9  # per row count; the lower quartile ignores slow outliers
_SAVED_COSTS = 1e-9, 1e9  # valid range of a saved cost
_MAX_SAVED_TIMES = 3  # per row count in a file: the machine may have been busy
_TOLERANCE = 0.02  # smaller changes do not rebuild the table
PROBE_INTERVAL, _MAX_PROBE_INTERVAL = 256, 4096  # plain passes between probes; each doubles it
_BUSY_FACTOR = 3.0  # a time faster by this factor: the machine was busy before
_FEW_ROWS = 8  # a pass over so many rows costs at most a few plain steps
_FEW_TIMES = 4  # up to this many times per row count, every time rebuilds the table
# A time's influence on other row counts: 1/e at this difference of logarithms. Faster times reach
# further, because a row count that looks too slow is never tried.
_REACH, _FASTER_REACH = 0.1, 1.0
_TILE = 32  # rows per tile of GPU kernels; slow times do not apply across tiles
_PRIOR_WEIGHT = 1.0  # against the squared number of measurements

_SLICES = 16  # times of prefill slices
_LEAST_SLICE = 16  # tokens of a slice that tells the time per token
_SPREAD = 1.5  # ratio of two sizes that tells the fixed cost of a pass
_FIXED_SHARE = 4.0  # a slice takes this many times the fixed cost, even beyond its limit
_LEAST_VARIABLE = 0.1  # assumed share of a slice's time that grows with its size
_GROWTH = 4  # of the largest slice so far

PRIOR_PREFILL_RATE = 500.0  # prompt tokens per second, before any measurement
PIPELINED = 0  # row count that stands for a plain step launched while another runs
_GAP_PRIOR = 0.1  # assumed share of a plain step that pipelining hides

# Relative costs before the first measurement: between a fast and a slow machine.
PRIOR_SHAPE: Mapping[int, float] = {1: 1.0, 2: 1.15, 4: 1.5, 5: 1.7, 8: 2.4, 16: 3.2, 32: 3.8}


class CostCurve:
    """Cost of a pass by rows: in seconds once measured, before that in the unit of `points`."""

    def __init__(self, points: Mapping[int, float] | None = None) -> None:
        """points: known costs by rows, with 1 row. Raises ValueError if a cost is invalid."""
        self.preset = points is not None  # known costs need no probing
        points = dict(sorted((PRIOR_SHAPE if points is None else points).items()))
        if 1 not in points or any(rows < 0 or not 0.0 < points[rows] < inf for rows in points):
            raise ValueError(f"expected positive costs by rows, 1 row among them, got {points}")
        self._points = points
        self._pipelined_share = (
            points.get(PIPELINED, points[1] * (1 if self.preset else 1 - _GAP_PRIOR)) / points[1]
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
        self._since_probe, self._probe_interval = 0, PROBE_INTERVAL
        self.prefill_rate: float | None = None  # prompt tokens per second
        self.slices = SliceCost()
        self.load_rate: float | None = None  # bytes of a prompt cache read from disk per second

    def table(self, context: int) -> list[float]:
        """Return the costs of 1 to MAX_ROWS rows at `context` tokens. Do not modify it."""
        band = bisect(BANDS, context)
        table = self._tables[band]
        if table is None:
            table = self._tables[band] = self._band_costs(band)
        return table

    def pipelined(self, context: int) -> float:
        """Return the cost of a plain step launched while another runs, at most that of 1 row."""
        band = bisect(BANDS, context)
        cost = self._pipelined[band]
        if cost is None:
            shares = [
                typical[PIPELINED] / typical[1]
                for _, typical in self._by_distance(band)
                if PIPELINED in typical and 1 in typical
            ]
            cost = self.table(context)[0] * min(1.0, shares[0] if shares else self._pipelined_share)
            self._pipelined[band] = cost
        return cost

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Record the time of a pass over `rows` rows, or PIPELINED. Ignores invalid times."""
        if not 0.0 < seconds < inf or not 0 <= rows <= MAX_ROWS:
            return
        band = bisect(BANDS, context)
        if rows > 1 and self.measured(rows):
            expected = self.table(context)[rows - 1]
            if seconds * _BUSY_FACTOR < expected:
                self._drop_slow(expected / self._prior[rows - 1] / _BUSY_FACTOR)
        times = self._times[band].setdefault(rows, [])
        times.append(seconds)
        del times[:-MAX_TIMES]
        typical = sorted(times)[(len(times) - 1) // 4]
        known = self._typical[band].get(rows)
        if known is None or len(times) < MAX_TIMES or abs(typical - known) > _TOLERANCE * known:
            self._typical[band][rows] = typical
            table = self._tables[band]
            few = len(times) <= _FEW_TIMES and not self.preset
            if rows and (
                table is None or few or abs(typical - table[rows - 1]) > _TOLERANCE * typical
            ):
                self._tables = [None] * len(self._tables)
            self._pipelined = [None] * len(self._pipelined)
            if rows == PIPELINED and not self.measured(1):  # it stands for 1 row; see `_nearest`
                self._tables = [None] * len(self._tables)

    def _drop_slow(self, factor: float) -> None:
        """Discard all times of a row count above 1 that typically exceeds `factor` x its prior."""
        for typical, times in zip(self._typical, self._times, strict=True):
            for rows in [rows for rows in typical if rows > 1]:
                if typical[rows] > factor * self._prior[rows - 1]:
                    del typical[rows], times[rows]
        self._tables = [None] * len(self._tables)

    def first_use(self, rows: int) -> bool:
        """Return whether this pass of `rows` rows is the first: devices compile kernels then."""
        first = rows not in self._used
        self._used.add(rows)
        return first

    def probe_is_due(self) -> bool:
        """Count a plain pass of any conversation; return whether a probe should replace it."""
        self._since_probe += 1
        return not self.preset and self._since_probe >= self._probe_interval

    def probed(self) -> None:
        """Record a probe and double the interval to the next one."""
        self._since_probe = 0
        self._probe_interval = min(2 * self._probe_interval, _MAX_PROBE_INTERVAL)

    def measured(self, rows: int) -> bool:
        """Return whether the cost of `rows` rows is preset or observed in any band."""
        return self.preset or any(rows in typical for typical in self._typical)

    def optimistic(self, costs: Sequence[float]) -> list[float]:
        """Return `costs`, with few rows never measured as cheap as one row less, to try them."""
        tried = list(costs)
        for rows in range(2, min(_FEW_ROWS, len(tried)) + 1):
            if not self.measured(rows):
                tried[rows - 1] = min(tried[rows - 2 : rows])
        return tried

    @property
    def timed(self) -> bool:
        """Whether the costs are measured or a preset, and not only the prior."""
        return self.preset or any(self._typical)

    def to_dict(self) -> dict[str, Any]:
        """Return the learned state, ready for JSON."""
        return {
            "points": {str(rows): cost for rows, cost in self._points.items()},
            "given": self.preset,
            "prefill_rate": self.prefill_rate,
            "load_rate": self.load_rate,
            "bands": [
                {str(rows): [time, len(times[rows])] for rows, time in typical.items()}
                for typical, times in zip(self._typical, self._times, strict=True)
            ],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostCurve:
        """Restore the curve from `to_dict`. Raises ValueError if it is invalid."""
        try:
            curve = cls({int(rows): float(cost) for rows, cost in content["points"].items()})
            curve.preset = bool(content["given"])
            bands = [
                {
                    int(rows): [float(time)] * min(_MAX_SAVED_TIMES, int(count))
                    for rows, (time, count) in band.items()
                }
                for band in content["bands"]
            ]
            for name in ("prefill_rate", "load_rate"):
                rate = content[name]
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
            for band, context in zip(bands, (0, *BANDS), strict=True):
                for rows, times in band.items():
                    for time in times:
                        curve.observe(rows, time, context)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as err:
            raise ValueError(f"expected a saved cost curve, found {content!r:.80}") from err
        return curve

    def _band_costs(self, band: int) -> list[float]:
        """Return the costs of 1 to MAX_ROWS rows in a band of contexts.

        Without any measurement, this is the prior. Otherwise the prior is scaled to the time of
        1 row, or by the median ratio if that is not measured, then corrected by the measured rows.
        Costs never fall with more rows, nor exceed a measured pass over as many rows or more.
        """
        measured = self._nearest(band)
        if not measured:
            return list(self._prior)
        ceiling = [inf] * MAX_ROWS  # time of the fastest pass with at least as many rows
        for rows, (time, _) in measured.items():
            ceiling[:rows] = [min(time, known) for known in ceiling[:rows]]
        scales = {rows: ceiling[rows - 1] / self._prior[rows - 1] for rows in measured}
        scale = scales[1] if 1 in scales else median_low(scales.values())
        costs = [scale * cost for cost in self._prior]
        times = [(rows, ceiling[rows - 1], count * count) for rows, (_, count) in measured.items()]
        costs = _corrected(costs, times, _FASTER_REACH, faster=True)
        costs = _corrected(costs, times, _REACH)
        highest = 0.0
        for place, cost in enumerate(costs):
            highest = costs[place] = min(max(cost, highest), ceiling[place])
        return costs

    def _nearest(self, band: int) -> dict[int, tuple[float, int]]:
        """Return (time, samples) by rows; other bands and pipelined steps fill in missing rows."""
        result = {
            rows: (time, len(self._times[band][rows])) for rows, time in self._typical[band].items()
        }
        for other, typical in self._by_distance(band)[1:]:
            ratios = [result[rows][0] / typical[rows] for rows in result.keys() & typical.keys()]
            scale = median_low(ratios) if ratios else 1.0
            for rows, time in typical.items():
                result.setdefault(rows, (time * scale, len(self._times[other][rows])))
        if (pipelined := result.pop(PIPELINED, None)) and 1 not in result:
            result[1] = pipelined[0] / self._pipelined_share, pipelined[1]
        return result

    def _by_distance(self, band: int) -> list[tuple[int, dict[int, float]]]:
        """Return all bands with their typical times, nearest first, `band` included."""
        return sorted(enumerate(self._typical), key=lambda each: abs(each[0] - band))


class SliceCost:
    """Time of a prefill slice: a fixed cost of the pass, and a cost per token."""

    def __init__(self) -> None:
        self._times: deque[tuple[int, float]] = deque(maxlen=_SLICES)  # tokens, seconds
        self._fixed: float | None = None  # seconds of a pass; None until sizes differed

    def observe(self, tokens: int, seconds: float) -> None:
        """Record the time of a slice, and fit the fixed cost if the sizes differ enough."""
        self._times.append((tokens, seconds))
        sizes = [size for size, _ in self._times]
        if max(sizes) < _SPREAD * min(sizes):
            return
        slope, fixed = linear_regression(sizes, [each for _, each in self._times])
        if slope > 0.0:
            self._fixed = max(0.0, fixed)

    def tokens_in(self, seconds: float) -> int | None:
        """Return the size of a slice of `seconds`, None at first. High fixed costs extend it."""
        if not self._times:
            return None
        long = [each for each in self._times if each[0] >= _LEAST_SLICE]
        size, last = long[-1] if long else self._times[-1]
        largest = max(size for size, _ in self._times)
        if self._fixed is None and len(self._times) > 1:  # a second size tells the fixed cost
            return 2 * largest
        fixed = self._fixed or 0.0
        slope = max(last - fixed, _LEAST_VARIABLE * last) / size
        room = max(seconds, _FIXED_SHARE * fixed) - fixed
        return min(int(room / slope), _GROWTH * largest)


@cache
def _nearness(rows: int, other: int, reach: float) -> float:
    return exp(-abs(log(rows / other)) / reach)


def _corrected(
    costs: Sequence[float],
    times: Sequence[tuple[int, float, int]],
    reach: float,
    *,
    faster: bool = False,
) -> list[float]:
    """Correct `costs` by the log differences of `times` (rows, time, weight) within `reach`.

    faster: only lower costs. The cost of 1 row stays.
    """
    corrected = list(costs)
    differences = [
        (other, log(time / costs[other - 1]), weight) for other, time, weight in times if other > 1
    ]
    for rows in range(2, MAX_ROWS + 1):
        tile = (rows - 1) // _TILE
        total, count = 0.0, _PRIOR_WEIGHT
        for other, difference, weight in differences:
            if (other - 1) // _TILE == tile or (faster and difference < 0.0):
                near = weight * _nearness(rows, other, reach)
                total += near * difference
                count += near
        difference = total / count
        corrected[rows - 1] *= exp(min(0.0, difference) if faster else difference)
    return corrected


def interpolate(points: Mapping[int, float], rows: int) -> float:
    """Interpolate linearly between ascending points; the last slope continues."""
    segments = list(pairwise(points.items()))
    if not segments:
        return points[1]
    (left, low), (right, high) = next((s for s in segments if rows <= s[1][0]), segments[-1])
    return low + (high - low) * (rows - left) / (right - left)


_GAIN_DECAY, _GAIN_PRIOR = 0.97, 6.0  # per pass; the prior in passes of one token each


class RecentGain:
    """Running average of tokens per cost, where plain decoding is 1."""

    def __init__(self) -> None:
        self._tokens = self._cost = _GAIN_PRIOR
        self.value = 1.0  # tokens per cost, at least 1

    def add(self, tokens: float, cost: float) -> None:
        """Add a pass. cost: in plain steps."""
        self._tokens = self._tokens * _GAIN_DECAY + tokens
        self._cost = self._cost * _GAIN_DECAY + cost
        self.value = max(self._tokens / self._cost, 1.0)
