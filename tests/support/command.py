"""The command line as a user runs it, and waiting for what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

AKUNU = (sys.executable, "-m", "akunu_py")


def akunu(
    *args: str, stdin: str | bytes = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `akunu` to its end, in a process of its own."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    done = subprocess.run(
        [*AKUNU, *args], input=data, capture_output=True, env=os.environ | (env or {}), timeout=120
    )
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


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
