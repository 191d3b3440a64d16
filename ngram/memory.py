"""What a model said in earlier conversations: evidence for when the present one has none.

Owns a ring of tokens with hash chains over contexts of 2 and 3 tokens, and their form as bytes.
Bounded: the oldest tokens are forgotten. Refuses files: who keeps the bytes where, and what to do
with damaged ones, is decided elsewhere.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple
from zlib import adler32

CAPACITY_BITS = 20
MAGIC = b"akunumem"
VERSION = 1
# magic, version, log2 of the capacity, tokens ever learned, checksum of the rest
_HEADER = struct.Struct("<8sIIQI")

BREAK = 0xFFFFFFFF  # between two items; never proposed
WALK = 8  # places of a chain that are looked at, latest first
LONGEST_MATCH = 8
_ARRAYS = ("_log", "_head2", "_head3", "_prev2", "_prev3")


class Recalled(NamedTuple):
    """The memory's best guess. length: tokens of context that match. agreeing, opposing: places
    with that context, or a longer one, that go on with this token and with another."""

    token: int
    length: int
    agreeing: int
    opposing: int


class Memory:
    """Up to 2**capacity_bits tokens said earlier, at 20 bytes each.

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
        self._log = array("I", zeros)
        self._head2 = array("I", zeros)
        self._head3 = array("I", zeros)
        self._prev2 = array("I", zeros)
        self._prev3 = array("I", zeros)

    def __len__(self) -> int:
        """How many tokens are remembered."""
        return min(self.total, self._mask + 1)

    def learn(self, tokens: Sequence[int]) -> None:
        """Remembers one item: an answer, or another text of the model's own."""
        if len(tokens) < 3:
            return
        mask, log = self._mask, self._log
        head2, head3, prev2, prev3 = self._head2, self._head3, self._prev2, self._prev3
        position = self.total
        if position + len(tokens) >= BREAK:
            self.__init__(self.capacity_bits)  # type: ignore[misc]
            position = 0
        third = second = BREAK
        for token in [*tokens, BREAK]:
            place = position & mask
            log[place] = token
            if third != BREAK:
                slot = _hash3(third2 := third, second, mask) if False else 0
            position += 1
        self.total = position

