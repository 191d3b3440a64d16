"""The user's MCP servers in a thread, and the tools that the model is offered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from textual.message import Message as TextualMessage

from akunu_py.errors import AkunuError, describe
from akunu_py.mcp.config import ServerConfig
from akunu_py.mcp.output import ListedTool, ToolOutput
from akunu_py.types import Tool

_MAX_NAME = 64  # characters of a tool's name
_CHARACTERS_A_TOKEN = 4  # about, in the description of a tool
_MOST_ROOM = 3  # The tools may fill one part in this many of the context without a notice.


@dataclass(frozen=True, slots=True)
class ServerTool:
    """A tool of a server, under the name that models use."""

    name: str  # unique among all tools
    server: str
    listed: ListedTool

    @property
    def key(self) -> tuple[str, str]:
        return self.server, self.listed.name

    @property
    def tokens(self) -> int:
        """An estimate of the prompt tokens that describe the tool."""
        text = f"{self.name}{self.listed.description}{self.listed.parameters}"
        return len(text) // _CHARACTERS_A_TOKEN


@dataclass(eq=False)
class OfferedTools:
    """The tools of all servers, under unique names."""

    servers: Sequence[str] = ()  # names of the configured servers
    listed: dict[str, Sequence[ListedTool]] = field(default_factory=dict)  # by started server
    failed: dict[str, str] = field(default_factory=dict)  # errors, by server
    off: set[tuple[str, str]] = field(default_factory=set)  # tools that are not offered

    def all_tools(self) -> list[ServerTool]:
        """Return the tools of all started servers, in the order of the file."""
        pairs = [(name, each) for name in self.servers for each in self.listed.get(name, ())]
        names = [_plain_name(listed.name) for _, listed in pairs]
        counts = Counter(names)
        tools: dict[str, ServerTool] = {}
        for (server, listed), name in zip(pairs, names, strict=True):
            if counts[name] > 1:
                name = _plain_name(f"{server}_{name}")
            tools.setdefault(name, ServerTool(name, server, listed))
        return list(tools.values())

    def find(self, server: str, name: str) -> ServerTool | None:
        """Return a tool by the name that it has for models, or had before a server joined."""
        tools = [each for each in self.all_tools() if each.server == server]
        return next(
            (each for each in tools if name in (each.name, _plain_name(each.listed.name))), None
        )

    def for_model(self) -> list[Tool]:
        """Return the tools for the next answer."""
        offered = [
            (each.name, each.listed) for each in self.all_tools() if each.key not in self.off
        ]
        return [Tool(name, each.description, each.parameters) for name, each in offered]

    def explain_room(self, context_length: int) -> str:
        """Return a notice if the offered tools take much of the context, else ""."""
        offered = [each for each in self.all_tools() if each.key not in self.off]
        tokens = sum(each.tokens for each in offered)
        if not context_length or tokens * _MOST_ROOM < context_length:
            return ""
        return (
            f"The descriptions of {len(offered)} tools take about {tokens:,} of "
            f"{context_length:,} tokens of context. /tools turns some of them off."
        )


def _plain_name(name: str) -> str:
    """Return a name that every family of models can write."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_MAX_NAME] or "tool"


if TYPE_CHECKING:  # a second of CPU time, which the thread spends
    from akunu_py.mcp.connection import Connection


class ToolServerMessage(TextualMessage):
    """A message about an MCP server or a call."""


@dataclass
class ToolsListed(ToolServerMessage):
    server: str
    tools: Sequence[ListedTool]


@dataclass
class ToolServerFailed(ToolServerMessage):
    server: str
    error: str


@dataclass
class ToolCalled(ToolServerMessage):
    """A call has ended; not posted for cancelled calls."""

    call: str  # its id
    output: ToolOutput


class ToolServers:
    """Starts servers and calls their tools. Call its methods from the app's thread."""

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        self._configs = configs
        self.names = [config.name for config in configs]
        self._post: Callable[[TextualMessage], object] = lambda message: None
        self._loop: asyncio.AbstractEventLoop | None = None  # while the thread runs
        self._closed = threading.Event()
        self._wake = asyncio.Event()  # set in the loop when `_closed` is
        self._connections: dict[str, Connection] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        # A daemon, because a server may refuse to end.
        self._thread = threading.Thread(target=self._run, name="tool servers", daemon=True)

    def start(self, post: Callable[[TextualMessage], object]) -> None:
        """Start all servers. `post` is called from another thread."""
        self._post = post
        self._thread.start()

    def call(self, call: str, server: str, tool: str, arguments: str) -> None:
        """Call a tool of a started server. arguments: JSON object. call: id of the result."""

        def begin() -> None:
            self._calls[call] = asyncio.create_task(self._call(call, server, tool, arguments))
            self._calls[call].add_done_callback(lambda task: self._calls.pop(call, None))

        self._in_loop(begin)

    def cancel(self, call: str) -> None:
        self._in_loop(lambda: call in self._calls and self._calls[call].cancel())

    def close(self, timeout: float) -> bool:
        """End all servers. Return False if one still runs after `timeout` seconds."""
        self._closed.set()
        self._in_loop(self._wake.set)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _in_loop(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has just ended.
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - reported to the user
            for name in self.names:
                self._post(ToolServerFailed(name, describe(error)))

    async def _serve(self) -> None:
        from akunu_py.mcp.connection import Connection

        self._loop = asyncio.get_running_loop()
        self._connections = {config.name: Connection(config) for config in self._configs}
        starts = [asyncio.create_task(self._start(name)) for name in self._connections]
        if not self._closed.is_set():
            await self._wake.wait()
        self._loop = None
        for task in (*starts, *self._calls.values()):
            task.cancel()
        closing = [connection.close() for connection in self._connections.values()]
        await asyncio.gather(*starts, *closing, return_exceptions=True)

    async def _start(self, name: str) -> None:
        try:
            tools = await self._connections[name].start()
        except AkunuError as error:
            self._post(ToolServerFailed(name, str(error)))
        else:
            self._post(ToolsListed(name, tools))

    async def _call(self, call: str, server: str, tool: str, arguments: str) -> None:
        try:
            values = json.loads(arguments or "{}")
            if not isinstance(values, dict):
                raise AkunuError("the arguments are not a JSON object")
            output = await self._connections[server].call(tool, values)
        except (AkunuError, ValueError, RecursionError) as error:
            output = ToolOutput(str(error) or describe(error), is_error=True)
        self._post(ToolCalled(call, output))
