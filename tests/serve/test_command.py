"""`akunu serve` as a process: sockets, signals, an idle event loop, defaults of the model."""

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.sampling import Sampler
from akunu_py.errors import AkunuError
from akunu_py.serve.http import server as server_module
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.server import ServeOptions, _Protocol, _Server, model_defaults, serve
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.reliability.fuzz import SCALARS
from tests.support.command import AKUNU, run_here, until
from tests.support.serving import TURNS, write_served_model

KEY = {"x-api-key": "sesame"}
CHAT = "/v1/chat/completions"


class Server:
    """The server process, and requests to it."""

    def __init__(self, process: subprocess.Popen[bytes], errors: Path) -> None:
        self.process, self._errors = process, errors
        until(lambda: "akunu serves" in self.printed() or process.poll() is not None)
        self.port = int(self.printed().rpartition(":")[2].partition("/")[0])

    def printed(self) -> str:
        return self._errors.read_text("utf-8")

    def connect(self, path: str, body: Any = None) -> http.client.HTTPConnection:
        """Send a request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), KEY)
        return connection

    def submit(self, path: str, body: Any = None) -> Any:
        return json.loads(self.connect(path, body).getresponse().read())

    def metrics(self) -> str:
        return self.connect("/metrics").getresponse().read().decode()


@pytest.fixture(scope="module")
def server(shallow_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    errors = tmp_path_factory.mktemp("serve") / "errors"
    words = ("--model", str(shallow_directory), "--port", "0", "--no-answer-cache", "--grace", "2")
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [*AKUNU, "serve", *words], stderr=file, env=os.environ | {"AKUNU_API_KEY": "sesame"}
        )
    try:
        yield Server(process, errors)
    finally:
        process.kill()
        process.wait()


def test_info_lists_the_running_server(server: Server) -> None:
    served = server.submit("/v1/models")["data"][0]
    assert served["not_batched"] is None
    lines = run_here("info").stdout.splitlines()  # other servers may run, too
    line = next(line for line in lines if f"127.0.0.1:{server.port} " in line)
    assert f"serves {served['id']} (ready; drafts with n-grams)" in line


@pytest.mark.long
@pytest.mark.usefixtures("loaded_shallow_starter")
def test_complete_uses_the_running_server(server: Server, shallow_directory: Path) -> None:
    """Clients on this machine find the server and need no API key."""

    def completed(choice: str) -> str:
        words = ("--model", str(shallow_directory), "--max-tokens", "8", "--server", choice)
        return run_here(
            "complete", "--filter", "--offset", "9", *words, stdin="The sea i the sky"
        ).stdout

    assert completed("auto") == completed("off")
    assert 'akunu_requests_total{path="/akunu/complete",status="200"} 1' in server.metrics()


@pytest.mark.e2e
def test_signal_stops_server_after_running_answer(server: Server) -> None:
    """Last test. After the grace period, running answers end with an error."""
    endless = {"logit_bias": {str(token): -100.0 for token in range(3)}}  # no end of a text
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, **endless}
    short, long = (server.connect(CHAT, body | {"max_tokens": tokens}) for tokens in (4, 7000))
    reply = short.getresponse()
    first = reply.readline()
    server.process.send_signal(signal.SIGTERM)
    assert (first + reply.read()).endswith(b"data: [DONE]\n\n")
    assert b"service_unavailable_error" in long.getresponse().read()
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.printed()


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def test_the_event_loop_has_no_timer_while_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply has the date of its second, and the first signal ends the server."""
    config = uvicorn.Config(app, http="h11", ws="none", lifespan="off", log_config=None)
    server, finished = _Server(config, "ready", lambda: finished.append(1)), list[int]()

    async def use(address: str) -> None:
        while not server.started:
            await asyncio.sleep(0)
        for _ in range(20):  # whatever starting left is done
            await asyncio.sleep(0)
        loop: Any = asyncio.get_running_loop()
        assert not [each for each in loop._scheduled if not each.cancelled()]
        for now in (1_000_000_000.0, 1_000_000_001.0):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            async with httpx.AsyncClient(trust_env=False) as client:
                reply = await client.get(address)
            assert parsedate_to_datetime(reply.headers["date"]).timestamp() == now
        monkeypatch.undo()
        signal.raise_signal(signal.SIGTERM)

    async def both() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            address = f"http://127.0.0.1:{listening.getsockname()[1]}"
            await asyncio.gather(server.serve([listening]), use(address))

    asyncio.run(both())
    assert finished == [1]


