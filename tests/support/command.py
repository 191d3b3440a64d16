"""The command line as a user runs it, and waiting for what it does."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

from akunu_py import cli

AKUNU = (sys.executable, "-m", "akunu_py")


def akunu(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `akunu` to its end in a process, with an empty stdin. `run_here` is faster."""
    return subprocess.run(
        [*AKUNU, *args], input="", capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def run_here(
    *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `akunu` to its end in this process, where all modules are imported already.

    Its streams are files, not terminals. Bytes of the output that are not UTF-8 become surrogates.
    Restores environment, working directory and signal handlers. Programs that it starts write to
    the streams of this process.
    """
    with tempfile.TemporaryDirectory() as directory:
        given, out, err = (Path(directory, name) for name in ("in", "out", "err"))
        given.write_bytes(stdin.encode() if isinstance(stdin, str) else stdin)
        with _own_process(given, out, err, env or {}):
            try:
                code: object = cli.main(args)
            except SystemExit as end:
                code = end.code or 0
        assert isinstance(code, int), code
        printed = [file.read_bytes().decode(errors="surrogateescape") for file in (out, err)]
    return subprocess.CompletedProcess(args, code, *printed)


def printed(*args: str, stdin: str = "") -> str:
    """Run `akunu` in this process, check that it succeeds, and return its output."""
    done = run_here(*args, stdin=stdin)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def _own_process(given: Path, out: Path, err: Path, env: dict[str, str]) -> Iterator[None]:
    """Replace what belongs to a process, and restore it afterwards."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with (
        given.open(encoding="utf-8") as stdin,
        out.open("w", encoding="utf-8") as stdout,
        err.open("w", encoding="utf-8", errors="backslashreplace") as stderr,
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(sys, "stdout", stdout),
        mock.patch.object(sys, "stderr", stderr),
        mock.patch.object(os, "_exit", _exited),
        mock.patch.dict(os.environ, env),
        contextlib.chdir(Path.cwd()),
    ):
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _exited(code: int) -> NoReturn:
    raise AssertionError(f"os._exit({code}) ends the process: run it with `akunu`")


def assert_one_line_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr


@contextlib.contextmanager
def pseudo_terminal() -> Iterator[tuple[int, int]]:
    """Open a terminal; yield its file descriptors: the user's side, and the program's."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(theirs)
        os.close(ours)


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Wait for an effect of another thread or process."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
