"""Requests that wait for their model: heartbeats, in the form that clients count as progress."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from akunu_py.decoding.generate.model_host import ModelLoop
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError
from akunu_py.serve.http.asgi import DIALECTS, create_app
from akunu_py.serve.http.guard import IGNORED_HEADER, AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.server import ServeOptions
from akunu_py.types import GenerateOptions
from tests.support.serving import Reply, Served, ask, write_served_model

USER = [{"role": "user", "content": "hello"}]
# A streamed request of each endpoint, and the member of its heartbeats; "": a comment.
STREAMED: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": USER, "stream": True}, "choices"),
    "/v1/completions": ({"prompt": "hello", "stream": True, "max_tokens": 4}, "choices"),
    "/v1/responses": ({"model": "m", "input": "hello", "stream": True}, "response"),
    "/v1/messages": (
        {"model": "m", "max_tokens": 4, "messages": USER, "stream": True}, "delta"
    ),
    "/api/chat": ({"messages": USER}, "message"),
    "/api/generate": ({"prompt": "hello"}, "response"),
    "/infill": ({"input_prefix": "def f(", "n_predict": 2, "stream": True}, ""),
    "/akunu/chat": ({"id": "1", "messages": USER, "options": {"max_tokens": 4}}, ""),
    "/akunu/complete": ({"id": "1", "request": {"prefix": "def f("}, "options": {}}, ""),
}  # fmt: skip
THINKING = {"thinking": {"type": "adaptive"}}


def values(reply: Reply) -> list[dict[str, Any]]:
    """Return the JSON values of a stream, without comments and the end."""
    lines = reply.body.decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if not line.startswith((":", "event:"))]
    return [json.loads(each) for each in data if each and each != "[DONE]"]


def content(value: Any) -> Any:
    """Return a value without what differs from one run to the next."""
    if isinstance(value, list):
        return [content(each) for each in value]
    if not isinstance(value, dict):
        return value
    changing = {
        *("id", "item_id", "created", "created_at", "completed_at", "akunu", "usage", "index"),
        *(
            "sequence_number",
            "stats",
            "timings",
            "signature",
            "output_index",
            "tokens_predicted",
            "reused",
        ),
    }
    durations = ("_duration", "seconds", "_evaluated", "tokens_cached", "gauges")
    return {
        name: content(each)
        for name, each in value.items()
        if name not in changing and not name.endswith(durations)
    }


def text_of(found: list[dict[str, Any]]) -> str:
    """Return the text of all deltas of a stream."""
    text = ""
    for each in found:
        for choice in each.get("choices", ()):
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        delta = each.get("delta", "")
        text += delta if isinstance(delta, str) else delta.get("text", "")
        text += each.get("message", {}).get("content", "") if "done" in each else ""
        text += each["response"] if isinstance(each.get("response"), str) else ""
        text += each.get("content", "") if "id_slot" in each else ""
        piece = each.get("AnnotatedPiece", {}).get("piece", {})
        text += piece.get("text", "") + each.get("TextDelta", each).get("text", "")
    return text


class Gate:
    """A model whose load waits until the test lets it go on."""

    def __init__(self, directory: Path, error: Exception | None = None) -> None:
        self.loading, self.go_on = threading.Event(), threading.Event()
        self._directory, self._error = directory, error

    def load(self, reserved: int) -> ModelLoop:
        self.loading.set()
        assert self.go_on.wait(60)
        if self._error is not None:
            raise self._error
        return StepLoop(Session(Engine.load(self._directory, name="m")))


@asynccontextmanager
async def loading_app(gate: Gate, on_done: Callable[..., None]) -> AsyncIterator[ASGIApp]:
    """Give an application whose model is not loaded yet."""
    options = ServeOptions(AccessRules(), GenerateOptions(), temperature=0.0, max_tokens=4)
    pool = ModelPool([ServedModel(("m",), gate.load, options.service)])
    app = create_app(
        options.backend(pool, RequestRecords(on_done)), AccessRules(), heartbeat_s=0.001
    )
    try:
        yield app
    finally:
        gate.go_on.set()
        assert await asyncio.to_thread(pool.close)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("waiting") / "m")


def after(count: int, gate: Gate) -> Callable[[Reply], bool]:
    """Let the load go on after some heartbeats."""

    def gone(reply: Reply) -> bool:
        assert gate.go_on.is_set() or gate.loading.is_set() or not reply.frames
        if len(reply.frames) >= count:
            gate.go_on.set()
        return False

    return gone


def test_every_streamed_endpoint_is_covered() -> None:
    streams = {
        endpoint.path
        for dialect in DIALECTS
        for endpoint in dialect.endpoints
        if endpoint.needs == "service" and "stream" in endpoint.body.model_fields
    }
    assert streams <= {*STREAMED}


@pytest.mark.parametrize("path", STREAMED)
async def test_heartbeats_while_the_model_loads(path: str, directory: Path, tiny: Served) -> None:
    """The stream goes on after them as if the model had been loaded."""
    records: list[RequestRecord] = []
    body, member = STREAMED[path]
    gate = Gate(directory)
    async with loading_app(gate, records.append) as app:
        asked = body | {"frobnicate": 1}
        waited = await asyncio.wait_for(ask(app, path, asked, gone=after(6, gate)), 60)
        at_once = await ask(app, path, body)
    assert waited.status == at_once.status == 200
    assert waited.ended
    assert waited.headers["content-type"] == at_once.headers["content-type"]
    assert waited.headers[IGNORED_HEADER] == "frobnicate"
    assert records[0].ignored == ["frobnicate"]
    beats = [frame.decode() for frame in waited.frames[:6]]
    if not member:
        assert all(beat.startswith(":") for beat in beats)
    else:
        first = [values(Reply(frames=[frame])) for frame in waited.frames[:6]]
        assert all(any(member in value for value in found) for found in first)
    found, expected = values(waited), values(at_once)
    assert text_of(found) == text_of(expected)
    assert content(found[-1]) == content(expected[-1])
    ids = {
        inner["id"]
        for each in found
        for inner in (each, each.get("response"))
        if isinstance(inner, dict) and str(inner.get("id", "")).startswith(("resp", "chat", "cmpl"))
    }
    assert len(ids) == (path.startswith("/v1/") and path != "/v1/messages")
    numbers = [each["sequence_number"] for each in found if "sequence_number" in each]
    assert numbers == [*range(len(numbers))]
    kinds = [each.get("type") for each in found]
    assert kinds.count("message_start") == (path == "/v1/messages")
    assert kinds.count("response.created") == (path == "/v1/responses")


@pytest.mark.parametrize(("more", "kinds"), [({}, ["text"]), (THINKING, ["thinking", "text"])])
async def test_blocks_of_a_message_stay_in_order(
    directory: Path, more: dict[str, Any], kinds: list[str]
) -> None:
    gate = Gate(directory)
    async with loading_app(gate, lambda record: None) as app:
        body = STREAMED["/v1/messages"][0] | more
        reply = await asyncio.wait_for(ask(app, "/v1/messages", body, gone=after(4, gate)), 60)
    found = values(reply)
    starts = [each for each in found if each["type"] == "content_block_start"]
    assert [each["content_block"]["type"] for each in starts] == kinds
    assert [each["index"] for each in starts] == [*range(len(kinds))]
    stops = [each["index"] for each in found if each["type"] == "content_block_stop"]
    assert stops == [*range(len(kinds))]


@pytest.mark.parametrize("path", STREAMED)
async def test_a_failed_load_ends_the_stream_with_its_error(path: str, directory: Path) -> None:
    records: list[RequestRecord] = []
    gate = Gate(directory, AkunuError("the disk is gone"))
    async with loading_app(gate, records.append) as app:
        body = STREAMED[path][0]
        reply = await asyncio.wait_for(ask(app, path, body, gone=after(3, gate)), 60)
    assert (reply.status, reply.ended) == (200, True)
    last = values(reply)[-1]
    assert "the disk is gone" in json.dumps(last)
    assert "error" in json.dumps(last)
    if path == "/v1/messages":
        assert last["request_id"] == reply.headers["request-id"]
    assert records[0].status == 200


@pytest.mark.parametrize("path", STREAMED)
async def test_a_client_that_leaves_while_the_model_loads_is_gone(
    path: str, directory: Path
) -> None:
    records: list[RequestRecord] = []
    gate, hung_up = Gate(directory), asyncio.Event()

    def gone(reply: Reply) -> bool:
        return len(reply.frames) >= 2

    async with loading_app(gate, records.append) as app:
        body = STREAMED[path][0]
        await asyncio.wait_for(ask(app, path, body, gone=gone, hung_up=hung_up), 60)
        assert hung_up.is_set()
        assert not gate.go_on.is_set()  # it left before the model was loaded
    assert [record.status for record in records] == [499]
