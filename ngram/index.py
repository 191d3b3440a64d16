"""Suffix index: earlier occurrences of the end of the token history, by context length."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

SuffixMatch = tuple[int, int]  # (position of the next token, matching tokens before it)

LONGEST_MATCH = 32
MAX_CHAIN_1, MAX_CHAIN_2, MAX_CHAIN_4, MAX_CHAIN_8 = 16, 24, 24, 32  # places per chain
MAX_CHAIN_ANSWERS = 24  # places in earlier answers
_SHIFT = 30  # bits of a token id


class SuffixIndex:
    """A token history with hash chains over contexts of 1, 2, 4 and 8 tokens.

    Source: the hash chains of LZ77 (RFC 1951, section 4). A position stands for the context that
    ends before it. Tokens appended to `tokens` directly are tentative until `drop_tentative`.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.size = 0
        self._head1: dict[int, int] = {}
        self._head2: dict[int, int] = {}
        self._head4: dict[int, int] = {}
        self._head8: dict[int, int] = {}
        self._prev1: list[int] = []
        self._prev2: list[int] = []
        self._prev4: list[int] = []
        self._pairs: list[int] = []
        self._quads: list[int] = []
        self._prev8: list[int] = []
        # Chain through earlier answers by their last token; keys are positions minus 1.
        self.answers: dict[int, int] = {}
        self._head_answers: dict[int, int] = {}
        self._answers_end = 0

    def extend(self, new: Sequence[int]) -> None:
        """Drop tentative tokens, append `new` and index it: about a microsecond per token."""
        if not new:
            return
        tokens, start = self.tokens, self.size
        self.drop_tentative()
        tokens.extend(new)
        self.size = len(tokens)
        _link(self._head1, self._prev1, new)
        # Contexts shortened by the start of the history get negative keys; no lookup finds them.
        befores = tokens[start - 1 : -1] if start else [-1, *tokens[:-1]]
        pairs = [before << _SHIFT | token for before, token in zip(befores, new, strict=True)]
        _link(self._head2, self._prev2, pairs)
        self._pairs += pairs
        quads = [-2] * (min(3, self.size) - start)
        quads += _hash_with_earlier(self._pairs, 2, max(start, 3))
        _link(self._head4, self._prev4, quads)
        self._quads += quads
        self._prev8 += [0] * (min(7, self.size) - start)
        _link(self._head8, self._prev8, _hash_with_earlier(self._quads, 4, max(start, 7)))

    def append(self, token: int) -> None:
        """Append and index one token; faster than `extend`."""
        tokens, position = self.tokens, self.size
        if len(tokens) != position:
            self.drop_tentative()
        tokens.append(token)
        end = self.size = position + 1
        head = self._head1
        self._prev1.append(head.get(token, 0))
        head[token] = end
        pairs, head = self._pairs, self._head2
        pair = (tokens[position - 1] if position else -1) << _SHIFT | token
        pairs.append(pair)
        self._prev2.append(head.get(pair, 0))
        head[pair] = end
        quads, head = self._quads, self._head4
        quad = hash((pairs[position - 2], pair)) if position > 2 else -2
        quads.append(quad)
        self._prev4.append(head.get(quad, 0))
        head[quad] = end
        before = 0
        if position > 6:
            head = self._head8
            key = hash((quads[position - 4], quad))
            before = head.get(key, 0)
            head[key] = end
        self._prev8.append(before)

    def mark_answer(self, start: int, end: int) -> None:
        """Mark the tokens in [start, end) as an earlier answer; earlier marks stay."""
        tokens, head, prev = self.tokens, self._head_answers, self.answers
        for position in range(max(start, self._answers_end, 1), end):
            last = tokens[position - 1]
            prev[position - 1] = head.get(last, 0)
            head[last] = position
        self._answers_end = max(self._answers_end, end)

    def mark_earlier_answers(self, start: int) -> None:
        """Mark the answers before the one at `start` that are not marked yet."""
        for answer in earlier_answers(self.tokens, start, self._answers_end):
            self.mark_answer(*answer)

    def drop_tentative(self) -> None:
        del self.tokens[self.size :]

    def rewind(self, size: int) -> None:
        """Truncate the history to `size` tokens, about as fast as `extend`."""
        self.drop_tentative()
        eights = {
            i: hash((self._quads[i - 4], self._quads[i])) for i in range(max(size, 7), self.size)
        }
        for position in range(self.size - 1, size - 1, -1):
            _unlink(self._head1, self.tokens[position], self._prev1.pop())
            _unlink(self._head2, self._pairs.pop(), self._prev2.pop())
            _unlink(self._head4, self._quads.pop(), self._prev4.pop())
            before = self._prev8.pop()
            if position in eights:
                _unlink(self._head8, eights[position], before)
            answer = self.answers.pop(position - 1, None)
            if answer is not None:
                _unlink(self._head_answers, self.tokens[position - 1], answer)
        self._answers_end = min(self._answers_end, size)
        del self.tokens[size:]
        self.size = size

    def matches(self) -> list[SuffixMatch]:
        """Return earlier occurrences of the last tokens, longer contexts first, latest first."""
        tokens = self.tokens
        end = len(tokens)
        found: dict[int, int] = {}
        if end > self.size:
            pair = tokens[-2] << _SHIFT | tokens[-1] if end > 1 else -1
            last2, last1 = self._head2.get(pair, 0), self._head1.get(tokens[-1], 0)
        elif end:
            last2, last1 = self._prev2[-1], self._prev1[-1]
            if last4 := self._prev4[-1]:  # else there is no longer context either
                # Their keys are hashes, so that no token is certain to match.
                if last8 := self._prev8[-1]:
                    self._follow(found, last8, self._prev8, MAX_CHAIN_8, 0)
                self._follow(found, last4, self._prev4, MAX_CHAIN_4, 0)
        else:
            return []
        if last2:
            self._follow(found, last2, self._prev2, MAX_CHAIN_2, 2)
        if last1:
            self._follow(found, last1, self._prev1, MAX_CHAIN_1, 1)
        if self.answers:
            last = self._head_answers.get(tokens[-1], 0)
            self._follow(found, last, self.answers, MAX_CHAIN_ANSWERS, 1)
        return list(found.items())

    def _follow(
        self,
        found: dict[int, int],
        position: int,
        prev: Mapping[int, int] | list[int],
        steps: int,
        least: int,
    ) -> None:
        """Add up to `steps` matches from `position` (0: none) back, of at least `least` tokens."""
        tokens = self.tokens
        end = len(tokens)
        while position and steps:
            if position not in found and position < end:
                left, right, length = position - 1 - least, end - 1 - least, least
                while length < LONGEST_MATCH and left >= 0 and tokens[left] == tokens[right]:
                    left -= 1
                    right -= 1
                    length += 1
                if length:  # 0 is a hash collision
                    found[position] = length
            position = prev[position - 1]
            steps -= 1


