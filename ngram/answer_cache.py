"""Answer cache: a ring of earlier output tokens with hash chains, to draft from."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import adler32

CAPACITY_BITS = 19
MAGIC = b"akunumem"
VERSION = 1
# magic, version, log2 of the capacity, tokens ever learned; then a checksum of the rest
_HEADER = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<I")

SEPARATOR = 0xFFFFFFFF  # between two items; never proposed
MAX_CHAIN = 16  # places of a chain to examine, latest first
LONGEST_MATCH = 8
_ARRAYS = ("_log", "_head1", "_head2", "_head3", "_prev1", "_prev2", "_prev3")


class AnswerMatch(NamedTuple):
    """The most likely next token after a context."""

    token: int
    length: int  # matching tokens of context
    agreeing: int  # places with at least this context where this token follows
    opposing: int  # places where another token follows


class AnswerCache:
    """Up to 2**capacity_bits tokens, at 28 bytes each.

    Positions count all tokens ever learned and live at position modulo capacity. Chains may point
    to overwritten places, so each place is checked against the log.
    """

    def __init__(self, capacity_bits: int = CAPACITY_BITS) -> None:
        if not 4 <= capacity_bits <= 24:
            raise ValueError(f"expected 4 to 24 capacity bits, got {capacity_bits}")
        self.capacity_bits = capacity_bits
        self.total = 0
        size = 1 << capacity_bits
        self._mask = size - 1
        self._log = array("I", [SEPARATOR]) * size  # never matches
        self._head1, self._head2, self._head3, self._prev1, self._prev2, self._prev3 = (
            array("I", bytes(4 * size)) for _ in range(6)
        )

    def learn(self, tokens: Sequence[int]) -> None:
        """Add one item, such as an answer: under a microsecond per token."""
        if self.total + len(tokens) + 1 >= SEPARATOR:  # positions are kept in 32 bits
            raise ValueError("the answer cache is full (2**32 tokens); create a new one")
        mask, log = self._mask, self._log
        first = second = third = SEPARATOR  # the context, oldest first
        for token in [*tokens, SEPARATOR]:
            place = self.total & mask
            log[place] = token
            self.total += 1  # from here on a link to the place: 0 means none
            if third != SEPARATOR:
                slot = third & mask
                self._prev1[place] = self._head1[slot]
                self._head1[slot] = self.total
            if second != SEPARATOR:
                slot = _hash2(second, third) & mask
                self._prev2[place] = self._head2[slot]
                self._head2[slot] = self.total
            if first != SEPARATOR:
                slot = _hash3(first, second, third) & mask
                self._prev3[place] = self._head3[slot]
                self._head3[slot] = self.total
            first, second, third = second, third, token

    def lookup(self, context: Sequence[int]) -> AnswerMatch | None:
        """Return the likely successor of `context`, at least whose last token must match."""
        matches: list[tuple[int, int]] = []
        chains = (
            (3, _hash3, self._head3, self._prev3),
            (2, _hash2, self._head2, self._prev2),
            (1, int, self._head1, self._prev1),
        )
        for length, key, head, prev in chains:
            if not matches and len(context) >= length:
                slot = key(*context[-length:]) & self._mask
                matches = self._follow(head[slot], prev, length, context)
        if not matches:
            return None
        votes: dict[int, int] = {}
        for token, length in matches:
            votes[token] = votes.get(token, 0) + (1 << 2 * length)
        best = max(votes, key=votes.__getitem__)
        agreeing = [length for token, length in matches if token == best]
        return AnswerMatch(best, max(agreeing), len(agreeing), len(matches) - len(agreeing))

    def _follow(
        self, link: int, prev: array[int], min_length: int, context: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return (token, matching length) of recent places with at least `min_length` tokens."""
        mask, log = self._mask, self._log
        longest = min(LONGEST_MATCH, len(context))
        # The context of earlier places is partly overwritten.
        oldest = max(0, self.total - mask - 1 + LONGEST_MATCH)
        newest = self.total
        matches = []
        for _ in range(MAX_CHAIN):
            position = link - 1
            if not oldest <= position < newest:  # a chain runs backwards, or was overwritten
                break
            length = 0
            while length < longest and log[(position - 1 - length) & mask] == context[-1 - length]:
                length += 1
            token = log[position & mask]
            if length >= min_length and token != SEPARATOR:
                matches.append((token, length))
            newest = position
            link = prev[position & mask]
        return matches

    def dump(self) -> bytes:
        """Return the cache as bytes, for `load`."""
        header = _HEADER.pack(MAGIC, VERSION, self.capacity_bits, self.total)
        body = b"".join(getattr(self, name).tobytes() for name in _ARRAYS)
        return header + _CHECKSUM.pack(adler32(body, adler32(header))) + body

    @classmethod
    def load(cls, data: bytes) -> AnswerCache:
        """Restore the cache from `dump`. Raises ValueError if `data` is invalid."""
        view = memoryview(data)
        start = _HEADER.size + _CHECKSUM.size
        if len(view) < start:
            raise ValueError(f"expected an answer cache, found only {len(view)} bytes")
        magic, version, bits, total = _HEADER.unpack_from(view)
        body = view[start:]
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"expected an answer cache of version {VERSION}")
        if not 4 <= bits <= 24 or len(body) != len(_ARRAYS) * 4 << bits or total >= SEPARATOR:
            raise ValueError("the answer cache is truncated or altered")
        (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
        if adler32(body, adler32(view[: _HEADER.size])) != checksum:
            raise ValueError("the answer cache is altered: wrong checksum")
        cache = cls(bits)
        cache.total = total
        size = 4 << bits
        for i, name in enumerate(_ARRAYS):
            setattr(cache, name, array("I", bytes(body[i * size : (i + 1) * size])))
        return cache


def _hash2(first: int, second: int) -> int:
    return (first * 0x9E3779B1 + second) * 0x85EBCA6B >> 12


def _hash3(first: int, second: int, third: int) -> int:
    return ((first * 0x9E3779B1 + second) * 0xC2B2AE35 + third) * 0x85EBCA6B >> 12
