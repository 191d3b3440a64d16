"""The server process: socket, model, signals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from akunu_py.engine.engine import Engine
from akunu_py.errors import AkunuError, DamagedModel, UsageError
from akunu_py.models.load.model_files import read_settings
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.http.asgi import Backend, create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.request_handler import HEARTBEAT_S
from akunu_py.serve.own.discovery import RunningServer, announce
from akunu_py.text import displayable, say
from akunu_py.types import GenerateOptions, SamplingOptions

_BACKLOG = 128
_KEEP_ALIVE_S = 60  # of a connection between two requests
HEADERS_S = 60.0  # for the headers of a request
_MAX_HEADERS = 64 << 10  # bytes
_INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"  # RFC 2518, section 10.1
_PROBES_S = (0.1, HEARTBEAT_S)  # between two interim replies
_LOST_GPU = (
    "macOS ignores the GPU work of this process after earlier GPU errors; start akunu serve again"
)
_LAST_S = 5.0  # for the last bytes of replies after the grace period


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How to serve models."""

    access: AccessRules
    defaults: GenerateOptions
    temperature: float | None = None  # None: recommended by the model's makers
    max_tokens: int | None = None  # None: up to the context length
    grace_s: float = 20.0  # for running requests on shutdown
    quiet: bool = False  # do not log requests
    log_content: bool = False
    strict: bool = False  # refuse unknown fields
    running: RunningServer | None = None  # announces the server to this user's other programs

    def service(self, engine: Engine, name: str) -> Service:
        """Return the service of a loaded model."""
        sampling = model_defaults(engine.path, self.defaults.sampling)
        if self.temperature is not None:
            sampling = replace(sampling, temperature=self.temperature)
        return Service(engine, name, replace(self.defaults, sampling=sampling), self.max_tokens)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises UsageError for an invalid address, AkunuError if the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # asyncio sets TCP_NODELAY only on sockets with an explicit protocol. Without it each chunk
        # waits for up to 40 ms.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, bound.detach())
    except (OSError, OverflowError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            message = (
                f"port {port} of {host} is in use, perhaps by another akunu serve; use --port N"
            )
            raise AkunuError(message) from error
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host}, port {port}: {reason}") from error


def serve(pool: ModelPool, listening: socket.socket, options: ServeOptions, url: str) -> None:
    """Serve until SIGINT or SIGTERM, then until running requests end or the grace period is over.

    The first model is loaded at once, the others by requests. Raises what loading it raises, and
    AkunuError if only another process can use the GPU.
    """
    lost: list[AkunuError] = []

    def on_lost_gpu() -> None:
        """Fail all requests, then shut down as on SIGTERM."""
        if not lost:
            lost.append(AkunuError(_LOST_GPU))
            pool.abandon(lost[0])
            os.kill(os.getpid(), signal.SIGTERM)

    records = RequestRecords(_printer(options), keep_content=options.log_content)
    try:
        pool.models[0].service()
        names = ", ".join(model.name for model in pool.models)
        backend = Backend(pool, records, options.strict, on_lost_gpu=on_lost_gpu)
        app = create_app(backend, options.access)
        # The application reports errors.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(options.grace_s + _LAST_S),
            h11_max_incomplete_event_size=_MAX_HEADERS,
        )
        ready = f"akunu serves {names} at {url} (Ctrl-C to stop)"
        running = options.running
        with announce(running) if running else contextlib.nullcontext():
            _Server(config, ready, lambda: pool.close(options.grace_s)).run([listening])
    finally:
        pool.close()
    for error in lost:
        raise error


class _Protocol(H11Protocol):
    """A connection that is closed if the headers of its next request do not arrive in time.

    A client that closes only its side for writing gets its reply.
    """

    _due: asyncio.TimerHandle | None = None
    _probe: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True to keep the connection open for the reply to a complete request."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["http_version"] == "1.0":  # which has no interim replies
            return False
        cycle.keep_alive = False
        self._check(*_PROBES_S)
        return True

    def _check(self, delay: float, then: float) -> None:
        """Send interim replies before the reply; one of them fails if the client is gone."""
        if not self.cycle.response_started:
            self.transport.write(_INTERIM)
            self._probe = self.loop.call_later(delay, self._check, then, then)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unwatch()
        if self._probe is not None:
            self._probe.cancel()

    def _watch(self) -> None:
        """Start the timer while headers are due, unless it runs."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._due is None:
            self._due = self.loop.call_later(HEADERS_S, self.transport.close)

    def _unwatch(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class _ServerState(ServerState):
    """The state that connections share. The date of a reply is that of its start."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"date", formatdate(usegmt=True).encode())]

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Ignore the headers that uvicorn would renew every second."""


class _Server(uvicorn.Server):
    """A uvicorn server that sleeps while idle.

    It does not raise the signal again after shutdown.
    """

    def __init__(self, config: uvicorn.Config, ready: str, finish: Callable[[], object]) -> None:
        super().__init__(config)
        self.server_state = _ServerState()
        self._exit = asyncio.Event()
        self._ready = ready
        self._finish = finish
        self._finishing: asyncio.Future[object] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop gracefully on the first signal, at once on the second."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Announce the server once it accepts connections."""
        await super().startup(sockets)
        say(self._ready, error=True)

    async def main_loop(self) -> None:
        """Wait for a signal; uvicorn wakes ten times a second to renew the date."""
        await self._exit.wait()

    def _on_signal(self) -> None:
        """Shut down after the running requests; at the second signal, at once."""
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._exit.set()
        self._finishing = asyncio.get_running_loop().run_in_executor(None, self._finish)


def _printer(options: ServeOptions) -> Callable[[RequestRecord], None]:
    def show(record: RequestRecord) -> None:
        with contextlib.suppress(OSError):  # stderr is closed
            if not options.quiet:
                say(f"{time.strftime('%H:%M:%S')} {record.line()}", error=True)
                if record.first_ignored:
                    names = displayable(", ".join(name[:100] for name in record.first_ignored[:20]))
                    say(f"{record.path}: fields without effect: {names}", error=True)
            if options.log_content:
                for mark, text in (("<", record.body), (">", record.answer)):
                    for line in displayable(text).splitlines():
                        say(f"{mark} {line}", error=True)

    return show


_DEFAULT_TEMPERATURE = 1.0  # OpenAI's
_RANGES = {  # accepted values
    "temperature": (0.0, 5.0),
    "top_p": (0.01, 1.0),
    "top_k": (0, 1_000_000),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.5, 2.0),
}


def model_defaults(path: Path, sampling: SamplingOptions) -> SamplingOptions:
    """Apply the model's generation_config.json, as vLLM and transformers do."""
    try:
        found = read_settings(path / "generation_config.json")
    except DamagedModel:  # no such file
        found = {}
    given: dict[str, Any] = {"temperature": _DEFAULT_TEMPERATURE}
    for name, (low, high) in _RANGES.items():
        value = found.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
            given[name] = int(value) if name == "top_k" else float(value)
    return replace(sampling, **given)
