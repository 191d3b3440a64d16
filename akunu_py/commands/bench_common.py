"""What the actions of `akunu bench` share: options, progress, and where results go."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.errors import StoreError
from akunu_py.types import DEFAULT_MODEL, WEIGHT_MODES

if TYPE_CHECKING:
    from akunu_py.bench.result import Result

FORMATS = ("text", "md", "csv", "json", "jsonl")


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="NAME_OR_PATH")
    parser.add_argument("--weights", choices=WEIGHT_MODES, default="auto")


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, default="text", help="of what is printed")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="also keep all figures there, as JSON"
    )


def write(options: argparse.Namespace, result: Result) -> None:
    """Keeps the result file where one is asked for, then prints."""
    from akunu_py.bench.report import tables

    if options.output:
        result.save(Path(options.output))
    texts = {
        "csv": tables.to_csv,
        "json": lambda result: result.to_json(),
        "jsonl": tables.to_jsonl,
    }
    if options.format in texts:
        print(texts[options.format](result), end="")
        return
    shape = tables.to_markdown if options.format == "md" else tables.to_text
    print(tables.heading(result), end="\n\n")
    for table in (
        tables.throughput_table(result),
        tables.curve_table(result),
        tables.speed_table(result),
    ):
        if table[1]:
            print(shape(table))
    for line in tables.notes(result):
        print(line)


def progress(line: str) -> None:
    """Says what is being measured: one line that changes on a terminal, one each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


def save_text(path: str, text: str) -> None:
    """Raises StoreError where the file cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
