"""Regular expressions as llguidance's grammars have them, with intersection and complement.

An `Expr` says which texts a terminal matches. Strings are matched as JSON writes them, so each
character has one spelling here: itself, or the shortest escape where JSON wants one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends in; sorted, disjoint

LAST = 0x10FFFF
SHORT_ESCAPES = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_FUEL = 10_000_000  # nodes of expressions; 14,000 or more are visited in a millisecond


@dataclass(frozen=True, slots=True)
class Expr:
    """text: a terminal's definition, one atom of it. plain: text is a regular expression without
    its slashes. nullable: it matches the empty text. inhabited: it is known to match some text."""

    text: str
    plain: bool = True
    nullable: bool = False
    inhabited: bool = True

    @property
    def atom(self) -> str:
        return f"/{self.text}/" if self.plain else self.text


EPSILON = Expr("(?:)", nullable=True)


def concat(*parts: Expr) -> Expr:
    parts = tuple(part for part in parts if part != EPSILON)
    if len(parts) < 2:
        return parts[0] if parts else EPSILON
    nullable = all(part.nullable for part in parts)
    inhabited = all(part.inhabited for part in parts)
    if all(part.plain for part in parts):
        return Expr("".join(part.text for part in parts), True, nullable, inhabited)
    return Expr(f"({' '.join(part.atom for part in parts)})", False, nullable, inhabited)


def either(parts: Iterable[Expr]) -> Expr | None:
    """None for no part: it matches nothing."""
    parts = list(dict.fromkeys(parts))
    if len(parts) < 2:
        return parts[0] if parts else None
    nullable = any(part.nullable for part in parts)
    inhabited = any(part.inhabited for part in parts)
    if all(part.plain for part in parts):
        return Expr(f"(?:{'|'.join(part.text for part in parts)})", True, nullable, inhabited)
    return Expr(f"({' | '.join(part.atom for part in parts)})", False, nullable, inhabited)


def both(*parts: Expr) -> Expr:
    parts = tuple(dict.fromkeys(parts))
    if len(parts) == 1:
        return parts[0]
    text = " & ".join(part.atom for part in parts)
    return Expr(f"({text})", False, all(part.nullable for part in parts), False)


def without(expr: Expr, other: Expr, *, inhabited: bool = False) -> Expr:
    """What `expr` matches and `other` does not. inhabited: there is known to be something left."""
    text = f"({expr.atom} & ~{other.atom})"
    return Expr(text, False, expr.nullable and not other.nullable, inhabited)


def repeat(expr: Expr, low: int, high: int | None) -> Expr:
    """high: None for any number."""
    if high == 0:
        return EPSILON
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
        (low, high), f"{{{low},{'' if high is None else high}}}"
    )
    nullable = low == 0 or expr.nullable
    if expr.plain:
        return Expr(f"(?:{expr.text}){times}", True, nullable, low == 0 or expr.inhabited)
    return Expr(f"({expr.atom}{times})", False, nullable, low == 0 or expr.inhabited)


def _class_text(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:x}}}"


def _class(ranges: Iterable[tuple[int, int]]) -> str:
    return "".join(
        _class_text(low) if low == high else f"{_class_text(low)}-{_class_text(high)}"
        for low, high in ranges
    )


def raw_text(text: str) -> Expr:
    """Exactly `text`, as it is."""
    return Expr("".join(map(_class_text, map(ord, text))) or "(?:)", nullable=not text)


def characters(ranges: Ranges) -> Expr | None:
    """One character of a string, as JSON writes it; None where there is none."""
    raw = [*subtract(ranges, ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF)))]
    options = [f"[{_class(raw)}]"] if raw else []
    letters = "".join(
        _class_text(ord(letter)) for code, letter in SHORT_ESCAPES.items() if contains(ranges, code)
    )
    if letters:
        options.append(f"\\x{{5c}}[{letters}]")
    controls = [code for code in range(32) if code not in SHORT_ESCAPES and contains(ranges, code)]
    if controls:
        options.append(f"\\x{{5c}}u00(?:{'|'.join(f'{code:02x}' for code in controls)})")
    if not options:
        return None
    return Expr(options[0] if len(options) == 1 else f"(?:{'|'.join(options)})")


def string_content(text: str) -> Expr:
    """Exactly `text`, as JSON writes it between the quotes."""
    return raw_text(written_content(text))


def written_content(text: str) -> str:
    """`text` as JSON writes it between the quotes."""
    written = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(f"\\u{ord(c):04x}" if "\ud800" <= c <= "\udfff" else c for c in written)


def quoted(content: Expr) -> Expr:
    return concat(_QUOTE, content, _QUOTE)


def contains(ranges: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


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
    return (*result, (start, LAST)) if start <= LAST else tuple(result)


def subtract(ranges: Ranges, others: Ranges) -> Ranges:
    return complement(union(complement(ranges), others))


_QUOTE = Expr("\\x{22}")
_any = characters(((0, LAST),))
assert _any is not None
CHARACTER = _any
CONTENT = repeat(CHARACTER, 0, None)  # of any string, each character spelled in one way
# Any string, spelled in any way.
STRING = Expr(
    r"\x{22}(?:[^\x{22}\x{5c}\x{0}-\x{1f}]"
    r"|\x{5c}(?:[\x{22}\x{5c}\x{2f}bfnrt]|u[0-9a-fA-F]{4}))*\x{22}"
)


class _Bytes:
    """A tokenizer of single bytes, to ask llguidance about expressions."""

    eos_token_id = 256
    bos_token_id = None
    tokens: Sequence[bytes] = (*(bytes([value]) for value in range(256)), b"")
    special_token_ids = (256,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def byte_tables() -> LLTokenizer:
    """Each byte is a token."""
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])


def limits() -> LLParserLimits:
    """Tokens that are consumed without a mask between them share one step's fuel. Errors are
    short: the states of a failed parser say more of us than of the grammar."""
    return LLParserLimits(verbose_errors=False, initial_lexer_fuel=_FUEL, step_lexer_fuel=_FUEL)


@cache
def _matcher(expr: Expr) -> LLMatcher:
    grammar = LLMatcher.grammar_from_lark(f"start: T\nT: {expr.atom}\n")
    return LLMatcher(byte_tables(), grammar, log_level=0, limits=limits())


def matches(expr: Expr, text: bytes) -> bool:
    """Whether it matches `text`. Raises ValueError where llguidance cannot say."""
    if not text:
        return expr.nullable
    matcher = _matcher(expr)
    if matcher.is_error():
        return not _says_empty(matcher)
    taken = matcher.try_consume_tokens(list(text))
    found = taken == len(text) and matcher.is_accepting()
    matcher.rollback(taken)
    return found


def _says_empty(matcher: LLMatcher) -> bool:
    error = matcher.get_error()
    if "NoExtension" not in error:
        raise ValueError(error)
    return True


@cache
def is_empty(expr: Expr) -> bool:
    """Whether it matches nothing. Raises ValueError where llguidance cannot say."""
    if expr.inhabited:
        return False
    matcher = _matcher(expr)
    if matcher.is_error():
        return _says_empty(matcher)
    if matcher.is_accepting():
        return False
    mask = matcher.compute_bitmask()
    return _says_empty(matcher) if matcher.is_error() else not any(mask)
