"""Running servers on this machine, and a client of `akunu serve` for akunu's own programs.

A server announces itself in a private file. This module imports no library.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from akunu_py import paths
from akunu_py.completion.completion_request import CompletionReason
from akunu_py.engine.events import LoadedModelFacts
from akunu_py.errors import AkunuError, NotAkunu, ServerGone, UsageError
from akunu_py.files import read_json, remove_unfinished, write_atomically
from akunu_py.types import LoadOptions
from akunu_py.version import __version__

_POLL_S = 0.01  # between two checks for cancellation
_END_TIMEOUT_S = 2.0  # for an answer to end after `ServerClient.end`
_CONNECT_TIMEOUT_S = 2.0
_READ_TIMEOUT_S = 30.0  # a live server sends a heartbeat every few seconds
_LOAD_TIMEOUT_S = 900.0  # for a server to unload other models and load one
_MAX_BYTES = 64 << 10  # of a file that announces a server


@dataclass(frozen=True, slots=True)
class RunningServer:
    """The contents of a running server's file."""

    url: str  # on this machine
    token: str  # API key of akunu's own clients
    models: dict[str, str]  # directories by name
    weights: str = "auto"
    kv_bits: int | None = None
    version: str = __version__
    process: int = field(default_factory=os.getpid)

    def name_of(self, model: Path, options: LoadOptions) -> str | None:
        """Return the name of a model if the server loads it as in `options`, else None.

        Any context length matches. Options with a memory limit never match.
        """
        expected = LoadOptions(options.weights, self.kv_bits, options.context)
        same = options.weights in ("auto", self.weights) and options == expected
        if not same or self.version != __version__:
            return None
        found = (name for name, path in self.models.items() if path == str(model.resolve()))
        return next(found, None)


def loopback_url(url: str) -> str:
    """Return the URL that this machine uses to reach a server; replaces wildcard addresses."""
    for wildcard, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(wildcard, loopback)
    return url


def proof(token: str, challenge: str) -> str:
    """Return the answer to a challenge, which proves the knowledge of the token."""
    return hmac.new(token.encode(), challenge.encode(), hashlib.sha256).hexdigest()


@contextlib.contextmanager
def announce(server: RunningServer) -> Iterator[None]:
    """Announce a server to this user's programs while the block runs; ignore write errors."""
    directory = paths.servers_dir()
    file = directory / f"{server.url.rpartition(':')[2]}.json"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_unfinished(file)
        write_atomically(file, json.dumps(asdict(server)).encode())
    try:
        yield
    finally:
        if _read(file) == server:
            with contextlib.suppress(OSError):
                file.unlink()


def running_servers() -> list[RunningServer]:
    """Return the running servers; delete the files of those that were killed."""
    servers = []
    for file in sorted(paths.servers_dir().glob("[!.]*.json")):  # not those being written
        server = _read(file)
        if server is not None and _is_running(server.process):
            servers.append(server)
        else:
            with contextlib.suppress(OSError):
                file.unlink()
    return servers


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, TypeError):
        return False
    return True


