"""The tools of the started MCP servers, and which of them are offered to the model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from akunu_py.mcp.output import ListedTool
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
    def tool(self) -> Tool:
        """The tool for a model."""
        return Tool(self.name, self.listed.description, self.listed.parameters)

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
        return [each.tool for each in self.all_tools() if each.key not in self.off]

    def switch(self, tools: Sequence[ServerTool], *, on: bool) -> None:
        """Offer tools from now on, or do not."""
        keys = {each.key for each in tools}
        self.off = self.off - keys if on else self.off | keys

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
