"""A running server, as our own programs ask it: over loopback, with the standard library alone, so
that they start at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from akunu_py.decoding.generate.chat_model import ModelFacts
from akunu_py.errors import AkunuError, ServerGone, UsageError
from akunu_py.serve.own.running import proof, running_servers
from akunu_py.types import LoadOptions

LOOK_S = 0.01  # between two looks at whether an answer is still wanted
END_S = 2.0  # that an answer has to end with what it has
_CONNECT_S = 2.0
_SILENCE_S = 30.0  # a server that is alive says something every few seconds


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """What a server says of its model. fills_in: whether it is known to read behind a cursor."""

    model: ModelFacts
    fills_in: bool

    @property
    def name(self) -> str:
        """Of the model."""
        return self.model.name


class ServerClient:
    """key: what lets us in, "" for nothing. Raises UsageError for what is no address."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError:
            self._host, parts = "", urlsplit("")
        if parts.scheme != "http" or not self._host or parts.path.strip("/") not in ("", "v1"):
            raise UsageError(f"expected a server such as http://127.0.0.1:8012, got {url[:200]!r}")

    def connect(self) -> http.client.HTTPConnection:
        """Raises OSError."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)
        connection.connect()
        connection.sock.settimeout(_SILENCE_S)
        return connection

    def knows(self, token: str) -> bool:
        """Whether what answers there is the server that has this token."""
        challenge = secrets.token_hex(16)
        try:
            health = self._asked("GET", f"/health?challenge={challenge}")
        except AkunuError:
            return False
        return health.get("proof") == proof(token, challenge)

    def facts(self) -> ServedFacts:
        """Of its model. Raises ServerGone, and AkunuError for what it refuses."""
        found = self._asked("POST", "/akunu/model", {})
        try:
            return ServedFacts(ModelFacts(**found["model"], server=self.url), found["fills_in"])
        except (KeyError, TypeError) as error:
            raise AkunuError(f"what answers at {self.url} is another akunu") from error

    def end(self, request: str) -> None:
        """Has the request of that id end with what it has."""
        with contextlib.suppress(AkunuError):
            self._asked("POST", "/akunu/end", {"id": request})

    def answer(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Posts a request whose answer is streamed. Closing it frees the server of it."""
        return Answer(self, path, body)

    def gone(self, error: object) -> ServerGone:
        """Why there is no answer."""
        why = (error.strerror if isinstance(error, OSError) else None) or error
        return ServerGone(f"the server at {self.url} does not answer: {why}")

    def post(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        """The reply. Raises AkunuError where that is an error, OSError, HTTPException."""
        headers = {"connection": "close"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, path, data, headers)
        reply = connection.getresponse()
        if reply.status != 200:
            raise self._refusal(reply.status, reply.read())
        return reply

    def _asked(self, method: str, path: str, body: Any = None) -> Any:
        try:
            with contextlib.closing(self.connect()) as connection:
                return json.loads(self.post(connection, method, path, body).read())
        except (OSError, http.client.HTTPException) as error:
            raise self.gone(error) from error
        except ValueError as error:
            raise AkunuError(f"what answers at {self.url} is not akunu") from error

    def _refusal(self, status: int, data: bytes) -> AkunuError:
        if status == 401:
            return AkunuError(f"{self.url} wants a key; set it in AKUNU_API_KEY")
        try:
            return self.error(json.loads(data)["error"])
        except (KeyError, TypeError, ValueError):
            return AkunuError(f"{self.url} answers with {status}: it is no akunu of this version")

    def error(self, told: Any) -> AkunuError:
        """What the server says went wrong."""
        if told.get("gone"):
            return self.gone(told["message"])
        kind = UsageError if told.get("kind") == "invalid" else AkunuError
        return kind(str(told["message"]))


class Answer:
    """The frames of a streamed answer, as they come; its own thread reads them."""

    def __init__(self, client: ServerClient, path: str, body: Mapping[str, Any]) -> None:
        self._client = client
        self._frames: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._read, args=(path, body), daemon=True).start()

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next frame, None where none comes for so long. Raises what ended the answer."""
        try:
            frame = self._frames.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(frame, Exception):
            raise frame
        if "error" in frame:
            raise self._client.error(frame["error"])
        found: dict[str, Any] = frame
        return found

    def finish(self) -> None:
        """Waits for the end of the stream, behind the last frame: who leaves before is taken for
        one that hung up."""
        with contextlib.suppress(AkunuError):
            self.next(END_S)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            with contextlib.closing(self._client.connect()) as connection:
                self._socket = connection.sock
                if self._closed.is_set():
                    return
                for line in self._client.post(connection, "POST", path, body):
                    if line.startswith(b"data: "):
                        self._frames.put(json.loads(line[6:]))
            end: Exception = self._client.gone("it broke off")
        except AkunuError as error:
            end = error
        except (OSError, http.client.HTTPException, ValueError) as error:
            end = self._client.gone(error)
        self._frames.put(end)


def server_at(url: str, name: str | None, key: str = "") -> tuple[ServerClient, ServedFacts]:
    """The server at an address, whatever it loaded its model with. key: for one that is not this
    user's. Raises UsageError where it has another model than `name`, AkunuError where nothing
    answers."""
    client = ServerClient(url, key)
    for server in running_servers():
        if urlsplit(server.url).netloc == urlsplit(url).netloc and client.knows(server.token):
            client = ServerClient(url, server.token)
    facts = client.facts()
    if name is not None and facts.name != name:
        raise UsageError(f"{url} serves {facts.name}, not {name}; leave out --model, or --server")
    return client, facts


def running_server(model: Path, options: LoadOptions) -> tuple[ServerClient, ServedFacts] | None:
    """The server of this user on this machine that has the model loaded as `options` ask for it,
    None where there is none."""
    for server in running_servers():
        if not server.has(model, options):
            continue
        try:
            client = ServerClient(server.url, server.token)
            if client.knows(server.token):
                facts = client.facts()
                if (options.context or 0) <= facts.model.context_length:
                    return client, facts
        except AkunuError:
            continue
    return None
