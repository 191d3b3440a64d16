"""Access to `akunu serve`, limits of requests, and privacy of their content."""

import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from akunu_py.engine.events import SharedPasses
from akunu_py.serve.http.guard import AccessRules, is_loopback
from akunu_py.serve.http.record import RequestRecord, RequestRecords
from akunu_py.serve.http.server import listen
from tests.support.command import assert_one_line_error, run_here
from tests.support.serving import Served, at_a_socket, fetch

NAMES = st.from_regex(r"[a-z0-9.-]{1,20}", fullmatch=True) | st.text(
    st.characters(max_codepoint=255, categories=("L", "N", "P", "S", "Zs")), max_size=20
)


@pytest.mark.parametrize(("path", "body", "headers", "status", "words"), [
    ("/v1/chat/completions", {"messages": []}, {}, 400, "messages is empty"),
    ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": []}, {}, 400, "messages is empty"),
    ("/v1/chat/completions", {"messages": 1, "stream": True}, {}, 400, "messages: input"),
    ("/v1/messages", b"{", {}, 400, "the body is not JSON"),
    ("/v1/completions", b"", {"host": "evil.example"}, 403, "wrong Host header 'evil.example'"),
    ("/v1/models/none", None, {}, 404, "not 'none'; request"),
    ("/a\n\x1b[1m/v1/messages", {}, {}, 404, "for /v1/messages, set the client's base URL"),
    ("/v1/messages", None, {}, 405, "/v1/messages expects POST, not GET"),
])  # fmt: skip
async def test_the_log_has_the_reason_of_an_error(
    tiny: Served, path: str, body: Any, headers: dict[str, str], status: int, words: str
) -> None:
    lines: list[str] = []
    records = RequestRecords(lambda record: lines.append(record.line()))
    app = tiny.application(records=records)
    reply = await fetch(app, path, body, headers=headers)
    (line,) = lines
    assert reply.status == status
    assert f" {status} · " in line
    assert words in line
    assert line.isprintable()


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_loopback_host_names_are_accepted(name: str) -> None:
    for port in ("", ":8012"):
        assert AccessRules().refusal(Headers({"host": name + port}), "/v1/models") is None


@settings(max_examples=40)
@given(NAMES, st.integers(0, 99999))
def test_other_host_names_are_refused(name: str, port: int) -> None:
    """As sent by a web page whose name resolves to 127.0.0.1."""
    assume(not is_loopback(name.partition(":")[0]))
    others = (
        f"{name}:{port}", f"{name}:127.0.0.1", f"127.0.0.1.{name}x", f"{name}@[::2]", f"[{name}",
    )  # fmt: skip
    for host in (name, *others):
        error = AccessRules().refusal(Headers({"host": host}), "/v1/models")
        assert error is not None, host
        assert error.status == 403


@given(st.sampled_from(["http://", "https://", "app://", ""]), NAMES)
def test_origins_are_refused_unless_allowed(scheme: str, name: str) -> None:
    origin = scheme + name
    headers = Headers({"host": "127.0.0.1:8012", "origin": origin})
    allowed = AccessRules(origins=(origin,)).refusal(headers, "/v1/models")
    assert allowed is None
    error = AccessRules(origins=("https://good.example",)).refusal(headers, "/v1/models")
    assert (error is None) == (origin == "")
    assert AccessRules(origins=("*",)).refusal(headers, "/v1/models") is None


@given(st.from_regex("[!-~]{1,9}", fullmatch=True), st.from_regex("[!-~]{0,9}", fullmatch=True),
       st.booleans())  # fmt: skip
def test_only_the_api_key_is_accepted(key: str, other: str, bearer: bool) -> None:
    access = AccessRules("0.0.0.0", key)

    def refused(path: str = "/v1/models", **headers: str) -> bool:
        error = access.refusal(Headers({"host": "x"} | headers), path)
        assert error is None or error.status == 401
        return error is not None

    for sent in (key, other, key + "x"):
        headers = {"authorization": f"Bearer {sent}"} if bearer else {"x-api-key": sent}
        assert refused(**headers) == (sent != key)
        both = {"authorization": "Bearer another", "x-api-key": "another"} | headers
        assert refused(**both) == (sent != key)
    assert refused("/v1/chat/completions")
    assert not refused("/health")


