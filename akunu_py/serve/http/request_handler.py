"""Replies with model output: streamed or at once, with heartbeats, cancelled on disconnect."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send

from akunu_py.engine.events import Event, Failed, Finished, ThinkingDelta, append_event
from akunu_py.engine.host import ModelHost
from akunu_py.engine.job import Job, JobHandle
from akunu_py.serve.dialect.bodies import MAX_BYTES
from akunu_py.serve.dialect.interface import CollectedAnswer, Encoder, PreparedRequest
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping, request_error

HEARTBEAT_S = 4.0  # clients and proxies time out after 5 or more

ChoiceEvent = tuple[int, Event]  # choice: the index of the job
Result = TypeVar("Result")


class RequestHandler:
    """Replies to one request. Raises ClientDisconnect."""

    def __init__(self, receive: Receive, send: Send, heartbeat_s: float) -> None:
        self._receive, self._send, self._heartbeat_s = receive, send, heartbeat_s
        self._encoder: Encoder  # set by `begin`
        self._streams = False
        self._started = False  # the first frame of the stream was sent
        self._last_sent = 0.0  # monotonic seconds
        self._disconnected: asyncio.Future[None] | None = None  # watched once the body arrived

    def begin(self, encoder: Encoder, *, streams: bool) -> None:
        """Set the encoder of the reply. streams: send heartbeats from now on."""
        self._encoder, self._streams, self._last_sent = encoder, streams, time.monotonic()

    async def wait(self, waiting: Awaitable[Result]) -> Result:
        """Wait for a result with heartbeats; cancel it if the client disconnects.

        Call after receiving the request's body.
        """
        if self._disconnected is None:
            self._disconnected = asyncio.ensure_future(_wait_for_disconnect(self._receive))
        task = asyncio.ensure_future(waiting)
        try:
            while not task.done():
                limit = self._next_beat_s() if self._streams else None
                await asyncio.wait(
                    (task, self._disconnected), timeout=limit, return_when=asyncio.FIRST_COMPLETED
                )
                if self._disconnected.done() and not task.done():
                    raise ClientDisconnect
                if self._streams and not task.done() and not self._next_beat_s():
                    self._encoder.heartbeat()
                    await self._write(self._encoder.take())
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Stop watching for a disconnect."""
        if self._disconnected is not None:
            self._disconnected.cancel()

    async def reply(
        self,
        prepared: PreparedRequest | Mapping[str, Any],
        run: RunJob,
        on_event: Callable[[Event], None],
    ) -> int:
        """Run the jobs, send the reply and return its status. on_event: called with every event.

        The status of a stream is sent with its first frame, so an early error has its own status.
        """
        if not isinstance(prepared, PreparedRequest):
            return await send_json(self._send, 200, prepared)
        encoder, finished = self._encoder, 0
        prepared.configure(encoder)
        answers = [CollectedAnswer() for _ in prepared.jobs]
        try:
            async with contextlib.aclosing(_run_jobs(prepared, run, on_event)) as events:
                while finished < len(prepared.jobs):
                    choice, event = await self.wait(anext(events))
                    if self._streams:
                        encoder.add(event, choice)
                        await self._write(encoder.take())
                    else:
                        answers[choice].add(event)
                    finished += isinstance(event, Finished)
            body = {} if self._streams else encoder.whole(answers)
        except ClientDisconnect:
            if not self._streams or finished < len(prepared.jobs):
                raise
            return 200  # the client received everything
        if not self._streams:
            return await send_json(self._send, 200, body)
        await self._write(b"", last=True)
        return 200

    async def fail(self, error: RequestError, body: Mapping[str, Any]) -> int:
        """Send an error, at the end of the stream if it began, and return the status."""
        if not self._started:
            return await send_json(self._send, error.status, body)
        self._encoder.fail(error, body)
        await self._write(self._encoder.take(), last=True)
        return 200

    def _next_beat_s(self) -> float:
        return max(0.0, self._last_sent + self._heartbeat_s - time.monotonic())

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not data and not last:
            return
        if not self._started:
            self._started = True
            headers = [
                (b"content-type", self._encoder.media_type.encode()),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self._last_sent = time.monotonic()


async def _run_jobs(
    prepared: PreparedRequest, run: RunJob, on_event: Callable[[Event], None]
) -> AsyncGenerator[ChoiceEvent]:
    """Run the jobs concurrently to share passes; yield events. Raises RequestError."""
    async with contextlib.AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(run(job, short=prepared.short, idle=prepared.idle))
            for job in prepared.jobs
        ]
        for choice, events in enumerate(streams):
            thinking = ""
            async for event in events:
                if isinstance(event, Failed):
                    raise request_error(event.error) from event.error
                on_event(event)
                if isinstance(event, ThinkingDelta):
                    thinking += event.text
                elif isinstance(event, Finished) and thinking:
                    tokens = prepared.count_tokens(thinking)
                    event = replace(
                        event, thinking_tokens=min(tokens, event.stats.generated_tokens)
                    )
                if isinstance(event, Finished) and event.reason == "cancelled":
                    if prepared.idle:
                        raise RequestError("another request needs the model", 503)
                    raise ServerStopping  # after a disconnect this code does not run
                if prepared.shows_thinking or not isinstance(event, ThinkingDelta):
                    yield choice, event


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, value: Mapping[str, Any]) -> int:
    """Send a JSON reply and return its status."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
    return status


@contextlib.asynccontextmanager
async def run_job(
    host: ModelHost, job: Job, on_submit: Callable[[JobHandle], object], **options: Any
) -> AsyncGenerator[AsyncIterator[Event]]:
    """Run a job while the block runs; yield its events, up to `Finished` or `Failed`.

    Queued events are merged, so a slow client's queue holds little more than the text.
    options: see `ModelHost.submit`.
    """
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    queued: list[Event] = []  # used in the event loop only

    def add(event: Event) -> None:
        append_event(queued, event)
        arrived.set()

    def put(event: Event) -> None:
        """Add an event from the model's thread. Raises RuntimeError when the loop is closed."""
        loop.call_soon_threadsafe(add, event)

    async def events() -> AsyncIterator[Event]:
        ended = False
        while not ended:
            while not queued:
                arrived.clear()
                await arrived.wait()
            event = queued.pop(0)
            ended = isinstance(event, Finished | Failed)
            yield event

    handle = host.submit(job, put, **options)
    on_submit(handle)
    try:
        yield events()
    finally:
        handle.cancel()


