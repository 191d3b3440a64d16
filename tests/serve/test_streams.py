"""Heartbeats, clients that disconnect, failures, and slow readers."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.engine.engine import Engine
from akunu_py.engine.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    PromptProcessed,
    SharedPasses,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.engine.host import ModelHost
from akunu_py.engine.job import Job, JobHandle, ModelLoop
from akunu_py.engine.loop import DEFAULT_SLOTS, StepLoop
from akunu_py.errors import AkunuError, PromptTooLong
from akunu_py.serve.http.asgi import Backend, create_app
from akunu_py.serve.http.guard import IGNORED_HEADER, AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.request_handler import run_job
from akunu_py.serve.http.server import ServeOptions
from akunu_py.types import GenerateOptions, Stats
from tests.support.command import until
from tests.support.dialects import DIALECTS, DialectRequest
from tests.support.jobs import open_jobs, scripted
from tests.support.serving import (
    Reply,
    Served,
    app_with_events,
    fetch,
    scripted_app,
    write_served_model,
)

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "on and on " * 30}], "max_tokens": 3000}
SHORT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
BODIES = {
    name: dialect.request_body(DialectRequest(("hello",), 4), stream=True)
    for name, dialect in DIALECTS.items()
}
# A field of each heartbeat, which clients count as progress; "": a comment.
BEATS = {
    "chat": "choices", "completions": "choices", "messages": "delta", "responses": "response",
    "ollama chat": "message", "ollama generate": "response", "infill": "", "own chat": "",
    "own complete": "",
}  # fmt: skip


class Gate:
    """A model whose load waits until the test opens the gate, and its requests."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self.opened, self.records = threading.Event(), list[RequestRecord]()
        self._directory, self._error = directory, error

    def load(self, reserved: int) -> ModelLoop:
        assert self.opened.wait(60)
        if self._error is not None:
            raise self._error
        return StepLoop(Engine.load(self._directory, name="m"))

    async def reply(self, name: str, body: dict[str, Any], beats: int = 0) -> Reply:
        """Send a request. beats: heartbeats before the gate opens; 0: disconnect after two."""

        def leave(reply: Reply) -> bool:
            if beats and len(reply.frames) >= beats:
                self.opened.set()
            return not beats and len(reply.frames) >= 2

        options = ServeOptions(AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=4)
        pool = ModelPool([ServedModel(("m",), self.load, options.service)])
        backend = Backend(pool, RequestRecords(self.records.append))
        app = create_app(backend, AccessRules(), heartbeat_s=0.001)
        try:
            return await asyncio.wait_for(fetch(app, DIALECTS[name].path, body, leave=leave), 60)
        finally:
            self.opened.set()
            assert await asyncio.to_thread(pool.close)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("waiting") / "m")


@pytest.mark.parametrize("name", BEATS)
async def test_heartbeats_while_the_model_loads(tiny: Served, name: str, directory: Path) -> None:
    """The rest of the stream is the same as that of a loaded model."""
    dialect, gate = DIALECTS[name], Gate(directory)
    waited = await gate.reply(name, BODIES[name] | {"frobnicate": 1}, beats=6)
    at_once = await fetch(tiny.app, dialect.path, BODIES[name])
    assert waited.ended
    assert waited.headers["content-type"] == at_once.headers["content-type"]
    assert waited.headers["cache-control"] == "no-cache"
    assert waited.headers["x-accel-buffering"] == "no"
    assert waited.headers[IGNORED_HEADER] == "frobnicate"
    assert gate.records[0].ignored == ["frobnicate"]
    for frame in waited.frames[:6]:
        if not BEATS[name]:
            assert frame == b": heartbeat\n\n"
        else:
            beats = Reply(headers=waited.headers, frames=[frame]).values()
            assert any(BEATS[name] in beat for beat in beats)
    found, expected = dialect.parse(waited), dialect.parse(at_once)
    assert (found.text, found.reason) == (expected.text, expected.reason)
    ids = {
        inner["id"]
        for value in waited.values()
        for inner in (value, value.get("response"))
        if isinstance(inner, dict) and str(inner.get("id", "")).startswith(("resp", "chat", "cmpl"))
    }
    assert len(ids) == (name in ("chat", "completions", "responses"))


