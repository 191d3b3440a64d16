"""Paragraphs, lists, quotes and tables of a growing answer, updated in place.

Textual's own widgets rebuild the content of a list or quote for every new piece of text.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
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
from akunu_py.tui.transcript.drafting import Mark
from akunu_py.tui.transcript.markdown_parser import TableCells, has_gap

_MEASURE = 92  # columns of text in a list
_BOXES = ("☐", "☑")  # of tasks, in place of bullets
_GAP, _NARROW_GAP = " │ ", "│"
_MIN_COLUMNS = 12  # columns: longer words may break; narrower tables become lists


class Paragraph(MarkdownParagraph):
    """A paragraph that keeps a written gap below it in a list or quote."""

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self.set_class(has_gap(token), "-gap", update=False)

    def _copy_context(self, block: MarkdownBlock) -> None:
        super()._copy_context(block)
        self._inline_token = block._inline_token


class Quote(MarkdownBlockQuote):
    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, Quote):
            await update_blocks(self, block._blocks)
            self._copy_context(block)
        else:
            await super()._update_from_block(block)


class ListRow(Horizontal):
    DEFAULT_CSS = """
    ListRow, ListRow > Vertical { width: 1fr; height: auto; }
    """

    def __init__(self, item: MarkdownListItem, symbol: str) -> None:
        self._bullet = MarkdownBullet()
        self._bullet.symbol = symbol
        self._column = Vertical(*item._blocks)
        super().__init__(self._bullet, self._column)

    async def update_item(self, item: MarkdownListItem, symbol: str) -> None:
        if symbol != self._bullet.symbol:
            self._bullet.symbol = symbol
            self._bullet.refresh(layout=True)
        await update_blocks(self._column, item._blocks)


class _List(MarkdownList):
    """A list: one widget if all items are text (fast layout), else a row per item."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"list--symbol"}

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self._has_rows = False
        self._lines: tuple[int, list[_ListLine]] = -1, []  # width, drawn lines

    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        raise NotImplementedError

    @property
    def _items(self) -> list[tuple[MarkdownListItem, str]]:
        items = [each for each in self._blocks if isinstance(each, MarkdownListItem)]
        return list(zip(items, self._symbols(items), strict=True))

    @property
    def _has_only_text(self) -> bool:
        return all(
            isinstance(block, Paragraph) or (isinstance(block, _List) and block._has_only_text)
            for item, _ in self._items
            for block in item._blocks
        )

    def compose(self) -> ComposeResult:
        self._has_rows = not self._has_only_text
        if self._has_rows:
            yield from (ListRow(item, symbol) for item, symbol in self._items)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if type(block) is not type(self):
            await super()._update_from_block(block)
            return
        self._blocks = block._blocks
        self._copy_context(block)
        self._has_rows = self._has_rows or not self._has_only_text
        if self._has_rows:
            await self._change_rows()
        self._lines = -1, []
        self.refresh(layout=True)

    async def _change_rows(self) -> None:
        shown = [each for each in self.children if isinstance(each, ListRow)]
        wanted = self._items
        for row, (item, symbol) in zip(shown, wanted, strict=False):
            await row.update_item(item, symbol)
        await self.remove_children(shown[len(wanted) :])
        await self.mount_all(ListRow(item, symbol) for item, symbol in wanted[len(shown) :])

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self._has_rows:
            return super().get_content_height(container, viewport, width)
        return len(self._drawn_lines(width))

    def render(self) -> RenderResult:
        if self._has_rows:
            return super().render()
        return Content("\n").join([line.content for line in self._drawn_lines(self.size.width)])

    def notify_style_update(self) -> None:
        self._lines = -1, []
        super().notify_style_update()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        if self._has_rows:
            return super().get_selection(selection)
        lines = self._drawn_lines(self.size.width)
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

    def _drawn_lines(self, width: int) -> list[_ListLine]:
        if self._lines[0] != width:
            style = self.get_visual_style("list--symbol", partial=True)
            self._lines = width, list(self._draw(width, style))
        return self._lines[1]

    def _draw(self, width: int, style: Style) -> Iterator[_ListLine]:
        for item, symbol in self._items:
            start, indent = Content.styled(symbol, style), cell_len(symbol)
            for block in item._blocks:
                room = max(1, width - indent)
                for line in _text_lines(block, room, style):
                    content = Content.assemble(start, line.content)
                    yield _ListLine(content, line.joined, line.indent + indent)
                    start = Content(" " * indent)
            if not item._blocks:
                yield _ListLine(start)


@dataclass(frozen=True, slots=True)
class _ListLine:
    content: Content
    joined: str | None = None  # text removed at the line break; None: starts a paragraph
    indent: int = 0  # columns


def _text_lines(block: MarkdownBlock, width: int, style: Style) -> Iterator[_ListLine]:
    if isinstance(block, _List):
        yield from block._draw(width, style)
        return
    plain, end = block._content.plain, 0
    for number, content in enumerate(block._content.wrap(min(width, _MEASURE))):
        shown = content.plain.strip()
        start = plain.find(shown, end)
        between, end = plain[end:start], start + len(shown)
        yield _ListLine(content, None if not number or "\n" in between else between)
    if has_gap(block._token):
        yield _ListLine(Content())


class BulletList(_List):
    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        tasks = (item._blocks and item._blocks[0]._content.plain[:1] in _BOXES for item in items)
        return ("" if task else item.bullet for item, task in zip(items, tasks, strict=True))


class NumberedList(_List):
    """A numbered list that counts from its first item's number."""

    def _symbols(self, items: list[MarkdownListItem]) -> Iterator[str]:
        first = int(items[0].bullet) if items else 1
        numbers = [f"{number}. " for number in range(first, first + len(items))]
        width = 1 + max(map(len, numbers), default=0)
        return (number.rjust(width) for number in numbers)


