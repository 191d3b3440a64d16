"""Patterns of JSON schemas, which are ECMAScript's regular expressions, as `Expr`s.

An `Expr` matches whole strings and has no anchors and no look-ahead. So a pattern is taken apart
from its end: each part is given what may follow it, and `(?!x)` is that without what begins with x.
What cannot be said so (look-behind, back-references, look-ahead within a repetition) is refused.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

from akunu_py.json_schema.regex import (
    CHARACTER,
    CONTENT,
    EPSILON,
    LAST,
    Expr,
    Ranges,
    both,
    characters,
    complement,
    concat,
    either,
    matches,
    repeat,
    subtract,
    union,
    without,
    written_content,
)

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE = union(((9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)),
               ((0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
               ((0xFEFF, 0xFEFF),))  # fmt: skip
_DOT = complement(((10, 10), (13, 13), (0x2028, 0x2029)))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_COUNT = re.compile(r"\{(\d+)(,(\d*))?\}")
_LONGEST_REPEAT = 100_000


class Unsupported(ValueError):
    """A part of a schema that no grammar can be made of."""


@dataclass(frozen=True, slots=True)
class Set:
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    start: bool


@dataclass(frozen=True, slots=True)
class Ahead:
    node: Node
    negated: bool


Node = Set | Sequence | Choice | Repeat | Anchor | Ahead


@cache
def content_matching(pattern: str) -> Expr | None:
    """What strings hold in which `pattern` is found, as JSON writes it; None where it never is.

    Raises Unsupported.
    """
    node = _Parser(pattern).parsed()
    first = _followed(node, CONTENT, at_start=True)
    if not _anchored((node,)):
        return None if first is None else concat(CONTENT, first)
    later = _followed(node, CONTENT, at_start=False)
    later = later and concat(repeat(CHARACTER, 1, None), later)
    return either(each for each in (first, later) if each is not None)


@cache
def is_found(pattern: str, text: str) -> bool:
    """Whether `pattern` is found in `text`. Raises Unsupported."""
    content = content_matching(pattern)
    return content is not None and matches(content, written_content(text).encode())


def _followed(node: Node, rest: Expr, *, at_start: bool) -> Expr | None:
    """What a string holds from here on, if `node` comes next and then `rest`, which is all that
    is left of it. at_start: whether the string begins here."""
    match node:
        case Sequence(parts):
            starts = [at_start]
            for at, part in enumerate(parts[:-1], start=1):
                starts.append(starts[-1] and _width_is_zero(part))
                if starts[-2] > starts[-1] and _nullable(part) and _anchored(parts[at:]):
                    raise Unsupported("^ behind something that may be empty")
            result: Expr | None = rest
            for part, start in zip(reversed(parts), reversed(starts), strict=False):
                result = None if result is None else _followed(part, result, at_start=start)
            return result
        case Choice(options):
            if _plain(node):
                inner = _expr(node)
                return None if inner is None else concat(inner, rest)
            each = (_followed(option, rest, at_start=at_start) for option in options)
            return either(option for option in each if option is not None)
        case Anchor(start):
            fits = at_start if start else rest.nullable
            return None if not fits else rest if start else EPSILON
        case Ahead(inner_node, negated):
            ahead = _followed(inner_node, CONTENT, at_start=at_start)
            if ahead is None:
                return rest if negated else None
            return without(rest, ahead) if negated else both(rest, ahead)
        case Repeat(inner_node, low, high) if not _plain(node):
            return _repeated(inner_node, low, high, rest, at_start)
        case _:
            inner = _expr(node)
            return None if inner is None else concat(inner, rest)


def _repeated(node: Node, low: int, high: int | None, rest: Expr, at_start: bool) -> Expr | None:
    """A repetition of what has anchors or look-ahead in it."""
    if high == 0:
        return rest
    if high == 1:
        once = _followed(node, rest, at_start=at_start)
        return once if low else either([rest, *([once] if once is not None else [])])
    if _has(node, Ahead) or _anchored((node,)):
        raise Unsupported("look-ahead or ^ in a repetition")
    # Behind a $ nothing may come, so one can only be in the last repetition.
    inner = _expr(node)
    options = [EPSILON] if inner is None and low == 0 else []
    if inner is not None:
        options.append(repeat(inner, low, high))
    found = [concat(option, rest) for option in options]
    last = _followed(node, EPSILON, at_start=False) if rest.nullable else None
    if last is not None:
        fewer = max(low - 1, 0), None if high is None else high - 1
        found.append(concat(EPSILON if inner is None else repeat(inner, *fewer), last))
    return either(found)


def _expr(node: Node) -> Expr | None:
    """What `node` matches without anchors; None where that is nothing."""
    match node:
        case Set(ranges):
            return characters(ranges)
        case Sequence(parts):
            known = [found for part in parts if (found := _expr(part)) is not None]
            return concat(*known) if len(known) == len(parts) else None
        case Choice(options):
            return either(inner for option in options if (inner := _expr(option)) is not None)
        case Repeat(inner_node, low, high):
            once = _expr(inner_node)
            if once is None:
                return EPSILON if low == 0 else None
            return repeat(once, low, high)
        case _:
            return None


def _children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(parts):
            return parts
        case Choice(options):
            return options
        case Repeat(inner, _, _) | Ahead(inner, _):
            return (inner,)
    return ()


def _has(node: Node, kind: type) -> bool:
    return isinstance(node, kind) or any(_has(child, kind) for child in _children(node))


def _plain(node: Node) -> bool:
    return not _has(node, Anchor) and not _has(node, Ahead)


def _anchored(nodes: tuple[Node, ...]) -> bool:
    """Whether there is a ^ in them."""
    return any(node == Anchor(True) or _anchored(_children(node)) for node in nodes)


def _width_is_zero(node: Node) -> bool:
    match node:
        case Anchor() | Ahead():
            return True
        case Sequence(parts) | Choice(parts):
            return all(map(_width_is_zero, parts))
        case Repeat(inner, _, high):
            return high == 0 or _width_is_zero(inner)
    return False


def _nullable(node: Node) -> bool:
    match node:
        case Set():
            return False
        case Sequence(parts):
            return all(map(_nullable, parts))
        case Choice(options):
            return any(map(_nullable, options))
        case Repeat(inner, low, _):
            return low == 0 or _nullable(inner)
    return True


class _Parser:
    """Of ECMAScript's syntax, with what it tolerates outside of its strict mode (annex B)."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parsed(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            self._refuse("a closing bracket too many")
        return node

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(f"the pattern {self._text!r:.100} has {what}")

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._refuse("no end")
        self._at += 1
        return self._text[self._at - 1]

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _quantified(self, node: Node) -> Node:
        low, high = 1, 1
        counted = _COUNT.match(self._text, self._at)
        if self._take("*"):
            low, high = 0, None  # type: ignore[assignment]
        elif self._take("+"):
            high = None  # type: ignore[assignment]
        elif self._take("?"):
            low = 0
        elif counted:
            self._at = counted.end()
            low = int(counted[1])
            high = low if counted[2] is None else int(counted[3]) if counted[3] else None  # type: ignore[assignment]
            if max(low, high or 0) > _LONGEST_REPEAT or (high is not None and high < low):
                self._refuse(f"the repetition {counted[0]}")
        else:
            return node
        self._take("?")  # as few as possible: the same texts
        if self._text[self._at : self._at + 1] in ("*", "+"):
            self._refuse("two quantifiers in a row")
        return Repeat(node, low, high)

    def _atom(self) -> Node:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._set()
        if character == "^":
            return Anchor(True)
        if character == "$":
            return Anchor(False)
        if character == ".":
            return Set(_DOT)
        if character == "\\":
            if self._text[self._at : self._at + 1] in ("b", "B"):
                self._refuse("a word boundary, which grammars cannot express")
            return Set(self._escape())
        if character in "*+?":
            self._refuse("nothing to repeat")
        return Set(((ord(character), ord(character)),))

    def _group(self) -> Node:
        node: Node
        if self._take("?=") or self._take("?!"):
            negated = self._text[self._at - 1] == "!"
            node = Ahead(self._choice(), negated)
        elif self._take("?<=") or self._take("?<!"):
            self._refuse("a look-behind, which grammars cannot express")
        else:
            if not self._take("?:") and (self._take("?<") or self._take("?P<")):
                while self._next() != ">":
                    pass
            elif self._text.startswith("?", self._at):
                self._refuse("a group of an unknown kind")
            node = self._choice()
        if not self._take(")"):
            self._refuse("a bracket that is not closed")
        return node

    def _set(self) -> Node:
        negated = self._take("^")
        ranges: list[Ranges] = []
        while not self._take("]"):
            first = self._member()
            if (
                len(first) == 1
                and first[0][0] == first[0][1]
                and self._text.startswith("-", self._at)
                and not self._text.startswith("-]", self._at)
            ):
                self._at += 1
                last = self._member()
                if len(last) == 1 and last[0][0] == last[0][1]:
                    if last[0][0] < first[0][0]:
                        self._refuse("a range that is upside down")
                    ranges.append(((first[0][0], last[0][0]),))
                    continue
                ranges += [((0x2D, 0x2D),), last]
            ranges.append(first)
        inside = union(*ranges)
        return Set(complement(inside) if negated else inside)

    def _member(self) -> Ranges:
        character = self._next()
        if character == "\\":
            return ((8, 8),) if self._take("b") else self._escape()
        return ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        """What is behind a backslash."""
        letter = self._next()
        code = ord(letter)
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else complement(ranges)
        if letter in "pP" and self._take("{"):
            name = ""
            while (character := self._next()) != "}":
                name += character
            ranges = self._property(name)
            return ranges if letter == "p" else complement(ranges)
        if letter in _CONTROLS:
            code = _CONTROLS[letter]
        elif letter.isdigit() or letter == "k":
            self._refuse("a back-reference, which grammars cannot express")
        elif letter == "c" and self._at < len(self._text):
            code = ord(self._next()) % 32
        elif letter == "x":
            code = self._hex(2, code)
        elif letter == "u":
            if self._take("{"):
                end = self._text.find("}", self._at)
                code = self._hex(end - self._at, code)
                self._at += 1
            else:
                code = self._hex(4, code)
                if 0xD800 <= code < 0xDC00 and self._take("\\u"):
                    code = 0x10000 + (code - 0xD800 << 10) + self._hex(4, 0xDC00) - 0xDC00
        elif letter in "AZzG":
            self._refuse(f"\\{letter}, which ECMAScript does not know")
        return ((code, code),)

    def _hex(self, digits: int, otherwise: int) -> int:
        text = self._text[self._at : self._at + max(digits, 0)]
        if not re.fullmatch("[0-9a-fA-F]+", text) or len(text) < digits or int(text, 16) > LAST:
            return otherwise
        self._at += digits
        return int(text, 16)

    def _property(self, name: str) -> Ranges:
        kind = name.removeprefix("gc=").removeprefix("General_Category=")
        kind = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S"}.get(kind, kind)
        ranges = _category(kind) if re.fullmatch("[A-Z][a-z]?", kind) else ()
        if not ranges:
            self._refuse(f"the Unicode property {name!r:.40}, which is not known here")
        return ranges


@cache
def _category(name: str) -> Ranges:
    codes = (
        (code, code) for code in range(LAST + 1) if unicodedata.category(chr(code)).startswith(name)
    )
    return subtract(union(tuple(codes)), ((0xD800, 0xDFFF),))
