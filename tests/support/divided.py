"""`akunu run --hosts` with a tiny model, and what becomes of its processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.command import AKUNU

PROMPT = " ".join(str(each * 7 % 90) for each in range(40))


def command(model: Path, hosts: str, *more: str, tokens: int = 200) -> list[str]:
    options = ["--raw", "--no-memory", "--max-tokens", str(tokens), "--model", str(model)]
    return [*AKUNU, "run", *options, *(["--hosts", hosts] if hosts else []), *more, PROMPT]


@contextmanager
def running(
    model: Path, hosts: str, *more: str, tokens: int = 4000
) -> Iterator[subprocess.Popen[str]]:
    """It, while it answers: its stdout has given something."""
    with subprocess.Popen(
        command(model, hosts, *more, tokens=tokens),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ranks(process: subprocess.Popen[str]) -> list[int]:
    """The processes of its other ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    found = [int(each) for each in children.read_text().split()]
    return [each for each in found if "hosts.follower" in _command_of(each)]


def all_gone(pids: Sequence[int], seconds: float) -> bool:
    """Whether they end in that time."""
    ends = time.monotonic() + seconds
    while any(_command_of(pid) for pid in pids):
        if time.monotonic() > ends:
            return False
        time.sleep(0.05)
    return True


def _command_of(pid: int) -> str:
    """ "" where it is no more, or only its exit code is left."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
