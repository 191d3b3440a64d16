"""The user's MCP servers: `mcp.json` next to settings.toml, in the format of Claude Desktop.

{"mcpServers": {"files": {"command": "npx", "args": [...], "env": {...}},
                "wiki": {"url": "https://...", "headers": {...}}}}
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.files import read_json
from akunu_py.text import did_you_mean

CALL_TIMEOUT_S = 120.0
_MAX_BYTES = 1 << 20  # of the file
_MAX_NAME = 40  # characters of a server's name


@dataclass(frozen=True, slots=True)
class ServerConfig:
    name: str
    command: str = ""  # "" for a server at `url`
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)  # besides PATH, HOME and the like
    cwd: str = ""  # working directory; "": akunu's
    url: str = ""  # of streamable HTTP
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float = CALL_TIMEOUT_S  # seconds for one call


def mcp_file() -> Path:
    return paths.config_dir() / "mcp.json"


def read_servers(path: Path | None = None) -> tuple[list[ServerConfig], list[str]]:
    """Return the servers in the file, and a line for each problem; none if there is no file."""
    path = path or mcp_file()
    try:
        content = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        return [], []
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return [], [f"cannot read {path}: {reason}; correct or remove it"]
    listed = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(listed, dict):
        return [], [f'{path}: expected {{"mcpServers": {{NAME: {{"command": ...}}}}}}']
    servers: list[ServerConfig] = []
    problems: list[str] = []
    for name, entry in listed.items():
        server, found = _read_server(name, entry)
        problems += [f"{path}: server {name[:_MAX_NAME]!r}: {problem}" for problem in found]
        servers += [server] if server else []
    return servers, problems


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value


def _is_table(value: Any) -> bool:
    return isinstance(value, dict) and _is_list([*value.values()])


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_HTTP = ("http://", "https://")
_TYPES = ("stdio", "http", "streamable-http", "streamableHttp")
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (_is_text, "a command"),
    "args": (_is_list, "a list of strings"),
    "env": (_is_table, "an object of strings"),
    "cwd": (_is_text, "a directory"),
    "url": (lambda value: _is_text(value) and value.startswith(_HTTP), "http://... or https://..."),
    "headers": (_is_table, "an object of strings"),
    "timeout": (
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
        "a number of seconds",
    ),
    "disabled": (lambda value: isinstance(value, bool), "true or false"),
    "type": (lambda value: value in _TYPES, "stdio or http (streamable HTTP)"),
}


def _read_server(name: str, entry: Any) -> tuple[ServerConfig | None, list[str]]:
    """Return a server unless it is invalid or disabled, and its problems."""
    if not isinstance(entry, dict):
        return None, ['expected {"command": ...} or {"url": ...}']
    if not name.strip() or len(name) > _MAX_NAME:
        return None, [f"expected a name of 1 to {_MAX_NAME} characters"]
    unknown = [
        f"{key[:_MAX_NAME]!r} is ignored: unknown field{did_you_mean(key, _FIELDS)}"
        for key in entry
        if key not in _FIELDS
    ]
    known = {key: value for key, value in entry.items() if key in _FIELDS}
    for key, value in known.items():
        is_valid, expected = _FIELDS[key]
        if not is_valid(value):
            return None, [f"expected {expected} for {key}, found {str(value)[:80]!r}"]
    if ("command" in known) == ("url" in known):
        both_or_neither = "both" if "url" in known else "neither"
        return None, [f"expected either command or url, found {both_or_neither}"]
    if known.pop("disabled", False):
        return None, []
    known.pop("type", None)
    known["args"] = tuple(known.get("args", ()))
    return ServerConfig(name, **known), unknown
