"""`akunu bench report`: tables from result files, as text or as Markdown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from akunu_py.bench import tables
from akunu_py.bench.result import Result, load_merged, write_text
from akunu_py.errors import UsageError


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
        raise UsageError(f"-o: expected a file name ending in .md, got {options.output}")
    results = load_merged(options.files)
    if options.output:
        write_text(options.output, to_markdown(results))
        print(options.output, file=sys.stderr)
    else:
        print("\n\n".join(tables.result_text(result, tables.to_text) for result in results))
    return 0


def to_markdown(results: Sequence[Result]) -> str:
    """Return a heading, tables and notes for each result."""
    parts = []
    for result in results:
        parts.append(f"```\n{tables.heading(result)}\n```\n")
        parts += map(tables.to_markdown, tables.result_tables(result))
        parts += [f"{line}\n" for line in tables.notes(result)]
    return "\n".join(parts)
