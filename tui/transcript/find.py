"""Text on the screen by characters: marks of hits, the word or line of a click."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.geometry import Offset
from textual.selection import Selection
from textual.widget import Widget

from akunu_py.chats.search import find_words
from akunu_py.text import displayable
from akunu_py.tui.transcript.code import TAB_SIZE
from akunu_py.tui.transcript.markdown import MarkdownSection
from akunu_py.tui.transcript.markdown_parser import parse

_HIT = Style(color="black", bgcolor="yellow")
_CURRENT = Style(color="black", bgcolor="bright_cyan", bold=True)
_NEXT = Offset(1, 0)  # to the next character; the end of a selection is exclusive


Finder = Callable[[str], Sequence[tuple[int, int]]]
"""Returns the half-open ranges of the hits in a text, in order."""


def phrase_finder(words: str) -> Finder:
    """Return a finder of `words` in this order, any case, any whitespace between them."""
    pattern = re.compile(r"\s+".join(map(re.escape, words.split())), re.IGNORECASE)
    return lambda text: [found.span() for found in pattern.finditer(text)]


def search_finder(words: str) -> Finder:
    """Return a finder of a query's words, by the rules of the search in all chats."""
    return lru_cache(maxsize=4096)(partial(find_words, words=words))  # lines are drawn often


@lru_cache(maxsize=4096)  # Parsing takes long, and each step needs it for all hits.
def plain_text(markdown: str) -> str:
    """Return the text of an answer as it is drawn, without Markdown's characters."""
    parts: list[str] = []
    for token in parse(displayable(markdown)):
        if token.type in ("fence", "code_block"):
            parts.append(token.content.expandtabs(TAB_SIZE))
        rows = token.meta["cells"].rows if "cells" in token.meta else []
        for inline in [token, *itertools.chain(*rows)]:
            drawn = (
                "\n" if child.type in ("softbreak", "hardbreak") else child.content
                for child in inline.children or ()
            )
            parts.append("".join(drawn))
    return "\n".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class ShownCharacter:
    text: str
    offset: Offset  # in the widget's text, as in `Selection`
    row: int  # in the widget's content


def characters(widget: Widget) -> list[ShownCharacter]:
    """Return a widget's selectable characters, with newlines, and spaces for wraps."""
    shown: list[ShownCharacter] = []
    for row in range(widget.content_size.height):
        new_row = True
        for segment in widget.render_line(row):
            x, y = (segment.style and segment.style.meta.get("offset")) or (None, None)
            if x is None or y is None:
                continue
            if new_row and shown:
                last = shown[-1].offset
                if last.y != y or last.x + 1 != x:  # otherwise a word is cut
                    gap = "\n" if last.y != y else " "
                    shown.append(ShownCharacter(gap, Offset(last.x + 1, last.y), shown[-1].row))
            new_row = False
            shown += [
                ShownCharacter(text, Offset(x + place, y), row)
                for place, text in enumerate(segment.text)
            ]
    return shown


@dataclass(frozen=True, slots=True)
class ShownHit:
    widget: Widget
    selection: Selection
    row: int  # of its first character, in the widget's content

    def row_in(self, view: Widget) -> int:
        """Return the row in the content of a scroll view that contains the hit.

        It does not depend on the scroll position, which may be newer than the regions of widgets.
        """
        above = (each for each in self.widget.ancestors_with_self if isinstance(each, Widget))
        part = next(each for each in above if each.parent is view)
        return part.virtual_region.y + self.widget.content_region.y - part.region.y + self.row


def hits_in(view: Widget, find: Finder) -> Iterator[ShownHit]:
    """Yield the hits in the widgets of a message, in order."""
    for widget in view.walk_children(with_self=True):
        if not isinstance(widget, Widget) or widget.children or not widget.display:
            continue
        shown = characters(widget)
        for start, end in find("".join(each.text for each in shown)):
            first, last = shown[start], shown[end - 1]
            yield ShownHit(widget, Selection(first.offset, last.offset + _NEXT), first.row)


def section_of_hit(
    view: Widget, sections: Iterable[MarkdownSection], index: int, find: Finder
) -> tuple[Widget, int]:
    """Return the section with hit number `index`, and the number of the hit there.

    view: the answer, returned for a hit after `sections`.
    """
    left = index
    for section in sections:
        count = len(find(plain_text(section.text)))
        if left < count:
            return section, left
        left -= count
    return view, index


class HitMarks(LineFilter):
    """Marks found text in each line, except text that continues on the next line."""

    find: Finder

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        spans = self.find("".join(segment.text for segment in segments))
        return _styled(segments, spans, _HIT) if spans else segments


class CurrentMark(LineFilter):
    def __init__(self, selection: Selection) -> None:
        super().__init__()
        self._selection = selection

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        spans, place = [], 0
        for segment in segments:
            size = len(segment.text)
            x, y = (segment.style and segment.style.meta.get("offset")) or (None, None)
            if x is not None and y is not None and (span := self._selection.get_span(y)):
                last = size if span[1] < 0 else span[1] - x  # -1: to the end of the line
                spans.append((place + max(0, span[0] - x), place + min(size, last)))
            place += size
        return _styled(segments, [span for span in spans if span[0] < span[1]], _CURRENT)


def _styled(
    segments: list[Segment], spans: Sequence[tuple[int, int]], style: Style
) -> list[Segment]:
    result: list[Segment] = []
    place = 0
    for segment in segments:
        text, own, control = segment
        size = len(text)
        cuts = {0, size}
        for span in spans:
            cuts |= {cut - place for cut in span if 0 < cut - place < size}
        for first, last in itertools.pairwise(sorted(cuts)):
            inside = any(start <= place + first < end for start, end in spans)
            is_current = own is not None and own.bgcolor == _CURRENT.bgcolor
            marked = (own or Style()) + style if inside and not is_current else own
            result.append(Segment(text[first:last], marked, control))
        place += size
    return result


def clicked_text(widget: Widget, offset: Offset, *, line: bool) -> Selection | None:
    """Return the word, or the line, at a place in the text of a widget."""
    found = [each for each in characters(widget) if each.offset.y == offset.y]
    shown = [each for each in found if each.text not in ("\n", "")]
    if line and shown:
        return Selection(shown[0].offset, shown[-1].offset + _NEXT)
    text = "".join(each.text for each in shown)
    for word in re.finditer(r"\w+|[^\w\s]+", text):
        first, last = shown[word.start()].offset, shown[word.end() - 1].offset
        if first.x <= offset.x <= last.x:
            return Selection(first, last + _NEXT)
    return None