class TableBlock(MarkdownBlock):
    """A table, at most as wide as the available space."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--header", "table--rule"}
    allow_horizontal_scroll = False

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self.set_class(has_gap(token), "-gap", update=False)
        cells: TableCells = token.meta["cells"]
        self._alignment = cells.alignment
        self._set_rows([[self._token_to_content(cell) for cell in row] for row in cells.rows])

    def _set_rows(self, rows: list[list[Content]]) -> None:
        self._rows = rows  # header row first
        self._natural = sum(natural_widths(rows)[0])
        self._lines: tuple[int, list[Content]] = -1, []  # width, drawn lines

    def mark(self, mark: Mark, source: str, offset: int) -> None:
        cells = iter(mark([cell for row in self._rows for cell in row], source, offset))
        self._set_rows([list(itertools.islice(cells, len(row))) for row in self._rows])

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, TableBlock):
            self._set_rows(block._rows)
            self._alignment, self._token = block._alignment, block._token
            self.refresh(layout=True)
        else:
            await super()._update_from_block(block)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return min(container.width, self._natural + len(_GAP) * (len(self._rows[0]) - 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._drawn_lines(width))

    def render(self) -> Content:
        return Content("\n").join(self._drawn_lines(self.size.width))

    def notify_style_update(self) -> None:
        self._lines = -1, []
        super().notify_style_update()

    def _drawn_lines(self, width: int) -> list[Content]:
        if self._lines[0] != width:
            header = self.get_visual_style("table--header", partial=True)
            rule = self.get_visual_style("table--rule", partial=True)
            heads = [cell.stylize(header) for cell in self._rows[0]]
            self._lines = width, draw_table(heads, self._rows[1:], self._alignment, width, rule)
        return self._lines[1]


def natural_widths(rows: Sequence[Sequence[Content]]) -> tuple[list[int], list[int]]:
    """Return each column's width without wrapping, and the width of its longest word."""
    natural = [1] * len(rows[0])
    words = natural.copy()
    for row in rows:
        for place, cell in enumerate(row):
            natural[place] = max(natural[place], cell.cell_length)
            if cell.cell_length > words[place]:
                words[place] = max([words[place], *map(cell_len, cell.plain.split())])
    return natural, words


def column_widths(natural: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """Distribute `room` text columns over table columns at the cost of the widest."""
    words_fit = sum(words) <= room
    least = words if words_fit else [1] * len(natural)
    wanted = natural if words_fit else words

    def widths_up_to(level: int) -> list[int]:
        return [max(each, min(most, level)) for each, most in zip(least, wanted, strict=True)]

    levels = range(1, max(*wanted, 1) + 1)
    level = bisect_right(levels, room, key=lambda each: sum(widths_up_to(each)))
    widths = widths_up_to(level)
    for place, width in enumerate(widths):  # distribute the remainder
        if width < wanted[place] and sum(widths) < room:
            widths[place] += 1
    return widths


def draw_table(
    header: Sequence[Content],
    rows: Sequence[Sequence[Content]],
    alignment: Sequence[str],
    width: int,
    rule: Style,
) -> list[Content]:
    """Return the lines of a table up to `width` columns wide; if too narrow, a list."""
    natural, words = natural_widths([header, *rows])
    least = sum(min(_MIN_COLUMNS, each) for each in words)
    for gap in (_GAP, _NARROW_GAP):
        room = width - len(gap) * (len(header) - 1)
        if room >= least:
            break
    else:
        return _as_list(header, rows, width, rule)
    widths = column_widths(natural, words, room)
    drawn = [_row_lines(row, widths, alignment, (gap, rule)) for row in [header, *rows]]
    crossing = gap.replace(" ", "─").replace("│", "┼")
    line = Content.styled(crossing.join("─" * each for each in widths), rule)
    wrapped = any(len(row) > 1 for row in drawn[1:])
    lines = [*drawn[0], line]
    for number, row in enumerate(drawn[1:]):
        lines += [line, *row] if wrapped and number else row
    return lines


def _row_lines(
    row: Sequence[Content], widths: Sequence[int], alignment: Sequence[str], gap: tuple[str, Style]
) -> list[Content]:
    cells = [
        cell.wrap(width) if cell.cell_length > width or "\n" in cell.plain else [cell]
        for cell, width in zip(row, widths, strict=True)
    ]
    lines: list[Content] = []
    for line in itertools.zip_longest(*cells, fillvalue=Content()):
        parts: list[Content | tuple[str, Style]] = []
        for part, width, side in zip(line, widths, alignment, strict=True):
            parts += [_aligned(part, width, side), gap]
        lines.append(Content.assemble(*parts[:-1]))
    return lines


def _aligned(content: Content, width: int, alignment: str) -> Content:
    room = max(0, width - content.cell_length)
    left = {"right": room, "center": room // 2}.get(alignment, 0)
    return content.pad(left, room - left)


def _as_list(
    header: Sequence[Content], rows: Sequence[Sequence[Content]], width: int, rule: Style
) -> list[Content]:
    lines: list[Content] = []
    for number, row in enumerate(rows):
        if number:
            lines.append(Content.styled("─" * width, rule))
        for head, cell in zip(header, row, strict=True):
            lines += Content.assemble(head, ": ", cell).wrap(max(1, width))
    return lines


_CHANGE_IN_PLACE = (Paragraph, CodeBlock, TableBlock, Quote, _List)


async def update_blocks(parent: Widget, blocks: Iterable[MarkdownBlock]) -> None:
    """Update the blocks in a widget in place; mount only blocks of another type."""
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
