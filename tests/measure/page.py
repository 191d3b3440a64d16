"""`python -m tests.measure.page FILE ...`: draw results as one HTML file, or as text plots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from akunu_py.bench import tables
from akunu_py.bench.result import Result, Series, load_merged, write_text
from akunu_py.bench.theory import theory_table
from tests.measure import charts
from tests.measure.tool import run_tool

SUMMARY = "Draw result files as an HTML page, or as plots for a terminal"
_SPREAD = "Medians; the line through a bar spans all repetitions."
_CHOSEN = "auto, share of passes; 0 is a plain step."
_THEORY = (
    "Leviathan et al. (2023), table 4: drafts of a fixed length g, accepted with chance a. Speed "
    "as the paper predicts it, as it does with the costs of passes measured here, and as measured."
)
_TESTED = "A drafted token is tested if all before it are accepted."

_STYLE = (
    """
:root{--ink:#1d2129;--quiet:#6b7280;--grid:#e5e7eb;--page:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ec;--quiet:#9aa1ad;--grid:#333943;--page:#15181d}}
body{margin:2rem auto;max-width:60rem;padding:0 1rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}p.quiet,pre.quiet{color:var(--quiet)}
pre{white-space:pre-wrap;font-size:.85rem}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .6rem;border-bottom:1px solid var(--grid);text-align:left;white-space:nowrap}
details{margin:.3rem 0}
"""
    + charts.STYLE
)


def to_html(results: Sequence[Result]) -> str:
    """Return the report as one page, with inline styles and charts and no script."""
    body = "".join(_html_of(result) for result in results)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>akunu bench</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body}</body>\n</html>\n"
    )


def _html_of(result: Result) -> str:
    sections = "".join(
        f"<h2>{escape(title)}</h2>\n"
        + (f'<p class="quiet">{escape(words)}</p>\n' if words else "")
        + drawn
        for title, words, drawn in _sections(result)
        if drawn
    )
    return (
        f"<h1>{escape(str(result.model.get('name')))} on "
        f"{escape(str(result.machine.get('device')))}</h1>\n"
        f'<pre class="quiet">{escape(tables.heading(result))}</pre>\n{sections}\n'
    )


def _sections(result: Result) -> list[tuple[str, str, str]]:
    """Return (title, explanation, HTML) of each section; HTML is empty without data."""
    auto = charts.auto_series(result)
    cost = {"cost": charts.curve_points(result)}
    yielded, chosen = charts.passes_by_length(auto), charts.chosen_lengths(auto)
    figures_table = _html_table(tables.speed_table(result)) + _html_notes(result)
    theory = _html_table(theory_table(result))
    return [
        ("Tokens per second", _SPREAD, charts.svg_bars(charts.speed_bars(result), " t/s")),
        ("Given lengths", "", _html_table(tables.throughput_table(result))),
        (
            "Cost of a pass by its positions",
            "One position: 1.",
            charts.svg_lines(cost, "positions"),
        ),
        (
            "Accepted, by position in the draft",
            _TESTED,
            charts.svg_lines(_positions(result), "position", percent=True),
        ),
        (
            "Tokens that a pass yielded",
            "auto, share of passes.",
            charts.svg_columns(yielded, "tokens"),
        ),
        ("Lengths that the planner chose", _CHOSEN, charts.svg_columns(chosen, "drafted tokens")),
        (
            "Tokens per pass along an answer",
            "auto, the mean of nine passes.",
            charts.svg_lines(_yields_along_answer(auto), "token of the answer"),
        ),
        ("Theory and measurement", _THEORY, theory),
        ("All figures", "", figures_table),
        ("Answers", "In the last repetition, by auto if it took part.", _answers(result)),
    ]


def _positions(result: Result) -> dict[str, charts.Points]:
    by_runner: dict[str, list[Series]] = {}
    for series in charts.drafting_series(result):
        by_runner.setdefault(series.runner, []).append(series)
    return {n: charts.acceptance_by_position(group) for n, group in by_runner.items()}


def _yields_along_answer(auto: Sequence[Series]) -> dict[str, charts.Points]:
    return {series.workload: charts.yields_along_answer(series) for series in auto}


def _html_table(table: tables.Table) -> str:
    headings, cells = table
    if not cells:
        return ""
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in cells
    )
    return f'<div class="wide"><table><tr>{head}</tr>\n{body}</table></div>'


def _html_notes(result: Result) -> str:
    return "".join(f'<p class="quiet">{escape(line)}</p>' for line in tables.notes(result))


def _answers(result: Result) -> str:
    chosen: dict[str, Series] = {}
    for series in result.runs:
        name = f"{series.workload}, temperature {series.temperature:g}"
        if series.answer and (name not in chosen or series.runner == "auto"):
            chosen[name] = series
    return "".join(
        f"<details><summary>{escape(name)}</summary><pre>{escape(series.answer)}</pre></details>"
        for name, series in chosen.items()
    )


def to_text(results: Sequence[Result]) -> str:
    """Return the charts as text for a terminal."""
    parts = []
    for result in results:
        auto = charts.auto_series(result)
        costs = [charts.Bar(f"{x:g}", y, y, y, f"{y:.2f}") for x, y in charts.curve_points(result)]
        drawn = {
            "Tokens per second": charts.text_bars(charts.speed_bars(result), " t/s"),
            "Cost of a pass by its positions": charts.text_bars([("", costs)], ""),
            "Accepted, by position in the draft": charts.sparklines(_positions(result)),
            "Tokens that a pass yielded (auto)": charts.text_columns(charts.passes_by_length(auto)),
            "Lengths that the planner chose (auto)": charts.text_columns(
                charts.chosen_lengths(auto)
            ),
            "Tokens per pass along an answer (auto)": charts.sparklines(_yields_along_answer(auto)),
        }
        parts.append(tables.heading(result) + "\n")
        parts += [f"{title}\n{plot}\n" for title, plot in drawn.items() if plot]
        parts += tables.notes(result)
    return "\n".join(parts) + "\n"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="Result file of akunu bench"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="OUT.html", help="Page (default: plots to stdout)"
    )


def run(options: argparse.Namespace) -> int:
    results = load_merged(options.files)
    if options.output:
        write_text(options.output, to_html(results))
    else:
        print(to_text(results), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("page", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
