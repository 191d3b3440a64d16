"""Completion as a filter: a buffer on stdin, its completion on stdout.

With `whole`, stdout gets the completed buffer, or the unchanged one after an error, because an
editor replaces its buffer with the output of a filter.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from akunu_py.completion.completion_queue import (
    CompletionQueue,
    LoadModel,
    QueueOptions,
    is_excluded,
)
from akunu_py.completion.completion_request import CompletionRequest, SourceFile
from akunu_py.errors import INTERRUPTED, UsageError
from akunu_py.files import disk_errors, read_bounded

MAX_FILE = 64 << 20  # bytes, as of a line of `jsonl`


def run_filter(
    load: LoadModel,
    base: CompletionRequest,
    cursor: str | None,
    offset: str | None,
    *,
    files: Sequence[Path] = (),
    whole: bool = False,
    exclude: Sequence[str] = (),
) -> None:
    """Complete the buffer on stdin at `cursor` or `offset`, as in `find_cursor`.

    base: limits and path. files: other files of the project. whole: print the whole buffer.
    exclude: patterns of files that are refused.
    """
    raw = sys.stdin.buffer.read()
    output = raw if whole else b""
    try:
        for name in (base.path, *map(str, files)):
            if is_excluded(name, exclude):
                raise UsageError(
                    f"{name} may contain secrets: it matches completion_exclude in the settings"
                )
        text = _decode(raw, "the buffer", "; convert it first")
        at = find_cursor(text, cursor, offset)
        read = tuple(_source_file(file) for file in files)
        queue = CompletionQueue(load, QueueOptions(exclude=tuple(exclude)))
        queue.start()
        try:
            request = replace(base, prefix=text[:at], suffix=text[at:], files=read)
            completion = queue.complete(request).text
        finally:
            queue.close_or_exit(INTERRUPTED)
        output = ((text[:at] + completion + text[at:]) if whole else completion).encode()
    finally:
        sys.stdout.buffer.write(output)
        sys.stdout.buffer.flush()


def _source_file(path: Path) -> SourceFile:
    with disk_errors(f"--file: cannot read {path}", UsageError):
        data = read_bounded(path, MAX_FILE)
    return SourceFile(str(path), _decode(data, f"--file {path}"))


def find_cursor(text: str, cursor: str | None, offset: str | None) -> int:
    """Return the number of characters before the cursor. cursor: LINE:COL, from 1.

    Raises UsageError for a position outside of the buffer, and unless exactly one is given.
    """
    if (cursor is None) == (offset is None):
        raise UsageError("--filter needs the place to complete: --cursor LINE:COL or --offset N")
    if offset is not None:
        if not re.fullmatch(r"\d{1,18}", offset, re.ASCII):
            raise UsageError(f"--offset: expected a number of characters, got {offset[:80]!r}")
        if int(offset) > len(text):
            raise UsageError(f"--offset {offset} is after the {len(text)} characters of the buffer")
        return int(offset)
    assert cursor is not None
    found = re.fullmatch(r"0*([1-9]\d{0,17}):0*([1-9]\d{0,17})", cursor, re.ASCII)
    if found is None:
        raise UsageError(f"--cursor: expected LINE:COL, both from 1, got {cursor[:80]!r}")
    line, column = int(found[1]), int(found[2])
    lines = text.split("\n")
    if line > len(lines):
        raise UsageError(f"--cursor {cursor}: the buffer has {len(lines)} lines")
    length = len(lines[line - 1].removesuffix("\r"))
    if column > length + 1:
        raise UsageError(f"--cursor {cursor}: line {line} has {length} characters")
    return sum(len(each) + 1 for each in lines[: line - 1]) + column - 1


def _decode(data: bytes, name: str, advice: str = "") -> str:
    """Decode UTF-8. Raises UsageError, which calls the input `name` and ends with `advice`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text (byte {error.start}){advice}") from error
