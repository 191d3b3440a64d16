"""Tables of a result as text and Markdown, and `akunu bench report`, which prints them."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from akunu_py.bench.result import Result, half_range, load_merged, median, write_text
from akunu_py.errors import UsageError
from akunu_py.text import table as aligned

Table = tuple[list[str], list[list[str]]]
"""Headings, and the cells of each row."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="Result file of akunu bench"
    )
    output = "Markdown file to write (default: text to stdout)"
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.md", help=output)


def run(options: argparse.Namespace) -> int:
    if options.output and options.output.suffix != ".md":
        raise UsageError(f"-o: expected a file name ending in .md, got {options.output}")
    results = load_merged(options.files)
    if options.output:
        write_text(options.output, "\n".join(result_markdown(result) for result in results))
        print(options.output, file=sys.stderr)
    else:
        print("\n\n".join(result_text(result) for result in results))
    return 0


def heading(result: Result) -> str:
    """Return the model, machine, versions, date and command, in three lines."""
    machine, model = result.machine, result.model
    return (
        f"{model.get('name')}, {model.get('weights')}, {params(model.get('params') or 0)} "
        f"parameters, {size(model.get('size_bytes') or 0)}, loaded in {result.load_s:.2f} s\n"
        f"{machine.get('device')}, {machine.get('backend')}, {machine.get('cores')} cores, "
        f"{size(machine.get('memory_bytes') or 0)}; {machine.get('system')}\n"
        f"{versions(result)}; {result.date}; {result.command}"
    )


def versions(result: Result) -> str:
    packages = result.machine.get("versions") or {}
    named = [f"{name} {number}" for name, number in packages.items()]
    return ", ".join([*named, f"Python {result.machine.get('python')}"])


def curve_table(result: Result) -> Table:
    curve = result.curve_s
    if 1 not in curve:
        return [], []
    cells = [[str(n), f"{s * 1e3:.1f}", f"{s / curve[1]:.2f}"] for n, s in curve.items()]
    return ["positions in a pass", "ms", "x one position"], cells


def throughput_table(result: Result) -> Table:
    """Return llama-bench's columns and the name of the loop."""
    model = result.model
    what = [
        f"{model.get('name')} {model.get('weights')}",
        size(model.get("size_bytes") or 0),
        params(model.get("params") or 0),
        str(result.machine.get("backend")),
    ]
    cells = [[*what, test.runner, test.test, rate(test.rates)] for test in result.throughput]
    return ["model", "size", "params", "backend", "loop", "test", "t/s"], cells


def speed_table(result: Result) -> Table:
    """Return one row per series; `x` is the speedup over its baseline."""
    headings = ["test", "temp", "loop", "tokens", "t/s", "x", "tokens/pass", "accepted", "score",
                "first token", "memory", "identical"]  # fmt: skip
    cells = []
    for series in result.runs:
        speedup, score = result.speedup(series), series.score(result.curve_s)
        recorded, repeats = bool(series.drafted), series.repeats
        peak = max((repeat.peak_bytes for repeat in repeats), default=0)
        cells.append(
            [
                series.workload + ("*" if series.loop is not None else ""),
                f"{series.temperature:g}",
                series.runner,
                str(repeats[-1].tokens) if repeats else "",
                rate(series.rates, series.failed),
                "" if speedup is None else f"{speedup:.2f}",
                f"{series.tokens_per_pass:.2f}" if recorded else "",
                f"{series.acceptance_rate:.0%}" if sum(series.drafted) else "",
                "" if score is None else f"{score:.2f}",
                f"{median([r.ttft_s for r in repeats]) * 1e3:.0f} ms" if repeats else "",
                size(peak) if peak else "",
                {None: "", True: "yes", False: "NO"}[series.identical],
            ]
        )
    if not any(series.temperature for series in result.runs):
        for row in (headings, *cells):
            del row[1]
    return headings, cells


def result_text(result: Result) -> str:
    return "\n".join([f"{heading(result)}\n", *map(to_text, result_tables(result)), *notes(result)])


def result_markdown(result: Result) -> str:
    parts = [f"```\n{heading(result)}\n```\n", *map(to_markdown, result_tables(result))]
    return "\n".join([*parts, *(f"{line}\n" for line in notes(result))])


def result_tables(result: Result) -> list[Table]:
    """Return the tables of a result that have rows."""
    tables = (throughput_table(result), curve_table(result), speed_table(result))
    return [table for table in tables if table[1]]


def notes(result: Result) -> list[str]:
    """Return notes about differing answers, loops, failures and an interruption."""
    lines = []
    if hosts := result.model.get("hosts"):
        split = f"split over {'; '.join(hosts)}"
        lines.append(f"{split}: mlx-lm's own loop cannot run, so the baseline is off")
    if any(series.loop is not None for series in result.runs):
        lines.append(
            "* the answer ends in a loop, which any drafter predicts; the speed is not typical"
        )
    for series in result.runs:
        where = f"{series.workload}, temperature {series.temperature:g}, {series.runner}"
        if series.failed:
            lines.append(f"{where} failed: {series.failed}")
        if (difference := series.difference) is not None:
            margin = difference["margin"]
            tie = "" if margin is None else f", where the two highest logits differ by {margin:.3g}"
            lines.append(
                f"{where} differs from {series.reference} at token {difference['position']} of "
                f"answer {difference['turn'] + 1}{tie}"
            )
    if not result.complete:
        lines.append("interrupted: the results are incomplete")
    return lines


def rate(rates: Sequence[float], failed: str | None = None) -> str:
    """Return the median ± half the range."""
    if not rates:
        return "failed" if failed else "interrupted"
    return f"{median(rates):.2f} ± {half_range(rates):.2f}"


def size(size_bytes: float) -> str:
    """Return a size in MiB or GiB, formatted as in llama-bench."""
    mib = size_bytes / 2**20
    return f"{mib / 1024:.2f} GiB" if mib >= 1024 else f"{mib:.2f} MiB"


def params(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"


def to_markdown(table: Table) -> str:
    """Return a Markdown table with padded columns; numbers are right-aligned."""
    headings, cells = table
    right = _numbers(cells)
    rows = [[text.replace("|", "\\|") for text in row] for row in [headings, *cells]]
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (w - (at in right)) + ":" * (at in right) for at, w in enumerate(widths)]
    lines = aligned([rows[0], rule, *rows[1:]], right, " | ")
    return "".join(f"| {line:<{len(lines[1])}} |\n" for line in lines)


def to_text(table: Table) -> str:
    headings, cells = table
    return "\n".join(aligned([headings, *cells], right=_numbers(cells))) + "\n"


def _numbers(cells: Sequence[Sequence[str]]) -> list[int]:
    columns = enumerate(zip(*cells, strict=True))
    return [
        place
        for place, texts in columns
        if any(texts) and all(text[:1].isdigit() or not text for text in texts)
    ]
