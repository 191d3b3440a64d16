"""MCP servers: configuration, connections, and limits of the output."""

import asyncio
import contextlib
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from mcp import Client

from akunu_py.errors import AkunuError
from akunu_py.mcp.config import ServerConfig, read_servers
from akunu_py.mcp.connection import Connection
from akunu_py.mcp.output import ToolOutput, limit_for, shorten
from tests.support.paths import ROOT

in_module = pytest.mark.asyncio(loop_scope="module")
SERVER = ("-m", "tests.support.mcp_server")


def stdio(**more: object) -> ServerConfig:
    return ServerConfig("tests", sys.executable, SERVER, cwd=str(ROOT), **more)  # type: ignore[arg-type]


@contextlib.contextmanager
def http_server() -> Iterator[str]:
    command = [sys.executable, *SERVER, "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        found = (re.search(r"running on (http://127\S+)", line) for line in process.stderr or ())
        yield f"{next(filter(None, found))[1]}/mcp"
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
        assert connection._task is not None
        assert connection._task.done()


@pytest.mark.long
@in_module
async def test_results(server: Connection) -> None:
    assert await server.call("add", {"first": 2, "second": 3}) == ToolOutput("5")
    shown = await server.call("picture", {})
    assert shown == ToolOutput("before\n[image not shown: image/png, 3.0 kB]")
    long = await server.call("repeat", {"text": "abc\n", "times": 100_000})
    assert len(long.text) == 400_000


@in_module
async def test_errors_are_results(server: Connection) -> None:
    for name, arguments, words in (
        ("refuse", {}, "the disk is on fire"),
        ("add", {"first": "x"}, "first"),
        ("missing", {}, "missing"),
    ):
        found = await server.call(name, arguments)
        assert found.is_error
        assert words in found.text


async def until(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


@in_module
async def test_cancelling_reaches_the_server(server: Connection, tmp_path: Path) -> None:
    call = asyncio.create_task(server.call("wait", {"file": str(tmp_path / "started")}))
    await until(tmp_path / "started")
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(tmp_path / "started.cancelled")
    assert await server.call("add", {"first": 1, "second": 1}) == ToolOutput("2")


@pytest.mark.long
@in_module
async def test_calls_that_need_an_ended_server_start_it_once(
    server: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if server.config.url:
        pytest.skip("akunu starts no server at an address")
    starts = []
    make = Connection._make

    async def count(self: Connection, stack: contextlib.AsyncExitStack) -> Client:
        starts.append(self)
        return await make(self, stack)

    monkeypatch.setattr(Connection, "_make", count)
    files = [tmp_path / name for name in "ab"]
    waiting = [asyncio.create_task(server.call("wait", {"file": str(each)})) for each in files]
    for each in files:
        await until(each)
    for call in [server.call("die", {}), *waiting]:
        with pytest.raises(AkunuError, match=r"^the server ended during the call: broke badly$"):
            await call
    assert starts == []
    names = ("COLOR", "PYTEST_CURRENT_TEST")
    calls = [server.call("environment", {"name": name}) for name in names]
    # Servers get no more of the environment than PATH and the like.
    assert await asyncio.gather(*calls) == [ToolOutput("blue"), ToolOutput("")]
    assert len(starts) == 1


@in_module
async def test_a_call_has_a_time_limit(
    server: Connection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "config", replace(server.config, timeout=0.05))
    with pytest.raises(AkunuError, match=r"^no result within 0.05 s; the call was cancelled$"):
        await server.call("wait", {"file": str(tmp_path / "x")})


@pytest.mark.parametrize(("config", "problem"), [
    (ServerConfig("x", "no-such-command"), "command 'no-such-command' not found; install it"),
    (ServerConfig("x", sys.executable, cwd="/no/such"), "there is no directory '/no/such'"),
    (ServerConfig("x", "/"), "Permission denied"),
    (ServerConfig("x", "sh", ("-c", "echo why >&2")), "ended while it started: why"),
    (ServerConfig("x", "sh", ("-c", "echo junk")), "ended while it started"),
    (ServerConfig("x", url="http://127.0.0.1:9/mcp"), "cannot reach http://127.0.0.1:9/mcp"),
    (ServerConfig("x", "sh", ("-c", "while read x; do :; done")), "did not answer within 3 s"),
])  # fmt: skip
@in_module
async def test_start_errors_give_the_reason(
    config: ServerConfig, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 3 if problem == "did not answer within 3 s" else 60
    monkeypatch.setattr("akunu_py.mcp.connection.START_S", seconds)
    with pytest.raises(AkunuError) as found:
        await Connection(config).start()
    assert problem in str(found.value)
    assert "\n" not in str(found.value)


def read(path: Path, servers: Any) -> tuple[list[ServerConfig], list[str]]:
    path.write_text(json.dumps({"mcpServers": servers}))
    return read_servers(path)


def test_the_format_of_claude_desktop(tmp_path: Path) -> None:
    """The file cannot allow calls."""
    servers, problems = read(
        tmp_path / "mcp.json",
        {
            "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "type": "stdio"},
            "wiki": {"type": "http", "url": "https://w/mcp", "headers": {"X": "y"}, "timeout": 5},
            "off": {"command": "x", "disabled": True},
            "a": {"command": "x", "autoApprove": ["rm"], "arg": []},
        },
    )
    assert servers == [
        ServerConfig("files", "npx", ("-y", "x"), {"A": "b"}),
        ServerConfig("wiki", url="https://w/mcp", headers={"X": "y"}, timeout=5),
        ServerConfig("a", "x"),
    ]
    where = f"{tmp_path / 'mcp.json'}: server 'a': "
    assert problems == [
        f"{where}'autoApprove' is ignored: unknown field",
        f"{where}'arg' is ignored: unknown field (did you mean 'args'?)",
    ]


@pytest.mark.parametrize(("entry", "problem"), [
    (5, 'expected {"command": ...} or {"url": ...}'),
    ({}, "expected either command or url, found neither"),
    ({"command": "x", "url": "http://x"}, "expected either command or url, found both"),
    ({"command": ""}, "expected a command for command, found ''"),
    ({"command": "x\0"}, "expected a command for command"),
    ({"command": "x", "args": [1]}, "expected a list of strings for args"),
    ({"command": "x", "env": {"A": 1}}, "expected an object of strings for env"),
    ({"command": "x", "timeout": 0}, "expected a number of seconds for timeout, found '0'"),
    ({"command": "x", "timeout": True}, "expected a number of seconds for timeout"),
    ({"command": "x", "disabled": "no"}, "expected true or false for disabled"),
    ({"url": "file:///etc/passwd"}, "expected http://... or https://... for url"),
    ({"url": "http://x", "type": "sse"}, "expected stdio or http (streamable HTTP) for type"),
])  # fmt: skip
def test_one_wrong_server_leaves_the_others(tmp_path: Path, entry: Any, problem: str) -> None:
    servers, problems = read(tmp_path / "mcp.json", {"bad": entry, "good": {"command": "x"}})
    assert servers == [ServerConfig("good", "x")]
    (line,) = problems
    assert line.startswith(f"{tmp_path / 'mcp.json'}: server 'bad': {problem}")
    assert "\n" not in line


def test_a_long_output_keeps_its_start_and_its_end() -> None:
    assert shorten("abc", 3) == "abc"
    assert shorten("a" * 50 + "b" * 50, 50) == f"{'a' * 40}\n[50 characters left out]\n{'b' * 10}"
    assert (limit_for(0), limit_for(8192), limit_for(1 << 20)) == (2000, 8192, 50_000)


@pytest.mark.long
def test_no_file_means_no_servers_and_a_broken_one_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    assert read_servers(path) == ([], [])
    for content in ("", "[]", '{"mcpServers": []}', "[" * 100_000, "\udcff"):
        path.write_text(content, errors="surrogateescape")
        servers, (line,) = read_servers(path)
        assert servers == []
        assert str(path) in line
