"""The command line as a user runs it, and waiting for what it does."""

import contextlib
import os
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


def akunu(
    *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `akunu` to its end, in a process of its own.

    For what only a process shows: signals, pipes that break or are closed, terminals, its end. What
    a command prints and returns, `run_here` shows sooner.
    """
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*AKUNU, *args], input=data, capture_output=True, env=os.environ | (env or {}), timeout=120
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def run_here(
    *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `akunu` to its end in this process, where all modules are imported already.

    Its streams are files, so it sees no terminal; bytes that are no UTF-8 are surrogates in what it
    printed. Environment, working directory and signal handlers are put back. Programs that it
    starts write to the streams of this process.
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


@contextlib.contextmanager
def _own_process(given: Path, out: Path, err: Path, env: dict[str, str]) -> Iterator[None]:
    """What belongs to a process is as in one of its own inside, and put back behind it."""
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


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.01)
