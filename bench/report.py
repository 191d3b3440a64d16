"""`akunu bench report`: tables from result files, as text or as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from akunu_py.bench.result import Result, load_merged, write_text
from akunu_py.bench.tables import heading, notes, result_tables, result_text
from akunu_py.bench.tables import to_markdown as table_to_markdown
from akunu_py.bench.tables import to_text as table_to_text
from akunu_py.errors import UsageError

SUMMARY = "Print tables from result files, or write them as Markdown"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="Result file of akunu bench"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="OUT.md",
        help="Markdown file to write (default: text to stdout)",
    )


def run(options: argparse.Namespace) -> int:
    if options.output and options.output.suffix != ".md":
        raise UsageError(f"expected -o with a name that ends in .md, found {options.output}")
    results = load_merged(options.files)
    if options.output:
        write_text(options.output, to_markdown(results))
        print(options.output, file=sys.stderr)
    else:
        print("\n\n".join(result_text(result, table_to_text) for result in results))
    return 0


def to_markdown(results: Sequence[Result]) -> str:
    """Return the tables of each result behind its heading."""
    parts = []
    for result in results:
        parts.append(f"```\n{heading(result)}\n```\n")
        parts += map(table_to_markdown, result_tables(result))
        parts += [f"{line}\n" for line in notes(result)]
    return "\n".join(parts)