def serve_while(server: _Server, use: Callable[[int], Awaitable[None]]) -> None:
    """Serve on a free port until `use(port)` ends the server."""

    async def both() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await asyncio.gather(server.serve([listening]), use(listening.getsockname()[1]))

    asyncio.run(both())


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-"])
def test_half_sent_headers_end_the_connection(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of a connection, and after a reply."""
    monkeypatch.setattr(server_module, "HEADERS_S", 0.05)
    config = uvicorn.Config(app, http=_Protocol, ws="none", lifespan="off", log_config=None)
    server = _Server(config, "ready", lambda: None)
    whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"

    async def use(port: int) -> None:
        for first in (b"", whole):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(first)
            reply = await reader.readuntil(b"0\r\n\r\n") if first else b""
            assert (b"hello" in reply) == bool(first)
            writer.write(sent or whole[:1])
            assert await reader.read() == b""
            writer.close()
        signal.raise_signal(signal.SIGTERM)

    serve_while(server, use)


@pytest.mark.parametrize("gone", [False, True])
def test_reply_reaches_a_client_that_only_stopped_writing(gone: bool) -> None:
    """A closed connection looks the same at first, but ends the request."""
    answer = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if gone:
            assert (await receive())["type"] == "http.disconnect"
            answer.set()
        await answer.wait()
        await app(scope, receive, send)

    config = uvicorn.Config(slow, http=_Protocol, ws="none", lifespan="off", log_config=None)
    server = _Server(config, "ready", lambda: None)

    async def use(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write_eof()
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 102 Processing\r\n\r\n"
        if gone:
            writer.close()
            await answer.wait()
        else:
            answer.set()
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"hello" in reply
            writer.close()
        signal.raise_signal(signal.SIGTERM)

    serve_while(server, use)


@pytest.mark.usefixtures("own_directories")
def test_a_lost_gpu_ends_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an error, so that launchd and systemd restart the service."""

    def step(loop: StepLoop, jobs: object) -> Any:
        raise RuntimeError("Ignored (00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)")

    monkeypatch.setattr(StepLoop, "step", step)
    directory = write_served_model(tmp_path / "model")
    options = ServeOptions(AccessRules(), GenerateOptions(), quiet=True)
    load = partial(Engine.load, directory, name="tiny")
    model = ServedModel(["tiny"], lambda reserved: StepLoop(load()), options.service)
    statuses: list[int] = []

    def use(port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", CHAT, json.dumps({"messages": TURNS}))
        statuses.append(connection.getresponse().status)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = threading.Thread(target=use, args=(listening.getsockname()[1],))
        client.start()
        with pytest.raises(AkunuError, match="start akunu serve again"):
            serve(ModelPool([model]), listening, options, "")
        client.join()
    assert statuses == [500]


def test_generation_config_sets_defaults(tmp_path: Path) -> None:
    assert model_defaults(tmp_path, SamplingOptions()).temperature == 1.0
    settings = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "x": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    requested = SamplingOptions(seed=3)
    expected = SamplingOptions(0.7, 0.8, top_k=20, repetition_penalty=1.05, seed=3)
    assert model_defaults(tmp_path, requested) == expected


@given(st.dictionaries(st.sampled_from(["temperature", "top_k", "do_sample"]), SCALARS) | SCALARS)
def test_any_generation_config_gives_valid_defaults(content: object) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "generation_config.json").write_text(json.dumps(content))
        Sampler(model_defaults(Path(directory), SamplingOptions()))
