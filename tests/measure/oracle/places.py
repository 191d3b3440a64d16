"""Cursor places in a source file, each with the removed text: the output of a perfect model.

kind        cursor                                      removed text
line        in a line, nothing after it                 rest of the line and what it opens
block       end of a line that opens a block            the block
body        on an indented line, end of block after it  lines up to the end of the block
open        same, but the end is not written yet        same, and the closing line
lines       on an indented line, lines after it         a few statements
margin      in the first column                         a statement and its block
inside      in brackets, more text after them           everything up to the closing bracket
inline      in a line, more text after it               a few words
auto        after a bracket that an editor closed       the contents; the closers stay
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from zlib import crc32

from tests.measure.oracle.source import Source, may_follow

_LINES, _LENGTH = 60, 4000  # most lines and characters to remove
_CLOSER = re.compile(r"\s*(?:[)\]};,]+|(?:end|fi|done|esac)\b[^\n]*|</[^>\n]*>)\s*$")


@dataclass(frozen=True, slots=True)
class Place:
    """A cursor place with the removed text."""

    kind: str
    source: Source
    start: int  # the cursor
    end: int  # of the removed text
    suffix: str  # text after the cursor
    widest: int  # end of what a completion may add if the suffix is empty

    @property
    def removed(self) -> str:
        return self.source.text[self.start : self.end]

    @property
    def is_duplicated(self) -> bool:
        """True if the removed lines equal the lines after the cursor."""
        start = self.source.line_start(self.start)
        lines = self.source.text[start : self.end].strip("\n").rstrip()
        rest, _, below = self.suffix.partition("\n")
        return not rest.strip() and f"{below}\n".lstrip("\n").startswith(f"{lines}\n")

    def describe(self) -> str:
        line = self.source.text.count("\n", 0, self.start) + 1
        column = self.start - self.source.line_start(self.start) + 1
        return f"{self.source.path}:{line}:{column} {self.kind}"


def choose_places(source: Source, count: int) -> list[Place]:
    """Return up to `count` places, the kinds evenly; deterministic for a file."""
    lines = [found.start() for found in re.finditer(r"(?m)^(?=[^\n]*\S)", source.text)]
    rng = random.Random(crc32(source.text.encode()))
    rng.shuffle(lines)
    kinds = [_places(source, lines, make, rng) for make in _KINDS]
    chosen: list[Place] = []
    while kinds and len(chosen) < count:
        for places in list(kinds):
            place = next(places, None)
            if place is None:
                kinds.remove(places)
            elif len(chosen) < count:
                chosen.append(place)
    return chosen


_Make = Callable[[Source, int, int, random.Random], Place | None]


def _places(source: Source, lines: list[int], make: _Make, rng: random.Random) -> Iterator[Place]:
    """Yield the places of one kind, without empty or very long ones."""
    for start in lines:
        first = start + len(source.line(start)) - len(source.line(start).lstrip())
        place = make(source, start, first, rng)
        if place is None or not place.removed.strip() or place.removed.count("\n") > _LINES:
            continue
        if len(place.removed) <= _LENGTH:
            yield place


def _place(kind: str, source: Source, start: int, end: int, widest: int | None = None) -> Place:
    return Place(kind, source, start, end, source.text[end:], end if widest is None else widest)


def _line(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    last = len(source.text[: source.line_end(start)].rstrip())
    if last - first < 3:
        return None
    at = rng.randrange(first + 1, last)
    span = source.span(at)
    end = source.statement_end(start)
    around = source.span(start) and source.span(source.line_end(start))
    if around or (span and span[0] < start):  # of a long string or comment, this line
        widest = max(source.line_end(start), (around or span or (0, 0))[1])
        return _place("line", source, at, source.line_end(start), widest)
    return _place("line", source, at, end, source.widest_end(start))


def _block(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    if source.span(start):
        return None
    end = source.block_end(start)
    line_end = source.line_end(start)
    if end <= line_end or source.text[line_end - 1 : line_end] == "\\":
        return None
    return _place("block", source, line_end, end, source.widest_end(start))


def _body_end(source: Source, start: int) -> int | None:
    """Return the end of the lines indented like the line at `start`, None for no such end."""
    end, base = source.block_end(start), source.width(start)
    while (below := source.next_line(end)) is not None and source.width(below) >= base:
        if source.text[end:below].count("\n") > 2:
            return None  # a gap of several lines ends a completion
        end = source.block_end(below)
    return end if source.balanced(start, end) else None


def _body(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    end = _body_end(source, start) if first > start and not source.span(start) else None
    return None if end is None else _place("body", source, first, end)


def _open(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    end = _body_end(source, start) if first > start and not source.span(start) else None
    below = source.next_line(end) if end is not None else None
    if end is None or below is None or source.width(below) >= source.width(start):
        return None
    if _CLOSER.fullmatch(source.line(below)):
        end = source.line_end(below)
    elif source.span(below) or may_follow(source.line(below)):
        return None
    return _place("open", source, first, end)


def _lines(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    if first == start or source.span(start):
        return None
    end = source.widest_end(start)
    for _ in range(rng.randrange(3)):
        below = source.next_line(end)
        if below is None or source.width(below) != source.width(start):
            break
        if source.text[end:below].count("\n") > 2:
            break
        end = source.widest_end(below)
    return _place("lines", source, first, end) if source.balanced(start, end) else None


def _margin(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    if first > start or source.span(start) or source.text[start] in ")]}":
        return None
    end = source.block_end(start)
    return _place("margin", source, start, end, source.widest_end(start))


def _brackets(source: Source, start: int, rng: random.Random) -> tuple[int, int] | None:
    """Return a random pair of non-empty brackets in the line, None if there is none."""
    end = source.line_end(start)
    pairs = [
        (each, source.partner[each])
        for each in range(start, end)
        if each in source.partner and each + 1 < source.partner[each] < end
    ]
    return rng.choice(pairs) if pairs else None


def _inside(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    pair = _brackets(source, start, rng)
    if pair is None:
        return None
    at = pair[0] + 1 if rng.random() < 0.5 else rng.randrange(pair[0] + 1, pair[1])
    return _place("inside", source, at, pair[1])


def _inline(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    borders = [found.start() for found in re.finditer(r"\b", source.line(start))]
    if len(borders) < 4:
        return None
    index = rng.randrange(len(borders) - 2)
    at = start + borders[index]
    end = start + borders[min(len(borders) - 1, index + rng.choice((1, 1, 3)))]
    return _place("inline", source, at, end) if source.span(at) == source.span(end) else None


def _auto(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    """Close every bracket that the line opens before the cursor, as an editor does."""
    line_end = source.line_end(start)
    opened = [each for each in range(start, line_end) if source.partner.get(each, -1) > each + 1]
    if not opened:
        return None
    at = rng.choice(opened) + 1
    if any(source.text.count(quote, start, at) % 2 for quote in "\"'"):
        return None  # in a string, where editors close the quote too
    unclosed = [each for each in opened if each < at <= source.partner[each]]
    closers = "".join(source.text[source.partner[each]] for each in reversed(unclosed))
    end = source.partner[unclosed[-1]]
    suffix = closers + source.text[source.statement_end(start) :]
    return Place("auto", source, at, end, suffix, end)


_KINDS: tuple[_Make, ...] = (
    _line,
    _block,
    _body,
    _open,
    _lines,
    _margin,
    _inside,
    _inline,
    _auto,
)
