"""`akunu bench report`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from akunu_py.bench.commands.output import FAILED
from akunu_py.errors import UsageError

SUMMARY = "charts and tables from results, as a page, as Markdown or for a terminal"
_SUFFIXES = (".html", ".md", ".txt")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="results of akunu bench"
    )
    parser.add_argument(
        "-o",
        "--output",
        action="append",
        metavar="OUT",
        help="by its ending a page (.html), Markdown tables (.md) or plots in characters (.txt); "
        "may be repeated (default: plots and tables to stdout)",
    )
    parser.add_argument("--readme", type=Path, metavar="FILE", help="make the tables in FILE again")
    parser.add_argument("--check", action="store_true", help="only say whether --readme agrees")


def run(options: argparse.Namespace) -> int:
    if options.readme:
        return _readme(options.readme, check=options.check)
    from akunu_py.bench.report import pages
    from akunu_py.bench.result import load_results, merged, write_text

    if not options.files:
        raise UsageError("expected result files: akunu bench report FILE ... (akunu bench -o FILE)")
    results = merged([each for file in options.files for each in load_results(file)])
    if not options.output:
        print(pages.to_text(results))
        print(pages.to_markdown(results), end="")
        return 0
    writers = dict(zip(_SUFFIXES, (pages.to_html, pages.to_markdown, pages.to_text), strict=True))
    if wrong := [out for out in options.output if Path(out).suffix not in writers]:
        raise UsageError(f"expected -o with {', '.join(_SUFFIXES)}, found {wrong[0]}")
    for out in options.output:
        write_text(Path(out), writers[Path(out).suffix](results))
        print(out, file=sys.stderr)
    return 0


def _readme(path: Path, *, check: bool) -> int:
    from akunu_py.bench.report.readme import regenerate
    from akunu_py.bench.result import write_text

    text = regenerate(path)
    if text == path.read_text(encoding="utf-8"):
        return 0
    if check:
        print(
            f"akunu bench: the tables in {path} are not those of their result files; "
            f"make them again with: akunu bench report --readme {path}",
            file=sys.stderr,
        )
        return FAILED
    write_text(path, text)
    return 0
