"""Servers that commands use: a running one (`--server`), or a child process."""

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from akunu_py.arguments import add_hosts, add_loading, as_arguments
from akunu_py.commands.serve import KEY_VARIABLE
from akunu_py.errors import AkunuError, ServerGone
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.parser import add_values
from akunu_py.serve.own.client import (
    ServerClient,
    ServerFacts,
    matching_server,
    running_servers,
    server_at,
)
from akunu_py.types import LoadOptions

_LOAD_S = 600.0  # for loading a model on all hosts
_POLL_S = 0.1
_END_S = 30.0  # for a child process to exit
_MAX_STDERR = 64 << 10  # bytes
# Only this process needs the server, whatever the settings of a service say.
_SERVE = ["-m", "akunu_py", "serve", "--host", "127.0.0.1", "--until-eof", "--quiet"]

Found = TypeVar("Found")


def add_server(parser: argparse.ArgumentParser) -> None:
    text = "Server to use. auto: a running akunu serve with the model, if any; off: load the "
    text += "model in this process; URL: this server (default: auto, or as in the settings)"
    add_values(parser, ("--server", "auto|off|URL", str, None, text))


def server_for(
    choice: str, requested: str | None, model: StoredModel | None, loading: LoadOptions
) -> tuple[ServerClient, ServerFacts] | None:
    """Return the server to use instead of loading `model`, or None.

    requested: the model that a server at an address must have, None for any. Raises AkunuError if
    no server responds at the address.
    """
    if choice == "off":
        return None
    if choice == "auto":
        return matching_server(model.path, loading) if model else None
    with contextlib.suppress(AkunuError):  # the server may have a model that is not installed
        requested = requested and model_store.resolve(requested).name
    return server_at(choice, requested, os.environ.get(KEY_VARIABLE, ""))


def is_address(choice: str) -> bool:
    return choice not in ("auto", "off")


def model_name_at(url: str, requested: str | None) -> str:
    """Return the name of the model that a server has. Raises AkunuError as `server_for`."""
    found = server_for(url, requested, None, LoadOptions())
    assert found is not None
    return found[1].name


class ServeProcess:
    """`akunu serve` as a child process, which also exits when this process ends."""

    def __init__(self, options: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `stop`
        self._process = subprocess.Popen(
            [sys.executable, *_SERVE, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._output,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C does not reach the server
        )
        self.id = self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait_for(self, find: Callable[[], Found | None], closing: threading.Event) -> Found:
        """Poll `find` until it returns a server. Raises AkunuError if the process exits first."""
        deadline = time.monotonic() + _LOAD_S
        while self.running and time.monotonic() < deadline:
            if (found := find()) is not None:
                return found
            if closing.wait(_POLL_S):
                raise AkunuError("the chat is closing")
        lines = self.stderr_lines() or ["the server does not respond"]
        raise AkunuError(lines[-1].removeprefix("akunu: "))

    def stderr_lines(self) -> list[str]:
        """Return the lines on stderr since the server started, or restarted itself."""
        data = os.pread(self._output.fileno(), _MAX_STDERR, 0)  # the child shares the file's offset
        lines = data.decode(errors="replace").splitlines()
        restarts = [at for at, line in enumerate(lines) if "restarting" in line]
        return lines[restarts[-1] + 1 :] if restarts else lines

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


class HostsServer:
    """The server of `akunu chat --hosts`, which splits the model over several hosts.

    A process cannot connect to hosts twice, so `akunu serve` restarts itself when a host is lost,
    and another model needs another process. args: options of `akunu chat`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._closing = threading.Event()
        options = as_arguments(args, add_loading, add_hosts)
        self._options = [*options, "--port", "0", "--grace", "0"]
        self._options += ["--no-answer-cache"] if args.no_answer_cache else []
        self._model = ""
        self._process: ServeProcess | None = None

    def connect(self, model: StoredModel) -> tuple[ServerClient, ServerFacts]:
        """Return a client of the server, restarted for another model. Raises AkunuError."""
        name = model.reference
        if self._process is None or not self._process.running or name != self._model:
            self._stop()
            # Clients use the token in the server's file instead of this key.
            key = {KEY_VARIABLE: secrets.token_hex(16)}
            self._process = ServeProcess([*self._options, "--model", name], key)
            self._model = name
        process = self._process

        def find() -> tuple[ServerClient, ServerFacts] | None:
            for server in running_servers():
                client = ServerClient(server.url, server.token)
                if server.process == process.id and client.has_token(server.token):
                    with contextlib.suppress(ServerGone):  # it restarts
                        return client, client.facts()
            return None

        client, served = process.wait_for(find, self._closing)
        partitions = [line for line in process.stderr_lines() if " holds " in line]
        lines = [line.removeprefix("akunu: ") for line in partitions]
        note = "\n".join(filter(None, (*lines, served.model.note)))
        return client, replace(served, model=replace(served.model, server="", note=note))

    def close(self) -> None:
        self._closing.set()
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
