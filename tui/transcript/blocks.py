"""Paragraphs, lists and quotes of an answer, which change where they stand while it grows.

Textual's own make all that is in a list or quote anew with each piece of text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from markdown_it.token import Token
from rich.cells import cell_len
from textual.app import ComposeResult, RenderResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.selection import Selection
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Markdown
from textual.widgets._markdown import (
    MarkdownBlockQuote,
    MarkdownBullet,
    MarkdownList,
    MarkdownListItem,
    MarkdownParagraph,
)
from textual.widgets.markdown import MarkdownBlock

from akunu_py.tui.transcript.code import CodeBlock
from akunu_py.tui.transcript.parser import has_gap
from akunu_py.tui.transcript.table import TableBlock

_MEASURE = 92  # columns of text in a list


class Paragraph(MarkdownParagraph):
    """A paragraph that keeps its distance from what follows in a list or quote."""

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self.set_class(has_gap(token), "-gap", update=False)

    def _copy_context(self, block: MarkdownBlock) -> None:
        super()._copy_context(block)
        self._inline_token = block._inline_token


class Quote(MarkdownBlockQuote):
    """A quote."""

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, Quote):
            await change(self, block._blocks)
            self._copy_context(block)
        else:
            await super()._update_from_block(block)


class ListRow(Horizontal):
    """An item of a list beside its bullet or number."""

    DEFAULT_CSS = """
    ListRow, ListRow > Vertical { width: 1fr; height: auto; }
    """

    def __init__(self, item: MarkdownListItem, symbol: str) -> None:
        self._bullet = MarkdownBullet()
        self._bullet.symbol = symbol
        self._column = Vertical(*item._blocks)
        super().__init__(self._bullet, self._column)

    async def change(self, item: MarkdownListItem, symbol: str) -> None:
        """Becomes another item, with its symbol."""
        if symbol != self._bullet.symbol:
            self._bullet.symbol = symbol
            self._bullet.refresh(layout=True)
        await change(self._column, item._blocks)


class _List(MarkdownList):
    """A list of either kind: one widget for items that are text, however many they are, as the
    layout looks at every widget whenever one changes; else a row for each item."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"list--symbol"}

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self._has_rows = False
        self._lines: tuple[int, list[_Line]] = -1, []  # for which width

    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        raise NotImplementedError

    @property
    def _items(self) -> list[tuple[MarkdownListItem, str]]:
        items = [each for each in self._blocks if isinstance(each, MarkdownListItem)]
        return list(zip(items, self._symbols(items), strict=True))

    @property
    def _is_text(self) -> bool:
        return all(
            isinstance(block, Paragraph) or (isinstance(block, _List) and block._is_text)
            for item, _ in self._items
            for block in item._blocks
        )

    def compose(self) -> ComposeResult:
        self._has_rows = not self._is_text
        if self._has_rows:
            yield from (ListRow(item, symbol) for item, symbol in self._items)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if type(block) is not type(self):
            await super()._update_from_block(block)
            return
        self._blocks = block._blocks
        self._copy_context(block)
        self._has_rows = self._has_rows or not self._is_text
        if self._has_rows:
            await self._change_rows()
        self._lines = -1, []
        self.refresh(layout=True)

    async def _change_rows(self) -> None:
        shown = [each for each in self.children if isinstance(each, ListRow)]
        wanted = self._items
        for row, (item, symbol) in zip(shown, wanted, strict=False):
            await row.change(item, symbol)
        await self.remove_children(shown[len(wanted) :])
        await self.mount_all(ListRow(item, symbol) for item, symbol in wanted[len(shown) :])

    # As text

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self._has_rows:
            return super().get_content_height(container, viewport, width)
        return len(self._drawn(width))

    def render(self) -> RenderResult:
        if self._has_rows:
            return super().render()
        return Content("\n").join([line.content for line in self._drawn(self.size.width)])

    def notify_style_update(self) -> None:
        self._lines = -1, []
        super().notify_style_update()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        if self._has_rows:
            return super().get_selection(selection)
        lines = self._drawn(self.size.width)
        first = selection.start.transpose if selection.start else (0, 0)
        last = selection.end.transpose if selection.end else (len(lines), 0)
        text = ""
        for number, line in enumerate(lines[first[0] : last[0] + 1], first[0]):
            shown = line.content.plain
            end = last[1] if number == last[0] else len(shown)
            begin = first[1] if number == first[0] else 0
            if text and line.joined is not None:
                text, begin = text + line.joined, max(begin, line.indent)
            elif text:
                text += "\n"
            text += shown[begin:end]
        return text, "\n"

    def _drawn(self, width: int) -> list[_Line]:
        if self._lines[0] != width:
            style = self.get_visual_style("list--symbol", partial=True)
            self._lines = width, list(self._draw(width, style))
        return self._lines[1]

    def _draw(self, width: int, style: Style) -> Iterator[_Line]:
        for item, symbol in self._items:
            start, indent = Content.styled(symbol, style), cell_len(symbol)
            for block in item._blocks:
                room = max(1, width - indent)
                for line in _text_lines(block, room, style):
                    content = Content.assemble(start, line.content)
                    yield _Line(content, line.joined, line.indent + indent)
                    start = Content(" " * indent)
            if not item._blocks:
                yield _Line(start)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a list. Where it continues a paragraph, `joined` is what stood at the break, and
    its text begins behind `indent` columns."""

    content: Content
    joined: str | None = None
    indent: int = 0


def _text_lines(block: MarkdownBlock, width: int, style: Style) -> Iterator[_Line]:
    if isinstance(block, _List):
        yield from block._draw(width, style)
        return
    plain, end = block._content.plain, 0
    for number, content in enumerate(block._content.wrap(min(width, _MEASURE))):
        shown = content.plain.strip()
        start = plain.find(shown, end)
        between, end = plain[end:start], start + len(shown)
        yield _Line(content, None if not number or "\n" in between else between)
    if has_gap(block._token):
        yield _Line(Content())


class BulletList(_List):
    """A list with bullets."""

    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        return (item.bullet for item in items)


class NumberedList(_List):
    """A list with numbers, which count from that of the first item."""

    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        first = int(items[0].bullet) if items else 1
        numbers = [f"{number}. " for number in range(first, first + len(items))]
        width = 1 + max(map(len, numbers), default=0)
        return (number.rjust(width) for number in numbers)


_CHANGE_IN_PLACE = (Paragraph, CodeBlock, TableBlock, Quote, _List)


async def change(parent: Widget, blocks: Iterable[MarkdownBlock]) -> None:
    """Makes the blocks in a widget look like others, and mounts only those that must be."""
    shown = [each for each in parent.children if isinstance(each, MarkdownBlock)]
    wanted = list(blocks)
    for old, new in zip(shown, wanted, strict=False):
        if type(old) is not type(new) or not isinstance(old, _CHANGE_IN_PLACE):
            await parent.mount(new, after=old)
            await old.remove()
        elif isinstance(old, Quote | _List) or _content(old) != _content(new):
            await old._update_from_block(new)
            old.set_class(has_gap(new._token), "-gap")
    await parent.remove_children(shown[len(wanted) :])
    await parent.mount_all(wanted[len(shown) :])


def _content(block: MarkdownBlock) -> tuple[object, ...]:
    token, inline = block._token, block._inline_token
    return token.info, token.content, token.meta, inline and inline.children
