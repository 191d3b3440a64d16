"""Regular expressions in the syntax of llguidance, with intersection and complement.

Strings are matched as JSON writes them. So a character has one spelling here: itself, or the
shortest escape where JSON needs one.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

Ranges = tuple[tuple[int, int], ...]  # inclusive ranges of code points, sorted and disjoint

MAX_CODE = 0x10FFFF
SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_FUEL = 10_000_000  # nodes of expressions; 14,000 or more are visited in a millisecond


@dataclass(frozen=True, slots=True)
class Expr:
    """The texts that a terminal matches."""

    text: str  # the definition, one atom of it
    plain: bool = True  # `text` is a regular expression without its slashes
    inhabited: bool = True  # it is known to match some text

    @property
    def atom(self) -> str:
        return f"/{self.text}/" if self.plain else self.text


EPSILON = Expr("(?:)")
NOTHING = Expr("[a&&b]", inhabited=False)  # a class without characters


def concat(*parts: Expr) -> Expr:
    parts = tuple(part for part in parts if part != EPSILON)
    if NOTHING in parts:
        return NOTHING
    if len(parts) < 2:
        return parts[0] if parts else EPSILON
    inhabited = all(part.inhabited for part in parts)
    if all(part.plain for part in parts):
        return Expr("".join(part.text for part in parts), True, inhabited)
    return Expr(_atoms(" ", parts), False, inhabited)


def either(parts: Iterable[Expr]) -> Expr:
    parts = [part for part in dict.fromkeys(parts) if part != NOTHING]
    if len(parts) < 2:
        return parts[0] if parts else NOTHING
    inhabited = any(part.inhabited for part in parts)
    if all(part.plain for part in parts):
        return Expr(f"(?:{'|'.join(part.text for part in parts)})", True, inhabited)
    return Expr(_atoms(" | ", parts), False, inhabited)


def both(*parts: Expr) -> Expr:
    parts = tuple(dict.fromkeys(parts))
    if NOTHING in parts:
        return NOTHING
    if len(parts) == 1:
        return parts[0]
    return Expr(_atoms(" & ", parts), plain=False, inhabited=False)


def _atoms(separator: str, parts: Iterable[Expr]) -> str:
    return f"({separator.join(part.atom for part in parts)})"


def without(expr: Expr, other: Expr, *, inhabited: bool = False) -> Expr:
    """Return an expression for texts of `expr`, not of `other`. inhabited: such texts exist."""
    if NOTHING in (expr, other):
        return expr
    return Expr(f"({expr.atom} & ~{other.atom})", False, inhabited)


def repeat(expr: Expr, low: int, high: int | None) -> Expr:
    """Return `expr` from `low` to `high` times, None for any number."""
    if high == 0 or (expr == NOTHING and low == 0):
        return EPSILON
    if expr == NOTHING:
        return NOTHING
    counts = f"{{{low},{'' if high is None else high}}}"
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high), counts)
    text = f"(?:{expr.text}){times}" if expr.plain else f"({expr.atom}{times})"
    return Expr(text, expr.plain, low == 0 or expr.inhabited)


def _class_char(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def raw_text(text: str) -> Expr:
    """Return the expression that matches `text` as it is."""
    return Expr("".join(map(_class_char, map(ord, text)))) if text else EPSILON


def characters(ranges: Ranges) -> Expr:
    """Return one character of a string, as JSON writes it."""
    escapes_and_surrogates = (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)
    raw = complement(union(complement(ranges), escapes_and_surrogates))
    members = [
        _class_char(low) if low == high else f"{_class_char(low)}-{_class_char(high)}"
        for low, high in raw
    ]
    options = [f"[{''.join(members)}]"] if members else []
    escaped = {code for low, high in ranges for code in range(low, min(high, 0x5C) + 1)}
    letters = [letter for code, letter in SHORT_ESCAPES.items() if code in escaped]
    if letters:
        options.append(f"\\x{{5c}}[{''.join(_class_char(ord(letter)) for letter in letters)}]")
    controls = [f"{code:02x}" for code in range(32) if code in escaped - SHORT_ESCAPES.keys()]
    if controls:
        options.append(f"\\x{{5c}}u00(?:{'|'.join(controls)})")
    return either(map(Expr, options))


def string_content(text: str) -> Expr:
    return raw_text(json_content(text))


def json_content(text: str) -> str:
    """Return `text` as JSON writes it between the quotes."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in written)


def quoted(content: Expr) -> Expr:
    return concat(_QUOTE, content, _QUOTE)


def union(*sets: Ranges) -> Ranges:
    result: list[tuple[int, int]] = []
    for low, high in sorted(each for ranges in sets for each in ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return tuple(result)


def complement(ranges: Ranges) -> Ranges:
    result, start = [], 0
    for low, high in union(ranges):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    return (*result, (start, MAX_CODE)) if start <= MAX_CODE else tuple(result)


_QUOTE = Expr("\\x{22}")
CHARACTER = characters(((0, MAX_CODE),))
CONTENT = repeat(CHARACTER, 0, None)  # of any string, each character spelled in one way
# Any string, spelled in any way.
STRING = Expr(
    r"\x{22}(?:[^\x{22}\x{5c}\x{0}-\x{1f}]"
    r"|\x{5c}(?:[\x{22}\x{5c}\x{2f}bfnrt]|u[0-9a-fA-F]{4}))*\x{22}"
)


@cache
def byte_tables() -> LLTokenizer:
    """Return the tables of a tokenizer in which each byte is a token."""
    return LLTokenizer("byte", slices=[])


def limits() -> LLParserLimits:
    """Return the limits of llguidance: enough fuel for a whole draft, and short error messages."""
    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL)


@cache
def _matcher(expr: Expr) -> LLMatcher:
    grammar = LLMatcher.grammar_from_lark(f"start: T\nT: {expr.atom}\n")
    return LLMatcher(byte_tables(), grammar, log_level=0, limits=limits())


def matches(expr: Expr, text: bytes) -> bool:
    """Return whether `expr` matches `text`. Raises ValueError at the limits of llguidance."""
    matcher = _matcher(expr)
    if _is_proven_empty(matcher):
        return False
    taken = matcher.try_consume_tokens(list(text))
    found = taken == len(text) and matcher.is_accepting()
    matcher.rollback(taken)
    return found


def _is_proven_empty(matcher: LLMatcher) -> bool:
    """Return whether the expression is found to be empty. Raises ValueError for other errors."""
    if matcher.is_error() and "NoExtension" not in matcher.get_error():
        raise ValueError(matcher.get_error())
    return bool(matcher.is_error())


@cache
def is_empty(expr: Expr) -> bool:
    """Return whether `expr` matches nothing. Raises ValueError at the limits of llguidance."""
    if expr.inhabited or expr == NOTHING:
        return expr == NOTHING
    matcher = _matcher(expr)
    if _is_proven_empty(matcher):
        return True
    if matcher.is_accepting():
        return False
    mask = matcher.compute_bitmask()
    return _is_proven_empty(matcher) or not any(mask)
