"""Replies with model output: streamed or at once, with heartbeats, cancelled on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import Receive, Send

from akunu_py.decoding.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
)
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.serve.dialect.interface import CollectedAnswer, Dialect, Encoder, PreparedRequest
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping, request_error

HEARTBEAT_S = 4.0  # clients and proxies time out after 5 or more

ChoiceEvent = tuple[int, Event]  # choice: the index of the job


class Disconnected(Exception):
    """The client disconnected."""


@dataclass(slots=True)
class RequestHandler:
    """Runs one request. Raises Disconnected; other errors become error replies."""

    prepared: PreparedRequest
    run: Callable[[Job], AsyncGenerator[Event]]  # closing the generator cancels the job
    dialect: Dialect
    request_id: str
    on_event: Callable[[Event], None]  # called with every event
    heartbeat_s: float = HEARTBEAT_S

    async def reply(self, receive: Receive, send: Send) -> int:
        """Send the reply and return its status; call after receiving the request's body."""
        disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            async with contextlib.aclosing(self._events()) as events:
                if self.prepared.encoder is None:
                    return await self._send_collected(_poll(events, disconnected), send)
                return await self._send_stream(self.prepared.encoder, events, disconnected, send)
        finally:
            disconnected.cancel()

    async def _events(self) -> AsyncGenerator[ChoiceEvent]:
        """Yield the events of all jobs. Raises RequestError."""
        for choice, job in enumerate(self.prepared.jobs):
            async with contextlib.aclosing(self.run(job)) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        raise request_error(event.error) from event.error
                    self.on_event(event)
                    if isinstance(event, Finished) and event.reason == "cancelled":
                        raise ServerStopping  # after a disconnect this code does not run
                    if self.prepared.shows_thinking or not isinstance(event, ThinkingDelta):
                        yield choice, event

    async def _send_collected(self, events: AsyncGenerator[ChoiceEvent | None], send: Send) -> int:
        answers = [CollectedAnswer() for _ in self.prepared.jobs]
        try:
            async for choice_event in events:
                if choice_event is not None:
                    answers[choice_event[0]].add(choice_event[1])
            body = self.prepared.build_reply(answers)
        except Disconnected:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets every error
            return await self._send_error(error, send)
        return await send_json(send, 200, body)

    async def _send_error(self, error: Exception, send: Send) -> int:
        failure = request_error(error)
        return await send_json(send, failure.status, self.dialect.error(failure, self.request_id))

    async def _send_stream(
        self,
        encoder: Encoder,
        events: AsyncGenerator[ChoiceEvent],
        disconnected: asyncio.Future[None],
        send: Send,
    ) -> int:
        """Send the status with the first frame, so that an early error has its own status."""
        stream, finished = _Stream(send, self.prepared.media_type), 0
        try:
            async for choice_event in _poll(
                events, disconnected, lambda: stream.last_sent + self.heartbeat_s - time.monotonic()
            ):
                if choice_event is None:
                    await stream.write([encoder.heartbeat()])
                    continue
                choice, event = choice_event
                await stream.write(encoder.encode(event, choice))
                finished += isinstance(event, Finished)
        except Disconnected:
            if finished < len(self.prepared.jobs):
                raise
            return 200  # the client received everything
        except Exception as error:  # noqa: BLE001 - the client gets every error
            if not stream.started:
                return await self._send_error(error, send)
            await stream.write(encoder.fail(request_error(error)))
        await stream.end()
        return 200


class _Stream:
    """A streamed reply."""

    def __init__(self, send: Send, media_type: str) -> None:
        self._media_type = media_type.encode()
        self._send, self.started, self.last_sent = send, False, time.monotonic()

    async def write(self, frames: list[bytes]) -> None:
        if not frames:
            return
        if not self.started:
            self.started = True
            headers = [
                (b"content-type", self._media_type),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(frames)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self.last_sent = time.monotonic()

    async def end(self) -> None:
        await self.write([] if self.started else [b""])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def _poll(
    events: AsyncGenerator[ChoiceEvent],
    disconnected: asyncio.Future[None],
    seconds: Callable[[], float | None] = lambda: None,
) -> AsyncGenerator[ChoiceEvent | None]:
    """Yield events, and None after each timeout of `seconds()`. Raises Disconnected."""
    next_event: asyncio.Future[ChoiceEvent | None] | None = None
    try:
        while True:
            next_event = next_event or asyncio.ensure_future(anext(events, None))
            limit = seconds()
            futures: set[asyncio.Future[Any]] = {next_event, disconnected}
            await asyncio.wait(
                futures,
                timeout=None if limit is None else max(0.0, limit),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if disconnected.done():
                raise Disconnected
            if not next_event.done():
                yield None
                continue
            event, next_event = next_event.result(), None
            if event is None:
                return
            yield event
    finally:
        if next_event is not None:
            next_event.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestError):
                await next_event


async def unless_disconnected(waiting: Awaitable[object], receive: Receive) -> None:
    """Wait until `waiting` is done. If the client disconnects, cancel it and raise Disconnected."""
    task = asyncio.ensure_future(waiting)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        task.result()
    finally:
        disconnected.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, value: Mapping[str, Any]) -> int:
    """Send a JSON reply and return its status."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
    return status


async def run_job(
    scheduler: ModelHost, job: Job, *, client: str = "", short: bool = False
) -> AsyncGenerator[Event]:
    """Submit a job and yield its events; the last one is `Finished` or `Failed`.

    Closing the generator cancels the job. Queued events are merged, so a slow client's queue holds
    little more than the text. client, short: see `ModelHost.submit`.
    """
    mailbox = _Mailbox()
    handle = scheduler.submit(job, mailbox.put, client=client, short=short)
    try:
        while True:
            event = await mailbox.get()
            yield event
            if isinstance(event, Finished | Failed):
                return
    finally:
        handle.cancel()


class _Mailbox:
    """A queue of events from the model's thread to the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: list[Event] = []  # used in the event loop only

    def put(self, event: Event) -> None:
        """Add an event from any thread. Raises RuntimeError when the loop is closed."""
        self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        self._events[-1:] = _merged(self._events[-1], event) if self._events else [event]
        self._arrived.set()

    async def get(self) -> Event:
        """Wait for the next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.pop(0)


def _merged(first: Event, second: Event) -> list[Event]:
    """Merge two consecutive events into one if possible."""
    if isinstance(first, PrefillProgress) and isinstance(second, PrefillProgress):
        return [second]
    for kind in (TextDelta, ThinkingDelta, ToolCallArguments):
        if isinstance(first, kind) and isinstance(second, kind):
            return [replace(first, text=first.text + second.text)]
    return [first, second]
