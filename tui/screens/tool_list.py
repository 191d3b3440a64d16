"""The tools of the MCP servers: which are offered to the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.content import Content
from textual.widgets.option_list import Option

from akunu_py.mcp.config import mcp_file
from akunu_py.text import collapse, displayable
from akunu_py.tui.offered_tools import OfferedTools, ServerTool
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog

_MAX_DESCRIPTION = 300  # characters
_SERVER = "server "  # prefix of the ids of servers' rows


class ToolsScreen(ListDialog[None]):
    """All servers with their tools. Enter turns a tool, or all tools of a server, on or off."""

    CSS_PATH = [DIALOG_STYLE]  # noqa: RUF012 - as in Textual

    heading = "Tools"
    keys = "Enter on or off · Esc close"
    placeholder = "Search tools"

    def __init__(self, tools: OfferedTools, on_change: Callable[[], None]) -> None:
        super().__init__()
        self._tools = tools
        self._on_change = on_change

    def options(self) -> Sequence[Option]:
        words = self.words.casefold().split()
        self.none_found = "No matching tool." if words else f"No MCP servers in {mcp_file()}."
        return [row for name in self._tools.servers for row in self._rows(name, words)]

    def choose(self) -> None:
        """Switch a tool, or all tools of a server."""
        chosen = self.highlighted_id
        if chosen.startswith(_SERVER):
            tools = self._tools_of(chosen.removeprefix(_SERVER))
        else:
            tools = [each for each in self._tools.all_tools() if each.name == chosen]
        off = self._tools.off
        self._tools.switch(tools, on=bool(tools) and all(each.key in off for each in tools))
        self._on_change()
        self.draw()

    def _tools_of(self, server: str) -> list[ServerTool]:
        return [each for each in self._tools.all_tools() if each.server == server]

    def _rows(self, server: str, words: Sequence[str]) -> list[Option]:
        """Return the row of a server and those of its tools that contain all words."""
        found = [
            each
            for each in self._tools_of(server)
            if all(word in _about(each).casefold() for word in words)
        ]
        if words and not found:
            return []
        head = Option(self._describe_server(server), id=f"{_SERVER}{server}")
        return [head, *(Option(self._describe_tool(each), id=each.name) for each in found)]

    def _describe_server(self, server: str) -> Content:
        tools = self._tools_of(server)
        on = [each for each in tools if each.key not in self._tools.off]
        if server in self._tools.failed:
            state = f"failed: {self._tools.failed[server]}"
        elif server not in self._tools.listed:
            state = "starting"
        else:
            tokens = sum(each.tokens for each in on)
            state = f"{len(on)} of {len(tools)} tools on, about {tokens:,} tokens of context"
        return Content.assemble((displayable(server), "bold"), f"  {displayable(state)}")

    def _describe_tool(self, tool: ServerTool) -> Content:
        mark = "[ ]" if tool.key in self._tools.off else "[x]"
        about = collapse(tool.listed.description)[:_MAX_DESCRIPTION]
        return Content(f"  {mark} {tool.name}  {about}")


def _about(tool: ServerTool) -> str:
    return f"{tool.name} {tool.server} {tool.listed.description}"
