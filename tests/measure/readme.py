"""`python -m tests.measure.readme FILE`: generate the tables of a README from result files.

A block is between `<!-- bench:speed FILE ... -->` and `<!-- /bench -->`, or after
`<!-- bench:replay TRACES CURVE ... -->`, which replays the trace file. Paths are relative to the
README's directory. Everything else stays.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from akunu_py.bench.command import FAILED
from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import COMPARED_DRAFTERS, replay_trace
from akunu_py.bench.result import Result, Series, load_merged, loop_start, write_text
from akunu_py.bench.tables import versions
from akunu_py.bench.trace import load_trace
from akunu_py.errors import UsageError
from tests.measure.tool import run_tool

SUMMARY = "Generate the tables of a README from result files and replays"
_BLOCK = re.compile(
    r"(<!-- bench:(speed|replay) (\S[^>]*?) -->\n)(.*?)(<!-- /bench -->)", re.DOTALL
)


def regenerate(readme: Path) -> str:
    """Return the README with every block generated again.

    Raises UsageError if it is unreadable, has no block, or names an invalid result file.
    """
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {readme}: {error.strerror or error}") from error
    if not _BLOCK.search(text):
        raise UsageError(
            f"no <!-- bench:speed FILE --> or <!-- bench:replay TRACES CURVE --> with a "
            f"<!-- /bench --> after it in {readme}"
        )

    def block(match: re.Match[str]) -> str:
        kind, names = match[2], match[3].split()
        if kind == "replay":
            return match[1] + replay_block(readme.parent, names[0], names[1:]) + match[5]
        results = load_merged([readme.parent / file for file in names])
        return match[1] + "\n".join(speed_block(r, names) for r in results) + match[5]

    return _BLOCK.sub(block, text)


def speed_block(result: Result, files: list[str]) -> str:
    """Return a row per workload and a column per runner, with a caption."""
    groups: dict[tuple[str, float], list[Series]] = {}
    for series in result.runs:
        if series.rates:
            groups.setdefault((series.workload, series.temperature), []).append(series)
    names = list(dict.fromkeys(s.runner for group in groups.values() for s in group))
    temperatures = {temperature for _, temperature in groups}
    auto = "auto" in names
    headings = ["", *(f"**{n}**" if n == "auto" else n for n in names)]
    headings += ["tokens a pass, auto"] if auto else []
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for (workload, temperature), group in groups.items():
        by_name = {series.runner: series for series in group}
        title = workload if len(temperatures) == 1 else f"{workload}, temperature {temperature:g}"
        cells = [title, *(_cell(result, by_name.get(name), name == "auto") for name in names)]
        if auto:
            cells.append(f"{by_name['auto'].tokens_per_pass:.2f}" if "auto" in by_name else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n" + "\n".join(lines) + f"\n\n{_caption(result, files)}\n\n"


def _cell(result: Result, series: Series | None, bold: bool) -> str:
    if series is None:
        return ""
    text = f"{series.tokens_per_s:.1f}"
    speedup = result.speedup(series)
    if speedup is not None and series.runner != series.baseline:
        text += f" ({speedup:.2f}x)"
    if series.identical is False:
        text += " (tokens differ)"
    return f"**{text}**" if bold else text


def _caption(result: Result, files: list[str]) -> str:
    machine = result.machine
    repeats = max((len(series.repeats) for series in result.runs), default=0)
    commands = "; ".join(f"`{command}`" for command in result.command.split("; "))
    kept = ", ".join(f"[{Path(file).name}]({file})" for file in files)
    return (
        f"Tokens per second, medians of {repeats}. {commands}: {result.model['name']} in "
        f"{result.model['weights']}, {machine['device']}, {machine['cores']} cores, "
        f"{machine['system'].split('-')[0]}, {machine['backend']}; "
        f"{versions(result)}; {result.date}. All figures: {kept}."
    )


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
    lines = [f"| costs of | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for curve in curves:
        for drafter in COMPARED_DRAFTERS if curve == curves[0] else ("auto",):
            rows = replay_trace(trace, parse_curve(curve), drafter).values()
            mark = "**" if drafter == "auto" else ""
            title = "akunu" if drafter == "auto" else drafter
            cells = [f"{mark}{text}{mark}" for text in (f"{row['score']:.2f}" for row in rows)]
            lines.append(f"| {curve}, {mark}{title}{mark} | {' | '.join(cells)} |")
    tokens = sum(len(item.output) for items in trace.workloads.values() for item in items)
    stars = " \\* An answer ends in a loop." if any("*" in title for title in titles) else ""
    commands = f"`akunu bench replay {file} --compare --curve {curves[0]}`"
    return (
        "\n" + "\n".join(lines) + f"\n\n{commands}, and so on: {tokens} tokens generated by "
        f"{trace.tokenizer}, in [{Path(file).name}]({file}).{stars}\n\n"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("readme", type=Path, metavar="README", help="File to update")
    parser.add_argument("--check", action="store_true", help="Only compare; exit code 1 if stale")


def run(options: argparse.Namespace) -> int:
    path: Path = options.readme
    text = regenerate(path)
    if text == path.read_text(encoding="utf-8"):
        return 0
    if options.check:
        print(
            f"the tables in {path} differ from their result files; "
            f"run: python -m tests.measure.readme {path}",
            file=sys.stderr,
        )
        return FAILED
    write_text(path, text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("readme", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
