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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

_SCANNED = 40_000  # characters before the cursor, 20,000 behind it
_STATEMENT = 40  # lines that a statement goes over
_PAIRS = {"(": ")", "[": "]", "{": "}"}
_OPENERS = {closer: opener for opener, closer in _PAIRS.items()}
_LONG = {'"""': '"""', "'''": "'''", "/*": "*/", "<!--": "-->", "--[[": "]]"}
_QUOTES = "\"'`"
_COMMENT = "#"  # any comment that ends with its line

# A quote ends in its line; inside a word, or before one where it should end, it is an apostrophe or
# a lifetime. A very long string is read as code: looking for the ends of all would take for ever. A
# regular expression stands where nothing can be divided. #name { and #fff; are no comments, nor is
# #define; -- before a quote ends the options of a command. A here-document begins behind <<WORD.
_STRINGS = {
    '"': r"\"(?:\\.|[^\"\\\n]){0,1000}+",
    "'": r"(?<!\w)'(?:\\.|[^'\\\n]){0,1000}+",
    "`": r"`[^`\n]{0,1000}+",
    "/": r"(?:(?<=[(,=:!&|?;~])|(?<=[(,=:!&|?;~] )|(?<=return ))/(?![/*\s,)])"
    r"(?:\\.|\[(?:\\.|[^\]\\\n]){0,300}+(?:\]|\Z)|[^/\\\[\n]){0,300}+",
}
_ENDS = {'"': '"', "'": r"'(?!\w)", "`": "`", "/": "/"}
_OTHER = (
    r"\"\"\"|(?<!')'''(?!')|(?<![^\s(){},;\[\]=])/\*|<!--|--\[\["
    r"|(?<![^\s(=])<<[-~<]?([\"']?)[A-Z_]\w*\1(?=\W|\Z)"
    r"|(?<!\S)(?://(?! *\$|=)|--(?!\S| *[\"'$])"
    r"|#(?![\[{(]|[\w-]+(?: ?[{(,.:>]|\))|[0-9a-fA-F]{3,8}[;,)]"
    r"|(?:define|if|ifn?def|el(?:if|se)|endif|include|undef|pragma|error|(?:end)?region)\b))[^\n]*"
    r"|(?<!\S):-?[()]|\\[()\[\]{}]|[()\[\]{}]"
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
_LABEL = re.compile(r"[ \t]*[^\s|;]+(?:[ \t]*\|[ \t]*[^\s|;]+)*")  # `a | b)`, `1)`
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
    """A bracket that is open at the cursor. at: where in the cursor's line, -1 if above. width: the
    indentation of its line. line: where that begins. taken: it is closed behind the cursor already.
    """

    kind: str
    at: int
    width: int
    line: int = 0
    taken: bool = False

    @property
    def own(self) -> bool:
        return self.at >= 0


class OpenBrackets:
    """The brackets that are open between `prefix` and `suffix`."""

    def __init__(self, prefix: str, suffix: str) -> None:
        window = prefix[-_SCANNED:]
        top = _TOP_LINE.search(window) if len(window) < len(prefix) else None
        if top is not None:
            window = window[top.end() :]
        # What is above may have opened more, where no line begins in the first column.
        self._unseen = len(window) < len(prefix) and top is None and "\n" in window
        start = window.rfind("\n") + 1
        above, self._begun = window[:start], window[start:]
        found, self._above_inside = scan(above)
        self._above = []
        for each in _match(found)[0]:
            line = above.rfind("\n", 0, each.at) + 1
            self._above.append(Open(each.kind, -1, width(above[line:]), line))
        self._taken: set[int] = set()  # places in the cursor's line of what is taken
        found, self.inside = scan(self._begun, self._above_inside, ended=False)
        self._open = self._add(self._above, found)
        if self.inside in _STRINGS:
            self._open.append(Open(self.inside, self._begun.rfind(self.inside), 0, 10**9))
        self._take(suffix)
        self._taken = {each.at for each in self._open if each.own and each.taken}

    def first_excess(self, text: str, *, ended: bool = True) -> int | None:
        """Where `text` closes what is closed behind it, or what nothing opened; None if nowhere.

        ended: whether the last line is whole. If not, a quote that is open at its end may yet be
        closed, and what is behind it is not counted.
        """
        stack = list(self._above)
        for bracket in self._scan(text, ended=ended):
            if bracket.opens:
                stack.append(Open(bracket.kind, bracket.at, 0, 0, bracket.at in self._taken))
                continue
            at = _closes([each.kind for each in stack], bracket.kind)
            behind = bracket.at + len(closer_of(bracket.kind)) - len(self._begun)
            if behind > 0:
                label = bracket.kind == "(" and self._is_label(text, bracket.at)
                if stack[at].taken if at is not None else not (label or self._unseen):
                    return max(0, bracket.at - len(self._begun))
            del stack[len(stack) if at is None else at :]
        return None

    def depth(self, text: str, *, taken: bool = False) -> int:
        """How many brackets of the cursor's line and of `text` are open behind `text`. taken: also
        those that are closed behind the cursor."""
        stack = self._add([], self._scan(text))
        return sum(each.kind not in _STRINGS and (taken or not each.taken) for each in stack)

    def imbalance(self, text: str) -> int:
        """How many brackets of the cursor's line with `text` in it are left open or close nothing.
        Those of a comment or a string count where the cursor is in one."""
        found = self._scan(text)
        if self.inside:
            line = self._begun + text
            found = [
                Bracket(at, _OPENERS.get(each, each), each in _PAIRS)
                for at, each in enumerate(line)
                if each in _PAIRS or each in _OPENERS
            ]
        left, excess, dropped = _match(found)
        return len(left) + len(excess) + dropped

    def ends_long(self, rest: str) -> bool:
        """Whether `rest` of the line begins with the end of the string or the comment that the
        cursor is in."""
        return is_long(self.inside) and rest.lstrip().startswith(closer_of(self.inside))

    @property
    def between_braces(self) -> bool:
        """Whether the cursor's line opened a brace last, which is closed behind it."""
        return bool(self._open) and self._open[-1].own and self._open[-1].kind == "{"

    @property
    def outermost(self) -> bool:
        """Whether no bracket of the lines above is open."""
        return not self._above

    def undecided(self, text: str) -> int:
        """How many characters at the end of `text` may begin what closes a string or a comment
        that is closed behind the cursor."""
        closers = [_LONG[each.kind] for each in self._open if each.taken and each.kind in _LONG]
        return max(
            (n for closer in closers for n in range(len(closer)) if text.endswith(closer[:n])),
            default=0,
        )

    def _scan(self, text: str, *, ended: bool = True) -> list[Bracket]:
        """The brackets of the cursor's line and of `text` behind what is begun of it."""
        return scan(self._begun + text, self._above_inside, ended=ended, cursor=len(self._begun))[0]

    def _add(self, stack: Sequence[Open], found: Sequence[Bracket]) -> list[Open]:
        """What is open behind `found`, of the cursor's line."""
        stack = list(stack)
        for bracket in found:
            if bracket.opens:
                taken = bracket.at in self._taken
                stack.append(Open(bracket.kind, bracket.at, width(self._begun), 10**9, taken))
            elif (at := _closes([each.kind for each in stack], bracket.kind)) is not None:
                del stack[at:]
        return stack

    def _is_label(self, text: str, at: int) -> bool:
        """Whether the line before `at` is a label of a case or a number of a list."""
        line = (self._begun + text)[:at].rpartition("\n")[2]
        return bool(_LABEL.fullmatch(line))

    def _take(self, suffix: str) -> None:
        """Marks what `suffix` closes."""
        inside = self.inside
        rest, _, below = suffix[: _SCANNED // 2].partition("\n")
        if is_long(inside):
            closed = _is_closed_in(suffix, inside)
        else:
            closed = inside in _STRINGS and len(re.findall(rf"(?<!\\){inside}", rest)) % 2 == 1
        inside = self._take_on_line(rest, below, inside if closed or inside == _COMMENT else "")
        self._take_below(below, inside if is_long(inside) else "")

    def _take_on_line(self, rest: str, below: str, inside: str) -> str:
        """Takes what the rest of the cursor's line closes: of what the line itself opened, the
        outermost, unless the lines below close all of it; else the innermost. Returns what the line
        ends inside of."""
        deeper = takewhile(lambda line: width(line) > width(self._begun), below.split("\n"))
        statement = "\n".join([rest, *islice(deeper, _STATEMENT)])
        opened = sum(each.own and each.kind in _PAIRS for each in self._open)
        all_closed = len(_match(scan(statement, inside)[0])[1]) >= opened
        found, after = scan(rest, inside)
        for kind in _match(found)[1]:
            free = [each for each in self._open if each.kind == kind and not each.taken]
            own = [each for each in free if each.own]
            if free:
                (own[0] if own and not all_closed else free[-1]).taken = True
        return after

    def _take_below(self, below: str, inside: str) -> None:
        """Takes what the lines below close at the indentation of the line that opened it: of such
        lines the last, or the first where not all is closed, since the last is new."""
        lowest, closing = 10**6, True  # of the lines so far; whether those of it all close
        left = Counter(each.kind for each in self._open if not each.taken)
        excess = Counter(_match(scan(below, inside)[0])[1])
        all_closed = {kind for kind in left if excess[kind] >= left[kind]}
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
                free = [
                    each
                    for each in self._open
                    if each.kind == kind and each.width == depth and not each.taken
                ]
                if free:  # of a line the outermost
                    choose = max if kind in all_closed else min
                    choose(free, key=lambda each: each.line).taken = True
                content = content[found.end() :].lstrip()
            if not depth and not closing:
                break


def scan(
    text: str, inside: str = "", *, ended: bool = True, cursor: int = -1
) -> tuple[list[Bracket], str]:
    """The brackets of `text` in their order, and what `text` ends inside of: a quote, what opens a
    string or a comment that goes over lines, "#" for a comment, or nothing.

    inside: the same at its beginning. ended: as in `OpenBrackets.first_excess`. cursor: the quotes
    around that place are brackets too.
    """
    found: list[Bracket] = []
    at = 0
    if inside == _COMMENT:
        at = text.find("\n")
        if at < 0:
            return found, inside
    elif is_long(inside):
        end = _find_end(text, inside, 0)
        if end is None:
            return found, inside
        found.append(Bracket(end[0], inside, False))
        at = end[1]
    elif inside in _REST and (closed := _REST[inside].match(text)):
        found.append(Bracket(closed.end() - 1, inside, False))
        at = closed.end()
    return _scan_code(text, at, found, ended, cursor)


def _scan_code(
    text: str, at: int, found: list[Bracket], ended: bool, cursor: int
) -> tuple[list[Bracket], str]:
    pattern = _CLOSED if ended else _MAY_CLOSE
    inside, here = "", ""  # here: what opens a here-document, which begins with the next line
    line_end = len(text)
    while True:
        token = pattern.search(text, at, line_end)
        if token is None:
            if not here:
                return found, inside
            end = _find_end(text, here, line_end)
            if end is None:
                return found, here
            found.append(Bracket(end[0], here, False))
            at, here, line_end = end[1], "", len(text)
            continue
        start, at, kind = token.start(), token.end(), token.group()
        if kind in _PAIRS:
            found.append(Bracket(start, kind, True))
        elif kind in _OPENERS:
            found.append(Bracket(start, _OPENERS[kind], False))
        elif kind.startswith("<<"):
            found.append(Bracket(start, kind, True))
            here, line_end = kind, text.find("\n", at)
            if line_end < 0:
                return found, kind
        elif kind in _LONG:
            found.append(Bracket(start, kind, True))
            end = _find_end(text, kind, at)
            if end is None:
                return found, kind
            found.append(Bracket(end[0], kind, False))
            at = end[1]
        elif kind[0] in _QUOTES and _CLOSED.match(text, start):
            if kind[0] == "'" and at == len(text) and not ended:
                inside = kind[0]  # what follows may show it to be an apostrophe
            elif start < cursor < at:
                found += Bracket(start, kind[0], True), Bracket(at - 1, kind[0], False)
        elif at == len(text):
            if kind[0] not in _STRINGS or kind.startswith("//"):
                inside = _COMMENT if kind[0] not in ":\\" else ""
            elif not ended:
                inside = kind[0] if kind[0] in _QUOTES else ""


def is_long(kind: str) -> bool:
    """Whether what `kind` opens goes over lines: a string, a comment, a here-document."""
    return kind in _LONG or kind.startswith("<<")


def closer_of(kind: str) -> str:
    """What closes a bracket; for a here-document its word."""
    return _PAIRS.get(kind) or _LONG.get(kind) or kind.strip("<-~\"'")


def _find_end(text: str, kind: str, at: int) -> tuple[int, int] | None:
    """From where to where the end stands of what `kind` opened, behind `at`."""
    if kind.startswith("<<"):
        found = re.compile(rf"(?m)^[ \t]*{closer_of(kind)}\b").search(text, at)
        return found.span() if found else None
    start = text.find(_LONG[kind], at)
    return None if start < 0 else (start, start + len(_LONG[kind]))


def _is_closed_in(suffix: str, kind: str) -> bool:
    """Whether `suffix` closes what `kind` opened before it, and opens no other such first."""
    closer = closer_of(kind)
    if closer == kind:
        return suffix.count(kind) % 2 == 1
    end = _find_end(suffix, kind, 0)
    return end is not None and not 0 <= suffix.find(kind) < end[0]


def _match(found: Sequence[Bracket]) -> tuple[list[Bracket], list[str], int]:
    """(What is left open, the kinds of what closes something before, in order, how many were closed
    by what closes one around them)."""
    left: list[Bracket] = []
    excess, dropped = [], 0
    for bracket in found:
        if bracket.opens:
            left.append(bracket)
        elif (at := _closes([each.kind for each in left], bracket.kind)) is not None:
            dropped += len(left) - at - 1
            del left[at:]
        else:
            excess.append(bracket.kind)
    return left, excess, dropped


def _hidden(text: str, inside: str) -> list[tuple[int, int]]:
    """From where to where `text` is in strings or comments that go over lines."""
    found = [each for each in scan(text, inside)[0] if is_long(each.kind)]
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
        if stack[at] == "{" or is_long(stack[at]):
            return None
    return None
