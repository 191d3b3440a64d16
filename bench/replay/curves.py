"""What a pass over M rows costs: curves published for some machines, and points given by the user.
One row costs 1."""

from __future__ import annotations

from akunu_py.errors import UsageError
from akunu_py.ngram.cost import CostCurve, interpolate

CURVES: dict[str, str] = {
    "m5max": "1:1 3:1.11 5:1.42 8:2.2 16:2.6 32:3.2",
    "m4pro": "1:1 2:1.2 3:1.4 4:1.6 5:1.8 6:2.2 10:3.2 16:3.9 32:3.9",
    "m1": "1:1 2:1.5 5:3.0 6:3.4 16:4.0 32:4.5",
    "cpu": "1:1 2:1.15 3:1.36 4:1.5 5:1.55 6:1.58 8:1.67 9:1.71",
}


class Curve:
    """Cost of a pass by its rows: linear between the points, the last slope beyond them."""

    def __init__(self, points: dict[int, float]) -> None:
        if sorted(points)[:1] != [1]:
            raise UsageError("a curve starts with the cost of 1 row, such as 1:1,3:1.11,5:1.42")
        self.points = dict(sorted(points.items()))

    def __call__(self, rows: int) -> float:
        return interpolate(self.points, rows)

    def table(self, rows: int) -> dict[int, float]:
        """The costs of 1 to `rows` rows."""
        return {row: self(row) for row in range(1, rows + 1)}


class FixedCosts(CostCurve):
    """A planner's costs that no measured time changes: what is drafted does not depend on how busy
    the machine is, nor on its kernels."""

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Ignored."""


def parse_curve(text: str) -> Curve:
    """A curve from its name or from points such as `1:1,3:1.11,5:1.42` (commas or spaces).

    Raises UsageError when `text` is neither, when a cost is not a positive number, when rows
    repeat, or when the cost of one row is missing.
    """
    points: dict[int, float] = {}
    for part in CURVES.get(text, text).replace(",", " ").split():
        rows_text, colon, cost_text = part.partition(":")
        try:
            rows, cost = int(rows_text), float(cost_text)
        except ValueError:
            colon = ""
        if not colon:
            raise UsageError(
                f"expected a curve ({', '.join(CURVES)}) or points such as 1:1,3:1.11,5:1.42, "
                f"found {text!r}"
            )
        if rows < 1 or not 0 < cost < float("inf") or rows in points:
            raise UsageError(
                f"expected different rows from 1 up with positive costs, found {part!r} in {text!r}"
            )
        points[rows] = cost
    return Curve(points)
