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

Brackets, strings, comments and the ends of statements and blocks come from a real lexer (Pygments).
This judge knows the languages; the rules of completion know only its comments and strings.
"""

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from zlib import crc32

from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, String, Text

LANGUAGES = {
    ".py": "python", ".js": "javascript", ".mjs": "javascript", ".ts": "typescript",
    ".tsx": "typescript", ".java": "java", ".kt": "kotlin", ".swift": "swift", ".c": "c",
    ".cc": "cpp", ".cpp": "cpp", ".hpp": "cpp", ".cs": "csharp", ".go": "go", ".rs": "rust",
    ".rb": "ruby", ".php": "php", ".lua": "lua", ".pm": "perl", ".pl": "perl", ".sh": "bash",
    ".bash": "bash", ".sql": "postgresql", ".html": "html", ".css": "css", ".scss": "scss",
    ".yml": "yaml", ".yaml": "yaml",
}  # fmt: skip
_PAIRS = {")": "(", "]": "[", "}": "{"}
_CLOSING = re.compile(r"[)\]}]|</|\{%-?\s*end|(?:end|fi|done|esac)\b")
_DECORATOR = re.compile(r"\s*(?:@[\w.:]+\s*(?:\(.*\))?|#!?\[.*\]|\[[A-Z].*\])\s*", re.DOTALL)
_DIRECTIVE = re.compile(r"\s*#\s*(?:endif|include|define|undef|pragma|error)\b")  # without a block
_MIDDLE = re.compile(r"(?:except|finally|catch|rescue|ensure)\b")
_GOES_ON = re.compile(
    r"\{(?![%{#])|\{%-?\s*(?:end|else|elif|empty)|[}.?:+*|&]|-[^-]|->|=|\)|\]|(?:else|elif|elsif|elseif|except|finally|catch|rescue|ensure|when|while|until"
    r"|and|or|from|where|case|default|order|group|having|limit|join|left|inner|on|set|values|as|returns|language"
    r"|union|throws|implements|extends|then|do|in|is|with|using|end)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Source:
    """A source file and its lexical structure."""

    path: str
    language: str
    text: str
    partner: dict[int, int]  # position of the matching bracket, outside strings and comments
    spans: list[tuple[int, int]]  # strings and comments as (start, end), in order

    def line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end

    def line(self, at: int) -> str:
        return self.text[self.line_start(at) : self.line_end(at)]

    def width(self, at: int) -> int:
        line = self.line(at)
        return len(line[: len(line) - len(line.lstrip())].expandtabs())

    def span(self, at: int) -> tuple[int, int] | None:
        """Return the string or comment around `at`, if any."""
        index = bisect_right(self.spans, (at, -1)) - 1
        if index >= 0 and self.spans[index][0] < at < self.spans[index][1]:
            return self.spans[index]
        return None

    def balanced(self, start: int, end: int, *, may_close: bool = False) -> bool:
        """Return True if the range closes all its brackets and cuts no string.

        may_close: allow it to close earlier brackets.
        """
        if self.span(start) != self.span(end) and (self.span(end) or not may_close):
            return False
        partners = [self.partner[at] for at in range(start, end) if at in self.partner]
        return all((may_close or start <= partner) and partner < end for partner in partners)

    def statement_end(self, at: int) -> int:
        """Return the end of the line of `at` with all the brackets and strings it opens."""
        start, end = self.line_start(at), self.line_end(at)
        while True:
            closes = [self.partner[each] for each in range(start, end) if each in self.partner]
            ends = [self.line_end(each) for each in closes if each >= end]
            if (span := self.span(end)) and span[0] >= start:
                ends.append(self.line_end(span[1]))
            if self.text[:end].endswith("\\") and not self.span(end):
                ends.append(self.line_end(end + 1))
            if not ends or max(ends) <= end:
                return end
            end = max(ends)

    def next_line(self, end: int) -> int | None:
        """Return the start of the next non-empty line after `end`, None for the last line."""
        found = re.compile(r"\n[^\S\n]*(?=\S)").search(self.text, end)
        return found.start() + 1 if found else None

    def block_end(self, at: int) -> int:
        """Return the end of the statement of `at` with its block.

        Includes the closing line, and for `try` the handlers.
        """
        base = self.width(at)
        end = self.statement_end(at)
        first = self.line_start(at) + len(self.line(at)) - len(self.line(at).lstrip())
        if any(span[0] == first for span in self.spans):
            return end  # a comment
        if _DIRECTIVE.match(self.line(at)):
            return end
        while _DECORATOR.fullmatch(self.text, self.line_start(at), end):
            below = self.next_line(end)
            if below is None or self.width(below) != base or self.text[end:below].count("\n") > 1:
                return end
            at, end = below, self.statement_end(below)
        tries = re.match(r"\s*(?:try|begin)\b", self.line(at))
        while (below := self.next_line(end)) is not None:
            content, deeper = self.line(below).lstrip(), self.width(below) - base
            middle = tries and _MIDDLE.match(content)
            brace = (
                re.match(r"\{(?![%{#])", content) and end == self.line_end(at) and below == end + 1
            )
            if deeper < 0 or (deeper == 0 and not middle and not brace):
                closes = deeper == 0 and _CLOSING.match(content) and content[0] not in ")]}"
                return self.statement_end(below) if closes and end > self.line_end(at) else end
            end = self.statement_end(below)
        return end

    def widest_end(self, at: int) -> int:
        """Return the end of the statement of `at`, including branches such as `else`."""
        end = self.block_end(at)
        while (below := self.next_line(end)) is not None:
            if self.width(below) != self.width(at) or self.text[end:below].count("\n") > 1:
                return end
            unfinished = re.search(r"[,=+\\|&]\s*$", self.line(end))
            if not (unfinished or may_follow(self.line(below))):
                return end
            end = self.block_end(below)
        return end


def read_source(path: Path) -> Source | None:
    """Return the source, None if the lexer fails or the file is generated."""
    text = (
        path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    )
    language = LANGUAGES[path.suffix]
    spans: list[tuple[int, int]] = []
    partner: dict[int, int] = {}
    open_brackets: list[int] = []
    template = language == "html" and "{%" in text
    lexer = get_lexer_by_name("html+django" if template else language)
    for at, kind, value in lexer.get_tokens_unprocessed(text):
        comment = kind in Comment and kind not in (Comment.Preproc, Comment.PreprocFile)
        comment = comment or (kind is String.Doc and value.lstrip().startswith("//"))
        if comment or kind in String:
            end = at + len(value.rstrip("\n") if comment else value)
            if spans and spans[-1][1] == at and (not comment or kind is Comment.Multiline):
                at = spans.pop()[0]
            elif kind in String.Heredoc and text[at - 1 : at] == "\n":
                at -= 1  # include the newline before its first line
            spans.append((at, end))
            continue
        if kind in Text:  # of a page
            continue
        for offset, character in enumerate(value):
            if character in "([{":
                open_brackets.append(at + offset)
            elif character in _PAIRS:
                if not open_brackets or text[open_brackets[-1]] != _PAIRS[character]:
                    if character == ")" and language == "bash":  # of a case
                        continue
                    return None
                partner[at + offset] = open_brackets[-1]
                partner[open_brackets.pop()] = at + offset
    spans = [(start, start + len(text[start:end].rstrip("\n"))) for start, end in spans]
    return None if open_brackets else Source(str(path), language, text, partner, spans)


def may_follow(line: str) -> bool:
    """Return True if a line may continue a statement above with the same indentation."""
    return bool(_GOES_ON.match(line.lstrip()))


_MARKED = re.compile(r"//|/\*|#|\$\$|`")
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

    def __str__(self) -> str:
        line = self.source.text.count("\n", 0, self.start) + 1
        column = self.start - self.source.line_start(self.start) + 1
        return f"{self.source.path}:{line}:{column} {self.kind}"


def choose_places(source: Source, count: int) -> list[Place]:
    """Return up to `count` places, the kinds evenly; deterministic for a file."""
    lines = [found.start() for found in re.finditer(r"(?m)^(?=[^\n]*\S)", source.text)]
    rng = random.Random(crc32(source.text.encode()))
    rng.shuffle(lines)
    # Every second line has a marker of a comment or a string, which a language may not know.
    marked = [at for at in lines if _MARKED.search(source.line(at))]
    others = [at for at in lines if not _MARKED.search(source.line(at))]
    pairs = zip_longest(marked, others)
    lines = [at for pair in pairs for at in pair if at is not None]
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
        removed = place.removed if place else ""
        if place and removed.strip() and removed.count("\n") <= _LINES and len(removed) <= _LENGTH:
            yield place


def _place(kind: str, source: Source, start: int, end: int, widest: int = 0) -> Place:
    return Place(kind, source, start, end, source.text[end:], widest or end)


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
    if not source.text[start].isspace() or source.span(start):
        return None
    end, base = source.block_end(start), source.width(start)
    while (below := source.next_line(end)) is not None and source.width(below) >= base:
        if source.text[end:below].count("\n") > 2:
            return None  # a gap of several lines ends a completion
        end = source.block_end(below)
    return end if source.balanced(start, end) else None


def _body(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    end = _body_end(source, start)
    return None if end is None else _place("body", source, first, end)


def _open(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    end = _body_end(source, start)
    below = None if end is None else source.next_line(end)
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


def _inside(source: Source, start: int, first: int, rng: random.Random) -> Place | None:
    pairs = [
        (each, source.partner[each])
        for each in range(start, source.line_end(start))
        if each + 1 < source.partner.get(each, -1) < source.line_end(start)
    ]
    if not pairs:
        return None
    opening, closing = rng.choice(pairs)
    at = opening + 1 if rng.random() < 0.5 else rng.randrange(opening + 1, closing)
    return _place("inside", source, at, closing)


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
    _line, _block, _body, _open, _lines, _margin, _inside, _inline, _auto,
)  # fmt: skip
