"""A home directory whose programs are watched for connections.

Python's audit events refuse and log each outward connection. strace, if available, logs the system
calls of native code too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.paths import ROOT

# Python runs a module of this name before anything else. Audit events cannot be worked around from
# Python code; sockets of the system's own (AF_UNIX: tmux, clipboards) lead nowhere outside.
WATCH = """
import os, sys
def watch(event, arguments):
    outward = event in ("socket.getaddrinfo", "socket.gethostbyname") or (
        event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind")
        and isinstance(arguments[1], tuple)
    )
    if outward:
        with open(os.environ["AKUNU_WATCH"], "a") as log:
            log.write(f"{event} {arguments[1:]} {sys.argv}\\n")
        raise OSError(101, "the network is refused")
sys.addaudithook(watch)
"""
_CALLS = "trace=connect,bind,sendto,sendmsg,sendmmsg"
_STRACE = ("strace", "--follow-forks", "--seccomp-bpf", "--output-append-mode", "-e", _CALLS)


class Home:
    """Directories of a user, with `own` environment variables and the `command` of akunu."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._log, self._calls = directory / "attempts", directory / "calls"
        watch = directory / "watch"
        watch.mkdir()
        (watch / "sitecustomize.py").write_text(WATCH)
        (directory / "tmp").mkdir()
        self.own = {
            "HOME": str(directory),
            "XDG_DATA_HOME": str(directory / "data"),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "XDG_CONFIG_HOME": str(directory / "config"),
            "TMPDIR": str(directory / "tmp"),
            "PYTHONPATH": f"{watch}:{ROOT}",
            "AKUNU_WATCH": str(self._log),
        }
        self._watched = [*_STRACE, f"--output={self._calls}"] if can_trace() else []
        self.command = [*self._watched, sys.executable, "-m", "akunu_py"]

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a program in its own process group."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "TRANSFORMERS_", "XDG_", "PIP_"))
        }
        return subprocess.Popen(
            [*self._watched, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=inherited | self.own,
            cwd=self.directory,
            umask=0o022,
            start_new_session=True,
        )

    def run(self, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run a program to its end."""
        with self.start(*words) as process:
            out, err = process.communicate(data, timeout=180)
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def akunu(self, *words: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return self.run(sys.executable, "-m", "akunu_py", *words, data=data)

    @property
    def attempts(self) -> list[str]:
        """Every attempted outward connection."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        seen = self._log.read_text().splitlines() if self._log.exists() else []
        return [*seen, *(line for line in calls if "AF_INET" in line)]


@cache
def can_trace() -> bool:
    """Return whether strace is installed and permitted."""
    if shutil.which("strace") is None:
        return False
    done = subprocess.run([*_STRACE, "--output=/dev/null", "true"], capture_output=True)
    return done.returncode == 0