@pytest.mark.parametrize("thinks", [False, True])
async def test_blocks_of_a_message_stay_in_order(directory: Path, thinks: bool) -> None:
    """Heartbeats open the first block: of thinking, if the request enables it."""
    more = {"thinking": {"type": "adaptive"}} if thinks else {}
    found = await Gate(directory).reply("messages", BODIES["messages"] | more, beats=4)
    starts = [each for each in found.values() if each["type"] == "content_block_start"]
    kinds = ["thinking", "text"] if thinks else ["text"]
    assert [each["content_block"]["type"] for each in starts] == kinds


@pytest.mark.parametrize("name", BEATS)
async def test_a_failed_load_ends_the_stream_with_its_error(name: str, directory: Path) -> None:
    gate = Gate(directory, AkunuError("the disk is gone"))
    reply = await gate.reply(name, BODIES[name], beats=3)
    assert (reply.status, reply.ended, gate.records[0].status) == (200, True, 200)
    last = json.dumps(reply.values()[-1])
    assert "the disk is gone" in last
    assert "error" in last


async def test_a_client_may_disconnect_while_the_model_loads(directory: Path) -> None:
    gate = Gate(directory)
    assert not (await gate.reply("chat", BODIES["chat"])).ended
    assert [record.status for record in gate.records] == [499]
    assert "client disconnected" in gate.records[0].line()


class ScriptedJob:
    """A job with scripted events; `proceed` releases all events after the first."""

    def __init__(self, *events: Event) -> None:
        self._events = events
        self.proceed, self.closed = asyncio.Event(), asyncio.Event()

    async def run(self, job: Job) -> AsyncGenerator[Event]:
        try:
            for event in self._events:
                yield event
                await self.proceed.wait()
        finally:
            self.closed.set()


END = Finished("stop", Stats())
BEGUN = PromptProcessed(1, 0)


@settings(max_examples=5)
@given(st.integers(0, 12), st.booleans(), st.integers(0, 40))
async def test_disconnect_frees_the_model(
    tiny: Served, frames: int, stream: bool, milliseconds: int
) -> None:
    """At any moment, also while the request is queued; the next answer is correct."""
    expected = (await fetch(tiny.app, CHAT, SHORT)).json()["choices"]
    left = asyncio.Event()
    body = LONG | {"stream": stream}
    first = fetch(
        tiny.app, CHAT, body, leave=lambda r: stream and len(r.frames) >= frames, left=left
    )
    both = [asyncio.create_task(each) for each in (first, fetch(tiny.app, CHAT, body, left=left))]
    await asyncio.sleep(milliseconds / 1000)
    left.set()
    replies = await asyncio.gather(*both)
    assert not any(reply.ended for reply in replies)
    await asyncio.to_thread(until, lambda: not any(open_jobs(tiny.scheduler)))
    assert (tiny.records.running, tiny.records.waiting) == (0, 0)
    assert (await fetch(tiny.app, CHAT, SHORT)).json()["choices"] == expected


async def test_metrics_count_running_and_waiting_requests(tiny: Served) -> None:
    left = asyncio.Event()

    async def reach(running: int, waiting: int) -> None:
        wanted = {f"akunu_requests_running {running}", f"akunu_requests_waiting {waiting}"}
        async with asyncio.timeout(60):
            while not wanted <= {*(await fetch(tiny.app, "/metrics")).body.decode().splitlines()}:
                await asyncio.sleep(0.005)

    requests = [
        asyncio.create_task(fetch(tiny.app, CHAT, LONG, left=left))
        for _ in range(DEFAULT_SLOTS + 3)
    ]
    await reach(DEFAULT_SLOTS, 3)
    left.set()
    await asyncio.gather(*requests)
    await reach(0, 0)


async def test_disconnect_after_complete_answer_is_no_error(tiny: Served) -> None:
    """Many clients close the connection before its end."""
    done: list[RequestRecord] = []
    job = ScriptedJob(BEGUN, TextDelta("x"), END)
    records = RequestRecords(done.append)

    def leave(reply: Reply) -> bool:
        job.proceed.set()
        if done := b"[DONE]" in reply.body:
            job.proceed.clear()  # the job takes its time to end
        return done

    app = scripted_app(job.run, tiny, 60, records)
    await fetch(app, CHAT, SHORT | {"stream": True}, leave=leave)
    metrics = records.metrics(SharedPasses())
    assert 'status="200"} 1' in metrics
    assert 'status="499"' not in metrics
    assert "tokens/s" not in done[0].line()  # no decode step


