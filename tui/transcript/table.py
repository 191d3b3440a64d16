"""A table of an answer: columns by their content, cells that wrap by words, and alignment.

One widget for a table of any length, as the layout looks at every widget whenever one changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from markdown_it.token import Token
from rich.cells import cell_len
from textual.content import Content
from textual.geometry import Size
from textual.style import Style
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

from akunu_py.tui.transcript.parser import has_gap, table_cells

_GAP, _NARROW_GAP = " │ ", "│"
_LEAST = 12  # columns: a longer word may be broken; with less, a row is written as a list


class TableBlock(MarkdownBlock):
    """A table, as wide as it needs and there is room."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"table--header", "table--rule"}
    allow_horizontal_scroll = False

    def __init__(self, markdown: Markdown, token: Token) -> None:
        super().__init__(markdown, token)
        self.set_class(has_gap(token), "-gap", update=False)
        self._read(token)

    def _read(self, token: Token) -> None:
        cells = table_cells(token)
        self._alignment = cells.alignment
        self._header = [self._token_to_content(cell) for cell in cells.header]
        self._rows = [[self._token_to_content(cell) for cell in row] for row in cells.rows]
        self._natural = sum(natural_widths([self._header, *self._rows])[0])
        self._lines: tuple[int, list[Content]] = -1, []  # for which width

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if isinstance(block, TableBlock):
            self._read(block._token)
            self._token = block._token
            self.refresh(layout=True)
        else:
            await super()._update_from_block(block)

    def get_content_width(self, container: Size, viewport: Size) -> int:
        return min(container.width, self._natural + len(_GAP) * (len(self._header) - 1))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._drawn(width))

    def render(self) -> Content:
        return Content("\n").join(self._drawn(self.size.width))

    def notify_style_update(self) -> None:
        self._lines = -1, []
        super().notify_style_update()

    def _drawn(self, width: int) -> list[Content]:
        if self._lines[0] != width:
            header = self.get_visual_style("table--header", partial=True)
            rule = self.get_visual_style("table--rule", partial=True)
            heads = [cell.stylize(header) for cell in self._header]
            self._lines = width, draw(heads, self._rows, self._alignment, width, rule)
        return self._lines[1]


def natural_widths(rows: Sequence[Sequence[Content]]) -> tuple[list[int], list[int]]:
    """For each column its width without wrapping, and that of its longest word."""
    natural = [1] * len(rows[0])
    words = natural.copy()
    for row in rows:
        for place, cell in enumerate(row[: len(natural)]):
            if cell.cell_length > natural[place]:
                natural[place] = cell.cell_length
            if cell.cell_length > words[place]:
                longest = max(map(cell_len, cell.plain.split()), default=0)
                words[place] = max(words[place], longest)
    return natural, words


def column_widths(natural: Sequence[int], words: Sequence[int], room: int) -> list[int]:
    """The widths of columns that share `room` columns; their sum is at most that, or one each.

    As far as there is room, every word fits; what is left goes to those that need most, so that a
    short column is never wrapped for the sake of a long one.
    """
    least = [1] * len(natural)
    if sum(words) <= room:
        least = list(words)
    wanted = natural if sum(words) <= room else words
    low, high = 0, max(*wanted, 1)
    while low < high:  # the highest level up to which all columns may grow
        level = (low + high + 1) // 2
        if sum(_grown(least, wanted, level)) <= room:
            low = level
        else:
            high = level - 1
    widths = _grown(least, wanted, low)
    for place, width in enumerate(widths):  # what the last level left over
        if width < wanted[place] and sum(widths) < room:
            widths[place] += 1
    return widths


def _grown(least: Sequence[int], wanted: Sequence[int], level: int) -> list[int]:
    return [max(each, min(most, level)) for each, most in zip(least, wanted, strict=True)]


def draw(
    header: Sequence[Content],
    rows: Sequence[Sequence[Content]],
    alignment: Sequence[str],
    width: int,
    rule: Style,
) -> list[Content]:
    """The lines of a table, none wider than `width` columns, if a column is left for each cell."""
    natural, words = natural_widths([header, *rows])
    least = sum(min(_LEAST, each) for each in words)
    for gap in (_GAP, _NARROW_GAP):
        room = width - len(gap) * (len(header) - 1)
        if room >= least:
            break
    else:
        return _as_list(header, rows, width, rule)
    widths = column_widths(natural, words, room)
    drawn = [_row(row, widths, alignment, (gap, rule)) for row in [header, *rows]]
    crossing = gap.replace(" ", "─").replace("│", "┼")
    line = Content.styled(crossing.join("─" * each for each in widths), rule)
    wrapped = any(len(row) > 1 for row in drawn[1:])
    lines = [*drawn[0], line]
    for number, row in enumerate(drawn[1:]):
        lines += [line, *row] if wrapped and number else row
    return lines


def _row(
    row: Sequence[Content],
    widths: Sequence[int],
    alignment: Sequence[str],
    gap: tuple[str, Style],
) -> list[Content]:
    cells = [
        cell.wrap(width) if cell.cell_length > width or "\n" in cell.plain else [cell]
        for cell, width in zip(row, widths, strict=False)
    ]
    lines: list[Content] = []
    for number in range(max(map(len, cells), default=1)):
        parts: list[Content | tuple[str, Style]] = []
        for place, width in enumerate(widths):
            cell = cells[place] if place < len(cells) else []
            part = cell[number] if number < len(cell) else Content()
            parts += [_aligned(part, width, alignment[place]), gap]
        lines.append(Content.assemble(*parts[:-1]))
    return lines


def _aligned(content: Content, width: int, alignment: str) -> Content:
    room = max(0, width - content.cell_length)
    left = {"right": room, "center": room // 2}.get(alignment, 0)
    return content.pad(left, room - left)


def _as_list(
    header: Sequence[Content], rows: Sequence[Sequence[Content]], width: int, rule: Style
) -> list[Content]:
    """Each cell on lines of its own, after the name of its column."""
    lines: list[Content] = []
    for number, row in enumerate(rows):
        if number:
            lines.append(Content.styled("─" * width, rule))
        for head, cell in zip(header, row, strict=False):
            lines += Content.assemble(head, ": ", cell).wrap(max(1, width))
    return lines
