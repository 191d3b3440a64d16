"""mcp.json: every way to be right and wrong; errors are one line with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from akunu_py.mcp.config import ServerConfig, read_servers


def read(path: Path, servers: Any) -> tuple[list[ServerConfig], list[str]]:
    path.write_text(json.dumps({"mcpServers": servers}))
    return read_servers(path)


def test_without_a_file_there_are_no_servers(tmp_path: Path) -> None:
    assert read_servers(tmp_path / "mcp.json") == ([], [])


def test_the_format_of_claude_desktop(tmp_path: Path) -> None:
    servers, problems = read(
        tmp_path / "mcp.json",
        {
            "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "type": "stdio"},
            "wiki": {"type": "http", "url": "https://w/mcp", "headers": {"X": "y"}, "timeout": 5},
            "off": {"command": "x", "disabled": True},
        },
    )
    assert problems == []
    assert servers == [
        ServerConfig("files", "npx", ("-y", "x"), {"A": "b"}),
        ServerConfig("wiki", url="https://w/mcp", headers={"X": "y"}, timeout=5),
    ]


def test_a_file_cannot_allow_calls(tmp_path: Path) -> None:
    entry = {"command": "x", "autoApprove": ["rm"], "arg": []}
    servers, problems = read(tmp_path / "mcp.json", {"a": entry})
    assert servers == [ServerConfig("a", "x")]
    where = f"{tmp_path / 'mcp.json'}: server 'a': "
    assert problems == [
        f"{where}'autoApprove' is ignored: unknown field",
        f"{where}'arg' is ignored: unknown field (did you mean 'args'?)",
    ]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (5, 'expected {"command": ...} or {"url": ...}'),
        ({}, "expected either command or url, found neither"),
        ({"command": "x", "url": "http://x"}, "expected either command or url, found both"),
        ({"command": ""}, "expected a command for command, found ''"),
        ({"command": "x\0"}, "expected a command for command"),
        ({"command": ["x"]}, "expected a command for command"),
        ({"command": "x", "args": "y"}, "expected a list of strings for args, found 'y'"),
        ({"command": "x", "args": [1]}, "expected a list of strings for args"),
        ({"command": "x", "env": {"A": 1}}, "expected an object of strings for env"),
        ({"command": "x", "timeout": 0}, "expected a number of seconds for timeout, found '0'"),
        ({"command": "x", "timeout": True}, "expected a number of seconds for timeout"),
        ({"command": "x", "disabled": "no"}, "expected true or false for disabled"),
        ({"url": "file:///etc/passwd"}, "expected http://... or https://... for url"),
        ({"url": "http://x", "type": "sse"}, "expected stdio or http (streamable HTTP) for type"),
        ({"url": "http://x", "headers": []}, "expected an object of strings for headers"),
    ],
)
def test_one_wrong_server_leaves_the_others(tmp_path: Path, entry: Any, problem: str) -> None:
    servers, problems = read(tmp_path / "mcp.json", {"bad": entry, "good": {"command": "x"}})
    assert servers == [ServerConfig("good", "x")]
    (line,) = problems
    assert line.startswith(f"{tmp_path / 'mcp.json'}: server 'bad': {problem}")
    assert "\n" not in line


def test_a_broken_file_is_one_problem(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    for content in ("", "[]", "{", '{"mcpServers": []}', "[" * 100_000, "\udcff"):
        path.write_text(content, errors="surrogateescape")
        servers, problems = read_servers(path)
        assert servers == []
        (line,) = problems
        assert str(path) in line