@pytest.mark.usefixtures("own_directories")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(("end", "status", "words"), [
    (Failed(PromptTooLong("too long", 9, 8)), 400, b"context_length_exceeded"),
    (Failed(ZeroDivisionError("a secret")), 500, b"internal error; see the server"),
    (Finished("cancelled", Stats()), 503, b"the server is stopping"),
])  # fmt: skip
async def test_failure_before_first_frame_has_its_own_status(
    tiny: Served, end: Event, status: int, words: bytes, begun: bool, stream: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Unexpected errors are reported without details."""
    job = ScriptedJob(*((BEGUN, TextDelta("x"), end) if begun else (end,)))
    job.proceed.set()
    reply = await fetch(scripted_app(job.run, tiny, 60), CHAT, SHORT | {"stream": stream})
    assert job.closed.is_set()
    assert (reply.status, reply.ended) == (200 if begun and stream else status, True)
    assert words in reply.body
    assert b"secret" not in reply.body
    printed = capsys.readouterr().err
    assert ("this is a bug: ZeroDivisionError" in printed) == (status == 500)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DIALECTS)
async def test_a_cancelled_request_ends_with_the_error_of_its_dialect(
    tiny: Served, name: str, stream: bool
) -> None:
    """As at the second signal, in the stream if it began."""
    done, begun = list[RequestRecord](), asyncio.Event()

    async def run(job: Job) -> AsyncGenerator[Event]:
        yield BEGUN
        yield TextDelta("x")
        begun.set()
        await asyncio.Event().wait()

    app = scripted_app(run, tiny, 60, RequestRecords(done.append))
    body = BODIES[name] | ({"stream": stream} if DIALECTS[name].streams else {})
    task = asyncio.create_task(fetch(app, DIALECTS[name].path, body))
    await begun.wait()
    task.cancel()
    reply, [record] = await task, done
    last = json.dumps(reply.values()[-1])
    assert (reply.ended, "error" in last, "the server is stopping" in last) == (True, True, True)
    assert record.status == reply.status
    assert "the server is stopping" in record.line()


class ScriptedHost(ModelHost):
    """Delivers all events before the reader takes the first."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    def submit(self, job: Job, on_event: Callable[[Event], None], **options: Any) -> JobHandle:
        for event in self.events:
            on_event(event)
        return JobHandle(job, on_event, "", lambda: None, short=False)


async def test_queued_events_are_merged_for_slow_reader() -> None:
    progress = [PrefillProgress(number, 500) for number in range(500)]
    parts = [TextDelta(str(number)) for number in range(10_000)]
    call, called = ToolCallStarted("1", "find"), ToolCallFinished()
    arguments = [ToolCallArguments("[]")] * 1000
    events: list[Event] = [*progress, BEGUN, *parts, call, *arguments, called, END]
    job, handles = scripted(lambda loop: iter([])), list[JobHandle]()
    async with run_job(ScriptedHost(events), job, handles.append) as reader:
        found = [event async for event in reader]
    assert isinstance(found[0], PrefillProgress)
    text = "".join(each.text for each in found if isinstance(each, TextDelta))
    assert text == "".join(each.text for each in parts)
    assert found[-4:] == [call, ToolCallArguments("[]" * 1000), called, END]
    assert len(found) < 20


HIDDEN: list[tuple[str, dict[str, Any], bool]] = [
    *((name, {}, False) for name in ("chat", "messages", "responses", "ollama chat")),
    *((name, {"include_reasoning": False}, True) for name in ("chat", "messages", "responses")),
    *((name, {"reasoning": {"exclude": True}}, True) for name in ("chat", "responses")),
    ("messages", {"thinking": {"type": "adaptive", "display": "omitted"}}, True),
    ("messages", {"thinking": {"type": "disabled"}}, True),
    ("ollama chat", {"think": False}, True),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "more", "hidden"), HIDDEN)
async def test_thinking_is_left_out_of_the_reply_on_request(
    tiny: Served, name: str, more: dict[str, Any], hidden: bool, stream: bool
) -> None:
    """Some models think even if thinking is disabled."""
    dialect = DIALECTS[name]
    app = app_with_events(tiny, BEGUN, ThinkingDelta("secret"), TextDelta("answer"), END)
    body = dialect.request_body(DialectRequest(("hello",)), stream=stream) | more
    reply = await fetch(app, dialect.path, body)
    data = dialect.parse(reply)
    assert (data.thinking, data.text) == ("" if hidden else "secret", "answer")
    assert (b"secret" in reply.body) == (not hidden)
