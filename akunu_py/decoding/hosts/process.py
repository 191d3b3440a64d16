"""A worker's process as rank 0 sees it: messages, heartbeat, equal files and versions.

mlx.launch's own class starts it, locally or over ssh. Messages are lines on stdin and stdout; see
`follower`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from mlx._distributed_utils.launch import RemoteProcess

from akunu_py.decoding.hosts.hostfile import HERE, NOT_REACHED, Hosts
from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular
from akunu_py.models.manifest import FILE_NAME, read_manifest
from akunu_py.version import __version__

SIGN = "@akunu "  # prefix of messages
_ALIVE = "."
_LAST_LINES = 20


class RankProcess:
    """The process of one rank."""

    def __init__(self, hosts: Hosts, rank: int, arguments: dict[str, Any]) -> None:
        self.rank, self.host = rank, hosts.names[rank]
        self.label = hosts.label(rank)
        command = ["-P", "-m", "akunu_py.decoding.hosts.partition_worker", json.dumps(arguments)]
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
        """Send a line. Ignores a closed pipe; see `ended`."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()

    def take(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, None on timeout."""
        with contextlib.suppress(Empty):
            return self._lines.get(timeout=seconds)
        return None

    @property
    def pid(self) -> int:
        """The local process: the rank's own, or ssh's."""
        return int(self._process.pid)

    def ended(self) -> str:
        """Return how it ended, "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        for reader in self._readers:
            reader.join(0.5)
        said = next((line for line in reversed(self._errors) if "[ring]" not in line), "")
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        how = f"ended with code {code}"
        if code == NOT_REACHED and self.host != HERE:
            how = "was killed, or the network is gone" if self._pidfile else "cannot be reached"
        return f"{how}{f': {said}' if said else ''}"

    def close(self) -> None:
        """Ask it to exit by closing its stdin."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill it, also if it is stopped."""
        if self._process.poll() is None and self.host != HERE:
            # Killing ssh ends the remote process; if that hangs, mlx.launch's own way helps.
            threading.Thread(target=self._kill_there, daemon=True).start()
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for its end and clean up. Returns False on timeout."""
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


_WHOLE = 4 << 20  # bytes; larger files are sampled
_PLACES = 64
_PIECE = 64 << 10  # bytes

_NAMES = {"mlx": "MLX", "mlx-lm": "mlx-lm", "transformers": "transformers"}


def likeness(model: Path) -> dict[str, str]:
    """Return versions and the files' digest, which must be equal on all hosts, by name."""
    found = {"akunu": __version__, "Python": platform.python_version()}
    for package, name in _NAMES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "none"
    return found | {"the model's files": files_digest(model)}


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """Describe the first difference, "" if there is none."""
    for name, value in here.items():
        if there.get(name) != value:
            return f"{name}: {value} here, {there.get(name, 'none')} there"
    return ""


def files_digest(directory: Path) -> str:
    """Return a digest of a model's files: names, sizes, recorded hashes and contents.

    Large files are sampled: both ends and 63 pieces between.
    """
    whole, recorded = hashlib.sha256(), _recorded(directory)
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken"):
            continue
        if path.name == FILE_NAME:  # says when it was fetched, too
            continue
        size = path.stat().st_size
        whole.update(f"{path.name}\0{size}\0{recorded.get(path.name, '')}\0".encode())
        with open_regular(path) as file:
            if size <= _WHOLE:
                whole.update(file.read())
                continue
            for place in range(_PLACES + 1):
                file.seek((size - _PIECE) * place // _PLACES, os.SEEK_SET)
                whole.update(file.read(_PIECE))
    return whole.hexdigest()[:16]


def _recorded(directory: Path) -> dict[str, str]:
    """Return the hashes in the manifest by file, empty outside the store."""
    try:
        return {name: record.sha256 for name, record in read_manifest(directory).files.items()}
    except DamagedModel:
        return {}
