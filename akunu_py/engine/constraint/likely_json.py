"""Likely JSON: draft tokens where a grammar leaves the answer open.

Models mostly write the schema's properties in its order and no others, with uniform whitespace. So
a narrower grammar without whitespace proposes text, which is then spaced like the answer. At the
possible end of a string or number, the text behind it is proposed as well.
"""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from llguidance import LLMatcher

_SPACE = b" \t\r\n"
_OPEN, _CLOSE = b"{[", b"}]"
_DIGITS, _STRUCTURE = b"0123456789", b"{}[],:"
_MAX_VALUE_TOKENS = 8  # tokens of a value
# Choices: how many, tokens allowed at each place, and steps of the search.
_MAX_CHOICES, _MAX_ALLOWED, _MAX_STEPS = 8, 64, 48
_FIRST_TOKEN = 24  # bytes of a text that decide its first token
_VALUE_ENDS = b'",}]>\n'
_ANY_BITS = re.compile(rb"[^\0]")


@dataclass(frozen=True, slots=True)
class JsonState:
    """The state of a JSON text at its end."""

    containers: bytes = b""  # opening brackets of the open containers
    in_string: bool = False
    escaped: bool = False
    before: bytes = b""  # the last byte outside strings except whitespace
    gap: bytes = b""  # the whitespace behind `before`
    gaps: Mapping[bytes, bytes] = field(default_factory=dict)  # last whitespace, see `_gap_name`
    written: int = 0  # bytes of the current string, number or word
    keys: tuple[frozenset[bytes], ...] = ()  # so far, of each open container
    key: bytes | None = None  # the beginning of an open key
    repeated: bool = False  # an object has the same key twice


@dataclass(eq=False)
class LikelyText:
    """Draft tokens from grammars narrower than the answer's, until the answer violates them all."""

    grammars: Sequence[Callable[[], Future[LLMatcher]]]  # start to compile, the narrowest first
    decode: Callable[[int], bytes]
    encode: Callable[[bytes], list[int]]
    _matcher: LLMatcher | None = field(default=None, init=False)
    _tokens: list[int] = field(default_factory=list, init=False)
    _consumed: list[int] = field(default_factory=list, init=False)  # by the matcher, per token
    _mismatch_at: int | None = field(default=None, init=False)  # the first token that does not fit

    def forced(self, tokens: Sequence[int], accepted: int) -> list[int]:
        """Return the likely next tokens of the answer, none where the grammar has a choice.

        tokens: answer and draft, which begin with the last call's tokens unless `rewind` undid
        them. accepted: the number of answer tokens.
        """
        for token in tokens[len(self._tokens) :]:
            self._add(token)
        while self._matcher is None or (
            self._mismatch_at is not None and self._mismatch_at < accepted
        ):
            if not self.grammars or not (future := self.grammars[0]()).done():
                return []  # the thread of the model waits for no other thread
            self.grammars = self.grammars[1:]
            self._matcher = None
            self.rewind(0)
            self._matcher = None if future.exception() else future.result().deep_copy()
            for token in tokens:
                self._add(token)
        if self._mismatch_at is not None or self._matcher.is_stopped():
            return []
        return self._encode_forced(tokens, self._matcher.compute_ff_bytes())

    def ending(self) -> tuple[list[int], int]:
        """Return the likely end of a value, and how many of its tokens are written.

        Call if `forced` is empty.
        """
        return [], 0

    def choices(self) -> list[int]:
        """Return the first tokens of texts that may follow, if few. Call if `forced` is empty."""
        if self._matcher is None or self._mismatch_at is not None:
            return []
        return self._choices_after(self._matcher)

    def _choices_after(self, matcher: LLMatcher) -> list[int]:
        return choices_after(matcher, self.decode, self.encode, self.encode)

    def _encode_forced(self, tokens: Sequence[int], text: bytes) -> list[int]:
        return self.encode(text) if text else []

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        undone = sum(self._consumed[length:])
        if undone and self._matcher is not None:
            self._matcher.rollback(undone)
        del self._tokens[length:], self._consumed[length:]
        if self._mismatch_at is not None and self._mismatch_at >= length:
            self._mismatch_at = None

    def _add(self, token: int) -> None:
        self._consume(token, [token])

    def _consume(self, token: int, written: list[int]) -> None:
        """Add a token. written: `token` in the matcher's own tokens, such as bytes."""
        consumed = 0
        if self._matcher is not None and self._mismatch_at is None and written:
            consumed = self._matcher.try_consume_tokens(written)
            if consumed < len(written):
                self._mismatch_at = len(self._tokens)
        self._tokens.append(token)
        self._consumed.append(consumed)


