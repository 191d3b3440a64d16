"""The export dialog: choosing a format, and writing the file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from akunu_py.chats.export import FORMATS, ExportFormat, file_name, render, write_new
from akunu_py.chats.tree import Tree
from akunu_py.text import displayable

_WORDS: dict[ExportFormat, tuple[str, str]] = {
    "markdown": ("Markdown", "what is on the screen, as text"),
    "json": ("JSON", "everything, with all branches; akunu can import it"),
    "svg": ("Picture", "what is on the screen, as SVG"),
}


class ExportScreen(ModalScreen[ExportFormat | None]):
    """The list of formats. The result is the one to write, None for none."""

    CSS_PATH = "export.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close")]
    COMPONENT_CLASSES: ClassVar[set[str]] = {"export--muted"}

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "Export"
            dialog.border_subtitle = "Enter write · Esc close"
            yield OptionList(compact=True)
            yield Static(id="file")

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()
        self.call_after_refresh(self._show_formats)  # once styles are known

    def _show_formats(self) -> None:
        muted = self.get_visual_style("export--muted", partial=True)
        formats = self.query_one(OptionList)
        for form in FORMATS:
            name, words = _WORDS[form]
            formats.add_option(Option(Content.assemble(f"{name:<10}", (words, muted)), id=form))
        formats.highlighted = 0

    @on(OptionList.OptionHighlighted)
    def _show_file(self, event: OptionList.OptionHighlighted) -> None:
        path = Path.cwd() / file_name(self._title, FORMATS[event.option_index])
        self.query_one("#file", Static).update(Content(displayable(str(path))))

    @on(OptionList.OptionSelected)
    def _take(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(FORMATS[event.option_index])

    def action_close(self) -> None:
        self.dismiss(None)


async def export_here(tree: Tree, form: ExportFormat) -> Path:
    """Writes a conversation into the working directory; returns the path of the new file.

    Raises ConversationError.
    """

    def write() -> Path:
        path = Path.cwd() / file_name(tree.title, form)
        return write_new(path, render(tree, form), numbered=True)

    return await asyncio.to_thread(write)
