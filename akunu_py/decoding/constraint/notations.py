"""Notations in which model families write the arguments of calls, instead of JSON.

The content of strings is given as JSON writes it, and spelled in the notation's own way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from akunu_py.json_schema.layouts import UNORDERED, Layout, Notation
from akunu_py.json_schema.regex import (
    SHORT_ESCAPES,
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
# Names that are written without quotes.
_PLAIN_NAME = re.compile(r"""[^\s:=,{}()\[\]<>"'\x00-\x1f]+""")
_PLAIN_NAMES = Expr(r"[^\x{0}-\x{20}\x{22}\x{27}-\x{29}\x{2c}\x{3a}<=>\[\]\{\}\x{a0}]+")
# Strings as Python writes them, but with raw newlines and tabs.
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
            # One terminal, so that the text stops at the end marker.
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


def marked(begin: str | Verbatim, end: str | Verbatim, line: str = "") -> Layout:
    """Return the layout with strings between markers and without whitespace."""
    return replace(UNORDERED, notation=Marked(begin, end, line))


def keywords(*, spaced: bool = False) -> Layout:
    """Return the layout of a Python call's arguments. spaced: commas and colons need a space."""
    space = r"\x{20}" if spaced else r"\x{20}?"
    comma, colon = Expr(f",{space}"), Expr(f":{space}")
    inside = replace(UNORDERED, comma=comma, colon=colon, notation=Python())
    opening, closing, named = Expr(r"\("), Expr(r"\)"), Python(keywords=True)
    outside = replace(inside, open_object=opening, close_object=closing, notation=named)
    return replace(inside, outermost=replace(outside, colon=Expr("=")))


def unescaped(content: Expr) -> Expr:
    """Return the same content without JSON's escapes. Each escape is one character."""
    return replace(content, text=_ESCAPED.sub(_character, content.text))


def _plain_names(content: Expr | None) -> Expr:
    return _PLAIN_NAMES if content is None else both(_PLAIN_NAMES, unescaped(content))


def _character(found: re.Match[str]) -> str:
    if symbols := re.findall(_SYMBOL, found["letters"] or found["letter"] or ""):
        letters = (chr(int(each[3:-1], 16)) if len(each) > 1 else each for each in symbols)
        codes = [_LETTERS[letter] for letter in letters]
    else:
        codes = [int(each, 16) for each in (found["controls"] or found["code"]).split("|")]
    return "[" + "".join(f"\\x{{{code:x}}}" for code in codes) + "]"