@dataclass(eq=False)
class LikelyJson(LikelyText):
    """Draft tokens of JSON, from byte matchers without whitespace."""

    compact: bool  # the answer has no whitespace
    _states: list[JsonState] = field(default_factory=lambda: [JsonState()], init=False)  # per token

    def rewind(self, length: int) -> None:
        super().rewind(length)
        del self._states[length + 1 :]

    def ending(self) -> tuple[list[int], int]:
        state = self._states[-1]
        if self._matcher is None or self._mismatch_at is not None or not state.written or state.gap:
            return [], 0
        matcher = self._matcher.deep_copy()
        if state.in_string:
            text = b"" if state.escaped else _force_first(matcher, b'"')
            if text == b'"':
                text += _force_first(matcher, b",}]")
        else:
            text = _force_first(matcher, b",}]") if state.before in _DIGITS else b""
        return self.encode(self._spaced(text)) if text else [], self._tokens_written()

    def _choices_after(self, matcher: LLMatcher) -> list[int]:
        return choices_after(matcher, _byte, list, lambda text: self.encode(self._spaced(text)))

    def _tokens_written(self) -> int:
        """Return the number of tokens of the current value, up to _MAX_VALUE_TOKENS."""
        count = 0
        for before, after in itertools.pairwise(self._states[: -2 - _MAX_VALUE_TOKENS : -1]):
            count += 1
            if not 0 < after.written < before.written:
                break
        return count

    def _add(self, token: int) -> None:
        state, written = advanced(self._states[-1], self.decode(token))
        self._consume(token, list(written))
        self._states.append(state)

    def _spaced(self, text: bytes) -> bytes:
        if self.compact:
            return text
        state = self._states[-1]
        result = b""
        for at in range(len(text)):
            byte = text[at : at + 1]
            if not state.in_string:
                wanted = _expected_gap(state, byte)
                if wanted.startswith(state.gap):
                    added = wanted[len(state.gap) :]
                    result += added
                    state, _ = advanced(state, added)
            result += byte
            state, _ = advanced(state, byte)
        if result and not state.in_string and state.before in (b",", b":"):
            result += _expected_gap(state, b'"')
        # A space and the text behind it become one token.
        return result.removesuffix(b" ") if text else result

    def _encode_forced(self, tokens: Sequence[int], text: bytes) -> list[int]:
        """Return the tokens of the forced `text`, with the expected whitespace.

        An answer that begins with a bare bracket is probably indented, if bracket and text have a
        common token.
        """
        text, state = self._spaced(text), self._states[-1]
        begins = bool(text) and len(tokens) == 1 and state.before in (b"{", b"[")
        if begins and not (state.gap or self.compact):
            whole = self.encode(self.decode(tokens[0]) + text)
            if whole[:1] != list(tokens):
                gaps = {**state.gaps, state.before: b"\n  "}
                self._states[-1] = replace(state, gaps=gaps)
                assert self._matcher is not None
                text = self._spaced(self._matcher.compute_ff_bytes())
        return self.encode(text) if text else []


def choices_after(
    matcher: LLMatcher,
    decode: Callable[[int], bytes],
    encode: Callable[[bytes], list[int]],
    tokenize: Callable[[bytes], list[int]],
) -> list[int]:
    """Return the first tokens of the texts that a grammar allows next, if these are few.

    A text ends with its value. decode, encode: tokens of the matcher. tokenize: to model tokens.
    """
    found = list[bytes]()
    waiting = [(matcher.deep_copy(), b"")]
    for _ in range(_MAX_STEPS):
        if not waiting:
            texts = [tokenize(text[:_FIRST_TOKEN]) for text in found if len(found) > 1]
            return [tokens[0] for tokens in texts if tokens]
        at, text = waiting.pop()
        ended = at.is_stopped() or any(byte in text for byte in _VALUE_ENDS)
        tokens = [] if ended else _few_tokens(at, decode)
        if not tokens and not text:
            return []
        if not tokens:
            found.append(text)
        for token in tokens:
            after = at.deep_copy()
            after.consume_token(token)
            forced = after.compute_ff_bytes()
            after.try_consume_tokens(encode(forced))
            waiting.append((after, text + decode(token) + forced))
    return []


