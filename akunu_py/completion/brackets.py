"""Brackets around a cursor: which are open there, which are closed behind it already, and where a
text that is put there closes one too many.

Brackets count outside of strings, comments and regular expressions, as far as one can tell without
a parser for each language. Triple quotes and the signs around a comment are brackets themselves.
Behind the cursor only two places count: the rest of its line, and lines that begin with the closing
bracket at the indentation of the line that opened it, which is where editors and people put it.
Anything else there may be prose, a label, or broken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

_SCANNED = 40_000  # characters before the cursor, 20,000 behind it
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_OPENERS = {closer: opener for opener, closer in _PAIRS.items()}
_LONG = {'"""': '"""', "'''": "'''", "/*": "*/", "<!--": "-->", "--[[": "]]"}
_QUOTES = "\"'`"
_COMMENT = "#"  # any comment that ends with its line

# A quote ends in its line; inside a word, or before one where it should end, it is an apostrophe or
# a lifetime. A very long string is read as code: looking for the ends of all would take for ever. A
# regular expression stands where nothing can be divided. #name { and #fff; are no comments.
_STRINGS = {
    '"': r"\"(?:\\.|[^\"\\\n]){0,1000}+",
    "'": r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+",
    "`": r"`[^`\n]{0,1000}+",
    "/": r"(?:(?<=[(,=:!&|?;~])|(?<=[(,=:!&|?;~] )|(?<=return ))/(?![/*\s,)])"
    r"(?:\\.|\[(?:\\.|[^\]\\\n]){0,300}+(?:\]|\Z)|[^/\\\[\n]){0,300}+",
}
_ENDS = {'"': '"', "'": r"'(?!\w)", "`": "`", "/": "/"}
_OTHER = (
    r"\"\"\"|'''|(?<![^\s(){},;\[\]=])/\*|<!--|--\[\["
    r"|(?<!\S)(?://|--(?!\S)|#(?![\[{(]|[\w-]+ ?[{(,.:>]|[0-9a-fA-F]{3,8}[;,)]))[^\n]*"
    r"|(?<!\S):-?[()]|[()\[\]{}]"
)
_CLOSED = re.compile("|".join([_OTHER, *(_STRINGS[kind] + _ENDS[kind] for kind in _STRINGS)]))
_MAY_CLOSE = re.compile(
    "|".join([_OTHER, *(rf"{_STRINGS[kind]}(?:{_ENDS[kind]}|\\?\Z)" for kind in _STRINGS)])
)
_REST = {
    '"': re.compile(r"(?:\\.|[^\"\\\n]){0,1000}+\""),
    "'": re.compile(r"(?:\\.|[^'\\\n]){0,1000}+'(?!\w)"),
    "`": re.compile(r"[^`\n]{0,1000}+`"),
}
_LABEL = re.compile(r"[ \t]*[\w*?.$\"'-]+(?:[ \t]*\|[ \t]*[\w*?.$\"'-]+)*")  # `a | b)`, `1)`
_LEADING = re.compile(r"[)\]}]|\"\"\"|'''|\*/")
_TOP_LINE = re.compile(r"\n(?=[^\s)\]}])")


@dataclass(frozen=True, slots=True)
class Bracket:
    """at: its place. kind: what opens it. opens: whether this is that."""

    at: int
    kind: str
    opens: bool


@dataclass(slots=True)
class Open:
    """A bracket that is open at the cursor. own: in the cursor's line. width: the indentation of
    its line. taken: it is closed behind the cursor already."""

    kind: str
    own: bool
    width: int
    taken: bool = False


class OpenBrackets:
    """The brackets that are open between `prefix` and `suffix`."""

    def __init__(self, prefix: str, suffix: str) -> None:
        window = prefix[-_SCANNED:]
        if len(window) < len(prefix) and (top := _TOP_LINE.search(window)):
            window = window[top.end() :]
        self._begun = window[window.rfind("\n") + 1 :]
        found, self.inside = scan(window, ended=False)
        stack: list[Bracket] = []
        for bracket in found:
            at = None if bracket.opens else _closes([each.kind for each in stack], bracket.kind)
            if bracket.opens:
                stack.append(bracket)
            elif at is not None:
                del stack[at:]
        own = len(window) - len(self._begun)
        self._open = [
            Open(each.kind, each.at >= own, width(window[window.rfind("\n", 0, each.at) + 1 :]))
            for each in stack
        ]
        if self.inside in _STRINGS:
            self._open.append(Open(self.inside, True, 0))
        rest, _, below = suffix[: _SCANNED // 2].partition("\n")
        self._take_below(below, self._take_on_line(rest))

    def first_excess(self, text: str, *, ended: bool = True) -> int | None:
        """Where `text` closes what is closed behind it, or what nothing opened; None if nowhere.

        ended: whether the last line is whole. If not, a quote that is open at its end may yet be
        closed, and what is behind it is not counted.
        """
        stack = list(self._open)
        for bracket in scan(text, self.inside, ended=ended)[0]:
            if bracket.opens:
                stack.append(Open(bracket.kind, True, 0))
                continue
            at = _closes([each.kind for each in stack], bracket.kind)
            if at is None and (bracket.kind != "(" or not self._is_label(text, bracket.at)):
                return bracket.at
            if at is not None and stack[at].taken:
                return bracket.at
            del stack[len(stack) if at is None else at :]
        return None

    def depth(self, text: str, *, taken: bool = False) -> int:
        """How many brackets of the cursor's line and of `text` are open behind `text`. taken: also
        those that are closed behind the cursor."""
        stack = [each for each in self._open if each.own and (taken or not each.taken)]
        for bracket in scan(text, self.inside)[0]:
            if bracket.opens:
                stack.append(Open(bracket.kind, True, 0))
            elif (at := _closes([each.kind for each in stack], bracket.kind)) is not None:
                del stack[at:]
        return sum(each.kind not in _STRINGS for each in stack)

    @property
    def inside_long(self) -> bool:
        """Whether the cursor is in a string or a comment that goes over lines."""
        return self.inside in _LONG

    def undecided(self, text: str) -> int:
        """How many characters at the end of `text` may begin what closes a string or a comment
        that is closed behind the cursor."""
        closers = [_LONG[each.kind] for each in self._open if each.taken and each.kind in _LONG]
        return max(
            (n for closer in closers for n in range(len(closer)) if text.endswith(closer[:n])),
            default=0,
        )

    def _is_label(self, text: str, at: int) -> bool:
        """Whether the line before `at` is a label of a case or a number of a list."""
        line = (self._begun + text[:at]).rpartition("\n")[2]
        return bool(_LABEL.fullmatch(line))

    def _take_on_line(self, rest: str) -> str:
        """Takes what the rest of the cursor's line closes: of what the line itself opened, the
        outermost; else the innermost. Returns what the line ends inside of."""
        stack: list[str] = []
        found, inside = scan(rest, self.inside)
        for bracket in found:
            if bracket.opens:
                stack.append(bracket.kind)
                continue
            if (at := _closes(stack, bracket.kind)) is not None:
                del stack[at:]
                continue
            free = [each for each in self._open if each.kind == bracket.kind and not each.taken]
            own = [each for each in free if each.own]
            if free:
                (own[0] if own else free[-1]).taken = True
        return inside if inside in _LONG else ""

    def _take_below(self, below: str, inside: str) -> None:
        """Takes what the lines below close at the indentation of the line that opened it."""
        lowest, closing = 10**6, True  # of the lines so far; whether those of it all close
        hidden = _hidden(below, inside)
        at = 0
        for line in below.split("\n"):
            start, at = at, at + len(line) + 1
            content = line.strip()
            if not content or any(first < start <= last for first, last in hidden):
                continue
            depth = width(line)
            if depth > lowest or (depth == lowest and not closing):
                continue
            closing = bool(_LEADING.match(content))
            lowest = depth
            while found := _LEADING.match(content):
                kind = _OPENERS.get(found.group(), {"*/": "/*"}.get(found.group(), found.group()))
                for each in self._open:
                    if each.kind == kind and each.width == depth and not each.taken:
                        each.taken = True
                        break
                content = content[found.end() :].lstrip()
            if not depth and not closing:
                break


def scan(text: str, inside: str = "", *, ended: bool = True) -> tuple[list[Bracket], str]:
    """The brackets of `text` in their order, and what `text` ends inside of: a quote, what opens a
    string or a comment that goes over lines, "#" for a comment, or nothing.

    inside: the same at its beginning. ended: as in `OpenBrackets.first_excess`.
    """
    found: list[Bracket] = []
    at = 0
    if inside == _COMMENT:
        at = text.find("\n")
        if at < 0:
            return found, inside
    elif inside in _LONG:
        end = text.find(_LONG[inside])
        if end < 0:
            return found, inside
        found.append(Bracket(end, inside, False))
        at = end + len(_LONG[inside])
    elif inside in _REST:
        if closed := _REST[inside].match(text):
            if inside == "'" and closed.end() == len(text) and not ended:
                return found, inside
            found.append(Bracket(closed.end() - 1, inside, False))
            at = closed.end()
        elif not ended and "\n" not in text:
            return found, inside
    return _scan_code(text, at, found, _CLOSED if ended else _MAY_CLOSE)


def _scan_code(
    text: str, at: int, found: list[Bracket], pattern: re.Pattern[str]
) -> tuple[list[Bracket], str]:
    inside = ""
    while token := pattern.search(text, at):
        start, at, kind = token.start(), token.end(), token.group()
        if kind in _PAIRS:
            found.append(Bracket(start, kind, True))
        elif kind in _OPENERS:
            found.append(Bracket(start, _OPENERS[kind], False))
        elif kind in _LONG:
            found.append(Bracket(start, kind, True))
            end = text.find(_LONG[kind], at)
            if end < 0:
                return found, kind
            found.append(Bracket(end, kind, False))
            at = end + len(_LONG[kind])
        elif at == len(text):
            if kind[0] not in _STRINGS or kind.startswith("//"):
                inside = _COMMENT if kind[0] != ":" else ""
            elif pattern is _MAY_CLOSE and not _CLOSED.match(text, start):
                inside = kind[0] if kind[0] in _QUOTES else ""
    return found, inside


def _hidden(text: str, inside: str) -> list[tuple[int, int]]:
    """From where to where `text` is in strings or comments that go over lines."""
    found = [each for each in scan(text, inside)[0] if each.kind in _LONG]
    spans, start = [], -1 if inside else None
    for each in found:
        if each.opens:
            start = each.at
        elif start is not None:
            line = text.rfind("\n", 0, each.at) + 1  # a line that begins with the end is not in it
            begins = not text[line : each.at].strip()
            spans.append((start, line - 1 if begins else each.at))
            start = None
    return spans


def width(line: str) -> int:
    """How deep a line is indented; a tab counts up to the next multiple of 8."""
    expanded = "".join(takewhile(str.isspace, line.partition("\n")[0])).expandtabs()
    return len(expanded)


def _closes(stack: list[str], kind: str) -> int | None:
    """The place in `stack` of what a closing bracket closes. It closes what was left open inside of
    it, but nothing beyond a brace that is open, nor beyond a string that goes over lines."""
    for at in range(len(stack) - 1, -1, -1):
        if stack[at] == kind:
            return at
        if stack[at] == "{" or stack[at] in _LONG:
            return None
    return None
