"""The server process: socket, model, signals, shutdown."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from akunu_py.engine.engine import Engine
from akunu_py.errors import INTERRUPTED, AkunuError, DamagedModel, UsageError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.load.model_files import read_settings
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.http.asgi import Backend, create_app
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.own.client import RunningServer, announce
from akunu_py.text import displayable, say
from akunu_py.types import GenerateOptions, SamplingOptions

_BACKLOG = 128
_KEEP_ALIVE_S = 60  # of a connection between two requests
_MAX_HEADERS = 64 << 10  # bytes
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

    Raises AkunuError if the port is taken, UsageError if it cannot listen for another reason.
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
        if not lost:
            lost.append(AkunuError(_LOST_GPU))
            pool.abandon(lost[0])
            os.kill(os.getpid(), signal.SIGTERM)

    records = RequestRecords(_printer(options), keep_content=options.log_content)
    try:
        say(f"loading {pool.models[0].name} ...", error=True)
        pool.models[0].service()
        names = ", ".join(model.name for model in pool.models)
        backend = Backend(pool, records, options.strict, on_lost_gpu=on_lost_gpu)
        app = create_app(backend, options.access)
        # The application reports errors.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config = uvicorn.Config(
            app,
            http="h11",
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
            _Server(config, ready, pool, records, options.grace_s).run([listening])
    except KeyboardInterrupt:  # during the load, which nothing can interrupt
        exit_without_teardown(INTERRUPTED)
    finally:
        pool.close()
    for error in lost:
        raise error


class _Server(uvicorn.Server):
    """A uvicorn server that does not raise the signal again after shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        ready: str,  # printed once the server accepts connections
        pool: ModelPool,  # closed on shutdown
        records: RequestRecords,
        grace_s: float,
    ) -> None:
        super().__init__(config)
        self._ready, self._pool, self._records, self._grace_s = ready, pool, records, grace_s
        self._finishing: asyncio.Future[object] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say(self._ready, error=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        count = self._records.running + self._records.waiting
        if count and self._grace_s and not self.force_exit:
            answers = "1 answer" if count == 1 else f"{count} answers"
            wait = f"waiting up to {self._grace_s:g} s for {answers}"
            say(f"{wait}; Ctrl-C again ends {'it' if count == 1 else 'them'}", error=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: object) -> None:
        """Shut down after the running requests; at the second signal, cancel them."""
        loop = asyncio.get_running_loop()
        if self.should_exit:
            self.force_exit = True
            loop.call_soon_threadsafe(self._cancel)
            return
        self.should_exit = True
        self._finishing = loop.run_in_executor(None, self._pool.close, self._grace_s)

    def _cancel(self) -> None:
        for task in self.server_state.tasks:
            task.cancel()


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
