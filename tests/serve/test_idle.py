"""An idle server sleeps until a connection or a signal comes."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn

from akunu_py.serve.http.server import _Server


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_the_event_loop_has_no_timer_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a reply has the date of its own second, and the first signal ends it."""
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    server, finished = _Server(config, "ready", lambda: finished.append(1)), list[int]()
    seen: list[object] = []

    async def use(address: str) -> None:
        loop: Any = asyncio.get_running_loop()
        while not server.started:
            await asyncio.sleep(0)
        for _ in range(20):  # whatever starting left is done
            await asyncio.sleep(0)
        seen.append([each for each in loop._scheduled if not each.cancelled()])
        dates = []
        for now in (1_000_000_000.0, 1_000_000_001.0):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            async with httpx.AsyncClient(trust_env=False) as client:
                reply = await client.get(address)
            dates.append(parsedate_to_datetime(reply.headers["date"]).timestamp())
        monkeypatch.undo()
        assert dates == [1_000_000_000.0, 1_000_000_001.0]
        signal.raise_signal(signal.SIGTERM)

    async def both(listening: socket.socket) -> None:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        await asyncio.gather(server.serve([listening]), use(address))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        asyncio.run(both(listening))
    assert finished == [1]
    assert seen == [[]]
