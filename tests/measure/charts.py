"""Charts of results, as SVG for a page and as characters for a terminal.

Colors and fonts of the SVG come from the page's style sheet. There are no scripts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from akunu_py.bench.result import Result, Series

_WIDTH, _LINE = 720, 22
_LABELS = 170  # pixels to the left of horizontal bars
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 40  # margins of charts with axes

STYLE = """
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif;display:block}
svg text{fill:var(--ink)} svg .quiet{fill:var(--quiet)} svg .grid{stroke:var(--grid)}
svg .whisker{stroke:var(--ink);stroke-width:1.5}
.c0{--c:#8a8f98}.c1{--c:#4c78a8}.c2{--c:#d98c3f}.c3{--c:#2f9e6e}.c4{--c:#8e6bbf}
.c5{--c:#c9506b}.c6{--c:#3aa3b5}.c7{--c:#a38a3c}
svg .fill{fill:var(--c)} svg .line{stroke:var(--c);stroke-width:2;fill:none}
"""
_COLORS = 8
_ONE = 3  # color of a single line or group

_BAR, _SPARKLINE = 40, 60  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_HEIGHTS = " ▁▂▃▄▅▆▇█"

Points = list[tuple[float, float]]

_LEAST_TESTED = 5  # drafted tokens, for a meaningful share
_WINDOW = 4  # passes to either side


# Figures


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with its spread."""

    label: str
    value: float
    low: float  # ends of the spread
    high: float
    note: str = ""  # shown at the end of the bar


def drafting_series(result: Result) -> list[Series]:
    """Return the series with recorded drafts."""
    return [series for series in result.runs if sum(series.drafted)]


def auto_series(result: Result) -> list[Series]:
    """Return the series of `auto` at the lowest measured temperature."""
    found = [series for series in drafting_series(result) if series.runner == "auto"]
    lowest = min((series.temperature for series in found), default=0.0)
    return [series for series in found if series.temperature == lowest]


def speed_bars(result: Result) -> list[tuple[str, list[Bar]]]:
    """Return the median and range of each runner, by workload and temperature."""
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
    """Return the cost of a pass by its rows; one row costs 1."""
    curve = result.curve_s
    return [(rows, seconds / curve[1]) for rows, seconds in curve.items()] if 1 in curve else []


def acceptance_by_position(series: Sequence[Series]) -> Points:
    """Return (position in the draft from 1, share accepted of the tokens tested there).

    A token is tested if all previous tokens of the draft are accepted.
    """
    tested: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for each in series:
        for drafted, accepted_tokens in zip(each.drafted, each.accepted, strict=True):
            for position in range(min(drafted, accepted_tokens + 1)):
                tested[position + 1] += 1
                accepted[position + 1] += position < accepted_tokens
    return [(p, accepted[p] / tested[p]) for p in sorted(tested) if tested[p] >= _LEAST_TESTED]


def passes_by_length(series: Sequence[Series]) -> Points:
    """Return (tokens that a pass yielded, share of passes)."""
    return _shares(1 + kept for one in series for kept in one.accepted)


def chosen_lengths(series: Sequence[Series]) -> Points:
    """Return (draft length that the planner chose, share of passes)."""
    return _shares(drafted for one in series for drafted in one.drafted)


def _shares(values: Iterable[int]) -> Points:
    counts = Counter(values)
    total = sum(counts.values())
    last = max(counts, default=-1)
    return [(value, counts[value] / total) for value in range(min(counts, default=0), last + 1)]


def yields_along_answer(series: Series) -> Points:
    """Return (token of the answer, mean tokens per pass around it)."""
    yields = [1 + kept for kept in series.accepted]
    points: Points = []
    before = 0
    for index, count in enumerate(yields):
        near = yields[max(0, index - _WINDOW) : index + _WINDOW + 1]
        points.append((before + count / 2, sum(near) / len(near)))
        before += count
    return points


# SVG


def svg_bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Draw horizontal bars in groups, with spreads and one color per label."""
    if not groups:
        return ""
    labels = list(dict.fromkeys(bar.label for _, group in groups for bar in group))
    most = max((bar.high for _, group in groups for bar in group), default=1.0) or 1.0
    scale = (_WIDTH - _LABELS - 150) / most
    parts: list[str] = []
    y = 0.0
    for title, group in groups:
        if title:
            parts.append(_text(0, y + 15, title, "quiet"))
            y += _LINE
        for bar in group:
            # Runners keep their color from group to group; without groups there are none.
            color = labels.index(bar.label) % _COLORS if title else _ONE
            middle = y + _LINE / 2
            parts.append(_text(_LABELS - 8, middle + 4, bar.label, anchor="end"))
            parts.append(
                f'<rect class="fill c{color}" x="{_LABELS}" y="{y + 3:.1f}" '
                f'width="{max(1.0, bar.value * scale):.1f}" height="{_LINE - 6}" rx="2"/>'
            )
            low, high = (_LABELS + end * scale for end in (bar.low, bar.high))
            if high - low >= 1:
                parts.append(_line(low, middle, high, middle, "whisker"))
            words = f"{bar.value:.3g}{unit} {bar.note}" if unit else bar.note
            parts.append(_text(max(high, _LABELS + bar.value * scale) + 6, middle + 4, words))
            y += _LINE
        y += 8
    return _svg(_WIDTH, y, parts)


def svg_columns(points: Points, x_label: str) -> str:
    """Draw vertical columns of shares in percent."""
    if not points:
        return ""
    width, height = _WIDTH, 220.0
    most = max(share for _, share in points)
    ticks = _ticks(0, most * 100)
    top = ticks[-1] / 100
    step = (width - _LEFT - _RIGHT) / len(points)
    parts = _grid(width, height, ticks, "{:g} %")
    every = ceil(len(points) / 17)
    bottom = height - _BOTTOM
    for index, (x, share) in enumerate(points):
        tall = share / top * (bottom - _TOP)
        left = _LEFT + index * step
        parts.append(
            f'<rect class="fill c{_ONE}" x="{left + step * 0.12:.1f}" y="{bottom - tall:.1f}" '
            f'width="{step * 0.76:.1f}" height="{tall:.1f}"/>'
        )
        if index % every == 0:
            middle = left + step / 2
            parts.append(_text(middle, height - _BOTTOM + 16, f"{x:g}", anchor="middle"))
    parts.append(_text((_LEFT + width) / 2, height - 6, x_label, "quiet", "middle"))
    return _svg(width, height, parts)


def svg_lines(curves: Mapping[str, Points], x_label: str, *, percent: bool = False) -> str:
    """Draw lines through points, with a legend for several lines."""
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return ""
    width, height = _WIDTH, 260.0
    everything = [point for points in curves.values() for point in points]
    factor = 100 if percent else 1
    xs = _ticks(min(x for x, _ in everything), max(x for x, _ in everything))
    ys = _ticks(0, max(y for _, y in everything) * factor)
    across = (width - _LEFT - _RIGHT) / (xs[-1] - xs[0])
    up = (height - _TOP - _BOTTOM) / ys[-1]
    parts = _grid(width, height, ys, "{:g} %" if percent else "{:g}")
    for x in xs:
        at = _LEFT + (x - xs[0]) * across
        parts.append(_text(at, height - _BOTTOM + 16, f"{x:g}", anchor="middle"))
    for index, (name, points) in enumerate(curves.items()):
        color = index % _COLORS if len(curves) > 1 else _ONE
        path = " ".join(
            f"{_LEFT + (x - xs[0]) * across:.1f},{height - _BOTTOM - y * factor * up:.1f}"
            for x, y in points
        )
        parts.append(f'<polyline class="line c{color}" points="{path}"/>')
        if len(curves) > 1:
            left = _LEFT + 12 + 168 * (index % 4)
            y = height + 8 + 18 * (index // 4)
            parts.append(
                f'<rect class="fill c{color}" x="{left}" y="{y - 9:g}" width="10" height="10"/>'
            )
            parts.append(_text(left + 15, y, name))
    parts.append(_text((_LEFT + width) / 2, height - 6, x_label, "quiet", "middle"))
    legend = 18 * ceil(len(curves) / 4) if len(curves) > 1 else 0
    return _svg(width, height + legend, parts)


def _grid(width: float, height: float, ticks: Sequence[float], form: str) -> list[str]:
    parts = []
    for tick in ticks:
        y = height - _BOTTOM - tick / ticks[-1] * (height - _TOP - _BOTTOM)
        parts.append(_line(_LEFT, y, width - _RIGHT, y, "grid"))
        parts.append(_text(_LEFT - 6, y + 4, form.format(tick), anchor="end"))
    return parts


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that span `low` to `high`."""
    span = max(high - low, 1e-9)
    rough = span / 5
    power = 10.0 ** floor(log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = floor(low / step), ceil(high / step)
    return [round(step * k, 10) for k in range(first, max(last, first + 1) + 1)]


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    inside = "\n".join(parts)
    return f'<svg viewBox="0 0 {width:g} {height:g}" role="img">\n{inside}\n</svg>'


def _line(x1: float, y1: float, x2: float, y2: float, css_class: str) -> str:
    return f'<line class="{css_class}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, css_class: str = "", anchor: str = "start") -> str:
    attribute = f' class="{css_class}"' if css_class else ""
    return f'<text{attribute} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


# For a terminal


def text_bars(groups: Sequence[tuple[str, Sequence[Bar]]], unit: str) -> str:
    """Draw horizontal bars as text."""
    most = max((bar.value for _, group in groups for bar in group), default=1.0) or 1.0
    wide = max((len(bar.label) for _, group in groups for bar in group), default=0)
    lines = []
    for title, group in groups:
        lines += [title] if title else []
        for bar in group:
            drawn = text_bar(bar.value / most, _BAR)
            words = f"{bar.value:.3g}{unit} {bar.note}" if unit else bar.note
            lines.append(f"  {bar.label:<{wide}}  {drawn:<{_BAR}}  {words}".rstrip())
    return "\n".join(lines)


def text_columns(points: Points) -> str:
    """Draw one line per value: `4  ████  12 %`."""
    most = max((share for _, share in points), default=1.0) or 1.0
    return "\n".join(
        f"  {x:>4g}  {text_bar(share / most, _BAR):<{_BAR}}  {share:.1%}".rstrip()
        for x, share in points
        if share
    )


def sparklines(curves: Mapping[str, Points]) -> str:
    """Draw one line per curve, in eighths of a line, on a common scale."""
    most = max((y for points in curves.values() for _, y in points), default=1.0) or 1.0
    wide = max(map(len, curves), default=0)
    lines = []
    for name, points in curves.items():
        if points:
            drawn = "".join(
                _HEIGHTS[max(1, round(8 * y / most))] for y in _sampled(points, _SPARKLINE)
            )
            lines.append(f"  {name:<{wide}}  {drawn}  up to {max(y for _, y in points):.1f}")
    return "\n".join(lines)


def _sampled(points: Points, width: int) -> list[float]:
    """Return the mean of the points in each of `width` cells; gaps repeat the last value."""
    last = points[-1][0] + 1
    cells: list[float] = []
    for cell in range(width):
        near = [y for x, y in points if int(width * x / last) == cell]
        cells.append(sum(near) / len(near) if near else cells[-1] if cells else points[0][1])
    return cells


def text_bar(share: float, width: int) -> str:
    """Draw a bar of `share` of `width` characters, rounded to eighths."""
    eighths = round(8 * width * min(max(share, 0.0), 1.0))
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