async def test_allowed_origin_may_send_requests(tiny: Served) -> None:
    app = tiny.application(AccessRules(origins=("https://good.example",)))
    headers = {
        "origin": "https://good.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    before = await fetch(app, "/v1/chat/completions", method="OPTIONS", headers=headers)
    assert before.status == 200
    assert before.headers["access-control-allow-origin"] == "https://good.example"
    assert before.headers["access-control-allow-private-network"] == "true"
    reply = await fetch(app, "/v1/models", headers={"origin": "https://good.example"})
    assert reply.headers["access-control-allow-origin"] == "https://good.example"
    other = await fetch(app, "/v1/models", headers={"origin": "https://evil.example"})
    assert other.status == 403
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("keep", [False, True])
async def test_content_is_recorded_only_if_enabled(tiny: Served, keep: bool) -> None:
    seen: list[RequestRecord] = []
    records = RequestRecords(seen.append, keep_content=keep)
    app = tiny.application(records=records)
    body = {"messages": [{"role": "user", "content": "my secret"}], "max_tokens": 3}
    reply = await fetch(app, "/v1/chat/completions", body)
    text = reply.json()["choices"][0]["message"]["content"]
    [record], metrics = seen, records.metrics(SharedPasses())
    assert (record.body, record.answer) == ((json.dumps(body), text) if keep else ("", ""))
    assert "secret" not in record.line() + metrics
    assert 'requests_total{path="/v1/chat/completions",status="200"} 1' in metrics


async def test_half_characters_are_replaced(tiny: Served) -> None:
    """Clients cut texts between the halves of an emoji, and send them again in every request."""
    found = []
    for text in ("cut \ud83d", "cut \ufffd", "whole \U0001f600"):
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 3}
        reply = await fetch(tiny.app, "/v1/chat/completions", body | {text: 1})
        assert reply.status == 200
        found.append(reply.json()["choices"][0]["message"]["content"])
        assert reply.headers["x-akunu-ignored"].isascii()
    assert found[0] == found[1]


def test_a_large_body_is_received_before_it_is_refused(tiny: Served) -> None:
    """Otherwise the client sees a broken connection instead of the reply."""
    body = b'{"user":"' + b"x" * (40 << 20) + b'"}'
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    with at_a_socket(tiny.app) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=60) as connection:
            start = f"{head}Content-Length: {len(body)}\r\n\r\n"
            connection.sendall(start.encode() + body)
            reply = b"".join(iter(lambda: connection.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"request body exceeds 32 MiB" in reply


async def test_depth_of_bodies_is_limited(tiny: Served) -> None:
    deep = b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    nested: object = "x"
    for _ in range(70):
        nested = [nested]
    for body in (deep, json.dumps({"metadata": nested}).encode()):
        reply = await fetch(tiny.app, "/v1/chat/completions", body)
        assert reply.status == 400
        assert "nested" in reply.json()["error"]["message"]


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": partial(gzip.compress, compresslevel=1),
    "x-gzip": partial(gzip.compress, compresslevel=1),
    "Deflate ": partial(zlib.compress, level=1),
    "identity": bytes,
}


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_compressed_bodies_are_accepted(tiny: Served, encoding: str) -> None:
    async def send(data: bytes) -> tuple[int, Any]:
        headers = {"content-encoding": encoding, "content-length": ""}
        reply = await fetch(tiny.app, path, data, headers=headers)
        return reply.status, reply.json()

    compress, name = ENCODINGS[encoding], encoding.strip().lower()
    path, body = "/v1/completions", json.dumps({"prompt": "hello" * 9, "max_tokens": 4}).encode()
    plain = (await fetch(tiny.app, path, body)).json()
    status, found = await send(compress(body))
    assert (status, found["choices"]) == (200, plain["choices"])
    when = "" if name == "identity" else " after decompression"
    status, found = await send(compress(b'{"user":"' + b"x" * (33 << 20) + b'"}'))
    assert (status, found["error"]["message"]) == (413, f"request body exceeds 32 MiB{when}")
    what = "not JSON" if name == "identity" else f"request body is not valid {name} data"
    for data in (compress(body)[:-3], compress(body) + b"more", b"", compress(body)[9:]):
        status, found = await send(data)
        assert (status, what in found["error"]["message"]) == (400, True)


async def test_number_of_waiting_requests_is_limited(tiny: Served) -> None:
    records = RequestRecords()
    app = tiny.application(records=records)
    with contextlib.ExitStack() as waiting:
        opened = [waiting.enter_context(records.request("/v1/completions")) for _ in range(256)]
        request = {"prompt": "x", "max_tokens": 1}
        assert (await fetch(app, "/v1/completions", request)).status == 200  # no body arrived
        for record in opened:
            record.arrived = True
        assert (await fetch(app, "/v1/completions", request)).status == 503
        assert (await fetch(app, "/health")).status == 200
    assert (await fetch(app, "/v1/completions", request)).status == 200


@pytest.mark.usefixtures("own_directories")
def test_startup_errors_are_one_line(tiny_chat_model: Path) -> None:
    model = ("serve", "--model", str(tiny_chat_model))
    with listen("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for words, code, found in (
            (("serve", "--model", "nope"), 1, "nope"),
            ((*model, "--host", "0.0.0.0"), 2, "AKUNU_API_KEY"),
            ((*model, "--host", "::"), 2, "AKUNU_API_KEY"),
            ((*model, "--host", "no.such.host.invalid"), 2, "cannot listen on no.such.host"),
            ((*model, "--host", "no.such.host.invalid", "--api-key", "x"), 2, "no.such.host"),
            ((*model, "--port", "70000"), 2, "65535"),
            ((*model, "--port", "x"), 2, "--port"),
            ((*model, "--port", port), 1, f"port {port} of 127.0.0.1 is in use"),
        ):
            assert_one_line_error(run_here(*words, env={"AKUNU_API_KEY": ""}), code, found)


def test_sockets_disable_nagle() -> None:
    with listen("127.0.0.1", 0) as listening:
        assert listening.proto == socket.IPPROTO_TCP  # then asyncio sets TCP_NODELAY
