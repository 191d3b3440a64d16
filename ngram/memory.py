"""What a model generated in earlier conversations, to draft from where the present has no match.

A ring of tokens, the oldest of which are overwritten, with hash chains over contexts of 1 to 3
tokens; and its form as bytes, which `akunu_py.decoding.learned` keeps in a file.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import adler32

CAPACITY_BITS = 19
MAGIC = b"akunumem"
VERSION = 1
# magic, version, log2 of the capacity, tokens ever learned; then a checksum of all the rest
_HEADER = struct.Struct("<8sIIQ")
_CHECKSUM = struct.Struct("<I")

SEPARATOR = 0xFFFFFFFF  # between two items; never proposed
MAX_CHAIN = 16  # places of a chain that are looked at, latest first
LONGEST_MATCH = 8
_ARRAYS = ("_log", "_head1", "_head2", "_head3", "_prev1", "_prev2", "_prev3")


class MemoryMatch(NamedTuple):
    """What most likely comes next. length: tokens of context that match. agreeing, opposing: places
    with that context, or a longer one, that this token follows, and another."""

    token: int
    length: int
    agreeing: int
    opposing: int


class Memory:
    """Up to 2**capacity_bits tokens, at 28 bytes each.

    Positions count all tokens ever learned, and live at position modulo capacity. Heads and
    chains may point to what was overwritten since: every place is checked against the log.
    """

    def __init__(self, capacity_bits: int = CAPACITY_BITS) -> None:
        if not 4 <= capacity_bits <= 24:
            raise ValueError(f"expected 4 to 24 capacity bits, got {capacity_bits}")
        self.capacity_bits = capacity_bits
        self.total = 0
        size = 1 << capacity_bits
        self._mask = size - 1
        zeros = bytes(4 * size)
        self._log = array("I", [SEPARATOR]) * size  # never matches
        self._head1 = array("I", zeros)
        self._head2 = array("I", zeros)
        self._head3 = array("I", zeros)
        self._prev1 = array("I", zeros)
        self._prev2 = array("I", zeros)
        self._prev3 = array("I", zeros)

    def __len__(self) -> int:
        """How many tokens are remembered."""
        return min(self.total, self._mask + 1)

    def learn(self, tokens: Sequence[int]) -> None:
        """Remembers one item, such as an answer: under a microsecond a token."""
        if self.total + len(tokens) + 1 >= SEPARATOR:  # positions are kept in 32 bits
            raise ValueError("a memory cannot learn more than 2**32 tokens; make a new one")
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

    def lookup(self, context: Sequence[int]) -> MemoryMatch | None:
        """What most likely follows `context`, whose last token at least must match."""
        found: list[tuple[int, int]] = []
        if len(context) > 2:
            slot = _hash3(context[-3], context[-2], context[-1]) & self._mask
            found = self._follow(self._head3[slot], self._prev3, 3, context)
        if not found and len(context) > 1:
            slot = _hash2(context[-2], context[-1]) & self._mask
            found = self._follow(self._head2[slot], self._prev2, 2, context)
        if not found and context:
            slot = context[-1] & self._mask
            found = self._follow(self._head1[slot], self._prev1, 1, context)
        if not found:
            return None
        votes: dict[int, int] = {}
        for token, length in found:
            votes[token] = votes.get(token, 0) + (1 << 2 * length)
        best = max(votes, key=votes.__getitem__)
        agreeing = [length for token, length in found if token == best]
        return MemoryMatch(best, max(agreeing), len(agreeing), len(found) - len(agreeing))

    def _follow(
        self, link: int, prev: array[int], least: int, context: Sequence[int]
    ) -> list[tuple[int, int]]:
        """(token, matching length) of the latest places with at least `least` tokens in common."""
        mask, log = self._mask, self._log
        reach = min(LONGEST_MATCH, len(context))
        # Places whose context is being overwritten are past use.
        oldest = max(0, self.total - mask - 1 + LONGEST_MATCH)
        newest = self.total
        found = []
        for _ in range(MAX_CHAIN):
            position = link - 1
            if not oldest <= position < newest:  # a chain runs backwards, or was overwritten
                break
            length = 0
            while length < reach and log[(position - 1 - length) & mask] == context[-1 - length]:
                length += 1
            token = log[position & mask]
            if length >= least and token != SEPARATOR:
                found.append((token, length))
            newest = position
            link = prev[position & mask]
        return found

    def dump(self) -> bytes:
        """The memory as bytes, for `load`."""
        header = _HEADER.pack(MAGIC, VERSION, self.capacity_bits, self.total)
        body = b"".join(_little(getattr(self, name)) for name in _ARRAYS)
        return header + _CHECKSUM.pack(adler32(body, adler32(header))) + body

    @classmethod
    def load(cls, data: bytes) -> Memory:
        """The memory that `dump` made `data` of. Raises ValueError when it is damaged, cut off,
        of another version, or no memory at all."""
        view = memoryview(data)
        start = _HEADER.size + _CHECKSUM.size
        if len(view) < start:
            raise ValueError("expected a memory, found too few bytes")
        magic, version, bits, total = _HEADER.unpack_from(view)
        if magic != MAGIC:
            raise ValueError("expected a memory, found something else")
        if version != VERSION:
            raise ValueError(f"expected a memory of version {VERSION}, found {version}")
        body = view[start:]
        if not 4 <= bits <= 24 or len(body) != len(_ARRAYS) * 4 << bits or total >= SEPARATOR:
            raise ValueError("expected a whole memory, found one cut off or altered")
        (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
        if adler32(body, adler32(view[: _HEADER.size])) != checksum:
            raise ValueError("expected a whole memory, found an altered one")
        memory = cls.__new__(cls)
        memory.capacity_bits = bits
        memory.total = total
        memory._mask = (1 << bits) - 1
        size = 4 << bits
        for i, name in enumerate(_ARRAYS):
            part = array("I")
            part.frombytes(body[i * size : (i + 1) * size])
            if sys.byteorder == "big":
                part.byteswap()
            setattr(memory, name, part)
        return memory


def _hash2(first: int, second: int) -> int:
    return (first * 0x9E3779B1 + second) * 0x85EBCA6B >> 12


def _hash3(first: int, second: int, third: int) -> int:
    return ((first * 0x9E3779B1 + second) * 0xC2B2AE35 + third) * 0x85EBCA6B >> 12


def _little(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = array("I", values)
        values.byteswap()
    return values.tobytes()
