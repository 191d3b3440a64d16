"""The reply to a request that the engine works for: streamed or whole, kept alive while there is
nothing to send, and given up as soon as its client is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Send

from akunu_py.decoding.generate.events import Ended, Event, Failed
from akunu_py.decoding.scheduling.job import Job
from akunu_py.serve.dialect import Dialect, Encoder, Prepared, WholeAnswer
from akunu_py.serve.errors import RequestError, Stopping, request_error

HEARTBEAT_S = 4.0  # clients and what lies between give up after 5 or more

Run = Callable[[Job], AsyncGenerator[Event]]  # closing it cancels the job


class ClientGone(Exception):
    """Nobody reads the reply any more."""


@dataclass(slots=True)
class Answering:
    """One request while it is answered. on_event: is told of all that happens.

    Raises ClientGone; everything else becomes an error in the dialect's shape.
    """

    prepared: Prepared
    run: Run
    dialect: Dialect
    request_id: str
    on_event: Callable[[Event], None]
    heartbeat_s: float = HEARTBEAT_S

    async def reply(self, receive: Receive, send: Send) -> int:
        """Sends the reply, whose body was read before. Returns its status."""
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            async with contextlib.aclosing(self._events()) as events:
                waited = _Waited(events, gone)
                if self.prepared.encoder is None:
                    return await self._send_whole(waited, send)
                return await self._send_stream(self.prepared.encoder, waited, send)
        finally:
            gone.cancel()

    async def _events(self) -> AsyncGenerator[tuple[int, Event]]:
        """The events of all jobs, each with the number of its job. Raises RequestError."""
        for choice, job in enumerate(self.prepared.jobs):
            async with contextlib.aclosing(self.run(job)) as events:
                async for event in events:
                    if isinstance(event, Failed):
                        raise request_error(event.error) from event.error
                    self.on_event(event)
                    if isinstance(event, Ended) and event.reason == "cancelled":
                        # Not by the client: then nobody would be here to read it.
                        raise Stopping
                    yield choice, event

    async def _send_whole(self, events: _Waited, send: Send) -> int:
        answers = [WholeAnswer() for _ in self.prepared.jobs]
        try:
            async for choice, event in events:
                answers[choice].add(event)
            body = self.prepared.whole(answers)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must read it
            return await self._send_error(request_error(error), send)
        return await send_json(send, 200, body)

    async def _send_error(self, error: RequestError, send: Send) -> int:
        return await send_json(send, error.status, self.dialect.error(error, self.request_id))

    async def _send_stream(self, encoder: Encoder, events: _Waited, send: Send) -> int:
        """The status is sent with the first frame, so that what fails at once has its own."""
        stream, ended = _Stream(send), 0
        try:
            while True:
                due = max(0.0, stream.last_sent + self.heartbeat_s - time.monotonic())
                try:
                    choice, event = await events.next(due)
                except TimeoutError:
                    await stream.write([encoder.heartbeat()])
                    continue
                except StopAsyncIteration:
                    break
                await stream.write(encoder.encode(event, choice))
                ended += isinstance(event, Ended)
        except ClientGone:
            if ended < len(self.prepared.jobs):
                raise
            return 200  # it had all, and did not wait for the end of the connection
        except Exception as error:  # noqa: BLE001 - whatever it is, the client must read it
            failure = request_error(error)
            if not stream.begun:
                return await self._send_error(failure, send)
            await stream.write(encoder.fail(failure))
        await stream.end()
        return 200


class _Stream:
    """A reply in frames."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.last_sent = time.monotonic()

    async def write(self, frames: list[bytes]) -> None:
        if not frames:
            return
        if not self.begun:
            self.begun = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"".join(frames)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self.last_sent = time.monotonic()

    async def end(self) -> None:
        await self.write([] if self.begun else [b""])
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


class _Waited(AsyncIterator[tuple[int, Event]]):
    """Events, as long as the client is there to read them. Raises ClientGone."""

    def __init__(
        self, events: AsyncGenerator[tuple[int, Event]], gone: asyncio.Future[None]
    ) -> None:
        self._events, self._gone = events, gone
        self._next: asyncio.Future[tuple[int, Event]] | None = None

    async def __anext__(self) -> tuple[int, Event]:
        return await self.next(None)

    async def next(self, seconds: float | None) -> tuple[int, Event]:
        """Raises TimeoutError where none comes for so long; asking again loses nothing."""
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._events))
        try:
            waited: set[asyncio.Future[Any]] = {self._next, self._gone}
            done, _ = await asyncio.wait(
                waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        except asyncio.CancelledError:
            await self._give_up()
            raise
        if self._gone in done:
            await self._give_up()
            raise ClientGone
        if not done:
            raise TimeoutError
        event, self._next = self._next, None
        return event.result()

    async def _give_up(self) -> None:
        assert self._next is not None
        self._next.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, RequestError):
            await self._next


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_json(send: Send, status: int, value: Mapping[str, Any]) -> int:
    """Sends a whole reply. Returns its status."""
    body = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
    return status
