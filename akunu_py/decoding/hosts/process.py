"""A process that holds one rank, as rank 0 sees it: what it says, and whether it is alive.

mlx.launch's own class starts it, here or through ssh. It is told things in lines on its stdin,
whose end ends it, and answers in lines on its stdout; see `follower`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from mlx._distributed_utils.launch import RemoteProcess

from akunu_py.decoding.hosts.hostfile import HERE, NOT_REACHED, Hosts

SIGN = "@akunu "  # begins lines that are meant
_ALIVE = "."
_LAST_LINES = 20


class RankProcess:
    """One rank's process. rank, host: which one, where."""

    def __init__(self, hosts: Hosts, rank: int, arguments: dict[str, Any]) -> None:
        self.rank, self.host = rank, hosts.names[rank]
        self.label = hosts.label(rank)
        command = ["-P", "-m", "akunu_py.decoding.hosts.follower", json.dumps(arguments)]
        python = hosts.env.get("AKUNU_PYTHON", sys.executable)
        env = [f"{name}={value}" for name, value in hosts.env.items()]
        self._remote = RemoteProcess(rank, self.host, python, None, hosts.files, env, command)
        self._process = self._remote.process
        self._lines: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_LAST_LINES)
        self._pidfile = ""
        self.heard = time.monotonic()
        self._readers = [
            threading.Thread(target=read, args=(stream,), name=f"rank {rank}", daemon=True)
            for read, stream in (
                (self._read_answers, self._process.stdout),
                (self._read_errors, self._process.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def tell(self, **what: Any) -> None:
        """Sends a line. It is no error that nobody reads it any more: `ended` says so."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def take(self, seconds: float) -> dict[str, Any] | None:
        """The next answer, None where none comes in time."""
        with contextlib.suppress(Empty):
            return self._lines.get(timeout=seconds)
        return None

    @property
    def pid(self) -> int:
        """Of the process here: the rank's own, or ssh's."""
        return int(self._process.pid)

    def ended(self) -> str:
        """How it ended, "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        for reader in self._readers:
            reader.join(0.5)  # its last words
        said = next((line for line in reversed(self._errors) if "[ring]" not in line), "")
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        how = f"ended with code {code}"
        if code == NOT_REACHED and self.host != HERE:
            how = "was killed, or the network is gone" if self._pidfile else "cannot be reached"
        return f"{how}{f': {said}' if said else ''}"

    def close(self) -> None:
        """Lets it end, as one whose stdin ends does."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Ends it, stopped or not, as far as it can be reached."""
        if self._process.poll() is None and self.host != HERE:
            # ssh's end ends what it runs; where that hangs, mlx.launch's way is tried, too.
            threading.Thread(target=self._kill_there, daemon=True).start()
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Whether it ends in that time. What it left behind is removed then."""
        with contextlib.suppress(Exception):
            self._process.wait(seconds)
        if self._process.poll() is None:
            return False
        if self.host == HERE and self._pidfile:
            Path(self._pidfile).unlink(missing_ok=True)
        return True

    def _kill_there(self) -> None:
        with contextlib.suppress(Exception):
            self._remote.terminate()

    def _read_answers(self, stream: BinaryIO) -> None:
        first = stream.readline().decode(errors="replace")
        self._remote.preprocess_output(first, is_stdout=True)
        self._pidfile = first.strip()
        for line in stream:
            self.heard = time.monotonic()
            text = line.decode(errors="replace").strip()
            if text.startswith(SIGN):
                with contextlib.suppress(ValueError):
                    self._lines.put(json.loads(text.removeprefix(SIGN)))
            elif self.host != HERE and text not in ("", _ALIVE):
                self._errors.append(text[:300])  # ssh's terminal has stderr, too

    def _read_errors(self, stream: BinaryIO) -> None:
        for line in stream:
            self._errors.append(" ".join(line.decode(errors="replace").split())[:300])


_direct: list[int] = []  # stderr as it was
_SIGN = b"[ring]"


def drop_ring_messages() -> None:
    """Drop what mx.distributed says on stderr, several times, of a peer that is gone: so do we.

    Python's own stderr goes the direct way, as it may not be lost when we end.
    """
    ours = sys.stderr
    if not isinstance(ours, io.TextIOWrapper) or ours.fileno() != 2:
        return  # somebody else looks after it
    direct = os.dup(2)
    read, write = os.pipe()
    ours.flush()
    sys.stderr = os.fdopen(direct, "w", buffering=1, errors=ours.errors)
    os.dup2(write, 2)
    os.close(write)
    _direct.append(direct)
    threading.Thread(target=_pass_on, args=(read, direct), name="stderr", daemon=True).start()


def restore_stderr() -> None:
    """Undo `drop_ring_messages` for a program that takes the place of this one."""
    while _direct:
        os.dup2(_direct.pop(), 2)


def _pass_on(read: int, direct: int) -> None:
    """All but what is behind its sign in a line, which comes in pieces."""
    inside = False
    while said := os.read(read, 1 << 16):
        kept = b""
        while said:
            if inside:
                _, ended, said = said.partition(b"\n")
                inside = not ended
            else:
                before, sign, said = said.partition(_SIGN)
                kept, inside = kept + before, bool(sign)
        if kept:
            os.write(direct, kept)
