"""`akunu bench report FILES`: charts and tables from result files, and the README's numbers."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from akunu_py.commands.bench_common import save_text
from akunu_py.errors import UsageError

_SUFFIXES = (".html", ".md", ".txt")
DISAGREES = 1  # the exit code of --check


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", metavar="FILE", help="results of akunu bench")
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="OUT",
        help="by its ending a page (.html), Markdown tables (.md) or plots in characters (.txt); "
        "may be repeated (default: plots and tables to stdout)",
    )
    parser.add_argument("--readme", metavar="FILE", help="make the tables in FILE anew")
    parser.add_argument("--check", action="store_true", help="only say whether --readme agrees")


def report(options: argparse.Namespace) -> int:
    if options.readme:
        return _readme(Path(options.readme), check=options.check)
    from akunu_py.bench.report import pages as reports
    from akunu_py.bench.result import load_result, merged

    if not options.files:
        raise UsageError("expected result files: akunu bench report FILE ... (akunu bench -o FILE)")
    results = merged([load_result(Path(file)) for file in options.files])
    if not options.output:
        print(reports.to_text(results))
        print(reports.to_markdown(results), end="")
        return 0
    shapes = dict(
        zip(_SUFFIXES, (reports.to_html, reports.to_markdown, reports.to_text), strict=True)
    )
    if wrong := [out for out in options.output if Path(out).suffix not in shapes]:
        raise UsageError(f"expected -o with {', '.join(_SUFFIXES)}, found {wrong[0]}")
    for out in options.output:
        save_text(out, shapes[Path(out).suffix](results))
        print(out, file=sys.stderr)
    return 0


def _readme(path: Path, *, check: bool) -> int:
    from akunu_py.bench.report.readme import regenerated

    text = regenerated(path)
    if text == path.read_text(encoding="utf-8"):
        return 0
    if check:
        print(
            f"akunu bench: the tables in {path} are not those of their result files; "
            f"make them anew with: akunu bench report --readme {path}",
            file=sys.stderr,
        )
        return DISAGREES
    save_text(str(path), text)
    return 0