def _hash_with_earlier(keys: Sequence[int], distance: int, start: int) -> list[int]:
    """Hash each key from position `start` on together with the key `distance` before it."""
    return list(map(hash, zip(keys[start - distance :], keys[start:], strict=False)))


def _link(head: dict[int, int], prev: list[int], keys: Sequence[int]) -> None:
    """Append the position before each key's to `prev`; put its own position into `head`."""
    last, append = head.get, prev.append
    for position, key in enumerate(keys, len(prev) + 1):
        append(last(key, 0))
        head[key] = position


def _unlink(head: dict[int, int], key: int, previous: int) -> None:
    if previous:
        head[key] = previous
    else:
        del head[key]


OPENING = 5  # tokens at the end of a prompt that identify the start of an answer


def earlier_answers(tokens: list[int], start: int, searched: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the answers from `searched` on, before the one at `start`.

    Each follows the same opening tokens. It ends where two adjacent opening tokens recur, and
    includes the first of these.
    """
    opening = tokens[max(0, start - OPENING) : start]
    ends = set(pairwise(opening))
    place = max(searched - OPENING, 0)
    while len(opening) == OPENING:
        try:
            place = tokens.index(opening[0], place, start - OPENING)
        except ValueError:
            return
        if tokens[place : place + OPENING] != opening:
            place += 1
            continue
        begin = end = place + OPENING
        while end < start - 1 and (tokens[end], tokens[end + 1]) not in ends:
            end += 1
        yield begin, end + 1
        place = end
