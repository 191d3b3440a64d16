"""`akunu chat --hosts`: a server that divides the model, and runs for one chat.

A process cannot connect hosts twice, and `akunu serve` starts itself again where one is lost. What
MLX and other hosts say is kept off the screen, too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time

from akunu_py.commands.serve import KEY_VARIABLE
from akunu_py.errors import AkunuError, ServerGone
from akunu_py.models.store.store import StoredModel
from akunu_py.serve.own.client import ServedFacts, ServerClient
from akunu_py.serve.own.running import running_servers

_LOAD_S = 600.0  # for a model to be loaded, on all hosts
_LOOK_S = 0.1
_END_S = 10.0
_MOST_SAID = 64 << 10  # bytes


class OwnServer:
    """args: of the chat. It serves the last model that was asked for; where it has ended, it is
    started again when somebody asks. `close` ends it, and so does the end of this process, whatever
    that is: its input ends then.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._closing = threading.Event()
        self._args = args
        self._model = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as there are processes

    def have(self, model: StoredModel) -> tuple[ServerClient, ServedFacts]:
        """Where the model is served, and what is to be known of it; waits until it is loaded.

        Raises AkunuError with the reason where it cannot be.
        """
        wanted = model.name if model.manifest is not None else str(model.path.resolve())
        if self._process is None or self._process.poll() is not None or wanted != self._model:
            self._end()
            self._process, self._model = self._start(wanted), wanted
        process, ends = self._process, time.monotonic() + _LOAD_S
        while process.poll() is None and time.monotonic() < ends:
            for server in running_servers():
                client = ServerClient(server.url, server.token)
                if server.process == process.pid and client.knows(server.token):
                    with contextlib.suppress(ServerGone):  # it is about to start again
                        return client, client.facts()
            if self._closing.wait(_LOOK_S):
                raise AkunuError("the chat ends")
        said = self._said() or ["it does not answer"]
        raise AkunuError(said[-1].removeprefix("akunu: "))

    def holds(self) -> str:
        """Which rank holds what, a line each."""
        return "\n".join(line.removeprefix("akunu: ") for line in self._said() if " holds " in line)

    def close(self) -> None:
        """Ends it, with all its ranks."""
        self._closing.set()
        self._end()
        self._output.close()

    def _start(self, model: str) -> subprocess.Popen[bytes]:
        args = self._args
        command = [sys.executable, "-m", "akunu_py", "serve", "--until-eof", "--quiet"]
        command += ["--port", "0", "--grace", "0", "--hosts", args.hosts, "--model", model]
        command += ["--weights", args.weights]
        command += ["--context", str(args.context)] if args.context else []
        command += ["--memory", f"{args.memory / 1e9:.9f}GB"] if args.memory else []
        if args.cache_memory is not None:
            command += ["--cache-memory", f"{args.cache_memory / 1e9:.9f}GB"]
        command += ["--force"] if args.force else []
        command += ["--no-memory"] if args.no_memory else []
        self._output.seek(0)
        self._output.truncate()
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            env=os.environ | {KEY_VARIABLE: secrets.token_hex(16)},  # for nobody but its user
            start_new_session=True,  # what the terminal sends is the chat's
        )

    def _said(self) -> list[str]:
        """The lines on its stderr since it started, or started again."""
        data = os.pread(self._output.fileno(), _MOST_SAID, 0)  # its place in the file is shared
        lines = data.decode(errors="replace").splitlines()
        again = [at for at, line in enumerate(lines) if "starting again" in line]
        return lines[again[-1] + 1 :] if again else lines

    def _end(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
