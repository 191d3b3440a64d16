"""Code blocks of an answer, in colors; CSS `text-wrap` decides whether lines wrap."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from markdown_it.token import Token as MarkdownToken
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Token, string_to_tokentype
from pygments.util import ClassNotFound
from rich.cells import cell_len, split_graphemes
from textual import events
from textual.app import ComposeResult
from textual.content import Content, Span
from textual.geometry import Offset, Size
from textual.message import Message
from textual.selection import Selection
from textual.style import Style
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from akunu_py.tui.transcript.drafting import Mark
from akunu_py.tui.transcript.markdown_parser import has_gap

_FUNCTION, _TYPE = "$code-function", "$code-type"
_TOKENS = {  # names of tokens, by style; other tokens have the style of their parent
    "bold": "Generic.Heading Generic.Strong",
    "italic": "Generic.Emph Name.Builtin.Pseudo",
    "$code-comment": "Generic.Prompt",
    "$code-comment italic": "Comment",
    "$code-keyword": "Comment.Preproc Keyword Name.Tag Operator.Word",
    "$code-number": "Keyword.Constant Literal.Date Literal.Number Literal.String.Escape "
    "Literal.String.Interpol Name.Constant",
    "$code-string": "Literal.String",
    "$text-error": "Generic.Deleted",
    "$text-success": "Generic.Inserted",
    _FUNCTION: "Generic.Subheading Name.Attribute Name.Builtin Name.Decorator Name.Function",
    _TYPE: "Keyword.Type Name.Class Name.Exception Name.Variable",
}
_STYLES: dict[Any, str] = {Token: ""} | {
    string_to_tokentype(name): style for style, names in _TOKENS.items() for name in names.split()
}
_TYPE_NAMES = ("bool", "bytes", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple")
_CAPITALIZED = re.compile(r"[A-Z](?=\w*[a-z])\w*")


def highlight(code: str, language: str) -> Content:
    """Return `code` in colors; a language that Pygments does not know has none."""
    spans: list[Span] = []
    start = 0
    tokens = [*_lexer(language).get_tokens(code), (Token, "")]
    for (kind, text), (_, following) in itertools.pairwise(tokens):
        if style := _style(kind, text, following):
            spans.append(Span(start, min(start + len(text), len(code)), style))
        start += len(text)
    return Content(code, spans=spans)


def _lexer(language: str) -> Lexer:
    try:
        return get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return get_lexer_by_name("text", stripnl=False)


def _style(kind: Any, text: str, following: str) -> str:
    """Return the style of a token; the form of a name shows if it is a call or a type."""
    if kind in (Token.Name, Token.Name.Other, Token.Name.Builtin):
        if text in _TYPE_NAMES or _CAPITALIZED.fullmatch(text):
            return _TYPE
        if following.startswith("("):
            return _FUNCTION
    while kind not in _STYLES:
        kind = kind.parent
    return _STYLES[kind]


_MEASURE = 96  # columns, as wide as text; long lines use all available space
_INDENT = 1  # minimum columns for each level of a list or quote
TAB_SIZE = 4
_STEP = 8  # columns to scroll for each key
_SCROLL = " · Shift+←→ scroll"
_MORE_RIGHT, _MORE_LEFT, _CONTINUATION = "›", "‹", "↪ "


class CodeBlock(MarkdownFence):
    """A code block. `code` is its text, `lexer` its language."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"code--head", "code--key", "code--mark"}

    @dataclass
    class CopyRequested(Message):
        block: CodeBlock

    def __init__(self, markdown: Markdown, token: MarkdownToken, code: str) -> None:
        # Skips MarkdownFence's constructor, which highlights immediately.
        MarkdownBlock.__init__(self, markdown, token)
        self.set_class(has_gap(token), "-gap", update=False)
        self.auto_links = False
        self._scroll_column = 0
        self._follows_end = False
        self._was_wrapped = False
        self._marks: tuple[Mark, str, int] | None = None  # mark, source, its offset
        self._set_code(code, token.info)

    def _set_code(self, code: str, info: str) -> None:
        self.code, self.lexer = code.expandtabs(TAB_SIZE), (info.split() or [""])[0]
        lines = self.code.split("\n")
        self._max_width = max(map(cell_len, lines))
        self._line_count = len(lines) if code else 0
        self._highlighted: list[Content] | None = None
        self._cached_lines: tuple[tuple[int, bool, int] | None, list[Content]] = None, []

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, CodeBlock):
            self._set_code(block.code, block.lexer)
            self._token, self._marks = block._token, block._marks
            self.refresh(layout=True)
        else:
            await MarkdownBlock._update_from_block(self, block)

    def mark(self, mark: Mark, source: str, offset: int) -> None:
        head = source.find("\n") + 1 if self._token.type == "fence" else 0
        self._marks = mark, source[head:], offset + head

    def follow_end(self, follows: bool) -> None:
        """Show the end of the last line, which grows, in place of its start."""
        if follows is not self._follows_end:
            self._follows_end = follows
            self._cached_lines = None, []
            self.refresh()

    def compose(self) -> ComposeResult:
        return ()

    def notify_style_update(self) -> None:
        self._highlighted, self._cached_lines = None, (None, [])
        if self._was_wrapped != self._is_wrapped:
            self._was_wrapped = self._is_wrapped
            self.refresh(layout=True)
        MarkdownBlock.notify_style_update(self)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        measure = _MEASURE - self.styles.gutter.width - _INDENT * self._token.level
        return min(container.width, max(measure, self._max_width))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return 1 + (len(self._lines(width)) if self._is_wrapped else self._line_count)

    @property
    def _is_wrapped(self) -> bool:
        return self.styles.text_wrap == "wrap"

    def watch_mouse_hover(self) -> None:
        self.refresh()

    def render(self) -> Content:
        return Content("\n").join([self._head(), *self._lines(self.size.width)])

    def _head(self) -> Content:
        head = self.get_visual_style("code--head", partial=True)
        key = self.get_visual_style("code--key", partial=True)
        lines = f"{self._line_count} line{'' if self._line_count == 1 else 's'}"
        parts: list[Content | str | tuple[str, Style]] = [
            (f"{self.lexer} · {lines}" if self.lexer else lines, head),
        ]
        # The keys work if the message is chosen; under the mouse, their names are links.
        has_keys = self.mouse_hover or any(each.has_class("-chosen") for each in self.ancestors)
        has_long_line = self._max_width > self.size.width
        if has_keys:
            parts += [(" · ", head), *_clickable("b", " copy", "copy", key, head)]
        if has_keys and has_long_line:
            wrap = " unwrap" if self._is_wrapped else " wrap"
            parts += [(" · ", head), *_clickable("w", wrap, "app.wrap_code", key, head)]
        shown = Content.assemble(*parts)
        can_scroll = has_keys and has_long_line and not self._is_wrapped
        if can_scroll and len(shown) + len(_SCROLL) <= self.size.width:
            shown += Content.styled(_SCROLL, head)
        return shown.truncate(self.size.width, ellipsis=True)

    def _lines(self, width: int) -> list[Content]:
        key = (width, self._is_wrapped, self._scroll_column)
        if self._cached_lines[0] != key:
            if self._highlighted is None:
                code = highlight(self.code, self.lexer)
                if self._marks is not None:
                    draw, source, offset = self._marks
                    (code,) = draw([code], source, offset)
                self._highlighted = code.split("\n", allow_blank=True)[: self._line_count]
            mark = self.get_visual_style("code--mark", partial=True)
            show = wrap_line if self._is_wrapped else truncate_line
            starts = [self._scroll_column] * len(self._highlighted)
            if self._follows_end and starts:
                starts[-1] = max(0, self._highlighted[-1].cell_length - width)
            lines = zip(self._highlighted, starts, strict=True)
            parts = (show(line, width, start, mark) for line, start in lines)
            self._cached_lines = key, list(itertools.chain.from_iterable(parts))
        return self._cached_lines[1]

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        if self._is_wrapped:
            return super().get_selection(selection)
        # The first row is the header, and a scrolled line starts left of the widget.
        start, end = selection
        moved = Offset(self._scroll_column, 0)
        if start is None or start.y == 0:
            start = Offset(0, 1)
        elif self._scroll_column:
            start += moved
        shown = [line.plain for line in self._highlighted or ()]
        return Selection(start, end and end + moved).extract("\n".join(["", *shown])), "\n"

    def scroll_code(self, steps: int) -> None:
        """Scroll truncated lines by some steps; positive steps scroll right."""
        room = 0 if self._is_wrapped else max(0, self._max_width - self.size.width)
        scrolled = max(0, min(room, self._scroll_column + steps * _STEP))
        if scrolled != self._scroll_column:
            self._scroll_column = scrolled
            self.refresh()

    def on_mouse_scroll_right(self, event: events.MouseScrollRight) -> None:
        event.stop()
        self.scroll_code(1)

    def on_mouse_scroll_left(self, event: events.MouseScrollLeft) -> None:
        event.stop()
        self.scroll_code(-1)

    def action_copy(self) -> None:
        self.post_message(self.CopyRequested(self))


