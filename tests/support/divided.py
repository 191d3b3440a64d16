"""`akunu run --hosts` with a tiny model, and what becomes of its processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.command import AKUNU

FOLLOWER = "akunu_py.decoding.hosts.partition_worker"
PROMPT = " ".join(str(each * 7 % 90) for each in range(40))


def command(model: Path, hosts: str, *more: str, tokens: int = 200) -> list[str]:
    options = ["--raw", "--no-answer-cache", "--max-tokens", str(tokens), "--model", str(model)]
    return [*AKUNU, "run", *options, *(["--hosts", hosts] if hosts else []), *more, PROMPT]


@contextmanager
def running(
    model: Path, hosts: str, *more: str, tokens: int = 4000
) -> Iterator[subprocess.Popen[bytes]]:
    """It, while it answers."""
    with subprocess.Popen(
        command(model, hosts, *more, tokens=tokens),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # or what is read ahead would be lost to `communicate`
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks(process: subprocess.Popen[Any]) -> list[int]:
    """The processes of its other ranks."""
    return [pid for pid, parent, what in _all() if parent == process.pid and FOLLOWER in what]


def below(process: int) -> list[int]:
    """The processes that it started, and those that they did, its own children first."""
    rows, found = _all(), [process]
    for each in found:
        found += [pid for pid, parent, _ in rows if parent == each]
    return found[1:]


def ranks_below(process: int) -> list[int]:
    """Those of them that are ranks but the first."""
    found = below(process)
    return [pid for pid, _, what in _all() if pid in found and FOLLOWER in what]


def all_gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether they end in that time."""
    ends = time.monotonic() + seconds
    while any(pid in pids for pid, _, what in _all() if "python" in what):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _all() -> list[tuple[int, int, str]]:
    """Of each process its id, its parent's and its command; no command where it has ended."""
    shown = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], text=True)
    rows = [line.split(None, 2) for line in shown.splitlines()]
    return [(int(row[0]), int(row[1]), row[2]) for row in rows if "<defunct>" not in row[2]]
