"""Patterns of JSON schemas, which are regular expressions of ECMAScript, as `Expr`s.

An `Expr` matches whole strings. So anchors can only stand where a string may begin or end.
"""

import re
import unicodedata
from functools import cache
from typing import NoReturn

from akunu_py.errors import SchemaError
from akunu_py.json_schema.regex import (
    CONTENT,
    MAX_CODE,
    Expr,
    Ranges,
    characters,
    complement,
    concat,
    either,
    json_content,
    matches,
    repeat,
    union,
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
_MAX_REPEAT = 100_000
_MAX_ANCHORED = 1000  # alternatives with anchors

# A part of a pattern: an expression, "^", "$", or a group of alternatives that have anchors.
_Part = Expr | str | list["_Parts"]
_Parts = list[_Part]


@cache
def content_matching(pattern: str) -> Expr:
    """Return the JSON content of strings that `pattern` matches. Raises SchemaError."""
    parser = _Parser(pattern)
    pending = [(parts, False, False) for parts in parser.parse()]
    found: list[Expr] = []
    while pending:
        parts, at_start, at_end = pending.pop()
        if len(pending) + len(found) > _MAX_ANCHORED:
            parser.refuse("too many alternatives with anchors")
        if parts and isinstance(parts[0], list):
            pending += [([*each, *parts[1:]], at_start, at_end) for each in parts[0]]
        elif parts and isinstance(parts[-1], list):
            pending += [([*parts[:-1], *each], at_start, at_end) for each in parts[-1]]
        elif parts and parts[0] == "^":
            pending.append((parts[1:], True, at_end))
        elif parts and parts[-1] == "$":
            pending.append((parts[:-1], at_start, True))
        else:
            inner = [part for part in parts if isinstance(part, Expr)]
            if len(inner) < len(parts):
                parser.refuse("an anchor within the text that it matches")
            before, after = [CONTENT] * (not at_start), [CONTENT] * (not at_end)
            found.append(concat(*before, *inner, *after))
    return either(reversed(found))


@cache
def is_found(pattern: str, text: str) -> bool:
    """Return whether the pattern matches a part of `text`. Raises SchemaError."""
    return matches(content_matching(pattern), json_content(text).encode())


class _Parser:
    """A parser of ECMAScript's syntax with the extensions of annex B."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def parse(self) -> list[_Parts]:
        options = self._alternatives()
        if self._at < len(self._text):
            self.refuse("an unmatched closing bracket")
        return options

    def refuse(self, what: str) -> NoReturn:
        raise SchemaError(f"the pattern {self._text!r:.100} has {what}")

    def _accept(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _next(self) -> str:
        if self._at >= len(self._text):
            self.refuse("an unfinished group, class or escape")
        self._at += 1
        return self._text[self._at - 1]

    def _alternatives(self) -> list[_Parts]:
        options = [self._sequence()]
        while self._accept("|"):
            options.append(self._sequence())
        return options

    def _sequence(self) -> _Parts:
        parts: _Parts = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._quantified(self._atom()))
        return parts

    def _quantified(self, part: _Part) -> _Part:
        low, high = 1, None
        counted = _COUNT.match(self._text, self._at)
        if self._accept("*"):
            low = 0
        elif self._accept("?"):
            low, high = 0, 1
        elif counted:
            self._at = counted.end()
            low = int(counted[1])
            high = low if counted[2] is None else int(counted[3]) if counted[3] else None
            if max(low, high or 0) > _MAX_REPEAT or (high is not None and high < low):
                self.refuse(f"the repetition {counted[0]}")
        elif not self._accept("+"):
            return part
        self._accept("?")  # A lazy quantifier matches the same texts.
        if self._text[self._at : self._at + 1] in ("*", "+"):
            self.refuse("two quantifiers in a row")
        if isinstance(part, Expr):
            return repeat(part, low, high)
        if high != 1:
            self.refuse("an anchor in a repetition")
        return [[part], *([[]] if low == 0 else [])]

    def _atom(self) -> _Part:
        character = self._next()
        if character == "(":
            return self._group()
        if character == "[":
            return self._character_class()
        if character in "^$":
            return character
        if character == ".":
            return characters(_DOT)
        if character == "\\":
            if self._text[self._at : self._at + 1] in ("b", "B"):
                self.refuse("a word boundary, which grammars cannot express")
            return characters(self._escape())
        if character in "*+?":
            self.refuse("a quantifier without anything to repeat")
        return characters(((ord(character), ord(character)),))

    def _group(self) -> _Part:
        if any(self._accept(mark) for mark in ("?=", "?!", "?<=", "?<!")):
            ahead = self._text[self._at - 2] == "?"
            self.refuse(f"a look-{'ahead' if ahead else 'behind'}, which is not supported")
        if not self._accept("?:") and (self._accept("?<") or self._accept("?P<")):
            while self._next() != ">":
                pass
        elif self._text.startswith("?", self._at):
            self.refuse("an unknown kind of group")
        options = self._alternatives()
        if not self._accept(")"):
            self.refuse("a group that is not closed")
        plain = [[part for part in parts if isinstance(part, Expr)] for parts in options]
        if list(map(len, plain)) == list(map(len, options)):
            return either(concat(*parts) for parts in plain)
        return options

    def _character_class(self) -> Expr:
        negated = self._accept("^")
        ranges: list[Ranges] = []
        while not self._accept("]"):
            first = self._class_member()
            if (
                len(first) == 1
                and first[0][0] == first[0][1]
                and self._text.startswith("-", self._at)
                and not self._text.startswith("-]", self._at)
            ):
                self._at += 1
                last = self._class_member()
                if len(last) == 1 and last[0][0] == last[0][1]:
                    if last[0][0] < first[0][0]:
                        self.refuse("a reversed range")
                    ranges.append(((first[0][0], last[0][0]),))
                    continue
                ranges += [((0x2D, 0x2D),), last]
            ranges.append(first)
        inside = union(*ranges)
        return characters(complement(inside) if negated else inside)

    def _class_member(self) -> Ranges:
        character = self._next()
        if character == "\\":
            return ((8, 8),) if self._accept("b") else self._escape()
        return ((ord(character), ord(character)),)

    def _escape(self) -> Ranges:
        letter = self._next()
        code = ord(letter)
        if letter.lower() in _CLASSES:
            ranges = _CLASSES[letter.lower()]
            return ranges if letter.islower() else complement(ranges)
        if letter in "pP" and self._accept("{"):
            name = ""
            while (character := self._next()) != "}":
                name += character
            ranges = self._property(name)
            return ranges if letter == "p" else complement(ranges)
        if letter in _CONTROLS:
            code = _CONTROLS[letter]
        elif letter.isdigit() or letter == "k":
            self.refuse("a back-reference, which grammars cannot express")
        elif letter == "c" and self._at < len(self._text):
            code = ord(self._next()) % 32
        elif letter == "x":
            code = self._hex(2, code)
        elif letter == "u":
            if self._accept("{"):
                end = self._text.find("}", self._at)
                code = self._hex(end - self._at, code)
                self._at += 1
            else:
                code = self._hex(4, code)
                if 0xD800 <= code < 0xDC00 and self._accept("\\u"):
                    code = 0x10000 + (code - 0xD800 << 10) + self._hex(4, 0xDC00) - 0xDC00
        elif letter in "AZzG":
            self.refuse(f"\\{letter}, which ECMAScript does not have")
        return ((code, code),)

    def _hex(self, digits: int, default: int) -> int:
        """Parse a hexadecimal number; if it is invalid, consume nothing and return `default`."""
        text = self._text[self._at : self._at + max(digits, 0)]
        if not re.fullmatch("[0-9a-fA-F]+", text) or len(text) < digits or int(text, 16) > MAX_CODE:
            return default
        self._at += digits
        return int(text, 16)

    def _property(self, name: str) -> Ranges:
        kind = name.removeprefix("gc=").removeprefix("General_Category=")
        kind = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S"}.get(kind, kind)
        ranges = _category(kind) if re.fullmatch("[A-Z][a-z]?", kind) else ()
        if not ranges:
            self.refuse(f"the Unicode property {name!r:.40}, which is not supported")
        return ranges


@cache
def _category(name: str) -> Ranges:
    codes = [n for n in range(MAX_CODE + 1) if unicodedata.category(chr(n)).startswith(name)]
    return union(tuple((code, code) for code in codes))


# The formats that are enforced, as patterns. From RFC 3339 (dates and times), 5321 (e-mail),
# 1123 (hosts), 3986 (URIs) and 4122 (UUIDs).
_DATE = (
    r"(?:\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|[12]\d)))"
)
_TIME = (
    r"(?:(?:[01]\d|2[0-3]):[0-5]\d:(?:[0-5]\d|60)(?:\.\d+)?(?:[zZ]|[+-](?:[01]\d|2[0-3]):[0-5]\d))"
)
_DAYS = r"(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)"
_HOURS = r"(?:T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S))"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]+"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_OCTET = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_GROUP = r"[0-9a-fA-F]{1,4}"
_LAST_GROUPS = rf"(?:{_GROUP}:{_GROUP}|{_IPV4})"
# What may be before "::", and behind it.
_HEADS = ["", *(rf"(?:(?:{_GROUP}:){{0,{most}}}{_GROUP})?" for most in range(7))]
_TAILS = [*(rf"(?:{_GROUP}:){{{count}}}{_LAST_GROUPS}" for count in range(5, -1, -1)), _GROUP, ""]
_SHORTENED = map("::".join, zip(_HEADS, _TAILS, strict=True))
_IPV6 = "|".join([rf"(?:{_GROUP}:){{6}}{_LAST_GROUPS}", *_SHORTENED])
_PART = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"  # of a path
_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})"
_HOST = rf"(?:\[(?:{_IPV6}|v[0-9a-fA-F]+\.[a-zA-Z0-9\-._~!$&'()*+,;=:]+)\]|{_NAME}*)"
_AUTHORITY = rf"//(?:(?:{_NAME}|:)*@)?{_HOST}(?::\d*)?(?:/{_PART}*)*"
_PATH = rf"(?:/(?:{_PART}+(?:/{_PART}*)*)?|{_PART}+(?:/{_PART}*)*)"
_TAIL = rf"(?:\?(?:{_PART}|[/?])*)?(?:#(?:{_PART}|[/?])*)?"

# A relative reference may not look as if its first part were a scheme.
_FIRST = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=@]|%[0-9a-fA-F]{2})+"
_RELATIVE = rf"(?:{_AUTHORITY}|/(?:{_PART}+(?:/{_PART}*)*)?|{_FIRST}(?:/{_PART}*)*|){_TAIL}"
_URI = rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:{_AUTHORITY}|{_PATH}|){_TAIL}"


def _regex(depth: int) -> str:
    """Return a pattern of ECMAScript's patterns, with groups nested up to `depth` deep."""
    atom = r"[^\\^$.*+?()\[\]{}|]|\\[^cux]|\\c[a-zA-Z]|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|[.^$\]}]"
    atom += r"|\[\^?(?:[^\]\\]|\\.)+\]"
    if depth:
        atom += rf"|\((?:\?[:=!]|\?<[=!])?{_regex(depth - 1)}\)"
    return rf"(?:(?:{atom})(?:[*+?]\??|\{{\d+(?:,\d*)?\}}\??)?|\|)*"


FORMATS = {
    name: f"^(?:{pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": rf"P(?:{_DAYS}{_HOURS}?|{_HOURS}|\d+W)",
        "email": rf"{_ATOM}(?:\.{_ATOM})*@(?:{_LABEL}(?:\.{_LABEL})*|\[{_IPV4}\])",
        "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
        "uri": _URI,
        "uri-reference": f"{_URI}|{_RELATIVE}",
        "idn-email": r"[^\s@\x00-\x1f]+@[^\s@\x00-\x1f]+",
        "json-pointer": r"(?:/(?:[^~/]|~[01])*)*",
        "regex": _regex(3),
    }.items()
}
