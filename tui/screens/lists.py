"""Searchable lists: earlier prompts, themes, and the tools of MCP servers."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from akunu_py.mcp.config import mcp_file
from akunu_py.text import collapse, displayable, on_one_line
from akunu_py.tui import themes
from akunu_py.tui.screens.dialog import DIALOG_STYLE, ListDialog
from akunu_py.tui.workers.tool_servers import OfferedTools, ServerTool

_MAX_SHOWN = 200  # prompts in the list
_MAX_CHARACTERS = 300  # displayed per prompt


class HistoryScreen(ListDialog[str]):
    """The prompts with all words, newest first. The result is the chosen prompt."""

    CSS_PATH = [DIALOG_STYLE, "lists.tcss"]  # noqa: RUF012 - as in Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+r", "move('cursor_up')", "Newer", show=False),
    ]

    heading = "Earlier prompts"
    keys = "Enter take · Esc close"
    placeholder = "Search prompts"
    none_found = "No matching prompt."

    def __init__(self, prompts: Sequence[str]) -> None:  # oldest first
        super().__init__()
        self._prompts = list(dict.fromkeys(reversed(prompts)))

    def options(self) -> Sequence[Option]:
        words = self.words.casefold().split()
        found = (
            Option(on_one_line(prompt[:_MAX_CHARACTERS]), id=str(place))
            for place, prompt in enumerate(self._prompts)
            if all(word in prompt.casefold() for word in words)
        )
        return list(islice(found, _MAX_SHOWN))

    def choose(self) -> None:
        self.dismiss(self._prompts[int(self.highlighted_id)] if self.highlighted_id else None)


class ThemesScreen(ListDialog[str]):
    """The list of themes. The result: the chosen theme; None restores the current one."""

    CSS_PATH = [DIALOG_STYLE, "lists.tcss"]  # noqa: RUF012 - as in Textual

    heading = "Themes"
    keys = "Enter use · Esc close"
    placeholder = "Search themes"
    none_found = "No matching theme."

    def __init__(self, current: str, show_theme: Callable[[str], None]) -> None:
        super().__init__()
        self.preferred = current
        self._show_theme = show_theme  # previews a theme

    def options(self) -> Sequence[Option]:
        words = self.words.strip().lower()
        return [
            Option(f"{'●' if name == self.preferred else ' '} {themes.describe(name)}", id=name)
            for name in themes.choices()
            if words in name
        ]

    def choose(self) -> None:
        if self.highlighted_id:
            self.dismiss(self.highlighted_id)

    @on(OptionList.OptionHighlighted)
    def _preview(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_id:
            self._show_theme(event.option_id)

    def action_close(self) -> None:
        self._show_theme(self.preferred)
        self.dismiss(None)


_MAX_DESCRIPTION = 300  # characters
_SERVER = "server "  # prefix of the ids of servers' rows


class ToolsScreen(ListDialog[None]):
    """All servers and their tools. Enter turns a tool or a server's tools on or off."""

    CSS_PATH = [DIALOG_STYLE]  # noqa: RUF012 - as in Textual

    heading = "Tools"
    keys = "Enter on or off · Esc close"
    placeholder = "Search tools"

    def __init__(self, tools: OfferedTools, context_length: int) -> None:
        super().__init__()
        self._tools = tools
        self._context_length = context_length  # tokens, 0 if unknown

    def options(self) -> Sequence[Option]:
        words = self.words.casefold().split()
        self.none_found = "No matching tool." if words else f"No MCP servers in {mcp_file()}."
        return [row for name in self._tools.servers for row in self._rows(name, words)]

    def choose(self) -> None:
        chosen = self.highlighted_id
        tools, off = self._tools.all_tools(), self._tools.off
        keys = {each.key for each in tools if chosen in (each.name, f"{_SERVER}{each.server}")}
        # Switch them on if all are off.
        self._tools.off = off - keys if keys <= off else off | keys
        if notice := self._tools.explain_room(self._context_length):
            self.notify(notice, markup=False)
        self.draw()

    def _rows(self, server: str, words: Sequence[str]) -> list[Option]:
        tools = [each for each in self._tools.all_tools() if each.server == server]
        rows = [Option(self._describe_server(server, tools), id=f"{_SERVER}{server}")]
        for tool in tools:
            about = f"{tool.name} {tool.server} {tool.listed.description}".casefold()
            if all(word in about for word in words):
                mark = "[ ]" if tool.key in self._tools.off else "[x]"
                description = collapse(tool.listed.description)[:_MAX_DESCRIPTION]
                rows.append(Option(f"  {mark} {tool.name}  {description}", id=tool.name))
        return rows if len(rows) > 1 or not words else []

    def _describe_server(self, server: str, tools: Sequence[ServerTool]) -> Content:
        on = [each for each in tools if each.key not in self._tools.off]
        if server in self._tools.failed:
            state = f"failed: {self._tools.failed[server]}"
        elif server not in self._tools.listed:
            state = "starting"
        else:
            tokens = sum(each.tokens for each in on)
            state = f"{len(on)} of {len(tools)} tools on, about {tokens:,} tokens of context"
        return Content.assemble((displayable(server), "bold"), f"  {displayable(state)}")
