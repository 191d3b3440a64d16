"""Any body and any header gets an answer or an error in the form of its dialect; later answers are
unaffected. The slow test sends them to a process, at real sockets, among clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.asgi import dialect_for_path
from tests.reliability.fuzz import TEXTS, changed, damaged, explore, json_like, lengths
from tests.support.command import AKUNU, until
from tests.support.serving import BODIES, TURNS, Served, fetch, served, write_served_model

REFUSALS = {400, 401, 403, 404, 405, 413, 503}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = write_served_model(tmp_path_factory.mktemp("served") / "model")
    with served(directory) as model:
        yield model


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
@lengths(12)
def test_changed_bodies(tiny: Served, path: str, examples: int) -> None:
    before = answer(tiny)
    explore(lambda body: check(tiny, path, encoded(body)), examples, changed(BODIES[path]))
    assert answer(tiny) == before


@lengths(12)
def test_damaged_bodies(tiny: Served, examples: int) -> None:
    def one(request: tuple[str, bytes]) -> None:
        check(tiny, *request)

    bodies = [
        st.tuples(st.just(path), damaged(json.dumps(body).encode()) | st.binary(max_size=30))
        for path, body in BODIES.items()
    ]
    explore(one, examples, st.one_of(bodies))


@lengths(12)
def test_any_json(tiny: Served, examples: int) -> None:
    def one(request: tuple[str, Any]) -> None:
        check(tiny, request[0], encoded(request[1]))

    names = sorted({name for body in BODIES.values() for name in body})
    paths = st.sampled_from(sorted(BODIES))
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
    body = json.dumps(BODIES["/v1/completions"]).encode()
    explore(lambda found: check(tiny, "/v1/completions", body, found), examples, headers)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


class Process:
    """`akunu serve` on a model."""

    def __init__(self, model: Path, errors: Path) -> None:
        self._errors = errors
        words = ("--model", str(model), "--port", "0", "--no-answer-cache", "--quiet")
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [*AKUNU, "serve", *words, "--max-tokens", "64", "--prompt-cache-memory", "8MB"],
                stderr=file,
            )
        until(lambda: "akunu serves" in self.printed() or self.process.poll() is not None)
        self.port = int(self.printed().rpartition(":")[2].partition("/")[0])

    def printed(self) -> str:
        return self._errors.read_text("utf-8")

    @property
    def memory(self) -> int:
        """Resident bytes of the process."""
        command = ["ps", "-o", "rss=", "-p", str(self.process.pid)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout) << 10

    async def send(self, path: str, body: bytes, leave_after_s: float | None = None) -> bytes:
        """Send a request; return the reply, b"" if the client leaves before its end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            return await asyncio.wait_for(reader.read(), leave_after_s)
        except (TimeoutError, ConnectionError):
            return b""
        finally:
            writer.transport.abort()


async def attack(process: Process, requests: list[tuple[str, bytes]], leaving: int) -> int:
    """Send all requests, eight at a time; return the growth of memory in the second half."""
    choose, places, statuses = random.Random(1), asyncio.Semaphore(8), set[bytes]()

    async def send(path: str, body: bytes, leave_after_s: float | None = None) -> None:
        async with places:
            reply = await process.send(path, body, leave_after_s)
            statuses.add(reply[9:12] if leave_after_s is None else b"200")

    work = [partial(send, *request) for request in requests]
    for _ in range(leaving):
        body = {"prompt": "a long story " * choose.randrange(1, 250), "max_tokens": 900}
        body["stream"] = choose.random() < 0.5
        seconds = choose.uniform(0, 0.5)
        work.append(partial(send, "/v1/completions", encoded(body), seconds))
    choose.shuffle(work)
    settled = 0
    for half in (work[: len(work) // 2], work[len(work) // 2 :]):
        before = settled
        await asyncio.gather(*(each() for each in half))
        settled = process.memory
    assert statuses <= {b"200", b"400", b"404", b"413"}
    return settled - before


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hostile_requests_and_leaving_clients_at_a_socket(tmp_path: Path) -> None:
    requests: list[tuple[str, bytes]] = []
    bodies = [
        st.tuples(st.just(path), changed(body).map(encoded) | damaged(encoded(body)))
        for path, body in BODIES.items()
    ]
    explore(requests.append, 1000, st.one_of(bodies))
    process = Process(write_served_model(tmp_path / "model"), tmp_path / "errors")
    body = {"messages": TURNS, "seed": 1, "temperature": 1.0, "max_tokens": 30}

    def choices() -> Any:
        reply = asyncio.run(process.send("/v1/chat/completions", encoded(body)))
        return json.loads(reply.partition(b"\r\n\r\n")[2])["choices"]

    try:
        before = choices()
        assert asyncio.run(attack(process, requests, 200)) < 16 << 20
        assert choices() == before
        assert "this is a bug" not in process.printed()
    finally:
        process.process.terminate()
        assert process.process.wait(60) == 0
