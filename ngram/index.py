"""Where did the end of the timeline occur before, and how far back does it agree?

Owns the tokens said so far and, for each, the previous place with the same last 1, 2 and 4
tokens (hash chains as in LZ77 compressors), plus the latest place with the same last 8. Refuses
to choose: it returns every source it finds, ranking them is the guesser's.
"""

from __future__ import annotations

from collections.abc import Sequence

Source = tuple[int, int]
"""(position of the token that would come next, how many tokens before it match)."""

LONGEST_MATCH = 32
# How many places of a chain are looked at, latest first.
WALK_1, WALK_2, WALK_4 = 16, 24, 24
_SHIFT = 20  # token ids are below 2**20; larger ones would only cost a wasted look


class SuffixIndex:
    """All tokens of a timeline, indexed by what precedes each.

    Source: the hash chains of LZ77 (Ziv and Lempel 1977, as in RFC 1951 section 4), one for each
    of the context lengths 1, 2 and 4. A position stands for the context that ends before it.

    Tentative tokens may be appended to `tokens` to look up a draft's continuation; `truncate`
    takes them away again.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.size = 0
        self._last1: dict[int, int] = {}
        self._last2: dict[int, int] = {}
        self._last4: dict[int, int] = {}
        self._last8: dict[int, int] = {}
        self._prev1: list[int] = []
        self._prev2: list[int] = []
        self._prev4: list[int] = []
        self._pairs: list[int] = []
        self._quads: list[int] = []
        self._prev8: list[int] = []

    def extend(self, new: Sequence[int]) -> None:
        """Appends `new` and indexes it: about a microsecond a token."""
        if not new:
            return
        tokens, start = self.tokens, self.size
        if len(tokens) != start:
            self.truncate()
        tokens.extend(new)
        self.size = len(tokens)
        self._link(self._last1, self._prev1, new)
        # Contexts that the start of the timeline cuts short get negative keys, never looked up.
        befores = tokens[start - 1 : -1] if start else [-1, *tokens[:-1]]
        pairs = [before << _SHIFT | token for before, token in zip(befores, new, strict=True)]
        self._link(self._last2, self._prev2, pairs)
        self._pairs += pairs
        quads = [
            hash((self._pairs[i - 2], self._pairs[i])) if i > 2 else -2
            for i in range(start, self.size)
        ]
        self._link(self._last4, self._prev4, quads)
        self._quads += quads
        self._prev8 += [0] * (min(7, self.size) - start)
        first = max(start, 7)
        eights = [hash((self._quads[i - 4], self._quads[i])) for i in range(first, self.size)]
        self._link(self._last8, self._prev8, eights)

    def append(self, token: int) -> None:
        """The same as `extend` for one token, and faster."""
        tokens, position = self.tokens, self.size
        if len(tokens) != position:
            self.truncate()
        tokens.append(token)
        end = self.size = position + 1
        last = self._last1
        self._prev1.append(last.get(token, 0))
        last[token] = end
        pairs, last = self._pairs, self._last2
        pair = (tokens[position - 1] if position else -1) << _SHIFT | token
        pairs.append(pair)
        self._prev2.append(last.get(pair, 0))
        last[pair] = end
        quads, last = self._quads, self._last4
        quad = hash((pairs[position - 2], pair)) if position > 2 else -2
        quads.append(quad)
        self._prev4.append(last.get(quad, 0))
        last[quad] = end
        before = 0
        if position > 6:
            last = self._last8
            key = hash((quads[position - 4], quad))
            before = last.get(key, 0)
            last[key] = end
        self._prev8.append(before)

    def truncate(self) -> None:
        """Takes tentative tokens away."""
        del self.tokens[self.size :]

    def rewind(self, size: int) -> None:
        """Forgets all but the first `size` tokens, as if the others had never been said: about as
        fast as learning them was."""
        self.truncate()
        eights = {
            i: hash((self._quads[i - 4], self._quads[i])) for i in range(max(size, 7), self.size)
        }
        for position in range(self.size - 1, size - 1, -1):
            _unlink(self._last1, self.tokens[position], self._prev1.pop())
            _unlink(self._last2, self._pairs.pop(), self._prev2.pop())
            _unlink(self._last4, self._quads.pop(), self._prev4.pop())
            before = self._prev8.pop()
            if position in eights:
                _unlink(self._last8, eights[position], before)
        del self.tokens[size:]
        self.size = size

    def sources(self) -> list[Source]:
        """Where the last tokens, tentative ones included, occurred before: latest first within
        each context length, longer contexts first. A source may lie among the tentative tokens'
        predecessors only."""
        tokens = self.tokens
        end = len(tokens)
        found: dict[int, int] = {}
        if end == self.size:
            if not end:
                return []
            if self._prev8[-1]:
                self._add(found, self._prev8[-1])
            starts = (self._prev4[-1], self._prev2[-1], self._prev1[-1])
        else:
            pair = tokens[-2] << _SHIFT | tokens[-1] if end > 1 else -1
            starts = (0, self._last2.get(pair, 0), self._last1.get(tokens[-1], 0))
        if starts[0]:
            self._walk(found, starts[0], self._prev4, WALK_4)
        if starts[1]:
            self._walk(found, starts[1], self._prev2, WALK_2)
        if starts[2]:
            self._walk(found, starts[2], self._prev1, WALK_1)
        return list(found.items())

    def match_length(self, position: int) -> int:
        """How many tokens before `position` equal the last tokens, up to LONGEST_MATCH."""
        tokens = self.tokens
        left, right, length = position - 1, len(tokens) - 1, 0
        while length < LONGEST_MATCH and left >= 0 and tokens[left] == tokens[right]:
            left -= 1
            right -= 1
            length += 1
        return length

    def _add(self, found: dict[int, int], position: int) -> None:
        length = self.match_length(position)
        if length:
            found[position] = length

    def _walk(self, found: dict[int, int], position: int, prev: list[int], steps: int) -> None:
        tokens = self.tokens
        end = len(tokens)
        while position and steps:
            if position not in found and position < end:
                # As `match_length`; a call for every place would take longer than the matching.
                left, right, length = position - 1, end - 1, 0
                while length < LONGEST_MATCH and left >= 0 and tokens[left] == tokens[right]:
                    left -= 1
                    right -= 1
                    length += 1
                if length:  # none: two contexts with one hash
                    found[position] = length
            position = prev[position - 1]
            steps -= 1

    def _link(self, last: dict[int, int], prev: list[int], keys: Sequence[int]) -> None:
        position = len(prev)
        for key in keys:
            position += 1
            prev.append(last.get(key, 0))
            last[key] = position


def _unlink(last: dict[int, int], key: int, before: int) -> None:
    if before:
        last[key] = before
    else:
        del last[key]