def _read(file: Path) -> RunningServer | None:
    try:
        return RunningServer(**read_json(file, _MAX_BYTES))
    except (OSError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The model of a server, and its capabilities."""

    model: LoadedModelFacts
    supports_fim: bool  # knows a fill-in-the-middle format

    @property
    def name(self) -> str:
        return self.model.name


class ServerClient:
    """A client of one model of a server. Raises UsageError for an invalid address."""

    def __init__(self, url: str, key: str = "", model: str = "") -> None:
        """model: its name; "": the server's first."""
        self.url, self._key, self._model = url, key, model
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host, parts = "", urlsplit("")
        if parts.scheme != "http" or not self._host or parts.path.strip("/") not in ("", "v1"):
            raise UsageError(f"expected a server such as http://127.0.0.1:8012, got {url[:200]!r}")

    def connect(self, read_timeout_s: float = _READ_TIMEOUT_S) -> http.client.HTTPConnection:
        """Open a connection. Raises OSError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        connection.connect()
        connection.sock.settimeout(read_timeout_s)
        return connection

    def has_token(self, token: str) -> bool:
        """Return True if the server at the address has this token."""
        challenge = secrets.token_hex(16)
        try:
            health = self._request("GET", f"/health?challenge={challenge}")
        except AkunuError:
            return False
        return health.get("proof") == proof(token, challenge)

    def facts(self) -> ServerFacts:
        """Return the model's facts, once it is loaded. Raises ServerGone, AkunuError."""
        reply = self._request("POST", "/akunu/model", {"model": self._model}, _LOAD_TIMEOUT_S)
        try:
            facts = LoadedModelFacts(**reply["model"] | {"server": self.url})
            return ServerFacts(facts, reply["fills_in"])
        except (KeyError, TypeError) as error:
            raise AkunuError(f"the server at {self.url} has another version of akunu") from error

    def models(self) -> list[dict[str, Any]]:
        """Return the server's models as `/v1/models` lists them. Raises AkunuError."""
        return self._request("GET", "/v1/models")["data"]

    def is_busy(self) -> bool:
        """Return True if the server has requests; False if it does not respond."""
        with contextlib.suppress(AkunuError):
            return bool(self._request("GET", "/akunu/status", None, _CONNECT_TIMEOUT_S)["requests"])
        return False

    def frames(
        self, path: str, body: Mapping[str, Any], end_reason: Callable[[], CompletionReason | None]
    ) -> Generator[dict[str, Any]]:
        """Post a request and yield the frames of its answer, {} while there are none.

        end_reason: polled. "cancelled" drops the answer; any other reason ends it with the text
        so far. Closing the generator cancels the answer. Raises ServerGone, AkunuError.
        """
        deadline, request = 0.0, {"id": secrets.token_hex(8), "model": self._model}
        with contextlib.closing(AnswerStream(self, path, {**request, **body})) as answer:
            while True:
                reason = end_reason()
                if reason == "cancelled" or (deadline and time.monotonic() > deadline):
                    return
                if reason and not deadline:
                    deadline = time.monotonic() + _END_TIMEOUT_S
                    with contextlib.suppress(AkunuError):
                        self._request("POST", "/akunu/end", request)
                frame = answer.next(_POLL_S)
                if "Finished" in frame or "Completion" in frame:
                    # To the server, a close before the end of the stream is a disconnect.
                    with contextlib.suppress(AkunuError):
                        answer.next(_END_TIMEOUT_S)
                    yield frame
                    return
                yield frame

    def unreachable(self, error: object) -> ServerGone:
        """Return the error for a server that does not respond."""
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return ServerGone(f"the server at {self.url} does not answer: {reason}")

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """Send a request. Raises OSError, HTTPException, and AkunuError for an error reply."""
        headers = {"connection": "close"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise self._status_error(reply.status, reply.read())
        return reply

    def _request(
        self, method: str, path: str, body: Any = None, read_timeout_s: float = _READ_TIMEOUT_S
    ) -> Any:
        try:
            with contextlib.closing(self.connect(read_timeout_s)) as connection:
                return json.loads(self.send(connection, method, path, body).read())
        except (OSError, http.client.HTTPException) as error:
            raise self.unreachable(error) from error
        except ValueError as error:
            raise NotAkunu(f"the program at {self.url} is not an akunu server") from error

    def _status_error(self, status: int, data: bytes) -> AkunuError:
        if status == 401:
            return AkunuError(f"{self.url} requires an API key; set AKUNU_API_KEY")
        try:
            return self.reported_error(json.loads(data)["error"])
        except (KeyError, TypeError, ValueError):
            return NotAkunu(
                f"the program at {self.url} is not an akunu server; it returned HTTP {status}"
            )

    def reported_error(self, report: Any) -> AkunuError:
        """Return the exception for an error reply of the server."""
        if report.get("gone"):
            return self.unreachable(report["message"])
        kind = UsageError if report.get("status") == 400 else AkunuError
        return kind(str(report["message"]))


class AnswerStream:
    """The frames of a streamed answer, received in a background thread."""

    def __init__(self, client: ServerClient, path: str, body: Mapping[str, Any]) -> None:
        self._client = client
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._receive, args=(path, body), daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any]:
        """Return the next frame, or {} after a timeout. Raises ServerGone, AkunuError."""
        try:
            frame = self._frames.get(timeout=seconds)
        except queue.Empty:
            return {}
        if isinstance(frame, Exception):
            raise frame
        if "error" in frame:
            raise self._client.reported_error(frame["error"])
        return frame

    def close(self) -> None:
        """End the answer if it has not ended."""
        self._closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _receive(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            with contextlib.closing(self._client.connect()) as connection:
                self._socket = connection.sock
                if self._closed.is_set():
                    return
                for line in self._client.send(connection, "POST", path, body):
                    if line.startswith(b"data: "):
                        self._frames.put(json.loads(line[6:]))
            end: Exception = self._client.unreachable("the connection was closed")
        except AkunuError as error:
            end = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            end = self._client.unreachable(error)
        self._frames.put(end)


def server_at(url: str, name: str | None, key: str = "") -> tuple[ServerClient, ServerFacts]:
    """Return the server at an address, with its model. key: the API key, if required.

    Raises UsageError if it has another model than `name`, AkunuError if it does not respond.
    """
    client = ServerClient(url, key, name or "")
    for server in running_servers():
        if urlsplit(server.url).netloc == urlsplit(url).netloc and client.has_token(server.token):
            client = ServerClient(url, server.token, name or "")
    facts = client.facts()
    if name is not None and facts.name != name:
        raise UsageError(f"{url} serves {facts.name}, not {name}; leave out --model or --server")
    return client, facts


def matching_server(model: Path, options: LoadOptions) -> tuple[ServerClient, ServerFacts] | None:
    """Return this user's server on this machine with the model loaded as in `options`, or None."""
    for server in running_servers():
        name = server.name_of(model, options)
        if name is None:
            continue
        try:
            client = ServerClient(server.url, server.token, name)
            if client.has_token(server.token):
                facts = client.facts()
                if (options.context or 0) <= facts.model.context_length:
                    return client, facts
        except AkunuError:
            continue
    return None
