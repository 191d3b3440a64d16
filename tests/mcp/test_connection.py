"""Connections to real servers, by standard streams and streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from mcp import Client

from akunu_py.errors import AkunuError
from akunu_py.mcp.config import ServerConfig
from akunu_py.mcp.connection import Connection
from akunu_py.mcp.output import ToolOutput
from tests.support.paths import ROOT

pytestmark = pytest.mark.asyncio(loop_scope="module")
SERVER = ("-m", "tests.support.mcp_server")


def stdio(**more: object) -> ServerConfig:
    return ServerConfig("tests", sys.executable, SERVER, cwd=str(ROOT), **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *SERVER, str(port)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "Uvicorn running" not in process.stderr.readline():
            assert process.poll() is None
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["stdio", "http"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Connection]:
    """A connection to a started server."""
    with contextlib.ExitStack() as stack:
        config = stdio(env={"COLOR": "blue"})
        if request.param == "http":
            config = ServerConfig("tests", url=stack.enter_context(http_server()))
        connection = Connection(config)
        tools = await connection.start()
        assert [each.name for each in tools][:2] == ["add", "repeat"]
        assert tools[0].description == "Add two numbers."
        assert set(tools[0].parameters["properties"]) == {"first", "second"}
        yield connection
        await connection.close()


async def test_results(server: Connection) -> None:
    assert await server.call("add", {"first": 2, "second": 3}) == ToolOutput("5")
    shown = await server.call("picture", {})
    assert shown == ToolOutput("before\n[image not shown: image/png, 3.0 kB]")
    long = await server.call("repeat", {"text": "abc\n", "times": 100_000})
    assert len(long.text) == 400_000


async def test_errors_are_results(server: Connection) -> None:
    for name, arguments, words in (
        ("refuse", {}, "the disk is on fire"),
        ("add", {"first": "x"}, "first"),
        ("missing", {}, "missing"),
    ):
        found = await server.call(name, arguments)
        assert found.is_error
        assert words in found.text


async def test_cancelling_reaches_the_server(server: Connection, tmp_path: Path) -> None:
    call = asyncio.create_task(server.call("wait", {"file": str(tmp_path / "started")}))
    await until(tmp_path / "started")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(tmp_path / "started.cancelled")
    assert await server.call("add", {"first": 1, "second": 1}) == ToolOutput("2")


async def until(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


async def test_a_server_that_dies_is_started_again(server: Connection) -> None:
    if server.config.url:
        pytest.skip("akunu starts no server at an address")
    with pytest.raises(AkunuError, match=r"^the server ended during the call: broke badly$"):
        await server.call("die", {})
    assert await server.call("environment", {"name": "COLOR"}) == ToolOutput("blue")
    home = await server.call("environment", {"name": "PYTEST_CURRENT_TEST"})
    assert home == ToolOutput(""), "servers get no more of the environment than PATH and the like"


async def test_calls_that_need_an_ended_server_start_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts = []
    make = Connection._make

    async def count(self: Connection, stack: contextlib.AsyncExitStack) -> Client:
        starts.append(self)
        return await make(self, stack)

    async def lose_and_call(name: str, arguments: dict[str, str]) -> ToolOutput:
        with pytest.raises(AkunuError, match="ended during the call"):
            await connection.call(name, arguments)
        return await connection.call("add", {"first": 2, "second": 3})

    monkeypatch.setattr(Connection, "_make", count)
    connection = Connection(stdio())
    calls = [connection.call("add", {"first": 1, "second": 1}) for _ in range(3)]
    assert await asyncio.gather(*calls) == [ToolOutput("2")] * 3
    assert len(starts) == 1
    files = [tmp_path / "a", tmp_path / "b"]
    waiting = [asyncio.create_task(lose_and_call("wait", {"file": str(file)})) for file in files]
    for file in files:
        await until(file)
    found = await asyncio.gather(lose_and_call("die", {}), *waiting)
    assert found == [ToolOutput("5")] * 3
    assert len(starts) == 2
    await connection.close()
    assert connection._task is None


async def test_a_call_has_a_time_limit(
    server: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "config", replace(server.config, timeout=0.05))
    with pytest.raises(AkunuError, match=r"^no result within 0.05 s; the call was cancelled$"):
        await server.call("wait", {"file": str(tmp_path / "x")})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (ServerConfig("x", "no-such-command"), "command 'no-such-command' not found; install it"),
        (ServerConfig("x", sys.executable, cwd="/no/such"), "there is no directory '/no/such'"),
        (ServerConfig("x", "/"), "Permission denied"),
        (ServerConfig("x", "sh", ("-c", "echo why >&2")), "ended while it started: why"),
        (ServerConfig("x", "sh", ("-c", "echo junk")), "ended while it started"),
        (ServerConfig("x", url="http://127.0.0.1:9/mcp"), "cannot reach http://127.0.0.1:9/mcp"),
    ],
)
async def test_a_server_that_cannot_start_says_why(config: ServerConfig, problem: str) -> None:
    with pytest.raises(AkunuError) as found:
        await Connection(config).start()
    assert problem in str(found.value)
    assert "\n" not in str(found.value)


async def test_a_silent_server_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akunu_py.mcp.connection.START_S", 0.1)
    with pytest.raises(AkunuError, match=r"the server did not answer within 0.1 s"):
        await Connection(ServerConfig("x", "sh", ("-c", "while read x; do :; done"))).start()