def _few_tokens(matcher: LLMatcher, decode: Callable[[int], bytes]) -> list[int]:
    """Return the tokens that `matcher` allows, except beginnings of others; [] if too many."""
    bits = matcher.compute_bitmask()
    if int.from_bytes(bits, "little").bit_count() > _MAX_ALLOWED:
        return []
    places = [each.start() for each in _ANY_BITS.finditer(bits)]
    tokens = [8 * at + bit for at in places for bit in range(8) if bits[at] >> bit & 1]
    texts = {decode(token): token for token in tokens}
    ordered = sorted(texts)
    longest = [
        texts[text]
        for text, after in itertools.zip_longest(ordered, ordered[1:], fillvalue=b"")
        if text and not after.startswith(text)
    ]
    return longest if len(longest) <= _MAX_CHOICES else []


def _byte(token: int) -> bytes:
    return bytes([token]) if token < 256 else b""


def _force_first(matcher: LLMatcher, options: bytes) -> bytes:
    """Return the first allowed byte of `options`, with the text forced after this byte."""
    for byte in options:
        if matcher.try_consume_tokens([byte]):
            return bytes([byte]) + matcher.compute_ff_bytes()
    return b""


def advanced(state: JsonState, text: bytes) -> tuple[JsonState, bytes]:
    """Return the state after `text`, and `text` without whitespace between values."""
    containers, in_string, escaped = state.containers, state.in_string, state.escaped
    before, gap, gaps, length = state.before, state.gap, state.gaps, state.written
    keys, key, repeated = state.keys, state.key, state.repeated
    written = bytearray()
    for at in range(len(text)):
        byte = text[at : at + 1]
        if in_string:
            in_string = escaped or byte != b'"'
            escaped = not escaped and byte == b"\\"
            written += byte
            length = length + 1 if in_string else 0
            if key is not None and in_string:
                key += byte
            elif key is not None:
                repeated = repeated or key in keys[-1]
                keys, key = (*keys[:-1], keys[-1] | {key}), None
            continue
        if byte in _SPACE:
            gap += byte
            length = 0
            continue
        gap_name = _gap_name(containers, before, byte)
        if gap_name:
            depth = len(containers) - (byte in _CLOSE)
            gaps = {**gaps, gap_name: _per_level(gap, depth)}
        if byte in _OPEN:
            containers, keys = containers + byte, (*keys, frozenset())
        elif byte in _CLOSE:
            containers, keys = containers[:-1], keys[:-1]
        elif byte == b'"' and containers[-1:] == b"{" and before in b"{,":
            key = b""
        in_string, before, gap = byte == b'"', byte, b""
        written += byte
        length = 0 if in_string or byte in _STRUCTURE else length + 1
    return JsonState(
        containers, in_string, escaped, before, gap, gaps, length, keys, key, repeated
    ), bytes(written)


def _gap_name(containers: bytes, before: bytes, after: bytes) -> bytes:
    """Return the gap's name: bracket, colon, or comma with container; b"" if always empty."""
    if not before or (before in _OPEN and after in _CLOSE):
        return b""
    if after in _CLOSE or before in _OPEN or before == b":":
        return after if after in _CLOSE else before
    return b"," + containers[-1:] if before == b"," else b""


def _per_level(gap: bytes, depth: int) -> bytes:
    """Reduce whitespace with a newline to the newline and one level of indentation."""
    if b"\n" not in gap:
        return gap
    indent = gap[gap.rindex(b"\n") + 1 :]
    return b"\n" + indent[: len(indent) // depth] if depth else b"\n"


def _expected_gap(state: JsonState, after: bytes) -> bytes:
    gap_name = _gap_name(state.containers, state.before, after)
    if not gap_name:
        return state.gap if state.before else b""
    depth = len(state.containers) - (after in _CLOSE)
    gap = _gap_like(state.gaps, gap_name)
    return gap[:1] + gap[1:] * depth if gap[:1] == b"\n" else gap


def _gap_like(gaps: Mapping[bytes, bytes], gap_name: bytes) -> bytes:
    """Return the last gap called `gap_name`, else one in the style of the other gaps."""
    if gap_name in gaps:
        return gaps[gap_name]
    if gap_name == b":":
        return b" "
    if gap_name in _CLOSE:
        opened = _OPEN[_CLOSE.index(gap_name) :][:1]
        closed = _gap_like(gaps, opened)
        return closed if closed[:1] == b"\n" else b""
    if gap_name[:1] == b",":
        opened = _gap_like(gaps, gap_name[1:])
        return opened if opened[:1] == b"\n" else b" "
    other = gaps.get(b"{" if gap_name == b"[" else b"[", b"")
    return other if other[:1] == b"\n" else b""
