"""A worker's process as rank 0 sees it: messages, heartbeat, equal files and versions.

mlx.launch's own class starts it, locally or over ssh. Messages are lines on stdin and stdout; see
`partition_worker`.
"""

import contextlib
import json
import platform
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mlx._distributed_utils.launch import RemoteProcess

from akunu_py.engine.hosts.hostfile import LOCALHOST, SSH_FAILED, Hosts
from akunu_py.models.load.safetensors import files_digest
from akunu_py.models.store.model_store import StoredModel
from akunu_py.version import __version__, package_version

MESSAGE_PREFIX = "@akunu "  # prefix of messages
_HEARTBEAT = "."
_LAST_LINES = 20
_LAST_OUTPUT_TIMEOUT = 3.0  # seconds to read the output of an ended process


class RankProcess:
    """The process of one rank."""

    def __init__(self, hosts: Hosts, rank: int, arguments: dict[str, Any]) -> None:
        self.host = hosts.names[rank]
        self.label = hosts.label(rank)
        command = ["-P", "-m", "akunu_py.engine.hosts.partition_worker", json.dumps(arguments)]
        python = hosts.env.get("AKUNU_PYTHON", sys.executable)
        env = [f"{name}={value}" for name, value in hosts.env.items()]
        self._remote = RemoteProcess(rank, self.host, python, None, hosts.files, env, command)
        self._process = self._remote.process
        self.pid = int(self._process.pid)  # of the rank's own process, or of ssh
        self._messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self._errors: deque[str] = deque(maxlen=_LAST_LINES)
        self._pidfile = ""
        self.last_message_at = time.monotonic()
        self._readers = [
            threading.Thread(target=read, name=f"rank {rank}", daemon=True)
            for read in (self._read_messages, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def send(self, **message: Any) -> None:
        """Send a line. Ignores a closed pipe, which `exit_reason` explains."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the next message, None on timeout."""
        with contextlib.suppress(Empty):
            return self._messages.get(timeout=seconds)
        return None

    def exit_reason(self) -> str:
        """Return why the process ended, "" while it runs."""
        code = self._process.poll()
        if code is None:
            return ""
        deadline = time.monotonic() + _LAST_OUTPUT_TIMEOUT
        for reader in self._readers:  # a child of ssh may keep a pipe open
            reader.join(max(0.0, deadline - time.monotonic()))
        last_error = next((line for line in reversed(self._errors) if "[ring]" not in line), "")
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        reason = f"ended with code {code}"
        if code == SSH_FAILED and self.host != LOCALHOST:
            reason = "was killed, or the network is gone" if self._pidfile else "cannot be reached"
        return f"{reason}{f': {last_error}' if last_error else ''}"

    def close(self) -> None:
        """Close the process's stdin, which makes it exit."""
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process, even while it is suspended."""
        if self._process.poll() is None and self.host != LOCALHOST:
            # Killing ssh ends the remote process; if that hangs, mlx.launch's `terminate` helps.
            threading.Thread(target=self._kill_remote, daemon=True).start()
        with contextlib.suppress(OSError):
            self._process.kill()

    def wait(self, seconds: float) -> bool:
        """Wait for the process to end, and delete its pidfile. Returns False on timeout."""
        with contextlib.suppress(Exception):
            self._process.wait(seconds)
        if self._process.poll() is None:
            return False
        if self.host == LOCALHOST and self._pidfile:
            Path(self._pidfile).unlink(missing_ok=True)
        return True

    def _kill_remote(self) -> None:
        with contextlib.suppress(Exception):
            self._remote.terminate()

    def _read_messages(self) -> None:
        stream = self._process.stdout
        first = stream.readline().decode(errors="replace")
        self._remote.preprocess_output(first, is_stdout=True)
        self._pidfile = first.strip()
        for line in stream:
            self.last_message_at = time.monotonic()
            text = line.decode(errors="replace").strip()
            if text.startswith(MESSAGE_PREFIX):
                with contextlib.suppress(ValueError):
                    self._messages.put(json.loads(text.removeprefix(MESSAGE_PREFIX)))
            elif self.host != LOCALHOST and text not in ("", _HEARTBEAT):
                self._errors.append(text[:300])  # ssh's terminal has stderr, too

    def _read_errors(self) -> None:
        for line in self._process.stderr:
            self._errors.append(" ".join(line.decode(errors="replace").split())[:300])


def host_fingerprint(model: StoredModel) -> dict[str, str]:
    """Return versions and the files' digest, which must be equal on all hosts, by name."""
    return {
        "akunu": __version__,
        "Python": platform.python_version(),
        **{name: package_version(name) for name in ("mlx", "mlx-lm", "transformers")},
        "the model's files": files_digest(model.path),
    }


def first_difference(local: dict[str, str], remote: dict[str, str]) -> str:
    """Describe the first difference, "" if there is none."""
    for name, value in local.items():
        if remote.get(name) != value:
            return f"{name}: {value} here, {remote.get(name, 'none')} there"
    return ""
