"""What anybody may send to `akunu serve`: any body, any header. It is answered, or refused in the
shape of its dialect; nothing fails, and the next answer is the right one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.asgi import dialect_for_path
from tests.reliability.fuzz import TEXTS, changed, damaged, explore, json_like, lengths
from tests.support.serving import Reply, Served, fetch, served, write_served_model

pytestmark = pytest.mark.rotating

SAID = [{"role": "user", "content": "hello"}]
FUNCTION = {"name": "look", "description": "d", "parameters": {"type": "object"}}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "alias", "messages": [
            {"role": "system", "content": [{"type": "text", "text": "be brief"}]}, *SAID,
            {"role": "assistant", "content": "x", "reasoning_content": "y"}, *SAID],
        "max_tokens": 4, "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
        "seed": 1, "stop": ["a"], "presence_penalty": 0.1, "frequency_penalty": 0.1,
        "repetition_penalty": 1.1, "logit_bias": {"1": 1.0}, "stream": True,
        "stream_options": {"include_usage": True}, "user": "me",
        "logprobs": True, "top_logprobs": 2, "tool_choice": "none", "parallel_tool_calls": False,
        "tools": [{"type": "function", "function": FUNCTION}],
        "prediction": {"type": "content", "content": [{"type": "text", "text": "p"}]},
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"type": "object"}, "strict": True}},
    },
    "/v1/completions": {
        "prompt": ["abc", "de"], "max_tokens": 4, "n": 2, "echo": True, "stop": "x",
        "guided_regex": "[ab]+", "stream": False,
    },
    "/v1/messages": {
        "model": "alias", "max_tokens": 4, "system": [{"type": "text", "text": "s"}],
        "messages": [*SAID, {"role": "assistant", "content": [{"type": "text", "text": "x"}]},
                     {"role": "user", "content": [{"type": "text", "text": "x"}]}],
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "stop_sequences": ["a"], "stream": True,
    },
    "/v1/messages/count_tokens": {"model": "alias", "messages": SAID, "system": "s"},
    "/v1/responses": {
        "model": "alias", "input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x"}]}],
        "instructions": "i", "max_output_tokens": 4, "temperature": 0.5, "stream": True,
        "text": {"format": {"type": "json_object"}},
    },
    "/infill": {
        "input_prefix": "def f(", "input_suffix": "):", "n_predict": 4, "prompt": "a",
        "input_extra": [{"filename": "a.py", "text": "x = 1"}], "stop": ["b"], "seed": 1,
        "temperature": 0.1, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "stream": False,
    },
    "/api/chat": {
        "model": "alias", "stream": True, "think": True, "format": "json", "options": {
            "num_predict": 4, "seed": 1, "temperature": 0.5, "stop": ["a"], "num_ctx": 99},
        "messages": [*SAID, {"role": "assistant", "tool_calls": [
            {"function": {"name": "look", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "x", "tool_name": "look"}, *SAID],
    },
    "/api/generate": {"prompt": "x", "system": "s", "raw": True, "suffix": "y", "stream": False,
                      "options": {"num_predict": 4}},
    "/api/show": {"model": "alias"},
    "/akunu/chat": {
        "id": "1", "messages": [*SAID, {"role": "assistant", "content": "x"}, *SAID], "options": {
            "max_tokens": 4, "draft": "fixed", "draft_tokens": 3, "stop": ["a"], "sampling": {
                "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1,
                "repetition_penalty": 1.1, "logit_bias": [[1, 1.0]]}},
    },
    "/akunu/complete": {
        "id": "2", "request": {
            "prefix": "def f(", "suffix": "):", "path": "a.py", "max_tokens": 4, "max_lines": 1,
            "temperature": 0.1, "files": [{"path": "b.py", "text": "x = 1"}], "recent": ["f"]},
        "options": {"fim": "none", "draft": "off", "prefix_tokens": 99, "suffix_tokens": 9},
    },
    "/akunu/end": {"id": "3"},
}  # fmt: skip
REFUSALS = {400, 401, 403, 404, 405, 413, 503}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_served_model(tmp_path_factory.mktemp("served") / "model")
    with served(directory) as model:
        yield model


def check(model: Served, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Such a request is answered, or refused in the shape of its dialect."""
    reply = asyncio.run(fetch(model.app, path, body, headers=headers or {}))
    if reply.status == 200:
        if reply.headers["content-type"] == "application/x-ndjson":
            assert all(json.loads(line) for line in reply.body.splitlines())
        elif "json" in reply.headers["content-type"]:
            reply.json()
        else:
            reply.body.decode()
        return
    assert reply.status in REFUSALS, (reply.status, reply.body)
    shape = dialect_for_path(path).error(RequestError("no"), "id")
    assert set(reply.json()) == set(shape), reply.body
    assert reply.ended


def right(model: Served) -> Reply:
    body = {"messages": SAID, "seed": 1, "temperature": 1.0}
    reply = asyncio.run(fetch(model.app, "/v1/chat/completions", body))
    assert reply.status == 200
    return reply


def test_bodies_that_are_right_are_answered(tiny: Served) -> None:
    """Those that the others are made of."""
    for path, body in ASKED.items():
        reply = asyncio.run(fetch(tiny.app, path, body))
        assert reply.status == 200, (path, reply.body)
        assert b'"error":{' not in reply.body, (path, reply.body)


@pytest.mark.parametrize("path", ASKED)
@lengths(12)
def test_bodies_that_are_nearly_right(tiny: Served, path: str, examples: int) -> None:
    before = right(tiny).json()["choices"]
    explore(lambda body: check(tiny, path, encoded(body)), examples, changed(ASKED[path]))
    assert right(tiny).json()["choices"] == before


@lengths(12)
def test_bodies_with_bytes_turned_over(tiny: Served, examples: int) -> None:
    def one(asked: tuple[str, bytes]) -> None:
        check(tiny, *asked)

    bodies = [
        st.tuples(st.just(path), damaged(json.dumps(body).encode()) | st.binary(max_size=30))
        for path, body in ASKED.items()
    ]
    explore(one, examples, st.one_of(bodies))


@lengths(12)
def test_any_json(tiny: Served, examples: int) -> None:
    def one(asked: tuple[str, Any]) -> None:
        check(tiny, asked[0], encoded(asked[1]))

    names = sorted({name for body in ASKED.values() for name in body})
    paths = st.sampled_from(sorted(ASKED))
    explore(one, examples, st.tuples(paths, json_like(st.sampled_from(names))))


@lengths(12)
def test_any_header(tiny: Served, examples: int) -> None:
    names = ("host", "origin", "authorization", "x-api-key", "content-length", "content-type",
             "anthropic-version", "transfer-encoding", "expect", "x-request-id")  # fmt: skip
    values = TEXTS | st.sampled_from(["127.0.0.1", "[::1]:x", "localhost:99999999", "-1", "9" * 99])
    headers = st.dictionaries(
        st.sampled_from(names),
        values.map(lambda text: text.encode("latin-1", "replace").decode("latin-1")),
    )
    body = json.dumps(ASKED["/v1/completions"]).encode()
    explore(lambda given: check(tiny, "/v1/completions", body, given), examples, headers)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()
