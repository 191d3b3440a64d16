"""The server as a process: its socket, its model's thread, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import uvicorn

from akunu_py.decoding.generate.events import Event
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.scheduling.scheduler import Scheduler, State
from akunu_py.errors import AkunuError, UsageError
from akunu_py.serve.app import Backend, create_app
from akunu_py.serve.defaults import model_defaults
from akunu_py.serve.engine_thread import events_of
from akunu_py.serve.guard import Access
from akunu_py.serve.own.running import RunningServer, announced
from akunu_py.serve.record import Record, Records
from akunu_py.serve.service import Service
from akunu_py.text import displayable, say
from akunu_py.types import GenerateOptions

_BACKLOG = 128
_KEEP_ALIVE_S = 60.0  # that a connection stays open between two requests
_MAX_HEADERS = 64 << 10  # bytes
_LAST_S = 5.0  # for the last bytes of replies, when the time to finish is over


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """names: what requests may call the model, its own first. defaults: how answers are made;
    temperature: None for what the model's makers say; max_tokens: None for all that fit. grace_s:
    for running answers, at the end. quiet: no line for each request. log_content: what was said,
    too. running: how this user's other programs find it."""

    names: tuple[str, ...]
    access: Access
    defaults: GenerateOptions
    temperature: float | None = None
    max_tokens: int | None = None
    grace_s: float = 20.0
    quiet: bool = False
    log_content: bool = False
    running: RunningServer | None = None


class ServedModel:
    """A scheduler as the application's backend sees it."""

    def __init__(self, scheduler: Scheduler, options: ServeOptions) -> None:
        self._scheduler, self._options = scheduler, options
        self.names = options.names
        self._service: Service | None = None
        self._description: dict[str, Any] = {}
        scheduler.on_state = self._on_state

    def _on_state(self, state: State) -> None:
        if state == "unloaded":  # which a reference would prevent
            self._service = None

    def service(self) -> Service:
        """Waits for the model, where it is not loaded. Raises what loading it raises."""
        engine = self._scheduler.engine or self._scheduler.ask(lambda engine: engine).result()
        if self._service is None or self._service.engine is not engine:
            defaults = self._options.defaults
            sampling = model_defaults(engine.path, defaults.sampling)
            if self._options.temperature is not None:
                sampling = replace(sampling, temperature=self._options.temperature)
            defaults = replace(defaults, sampling=sampling)
            self._service = Service(engine, self._options.names, defaults, self._options.max_tokens)
        return self._service

    def description(self) -> dict[str, Any]:
        """Of the model, as clients list it; waits for it the first time only."""
        self._description = self._description or self.service().description
        return self._description

    def backend(self, records: Records) -> Backend:
        """For the application."""
        return Backend(self.names, self.service, self.description, self.run, records)

    def run(self, job: Job, client: str, short: bool) -> AsyncGenerator[Event]:
        """The events of a job; closing it cancels the job."""
        return events_of(self._scheduler, job, client=client, short=short)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, and takes connections. Raises UsageError for what is no host of this
    machine, AkunuError where the port is taken."""
    try:
        family, *_, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # asyncio switches Nagle's algorithm off, which would hold back each piece of an answer for
        # up to 40 ms, only on sockets that are told to be TCP's.
        return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, bound.detach())
    except (OSError, OverflowError, UnicodeError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise AkunuError(
                f"port {port} of {host} is taken, perhaps by another akunu serve; "
                "choose another: --port N"
            ) from error
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen at {host}, port {port}: {reason}") from error


def serve(scheduler: Scheduler, listening: socket.socket, options: ServeOptions, url: str) -> None:
    """Serves until SIGINT or SIGTERM; then the answers that are running have some time to end.

    scheduler: not started. Raises what loading the model raises.
    """
    model = ServedModel(scheduler, options)
    records = Records(_printer(options), keep_content=options.log_content)
    scheduler.start()
    try:
        name = model.service().name
        app = create_app(model.backend(records), options.access)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # what fails, the app tells
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=int(_KEEP_ALIVE_S),
            timeout_graceful_shutdown=int(options.grace_s + _LAST_S),
            h11_max_incomplete_event_size=_MAX_HEADERS,
        )
        ready = f"akunu serves {name} at {url} (Ctrl-C ends it)"
        running = options.running
        with announced(running) if running else contextlib.nullcontext():
            _Server(config, ready, lambda: scheduler.close(options.grace_s)).run([listening])
    finally:
        scheduler.close()


class _Server(uvicorn.Server):
    """uvicorn's, with other manners at the end: a signal does not end the process again."""

    def __init__(self, config: uvicorn.Config, ready: str, finish: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready
        self._finish = finish
        self._finishing: asyncio.Future[object] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first asks to end, a second does it at once."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            loop.add_signal_handler(number, self._asked_to_end)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says that it is ready when it is."""
        await super().startup(sockets)
        say(self._ready, error=True)

    def _asked_to_end(self) -> None:
        if self.should_exit:
            self.force_exit = True
            return
        self.should_exit = True
        self._finishing = asyncio.get_running_loop().run_in_executor(None, self._finish)


def _printer(options: ServeOptions) -> Callable[[Record], None]:
    def show(record: Record) -> None:
        with contextlib.suppress(OSError):  # nobody reads it any more
            if not options.quiet:
                say(f"{time.strftime('%H:%M:%S')} {record.line()}", error=True)
            if options.log_content:
                for mark, text in (("<", record.asked), (">", record.said)):
                    for line in displayable(text).splitlines():
                        say(f"{mark} {line}", error=True)

    return show
