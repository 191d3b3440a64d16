"""`akunu serve` as a process: signals, a lost GPU, defaults of the model."""

import http.client
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.sampling import Sampler
from akunu_py.errors import AkunuError
from akunu_py.serve.http import server as server_process
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.model_pool import ModelPool, ServedModel
from akunu_py.serve.http.server import ServeOptions, model_defaults, serve
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.reliability.fuzz import SCALARS
from tests.support.command import AKUNU, run_here, until
from tests.support.serving import LONG_CONTEXT, TURNS, write_served_model

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
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("serve") / "model", context=LONG_CONTEXT)


@contextmanager
def started(model: Path, grace: str) -> Iterator[Server]:
    errors = model.parent / f"errors-{grace}"
    words = ("--model", str(model), "--port", "0", "--no-answer-cache", "--grace", grace)
    with errors.open("wb") as file:
        process = subprocess.Popen(
            [*AKUNU, "serve", *words], stderr=file, env=os.environ | {"AKUNU_API_KEY": "sesame"}
        )
    try:
        yield Server(process, errors)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with started(model, "1") as server:
        yield server


def test_info_lists_the_running_server(server: Server) -> None:
    served = server.submit("/v1/models")["data"][0]
    assert served["not_batched"] is None
    lines = run_here("info").stdout.splitlines()  # other servers may run, too
    line = next(line for line in lines if f"127.0.0.1:{server.port} " in line)
    assert f"serves {served['id']} (ready; drafts with n-grams)" in line


def test_complete_uses_the_running_server(server: Server, model: Path) -> None:
    """Clients on this machine find the server and need no API key."""

    def completed(choice: str) -> str:
        words = ("--model", str(model), "--max-tokens", "8", "--server", choice)
        return run_here(
            "complete", "--filter", "--offset", "9", *words, stdin="The sea i the sky"
        ).stdout

    assert completed("auto") == completed("off")
    assert 'akunu_requests_total{path="/akunu/complete",status="200"} 1' in server.metrics()


@pytest.mark.e2e
def test_signal_stops_server_after_running_answer(server: Server) -> None:
    """Last test. After the grace period, running answers end with an error."""
    body = {"messages": TURNS, "stream": True, "ignore_eos": True}
    short, long = (server.connect(CHAT, body | {"max_tokens": tokens}) for tokens in (4, 100_000))
    reply = short.getresponse()
    first = reply.readline()
    server.process.send_signal(signal.SIGTERM)
    assert (first + reply.read()).endswith(b"data: [DONE]\n\n")
    assert b"service_unavailable_error" in long.getresponse().read()
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.printed()


@pytest.mark.e2e
def test_a_second_interrupt_ends_the_running_answers(model: Path) -> None:
    """The first one prints how long the server waits."""
    body = {"messages": TURNS, "ignore_eos": True, "max_tokens": 100_000}
    with started(model, "60") as server:
        stream = server.connect(CHAT, body | {"stream": True}).getresponse()
        whole = server.connect(CHAT, body)
        until(lambda: "akunu_requests_running 2" in server.metrics())
        server.process.send_signal(signal.SIGINT)
        line = "waiting up to 60 s for 2 answers; Ctrl-C again ends them\n"
        until(lambda: server.printed().endswith(line))
        server.process.send_signal(signal.SIGINT)
        assert b"service_unavailable_error" in stream.read()
        reply = whole.getresponse()
        error = json.loads(reply.read())["error"]["message"]
        assert (reply.status, error) == (503, "the server is stopping")
        assert server.process.wait(30) == 0
        assert server.printed().count("the server is stopping") == 2


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


def test_an_interrupt_does_not_wait_for_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load takes a while, and its threads may crash Python's teardown."""

    def load(model: ServedModel) -> None:
        raise KeyboardInterrupt

    def exit_without_teardown(code: int) -> None:
        assert not pool._closing
        raise SystemExit(code)

    monkeypatch.setattr(ServedModel, "service", load)
    monkeypatch.setattr(server_process, "exit_without_teardown", exit_without_teardown)
    options = ServeOptions(AccessRules(), GenerateOptions())
    pool = ModelPool([ServedModel(["tiny"], lambda _: pytest.fail("loads"), options.service)])
    with socket.socket() as listening, pytest.raises(SystemExit, match="130"):
        serve(pool, listening, options, "")


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
