"""Any body and any header gets an answer or an error in the form of its dialect; later answers are
unaffected."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.asgi import dialect_for_path
from tests.reliability.fuzz import TEXTS, changed, damaged, explore, json_like, lengths
from tests.serve.conftest import tiny as tiny  # a fixture
from tests.support.serving import BODIES, TURNS, Served, fetch

REFUSALS = {400, 401, 403, 404, 405, 413, 503}


def check(model: Served, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
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


def answer(model: Served) -> Any:
    body = {"messages": TURNS, "seed": 1, "temperature": 1.0}
    reply = asyncio.run(fetch(model.app, "/v1/chat/completions", body))
    assert reply.status == 200
    return reply.json()["choices"]


def test_valid_bodies_are_answered(tiny: Served) -> None:
    for path, body in BODIES.items():
        reply = asyncio.run(fetch(tiny.app, path, body))
        assert reply.status == 200, (path, reply.body)
        assert b'"error":{' not in reply.body, (path, reply.body)


@pytest.mark.parametrize("path", BODIES)
@lengths(5)
def test_changed_bodies(tiny: Served, path: str, examples: int) -> None:
    before = answer(tiny)
    explore(lambda body: check(tiny, path, encoded(body)), examples, changed(BODIES[path]))
    assert answer(tiny) == before


@lengths(10)
def test_damaged_bodies_and_any_json(tiny: Served, examples: int) -> None:
    names = st.sampled_from(sorted({name for body in BODIES.values() for name in body}))
    bodies = st.binary(max_size=30) | json_like(names).map(encoded)
    requests = [
        st.tuples(st.just(path), damaged(encoded(body)) | bodies) for path, body in BODIES.items()
    ]
    explore(lambda request: check(tiny, *request), examples, st.one_of(requests))


@lengths(5)
def test_any_header(tiny: Served, examples: int) -> None:
    names = ("host", "origin", "authorization", "x-api-key", "content-length", "content-type",
             "anthropic-version", "transfer-encoding", "expect", "x-request-id")  # fmt: skip
    values = TEXTS | st.sampled_from(["127.0.0.1", "[::1]:x", "localhost:99999999", "-1", "9" * 99])
    headers = st.dictionaries(
        st.sampled_from(names),
        values.map(lambda text: text.encode("latin-1", "replace").decode("latin-1")),
    )
    body = json.dumps(BODIES["/v1/completions"]).encode()
    explore(lambda found: check(tiny, "/v1/completions", body, found), examples, headers)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()
