"""What the actions of `akunu bench` print alike."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from akunu_py.errors import INTERRUPTED
from akunu_py.text import rewrite_line

FAILED = 1  # the exit code where B is slower than A, and where a README disagrees


def progress(line: str) -> None:
    """Shows what is being measured: one line that changes on a terminal, one each elsewhere."""
    if sys.stderr.isatty():
        rewrite_line(line)
    elif line:
        print_line(line)


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(options: argparse.Namespace, as_json: Any, print_text: Callable[[], None]) -> None:
    """Prints a result in the format that was asked for."""
    if options.format == "json":
        print(json.dumps(as_json, indent=1))
    else:
        print_text()


def was_interrupted(measure: Callable[[], None]) -> bool:
    """Runs `measure`. True where Ctrl-C ended it: what it collected until then is a result."""
    interrupted = False
    try:
        measure()
    except KeyboardInterrupt:
        interrupted = True
    progress("")
    return interrupted


def exit_code(interrupted: bool, done: str = "measured") -> int:
    if interrupted:
        print(f"interrupted: this is what was {done} so far", file=sys.stderr)
    return INTERRUPTED if interrupted else 0