def _clickable(
    key: str, words: str, action: str, key_style: Style, style: Style
) -> list[tuple[str, Style]]:
    click = Style.from_meta({"@click": action})
    return [(key, key_style + click), (words, style + click)]


def truncate_line(line: Content, width: int, start: int, mark: Style) -> list[Content]:
    """Return `width` columns of a line from `start`; mark each truncated end."""
    length = line.cell_length
    if length <= width and not start:
        return [line]
    first = start + 1 if start and length else start
    end = start + width - 1 if length > start + width else start + width
    left = (_MORE_LEFT if first > start else "", mark)
    shown = Content.assemble(left, _slice_columns(line, first, end))
    if length > start + width:
        shown = shown.pad_right(max(0, width - 1 - shown.cell_length))
        shown = Content.assemble(shown, (_MORE_RIGHT, mark))
    return [shown]


def wrap_line(line: Content, width: int, start: int, mark: Style) -> list[Content]:
    """Wrap a line; continuation lines start with a mark."""
    if line.cell_length <= width:
        return [line]
    first, rest = _split(line, width)
    room = max(1, width - len(_CONTINUATION))
    lines = [first]
    while rest:
        part, rest = _split(rest, room)
        lines.append(Content.assemble((_CONTINUATION, mark), part))
    return lines


def _split(line: Content, width: int) -> tuple[Content, Content]:
    """Split off what fits (at least a character), after a space or comma if near."""
    fits = len(_slice_columns(line, 0, width).plain) or 1
    text = line.plain
    if fits < len(text):
        near = max(text.rfind(mark, fits // 2, fits) for mark in " ,;(")
        fits = near + 1 if near >= 0 else fits
    return line[:fits], line[fits:]


def _slice_columns(line: Content, start: int, end: int) -> Content:
    """Return columns `start` to `end`; a truncated wide character becomes a space."""
    text = line.plain
    if cell_len(text) == len(text):
        return line[start:end]
    column, first, last, pad = 0, len(text), 0, 0
    for begin, stop, width in split_graphemes(text)[0]:
        if column < start < column + width:
            pad = 1
        elif column >= start and column + width <= end:
            first, last = min(first, begin), stop
        column += width
    return line[first:last].pad_left(pad) if first < last else Content(" " * pad)
