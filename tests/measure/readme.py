"""Generate the tables of the README and of the docs from result files and replays.

A block is between `<!-- bench:speed FILE ... -->` and `<!-- /bench -->`, or after
`<!-- bench:replay TRACES CURVE ... -->`, which replays the trace file. Paths are relative to the
page's directory. Everything else stays.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import COMPARED_DRAFTERS, replay_trace
from akunu_py.bench.result import Result, Series, load_merged, loop_start, write_text
from akunu_py.bench.tables import versions
from akunu_py.bench.trace import load_trace
from akunu_py.errors import UsageError
from tests.measure.tool import run_tool

_BLOCK = re.compile(
    r"(<!-- bench:(speed|replay) (\S[^>]*?) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL
)


def regenerate(page: Path) -> str:
    """Return the page with every block generated again. Raises UsageError if it has none."""
    text = page.read_text(encoding="utf-8")
    if not _BLOCK.search(text):
        raise UsageError(f"no <!-- bench:speed FILE --> with a <!-- /bench --> in {page}")

    def block(match: re.Match[str]) -> str:
        names = match[3].split()
        if match[2] == "replay":
            return match[1] + replay_block(page.parent, names[0], names[1:]) + match[5]
        results = load_merged([page.parent / file for file in names])
        return match[1] + "\n".join(speed_block(r, names) for r in results) + match[5]

    return _BLOCK.sub(block, text)


def speed_block(result: Result, files: list[str]) -> str:
    """Return a row per workload and a column per runner, with a caption."""
    groups: dict[str, dict[str, Series]] = {}
    for series in result.runs:
        if series.rates and not series.temperature:
            groups.setdefault(series.workload, {})[series.runner] = series
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    headings = ["", *(f"**{n}**" if n == "auto" else n for n in names), "tokens a pass, auto"]
    rows = [headings]
    for title, group in groups.items():
        yielded = f"{group['auto'].tokens_per_pass:.2f}" if "auto" in group else ""
        rows.append([title, *(_cell(result, group.get(name)) for name in names), yielded])
    machine, model = result.machine, result.model
    repeats = max((len(series.repeats) for series in result.runs), default=0)
    commands = "; ".join(f"`{command}`" for command in result.command.split("; "))
    kept = ", ".join(f"[{Path(file).name}]({file})" for file in files)
    caption = (
        f"Tokens per second, medians of {repeats}. {commands}: {model['name']} in "
        f"{model['weights']}, {machine['device']}, {machine['cores']} cores, "
        f"{machine['system'].split('-')[0]}, {machine['backend']}; "
        f"{versions(result)}; {result.date}. All figures: {kept}."
    )
    return f"\n{_table(rows)}\n{caption}\n\n"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table; the first row has the headings."""
    first, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([first, "|---" * len(rows[0]), "|\n", *rest])


def _cell(result: Result, series: Series | None) -> str:
    if series is None:
        return ""
    text = f"{series.tokens_per_s:.1f}"
    speedup = result.speedup(series)
    if speedup is not None and series.runner != series.baseline:
        text += f" ({speedup:.2f}x)"
    if series.identical is False:
        text += " (tokens differ)"
    return f"**{text}**" if series.runner == "auto" else text


def replay_block(directory: Path, file: str, curves: Sequence[str]) -> str:
    """Return a row per drafter and curve, a column per workload: scores; plain decoding is 1.

    The first curve has all compared drafters, the others only akunu's. A star marks workloads with
    an answer that ends in a loop.
    """
    trace = load_trace(directory / file)
    titles = [
        name + ("*" if any(loop_start(item.output) is not None for item in items) else "")
        for name, items in trace.workloads.items()
    ]
    rows = [["costs of", *titles]]
    for curve in curves:
        for drafter in COMPARED_DRAFTERS if curve == curves[0] else ("auto",):
            found = replay_trace(trace, parse_curve(curve), drafter).values()
            mark, title = ("**", "akunu") if drafter == "auto" else ("", drafter)
            cells = (f"{mark}{row['score']:.2f}{mark}" for row in found)
            rows.append([f"{curve}, {mark}{title}{mark}", *cells])
    tokens = sum(len(item.output) for items in trace.workloads.values() for item in items)
    stars = " \\* An answer ends in a loop." if any("*" in title for title in titles) else ""
    command = f"`akunu bench replay {file.removeprefix('../')} --compare --curve {curves[0]}`"
    return (
        f"\n{_table(rows)}\n{command}, and so on: {tokens} tokens generated by "
        f"{trace.tokenizer}, in [{Path(file).name}]({file}).{stars}\n\n"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pages", type=Path, nargs="+", metavar="PAGE", help="Files to update")


def run(options: argparse.Namespace) -> int:
    for page in options.pages:
        write_text(page, regenerate(page))
    return 0


main = partial(run_tool, "readme", "Generate the tables of pages from result files and replays",
               add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
