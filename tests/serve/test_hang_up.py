"""Clients that disconnect or wait, and failures during an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
)
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.model_host import SharedPasses
from akunu_py.decoding.generate.step_loop import DEFAULT_SLOTS
from akunu_py.errors import PromptTooLong
from akunu_py.serve.http.record import RequestRecords
from akunu_py.types import Stats
from tests.support.jobs import open_jobs
from tests.support.serving import Reply, Served, ask, scripted_app

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "on and on " * 30}], "max_tokens": 3000}
SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def wait_until_idle(model: Served) -> None:
    async with asyncio.timeout(30):
        while any(open_jobs(model.scheduler)):
            await asyncio.sleep(0.005)


@settings(max_examples=5)
@given(st.integers(0, 12), st.booleans(), st.integers(0, 40))
async def test_disconnect_frees_the_model(
    tiny: Served, frames: int, stream: bool, milliseconds: int
) -> None:
    """At any moment, also while the request is queued; the next answer is correct."""
    expected = (await ask(tiny.app, CHAT, SHORT)).json()["choices"][0]["message"]["content"]
    made: list[Stats] = []
    tiny.scheduler._on_answered = lambda engine, stats: made.append(stats)
    hung_up = asyncio.Event()
    body = LONG | {"stream": stream}

    def gone(reply: Reply) -> bool:
        return stream and len(reply.frames) >= frames

    asked = [asyncio.create_task(ask(tiny.app, CHAT, body, gone=gone, hung_up=hung_up))]
    asked.append(asyncio.create_task(ask(tiny.app, CHAT, body, hung_up=hung_up)))
    await asyncio.sleep(milliseconds / 1000)
    hung_up.set()
    replies = await asyncio.gather(*asked)
    assert not any(reply.ended for reply in replies)
    await wait_until_idle(tiny)
    assert len(made) <= 2
    assert sum(each.generated_tokens for each in made) < 2 * 3000
    assert (tiny.records.running, tiny.records.waiting) == (0, 0)
    again = (await ask(tiny.app, CHAT, SHORT)).json()["choices"][0]["message"]["content"]
    assert again == expected


async def test_metrics_count_running_and_waiting_requests(tiny: Served) -> None:
    hung_up = asyncio.Event()

    async def gauges() -> list[str]:
        lines = (await ask(tiny.app, "/metrics")).body.decode().splitlines()
        return [line for line in lines if line.startswith("akunu_requests_") and "{" not in line]

    async def until(running: int, waiting: int) -> None:
        wanted = [f"akunu_requests_running {running}", f"akunu_requests_waiting {waiting}"]
        async with asyncio.timeout(30):
            while await gauges() != wanted:
                await asyncio.sleep(0.005)

    asked = [
        asyncio.create_task(ask(tiny.app, CHAT, LONG, hung_up=hung_up))
        for _ in range(DEFAULT_SLOTS + 3)
    ]
    await until(DEFAULT_SLOTS, 3)
    hung_up.set()
    await asyncio.gather(*asked)
    await until(0, 0)


async def test_prefilled_tokens_stay_cached_after_disconnect(tiny: Served) -> None:
    body = {"prompt": "a long text " * 200, "max_tokens": 900}
    await ask(
        tiny.app, "/v1/completions", body | {"stream": True}, gone=lambda reply: bool(reply.frames)
    )
    await wait_until_idle(tiny)
    used = (await ask(tiny.app, "/v1/completions", body | {"max_tokens": 1})).json()["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] >= used["prompt_tokens"] - 1


class ScriptedJob:
    """A job with scripted events; `proceed` releases all events after the first."""

    def __init__(self, *events: Event) -> None:
        self._events = events
        self.proceed = asyncio.Event()
        self.closed = asyncio.Event()

    async def run(self, job: Job) -> AsyncGenerator[Event]:
        try:
            for event in self._events:
                yield event
                await self.proceed.wait()
        finally:
            self.closed.set()


END = Finished("stop", Stats())


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_waiting_client_gets_heartbeats(tiny: Served, path: str) -> None:
    """During prefill, and while text is withheld: empty deltas."""
    told = ScriptedJob(PrefillProgress(0, 10), PromptProcessed(10, 0), TextDelta("x"), END)
    app = scripted_app(told.run, tiny, heartbeat_s=0.001)

    def gone(reply: Reply) -> bool:
        if reply.body.count(b"\n\n") >= 5:
            told.proceed.set()
        return False

    body: dict[str, Any] = {"stream": True, "prompt": "x"}
    reply = await ask(app, path, LONG | {"stream": True} if path == CHAT else body, gone=gone)
    assert reply.status == 200
    chunks = reply.chunks()  # comments do not count for all clients
    assert len(chunks) >= 5
    assert reply.chunks()[-1]["choices"][0]["finish_reason"] == "stop"


async def test_disconnect_after_complete_answer_is_no_error(tiny: Served) -> None:
    """Many clients close the connection before its end."""
    told, records = ScriptedJob(PromptProcessed(1, 0), TextDelta("x"), END), RequestRecords()
    end = "[DONE]"

    def gone(reply: Reply) -> bool:
        told.proceed.set()
        if end.encode() in reply.body:
            told.proceed.clear()  # the job takes its time to end
        return end.encode() in reply.body

    app = scripted_app(told.run, tiny, 60, records)
    await ask(app, CHAT, SHORT | {"stream": True}, gone=gone)
    assert 'status="200"} 1' in records.metrics(SharedPasses())
    assert 'status="499"' not in records.metrics(SharedPasses())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_first_frame_has_its_own_status(
    tiny: Served, begun: bool, stream: bool
) -> None:
    error = Failed(PromptTooLong("too long", 9, 8))
    told = (
        ScriptedJob(PromptProcessed(1, 0), TextDelta("x"), error) if begun else ScriptedJob(error)
    )
    told.proceed.set()
    reply = await ask(scripted_app(told.run, tiny, 60), CHAT, SHORT | {"stream": stream})
    assert told.closed.is_set()
    if begun and stream:
        assert reply.status == 200
        last = reply.body.decode().split("\n\n")[-2]
        assert "prompt is too long: 9 tokens > 8 maximum" in last
    else:
        assert reply.status == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize("begun", [False, True])
async def test_unexpected_failure_is_reported_without_details(
    tiny: Served, begun: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    error = Failed(ZeroDivisionError("a secret"))
    told = ScriptedJob(PromptProcessed(1, 0), error) if begun else ScriptedJob(error)
    told.proceed.set()
    reply = await ask(scripted_app(told.run, tiny, 60), CHAT, SHORT | {"stream": True})
    assert reply.status == (200 if begun else 500)
    assert b"internal error; see the server" in reply.body
    assert b"secret" not in reply.body
    assert reply.ended
    assert "this is a bug: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_cancelled_by_shutdown_is_an_error(tiny: Served, stream: bool) -> None:
    told = ScriptedJob(PromptProcessed(1, 0), TextDelta("x"), Finished("cancelled", Stats()))
    told.proceed.set()
    reply = await ask(scripted_app(told.run, tiny, 60), CHAT, SHORT | {"stream": stream})
    assert b"the server is stopping" in reply.body
    assert reply.status == (200 if stream else 503)
