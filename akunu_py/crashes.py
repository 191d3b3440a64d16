"""Reports of unexpected exceptions: one line on stderr, and a file with the details."""

import contextlib
import os
import sys
import time
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import describe
from akunu_py.text import displayable, print_warnings
from akunu_py.version import __version__

MAX_REPORTS = 10  # files
_MAX_PART = 32_768  # characters of the beginning and of the end of a traceback
_MAX_SUMMARY = 240  # characters of the line about an exception


def report(error: BaseException, *, debug: bool = False) -> None:
    """Report a bug on stderr; debug: with the traceback. Never raises."""
    if debug:
        print_traceback(error)
    file = save_report(error)
    where = f"details are in {file}" if file else "for details, run it again with --debug"
    how = "please report them with the output of akunu info"
    try:
        summary = describe(error)[:_MAX_SUMMARY]
    except Exception:  # noqa: BLE001 - str() of the exception can fail
        summary = type(error).__name__
    print_warnings([f"this is a bug: {summary}; {where}; {how}"])


def save_report(error: BaseException) -> Path | None:
    """Save the details in a new private file; None if that fails. Never raises."""
    directory = paths.cache_dir() / "crashes"
    file = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns()}.txt"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
            output.write(_details(error).encode("utf-8", "backslashreplace"))
        for old in sorted(directory.glob("*.txt"))[:-MAX_REPORTS]:
            old.unlink()
    except OSError:
        return None
    return file


def print_traceback(error: BaseException) -> None:
    with contextlib.suppress(OSError):
        print(displayable(_details(error)), file=sys.stderr)


def _details(error: BaseException) -> str:
    import platform
    import traceback

    text = "".join(traceback.format_exception(error))
    if len(text) > 2 * _MAX_PART:
        text = f"{text[:_MAX_PART]}\n[...]\n{text[-_MAX_PART:]}"
    return f"akunu {__version__}, Python {sys.version}, {platform.platform()}\n\n{text}"
