"""Charts for a terminal, in plain characters: for those without a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from akunu_py.bench.report.figures import Bar, Points

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"


def bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Horizontal bars, and the range of each where it has one."""
    most = max((bar.value for _, group in groups for bar in group), default=1.0) or 1.0
    wide = max((len(bar.label) for _, group in groups for bar in group), default=0)
    lines = []
    for title, group in groups:
        lines += [title] if title else []
        for bar in group:
            drawn = horizontal(bar.value / most, _BAR)
            words = f"{bar.value:.3g}{unit} {bar.note}" if unit else bar.note
            lines.append(f"  {bar.label:<{wide}}  {drawn:<{_BAR}}  {words}".rstrip())
    return "\n".join(lines)


def columns(points: Points) -> str:
    """One line a value: `4  ████  12 %`."""
    most = max((share for _, share in points), default=1.0) or 1.0
    return "\n".join(
        f"  {x:>4g}  {horizontal(share / most, _BAR):<{_BAR}}  {share:.1%}".rstrip()
        for x, share in points
        if share
    )


def sparks(curves: Mapping[str, Points], width: int = 60) -> str:
    """One line a curve, its height in eighths of a line; all have the same scale."""
    most = max((y for points in curves.values() for _, y in points), default=1.0) or 1.0
    wide = max(map(len, curves), default=0)
    lines = []
    for name, points in curves.items():
        if points:
            drawn = "".join(_HEIGHTS[max(1, round(8 * y / most))] for y in _sampled(points, width))
            lines.append(f"  {name:<{wide}}  {drawn}  up to {max(y for _, y in points):.1f}")
    return "\n".join(lines)


def _sampled(points: Points, width: int) -> list[float]:
    """The curve at `width` places, each the mean of the points there; gaps go on as before."""
    last = points[-1][0] + 1
    cells: list[float] = []
    for cell in range(width):
        near = [y for x, y in points if int(width * x / last) == cell]
        cells.append(sum(near) / len(near) if near else cells[-1] if cells else points[0][1])
    return cells


def horizontal(share: float, width: int) -> str:
    """A bar of `share` of `width` characters, to an eighth of one."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
