"""The brackets, strings and comments that are open at the cursor, in most languages."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, takewhile

from akunu_py.completion.syntax import (
    PAIRS,
    QUOTES,
    STRINGS,
    Syntax,
    closer_of,
    find_end,
    is_long,
    rest_of_string,
    syntax_of,
)

_SCANNED = 40_000  # characters before the cursor; half as many after it
_STATEMENT = 40  # maximum lines of a statement
_KEPT_SCANS = 100
_OPENERS = {closer: opener for opener, closer in PAIRS.items()}
_COMMENT = "#"  # any comment that ends with its line
_LABEL_LENGTH = 300  # maximum characters of a line with a label
# Case labels and list numbers: `a | b)`, `1)`, `case $x in a)`, `;; b)`
_PART = r"(?:\"[^\"\n]*\"|'[^'\n]*'|\\.|[^\s|;\"'])++"
_LABEL = re.compile(rf"(?:.*(?:\bin|;[;&])[ \t]+|[ \t]*){_PART}(?:[ \t]*\|[ \t]*{_PART})*[ \t]*")
_LEADING = re.compile(r"[)\]}]|\"\"\"|'''|\*/")
_TOP_LINE = re.compile(r"\n(?=[^\s)\]}])")


@dataclass(frozen=True, slots=True)
class Bracket:
    """A bracket in a text."""

    at: int  # its position; in `OpenBrackets` relative to the cursor's line, so negative above it
    kind: str  # the opening bracket
    opens: bool  # False for the closing bracket


class OpenBrackets:
    """The brackets that are open between `prefix` and `suffix`.

    Brackets in strings, comments and regular expressions do not count. Triple quotes and comment
    delimiters count as brackets. After the cursor, a closing bracket counts in the rest of its
    line, or as the first character of a line with the indentation of the opening line.
    """

    def __init__(self, prefix: str, suffix: str, syntax: Syntax | None = None) -> None:
        self._syntax = syntax or syntax_of()
        window = prefix[-_SCANNED:]
        top = _TOP_LINE.search(window) if len(window) < len(prefix) else None
        if top is not None:
            window = window[top.end() :]
        # Without a line in the first column, text before the window may have opened brackets.
        self._unseen = len(window) < len(prefix) and top is None and "\n" in window
        self._window, self._start = window, window.rfind("\n") + 1
        above, self._before = window[: self._start], window[self._start :]
        found, self._above_inside = scan(self._syntax, above)
        self._above = [replace(each, at=each.at - self._start) for each in _match(found)[0]]
        found, self.inside = scan(self._syntax, self._before, self._above_inside, ended=False)
        self._open = _match([*self._above, *found])[0]
        if self.inside in STRINGS:
            self._open.append(Bracket(self._before.rfind(self.inside), self.inside, True))
        self._closed_at: set[int] = set()  # positions of brackets closed after the cursor
        self._scan = lru_cache(_KEPT_SCANS)(self._scan_line)  # stop rules repeat some texts
        self._mark_closed(suffix)

    def first_excess(self, text: str, *, ended: bool = True) -> int | None:
        """Return the position of the first unmatched closing bracket in `text`, None for none.

        ended: the last line is complete. If not, brackets after an open quote do not count,
        because the quote may still be closed.
        """
        stack = list(self._above)
        for bracket in self._scan(text, ended=ended):
            if bracket.opens:
                stack.append(bracket)
                continue
            at = _closes(stack, bracket.kind)
            after_cursor = bracket.at + len(closer_of(bracket.kind)) - len(self._before)
            if after_cursor > 0:
                label = bracket.kind == "(" and self._is_label(text, bracket.at)
                known = at is not None and stack[at].at in self._closed_at
                if known or (at is None and not (label or self._unseen)):
                    return max(0, bracket.at - len(self._before))
            del stack[len(stack) if at is None else at :]
        return None

    def depth(self, text: str) -> int:
        """Count the brackets open after `text`, without those closed after the cursor."""
        left = [each for each in _match(self._scan(text))[0] if each.at not in self._closed_at]
        return sum(each.kind not in STRINGS for each in left)

    def imbalance(self, text: str) -> int:
        """Count the unmatched brackets of the cursor's line followed by `text`."""
        found = self._scan(text)
        if self.inside:  # the cursor is in a comment or a string, so brackets inside it count
            line = self._before + text
            found = [
                Bracket(at, _OPENERS.get(each, each), each in PAIRS)
                for at, each in enumerate(line)
                if each in PAIRS or each in _OPENERS
            ]
        unmatched, excess, dropped = _match(found)
        return len(unmatched) + len(excess) + dropped

    def ends_long(self, rest: str) -> bool:
        """Return True if `rest` starts with the end of the string or comment at the cursor."""
        return is_long(self.inside) and rest.lstrip().startswith(closer_of(self.inside))

    @property
    def between_braces(self) -> bool:
        """Return True if the last open bracket is a brace of the cursor's line."""
        return bool(self._open) and self._open[-1].at >= 0 and self._open[-1].kind == "{"

    @property
    def outermost(self) -> bool:
        """Return True if the lines above leave no bracket open."""
        return not self._above

    def undecided(self, text: str) -> int:
        """Count the last characters of `text` that may be part of a closing delimiter."""
        closed = [each.kind for each in self._open if each.at in self._closed_at]
        closers = [closer_of(kind) for kind in closed if is_long(kind)]
        return max((overlap(text, closer[:-1]) for closer in closers), default=0)

    def _scan_line(self, text: str, *, ended: bool = True) -> list[Bracket]:
        """Scan the cursor's line followed by `text`."""
        line, cursor = self._before + text, len(self._before)
        return scan(self._syntax, line, self._above_inside, ended=ended, cursor=cursor)[0]

    def _is_label(self, text: str, at: int) -> bool:
        line = (self._before + text)[:at].rpartition("\n")[2]
        return len(line) <= _LABEL_LENGTH and bool(_LABEL.fullmatch(line))

    def _mark_closed(self, suffix: str) -> None:
        inside = self.inside
        rest, _, below = suffix[: _SCANNED // 2].partition("\n")
        if is_long(inside):
            closed = _is_closed_in(suffix, inside, self._syntax)
            if closed and inside.endswith("\n") and self._open:
                self._closed_at.add(self._open[-1].at)
        else:
            closed = inside in STRINGS and len(re.findall(rf"(?<!\\){inside}", rest)) % 2 == 1
        inside = self._mark_on_line(rest, below, inside if closed or inside == _COMMENT else "")
        self._mark_below(below, inside if is_long(inside) else "")

    def _free(self, kind: str) -> list[int]:
        """Return the positions of open brackets that no text after the cursor has closed yet."""
        free = [each for each in self._open if each.at not in self._closed_at]
        return [each.at for each in free if each.kind == kind]

    def _mark_on_line(self, rest: str, below: str, inside: str) -> str:
        """Mark brackets that the rest of the line closes; return the end state of `scan`."""
        deeper = takewhile(lambda line: width(line) > width(self._before), below.split("\n"))
        statement = "\n".join([rest, *islice(deeper, _STATEMENT)])
        opened = sum(each.at >= 0 and each.kind in PAIRS for each in self._open)
        found, _ = scan(self._syntax, statement, inside)
        all_closed = len(_match(found)[1]) >= opened
        found, after = scan(self._syntax, rest, inside)
        for kind in _match(found)[1]:
            free = self._free(kind)
            on_line = [at for at in free if at >= 0]
            if free:  # the outermost of the line, but the innermost if the lines below close all
                self._closed_at.add(on_line[0] if on_line and not all_closed else free[-1])
        return after

    def _mark_below(self, below: str, inside: str) -> None:
        """Mark brackets that the lines below close at the indentation of the opening line.

        Several opening lines may match: the last one does if all brackets are closed, else the
        first, because the last one is new.
        """
        lowest, closing = 10**6, True  # least indentation so far; its lines all close brackets
        unmatched = Counter(each.kind for each in self._open if each.at not in self._closed_at)
        scanned, _ = scan(self._syntax, below, inside)
        excess = Counter(_match(scanned)[1])
        all_closed = {kind for kind in unmatched if excess[kind] >= unmatched[kind]}
        hidden = _hidden(below, scanned, inside)
        widths = {  # of the lines with the open brackets
            each.at: width(self._window[self._window.rfind("\n", 0, self._start + each.at) + 1 :])
            for each in self._open
        }
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
                free = [at for at in self._free(kind) if widths[at] == depth]
                if free:
                    choose = max if kind in all_closed else min
                    self._closed_at.add(choose(free))
                content = content[found.end() :].lstrip()
            if not depth and not closing:
                break


def scan(
    syntax: Syntax, text: str, inside: str = "", *, ended: bool = True, cursor: int = -1
) -> tuple[list[Bracket], str]:
    """Return the brackets of `text` in order, and the state at its end.

    The state is a quote, the delimiter of a long string or comment, "#" for a comment, or "".
    inside: the state at the start. ended: as in `OpenBrackets.first_excess`. cursor: the quotes
    around this position count as brackets.
    """
    pattern = syntax.closed if ended else syntax.may_close
    found: list[Bracket] = []
    here = ""  # the start of a here-document, whose text starts on the next line
    at, line_end = rest_of_string(text, inside), len(text)
    if at:
        found.append(Bracket(at - 1, inside, False))
    if inside in QUOTES:
        inside = ""
    while True:
        if inside == _COMMENT:
            at = text.find("\n", at)
            if at < 0:
                return found, inside
            inside = ""
        elif inside and is_long(inside):
            end = find_end(text, inside, at)
            if end is None:
                return found, inside
            found.append(Bracket(end[0], inside, False))
            at, inside = end[1], ""
        token = pattern.search(text, at, line_end)
        if token is None:
            if not here:
                return found, inside
            inside, at, here, line_end = here, line_end, "", len(text)
            continue
        start, at, kind = token.start(), token.end(), token.group()
        kind = syntax.long_quotes.get(kind, kind)
        if kind in PAIRS:
            found.append(Bracket(start, kind, True))
        elif kind in _OPENERS:
            found.append(Bracket(start, _OPENERS[kind], False))
        elif kind.startswith("<<"):
            found.append(Bracket(start, kind, True))
            here, line_end = kind, text.find("\n", at)
            if line_end < 0:
                return found, kind
        elif is_long(kind):
            found.append(Bracket(start, kind, True))
            inside = kind
        elif kind[0] in QUOTES and syntax.closed.match(text, start):
            if kind[0] == "'" and at == len(text) and not ended:
                inside = kind[0]  # may still be an apostrophe
            elif start < cursor < at:
                found += Bracket(start, kind[0], True), Bracket(at - 1, kind[0], False)
        elif kind[0] == "{" and start < cursor < at:  # a tag of a template
            inner = enumerate(kind, start)
            found += (Bracket(each, "{", char == "{") for each, char in inner if char in "{}")
        elif at == len(text):
            if kind[0] in "#;%- \t" or kind.startswith("//"):
                inside = _COMMENT
            elif not ended and kind[0] in QUOTES:
                inside = kind[0]


def _is_closed_in(suffix: str, kind: str, syntax: Syntax) -> bool:
    """Return True if `suffix` closes `kind` before it opens another one."""
    closer = closer_of(kind)
    if kind.endswith("\n"):
        return scan(syntax, suffix)[1] == kind  # as code, a closing quote opens a new string
    if closer == kind:
        return suffix.count(closer) % 2 == 1
    end = find_end(suffix, kind, 0)
    return end is not None and not 0 <= suffix.find(kind) < end[0]


def _match(found: Sequence[Bracket]) -> tuple[list[Bracket], list[str], int]:
    """Return the open brackets, the kinds of excess closing ones, and a skip count.

    A closing bracket skips the brackets that are open inside its pair.
    """
    unmatched: list[Bracket] = []
    excess, dropped = [], 0
    for bracket in found:
        if bracket.opens:
            unmatched.append(bracket)
        elif (at := _closes(unmatched, bracket.kind)) is not None:
            dropped += len(unmatched) - at - 1
            del unmatched[at:]
        else:
            excess.append(bracket.kind)
    return unmatched, excess, dropped


def _hidden(text: str, found: Sequence[Bracket], inside: str) -> list[tuple[int, int]]:
    """Return the spans of `text` in strings or comments of several lines."""
    found = [each for each in found if is_long(each.kind)]
    spans, start = [], -1 if inside else None
    for each in found:
        if each.opens:
            start = each.at
        elif start is not None:
            line = text.rfind("\n", 0, each.at) + 1  # a line that starts with the closer is outside
            begins = not text[line : each.at].strip()
            spans.append((start, line - 1 if begins else each.at))
            start = None
    return spans


def overlap(text: str, other: str) -> int:
    """Return the number of characters at the end of `text` that `other` starts with."""
    longest = min(len(text), len(other))
    return next((n for n in range(longest, 0, -1) if text.endswith(other[:n])), 0)


def width(line: str) -> int:
    """Return the indentation of a line in columns; a tab stop is every 8 columns."""
    return len("".join(takewhile(str.isspace, line.partition("\n")[0])).expandtabs())


def _closes(stack: Sequence[Bracket], kind: str) -> int | None:
    """Return the index of the bracket that `kind` closes, None for none."""
    for at in range(len(stack) - 1, -1, -1):
        if stack[at].kind == kind:
            return at
        if stack[at].kind == "{" or is_long(stack[at].kind):  # hides the brackets outside of it
            return None
    return None