RunJob = Callable[..., contextlib.AbstractAsyncContextManager[AsyncIterator[Event]]]

_TIMEOUT_S = 60.0
_COMPRESSIONS = ("gzip", "x-gzip", "deflate")


async def read_body(request: Request) -> bytes:
    """Return the body. Raises ClientDisconnect; RequestError if it is too large, slow or damaged.

    The rest of a large body is received and dropped: clients that cannot send it see no reply.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", *_COMPRESSIONS):
        raise RequestError(
            f"Content-Encoding {encoding[:100]!r} is not supported; use gzip or deflate", 415
        )
    data, received = bytearray(), 0
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            async for part in request.stream():
                received += len(part)
                if received <= MAX_BYTES:
                    data += part
    except TimeoutError:
        raise RequestError(f"request body did not arrive within {_TIMEOUT_S:g} seconds") from None
    if received > MAX_BYTES:
        raise _too_large()
    whole = bytes(data)
    if encoding not in _COMPRESSIONS:
        return whole
    return await run_in_threadpool(_decompress, whole, encoding)


def _decompress(data: bytes, encoding: str) -> bytes:
    """Return a compressed body. Raises RequestError if it is damaged or too large."""
    stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # finds the format by the header
    with contextlib.suppress(zlib.error):
        found = stream.decompress(data, MAX_BYTES + 1)
        if len(found) > MAX_BYTES:
            raise _too_large(" after decompression")
        if stream.eof and not stream.unused_data:
            return found
    raise RequestError(f"request body is not valid {encoding} data")


def _too_large(when: str = "") -> RequestError:
    return RequestError(f"request body exceeds {MAX_BYTES >> 20} MiB{when}", 413)
