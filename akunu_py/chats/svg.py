"""A conversation as SVG: the whole active branch, in the colours of the chat's dark theme.

Drawn as on a wide terminal; the text in it can be selected. Holds no font and loads nothing from
anywhere.
"""

from __future__ import annotations

import io
import re
from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.padding import Padding
from rich.style import Style
from rich.syntax import Syntax
from rich.terminal_theme import SVG_EXPORT_THEME, TerminalTheme
from rich.text import Text
from rich.theme import Theme

from akunu_py.chats import colors
from akunu_py.chats.tree import (
    ChatMessage,
    Tree,
    author_of,
    ending_of,
    title_of,
    visible_messages,
)
from akunu_py.errors import ConversationError
from akunu_py.text import displayable

WIDTH = 98  # columns
MAX_LINES = 3000

_MUTED = colors.FOREGROUND_MUTED
_CODE_STYLE = "github-dark"
_STYLES = Theme(
    {
        **{f"markdown.h{level}": Style(bold=True, color=colors.PRIMARY) for level in range(1, 7)},
        "markdown.code": Style(color=colors.ACCENT, bgcolor=colors.SURFACE),
        "markdown.block_quote": Style(color=_MUTED),
        "markdown.item.bullet": Style(color=colors.PRIMARY),
        "markdown.item.number": Style(color=colors.PRIMARY),
        "markdown.hr": Style(color=_MUTED),
        "markdown.link": Style(color=colors.PRIMARY),
        "markdown.link_url": Style(color=_MUTED),
        "markdown.table.border": Style(color=_MUTED),
        "markdown.table.header": Style(bold=True),
    }
)
# Rich's frame names a font on a server, which every viewer of the SVG would ask for it.
_FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
# Characters that XML has no place for, and that `displayable` leaves.
_NOT_IN_XML = dict.fromkeys((0xFFFE, 0xFFFF), "\ufffd")


class _Title(Heading):
    """A heading of any level, at the left."""

    LEVEL_ALIGN: ClassVar = dict.fromkeys((f"h{level}" for level in range(1, 7)), "left")


class _Code(CodeBlock):
    """A block of code on the background that it has in the chat."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip(),
            self.lexer_name,
            theme=_CODE_STYLE,
            background_color=colors.SURFACE,
            word_wrap=True,
            padding=(0, 1),
        )


class _Answer(Markdown):
    """Markdown as the chat shows it: HTML is text."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Title,
        "fence": _Code,
        "code_block": _Code,
    }

    def __init__(self, markup: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = MarkdownIt("gfm-like", {"html": False}).parse(markup)


def as_svg(tree: Tree) -> str:
    """The active branch as an SVG. Raises ConversationError where it is longer than MAX_LINES."""
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        theme=_STYLES,
        legacy_windows=False,
        _environ={},
    )
    assert isinstance(console.file, io.StringIO)
    lines = 0
    for message in visible_messages(tree):
        console.print()
        _print(console, message)
        lines += console.file.getvalue().count("\n")
        console.file.seek(0)
        console.file.truncate()
        if lines > MAX_LINES:
            raise ConversationError(
                f"expected a conversation of at most {MAX_LINES} lines for a picture, found more; "
                "export it as Markdown"
            )
    console.print()
    title = title_of(_drawable(tree.title))
    return console.export_svg(title=title, theme=_colours(), code_format=_frame())


def _print(console: Console, message: ChatMessage) -> None:
    """One message: a prompt on a panel, an answer under the name of its model."""
    if message.role != "assistant":
        prompt = Text(_drawable(message.text), style=Style(bgcolor=colors.PANEL))
        console.print(Padding(prompt, (0, 1), style=f"on {colors.PANEL}", expand=True))
        return
    console.print(Padding(Text(_drawable(author_of(message)), style=Style(color=_MUTED)), (0, 1)))
    if message.thinking.strip():
        thinking = Text(
            _drawable(message.thinking).strip(),
            style=Style(color=_MUTED, italic=True),
        )
        console.print(Padding(thinking, (0, 1, 1, 3)))
    if message.text.strip():
        console.print(Padding(_Answer(_drawable(message.text)), (0, 1)))
    if ending := ending_of(message):
        console.print(Padding(Text(ending, style=Style(color=_MUTED, italic=True)), (1, 1, 0, 1)))


def _drawable(text: str) -> str:
    return displayable(text).translate(_NOT_IN_XML)


def _colours() -> TerminalTheme:
    """Our background and foreground, Rich's other colours."""
    ansi = [SVG_EXPORT_THEME.ansi_colors[number] for number in range(16)]
    colours = [(each[0], each[1], each[2]) for each in ansi]
    return TerminalTheme(_rgb(colors.BACKGROUND), _rgb(colors.FOREGROUND), colours[:8], colours[8:])


def _rgb(color: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


def _frame() -> str:
    frame: str = (Console.export_svg.__kwdefaults__ or {})["code_format"]
    return _FONT_FACE.sub("", frame).replace(
        "Fira Code, monospace", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
    )
