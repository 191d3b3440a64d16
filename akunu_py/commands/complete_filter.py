"""`akunu complete --filter`: a buffer on stdin, its completion on stdout.

Owns where the cursor is, and that nothing is lost: with --whole stdout is the buffer again where
completing failed, because an editor replaces the buffer by what a filter prints.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from akunu_py.errors import UsageError

if TYPE_CHECKING:
    from akunu_py.completion.completer import SourceFile


def run_filter(args: argparse.Namespace) -> int:
    raw = sys.stdin.buffer.read()
    try:
        completed = complete_buffer(args, raw)
    except BaseException:
        if args.whole:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
        raise
    sys.stdout.buffer.write(completed)
    sys.stdout.buffer.flush()
    return 0


def complete_buffer(args: argparse.Namespace, raw: bytes) -> bytes:
    """What to print for the buffer `raw`. Raises UsageError for a cursor that is not in it."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the buffer is not UTF-8 text (byte {error.start}); convert it first"
        ) from error
    at = find_cursor(text, args.cursor, args.offset)

    from akunu_py.commands.complete import check_model, load_completer, request_from

    check_model(args)
    files = tuple(_read(path) for path in args.file or ())
    asked = replace(
        request_from(args), prefix=text[:at], suffix=text[at:], path=args.path, files=files
    )
    completer = load_completer(args)
    try:
        said = completer.complete(asked).text
    finally:
        completer.close()
    return ((text[:at] + said + text[at:]) if args.whole else said).encode()


def find_cursor(text: str, cursor: str | None, offset: str | None) -> int:
    """The characters before the cursor. cursor: LINE:COL, from 1. offset: from 0.

    Raises UsageError where there is no such place, or not exactly one of both.
    """
    if (cursor is None) == (offset is None):
        raise UsageError("--filter needs the place to complete: --cursor LINE:COL or --offset N")
    if offset is not None:
        if not re.fullmatch(r"\d+", offset, re.ASCII) or len(offset) > 18:
            raise UsageError(f"--offset: expected a number of characters, got {offset[:80]!r}")
        if int(offset) > len(text):
            raise UsageError(
                f"--offset {offset} is behind the {len(text)} characters of the buffer"
            )
        return int(offset)
    assert cursor is not None
    found = re.fullmatch(r"(\d{1,18}):(\d{1,18})", cursor, re.ASCII)
    if found is None or found[1].strip("0") == "" or found[2].strip("0") == "":
        raise UsageError(f"--cursor: expected LINE:COL, both from 1, got {cursor[:80]!r}")
    line, column = int(found[1]), int(found[2])
    lines = text.split("\n")
    if line > len(lines):
        raise UsageError(f"--cursor {cursor}: the buffer has {len(lines)} lines")
    length = len(lines[line - 1].removesuffix("\r"))
    if column > length + 1:
        raise UsageError(f"--cursor {cursor}: line {line} has {length} characters")
    return sum(len(each) + 1 for each in lines[: line - 1]) + column - 1


def _read(path: Path) -> SourceFile:
    from akunu_py.completion.completer import SourceFile

    try:
        return SourceFile(str(path), path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"--file {path} is not UTF-8 text (byte {error.start})") from error
