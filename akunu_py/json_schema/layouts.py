"""How values are written: as JSON, or as model families write the arguments of their calls.

The content of strings is given as JSON writes it. Other notations spell it in their own way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from akunu_py.json_schema.regex import (
    SHORT_ESCAPES,
    STRING,
    Expr,
    both,
    concat,
    either,
    quoted,
    raw_text,
    without,
)
from akunu_py.json_schema.rules import Symbol, Verbatim

_ANY = Expr(r"(?:.|\n)*", nullable=True)
_SYMBOL = r"(?:\\x\{[0-9a-f]+\}|[0-9A-Za-z])"
_ESCAPED = re.compile(
    r"\\x\{5c\}(?:\[(?P<letters>" + _SYMBOL + r"+)\]|u00\(\?:(?P<controls>[0-9a-f|]+)\)"
    r"|u(?P<code>[0-9a-f]{4})|(?P<letter>" + _SYMBOL + "))"
)
_LETTERS = {letter: code for code, letter in SHORT_ESCAPES.items()}
# Names that stand without quotes, and need none.
_PLAIN_NAME = re.compile(r"""[^\s:=,{}()\[\]<>"'\x00-\x1f]+""")
_PLAIN_NAMES = Expr(r"[^\x{0}-\x{20}\x{22}\x{27}-\x{29}\x{2c}\x{3a}<=>\[\]\{\}\x{a0}]+")
# As Python writes strings; newlines and tabs may stand there as they are.
_PYTHON_ESCAPE = (
    r"\x{5c}(?:[\x{22}\x{27}\x{5c}bfnrt]|x[0-9a-fA-F]{2}"
    r"|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|u(?:[0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
_IN_SINGLE = Expr(r"(?:[^\x{27}\x{5c}\x{0}-\x{1f}]|[\n\t])*", nullable=True)
_NO_QUOTES = Expr(r"(?:[^\x{22}\x{27}\x{5c}]|\x{5c}[^\x{22}])*", nullable=True)
_PYTHON_STRING = Expr(
    "(?:"
    + "|".join(
        rf"\x{{{mark}}}(?:[^\x{{{mark}}}\x{{5c}}\x{{0}}-\x{{1f}}]|[\n\t]|{_PYTHON_ESCAPE})*\x{{{mark}}}"
        for mark in ("22", "27")
    )
    + ")"
)


class Notation:
    """The spelling of words, strings and keys: JSON, unless a subclass has another one."""

    def word(self, value: bool | None) -> Expr:
        """Return True, False or None."""
        return Expr({None: "null", True: "true", False: "false"}[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        """Return a string with this content, or any string for None."""
        return (STRING if content is None else quoted(content),)

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        """Return the key of a member: this name, or any with this content."""
        return self.string(content)

    def has_key(self, name: str) -> bool:
        """Return whether a member can have this name."""
        return True


@dataclass(frozen=True)
class Marked(Notation):
    """Strings without escapes between markers, and names without markers."""

    begin: str | Verbatim
    end: str | Verbatim
    line: str = ""  # between a string and `end`

    def word(self, value: bool | None) -> Expr:
        # Templates write null as Python's None.
        return Expr({None: "(?:null|None)", True: "true", False: "false"}[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        held = _ANY if content is None else unescaped(content)
        begin = raw_text(self.begin) if isinstance(self.begin, str) else None
        if isinstance(self.end, str):
            # One terminal, because the text must stop at its end.
            end = raw_text(self.end)
            ended = without(held, concat(_ANY, end, _ANY), inhabited=content is None)
            parts: tuple[Symbol, ...] = (concat(ended, raw_text(self.line + self.end)),)
        else:
            parts = (concat(held, raw_text(self.line)), self.end)
        if begin is None:
            assert isinstance(self.begin, Verbatim)
            return (self.begin, *parts)
        assert isinstance(parts[0], Expr)
        return (concat(begin, parts[0]), *parts[1:])

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        if name is None:
            return (_plain_names(content),)
        return (raw_text(name),) if _PLAIN_NAME.fullmatch(name) else self.string(content)


@dataclass(frozen=True)
class Python(Notation):
    """Python's literals."""

    keywords: bool = False  # members are arguments of a call, not of a dictionary

    def word(self, value: bool | None) -> Expr:
        found = {None: "(?:None|null)", True: "(?:True|true)", False: "(?:False|false)"}
        return Expr(found[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        if content is None:
            return (_PYTHON_STRING,)
        mark = raw_text("'")
        single = [both(content, _NO_QUOTES), both(unescaped(content), _IN_SINGLE)]
        found = either([quoted(content), *(concat(mark, each, mark) for each in single)])
        return (replace(found, inhabited=content.inhabited),)

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        if not self.keywords:
            return self.string(content)
        return (_plain_names(content) if name is None else raw_text(name),)

    def has_key(self, name: str) -> bool:
        return not self.keywords or _PLAIN_NAME.fullmatch(name) is not None


JSON = Notation()


_SPACE = r"[\x{20}\x{a}\x{d}\x{9}]*"


@dataclass(frozen=True, slots=True)
class Layout:
    """The notation, the punctuation, and the order of properties."""

    open_array: Expr
    close_array: Expr
    open_object: Expr
    close_object: Expr
    comma: Expr
    colon: Expr
    ordered: bool  # properties are in the order of the schema
    closed: bool = False  # an object with named properties has no others
    notation: Notation = JSON
    outermost: Layout | None = None  # of the outermost object, if it is another


def _layout(space: str, *, ordered: bool, notation: Notation = JSON) -> Layout:
    return Layout(
        open_array=Expr(rf"\[{space}"),
        close_array=Expr(rf"{space}\]"),
        open_object=Expr(rf"\{{{space}"),
        close_object=Expr(rf"{space}\}}"),
        comma=Expr(f"{space},{space}"),
        colon=Expr(f"{space}:{space}"),
        ordered=ordered,
        notation=notation,
    )


FREE = _layout(_SPACE, ordered=False)
COMPACT = _layout("", ordered=True)
LIKELY = replace(COMPACT, closed=True)  # for drafts
UNORDERED = replace(COMPACT, ordered=False)
# As Python's json module writes it on one line.
ONE_LINE = replace(UNORDERED, comma=Expr(r",\x{20}"), colon=Expr(r":\x{20}"))


def marked(begin: str | Verbatim, end: str | Verbatim, line: str = "") -> Layout:
    """Return the layout with strings between markers and without whitespace."""
    return _layout("", ordered=False, notation=Marked(begin, end, line))


def keywords(*, spaced: bool = False) -> Layout:
    """Return the layout of the arguments of a call in Python, with brackets.

    spaced: a space follows each comma and colon, otherwise it may.
    """
    space = r"\x{20}" if spaced else r"\x{20}?"
    inside = replace(_layout("", ordered=False, notation=Python()), comma=Expr(f",{space}"))
    inside = replace(inside, colon=Expr(f":{space}"))
    outside = replace(
        inside,
        open_object=Expr(r"\("),
        close_object=Expr(r"\)"),
        colon=Expr("="),
        notation=Python(keywords=True),
    )
    return replace(inside, outermost=outside)


def unescaped(content: Expr) -> Expr:
    """Return the same content without JSON's escapes. Each escape is one character."""
    return replace(content, text=_ESCAPED.sub(_character, content.text))


def _plain_names(content: Expr | None) -> Expr:
    return _PLAIN_NAMES if content is None else both(_PLAIN_NAMES, unescaped(content))


def _character(found: re.Match[str]) -> str:
    if found["letters"]:
        codes = [_code(each) for each in re.findall(_SYMBOL, found["letters"])]
    elif found["controls"]:
        codes = [int(each, 16) for each in found["controls"].split("|")]
    else:
        codes = [int(found["code"], 16) if found["code"] else _code(found["letter"])]
    return "[" + "".join(f"\\x{{{code:x}}}" for code in codes) + "]"


def _code(symbol: str) -> int:
    letter = chr(int(symbol[3:-1], 16)) if len(symbol) > 1 else symbol
    return _LETTERS[letter]
