"""Follows copies through the changes that interrupt them.

Owns two copies in progress: one from what was there before the answer (a file to rewrite, rows
to convert) and one from the answer itself (its own previous row). Each has a position where it
goes on, is broken off by a token that differs, and is resumed at the same place: where its
context comes up again a little further on, or after a leap over a delimiter, as from one field of
a table to the next. It also remembers what the target said instead of a token of the source.
Refuses to weigh: probabilities are the acceptance model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from akunu_py.ngram.acceptance import NO_BITS, Bits, run_class
from akunu_py.ngram.index import Source

WINDOW = 48  # how far ahead of where it broke off a copy may be resumed
LEAP_REACH = 6  # how many tokens a leap may pass over
NEW_COPY = 3  # tokens of context that start a copy elsewhere
DELIMITERS = 4  # remembered at most for a context

RESUMED = 5  # added to the context length: classes 6, 7 and 8 of acceptance.COPY
_LEAP_CLASSES = (0, 9, 15)  # where the run lengths start in acceptance.COPY, by `Copy.leapt`


class Copy(NamedTuple):
    """A copy in progress. position: of the token expected next. run: tokens copied since it was
    last resumed, 0 when broken off. leapt: how it was resumed; 0 by context, 1 by a first leap,
    2 by a leap like an earlier one."""

    position: int
    run: int
    leapt: int


Copies = tuple[Copy | None, Copy | None]
"""From before the answer, and from the answer itself."""


class CopyGuess(NamedTuple):
    """What a copy expects: token, class in acceptance.COPY, position of the token."""

    token: int
    kind: int
    position: int


class Copying:
    """What is known of the copies of one conversation. `tokens` is the index's list, shared."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.split = 0  # where the answer begins
        self.copies: Copies = (None, None)
        self.delimiters: dict[int, list[int]] = {}  # by pair of tokens: what a leap passed over
        self.corrections: dict[int, int] = {}  # by source token or pair: said instead of it

    def begin_answer(self, split: int) -> None:
        """A new answer starts at position `split`; what is before it can be copied from."""
        self.split = split
        self.copies = (None, None)

    def guess(self, which: int, copy: Copy) -> CopyGuess | None:
        """What `copy` expects after the last tokens; None when it is broken off for good."""
        tokens = self.tokens
        position, run, leapt = copy
        if run:
            if position >= len(tokens):
                return None
            return CopyGuess(tokens[position], run_class(run) + _LEAP_CLASSES[leapt], position)
        if len(tokens) < 3:
            return None
        third, second, last = tokens[-3:]
        end = min(position + WINDOW, len(tokens) - 1 if which else self.split) - 1
        nearest = -1
        place = position
        while place < end:
            try:
                place = tokens.index(last, place, end)
            except ValueError:
                break
            if place > 1 and tokens[place - 1] == second:
                length = 3 if tokens[place - 2] == third else 2
                return CopyGuess(tokens[place + 1], RESUMED + length, place + 1)
            place += 1
            if nearest < 0:
                nearest = place
        return CopyGuess(tokens[nearest], RESUMED + 1, nearest) if nearest >= 0 else None

    def leap(self, copy: Copy, pair: int) -> tuple[int, int] | None:
        """(token, position) of the source's next field, when fields were filled in after this
        pair of tokens before."""
        delimiters = self.delimiters.get(pair)
        if delimiters is None:
            return None
        tokens = self.tokens
        start = copy.position + 1
        for place in range(start, min(start + LEAP_REACH, self.split)):
            if tokens[place - 1] in delimiters:
                return tokens[place], place
        return None

    def correction(self, position: int) -> tuple[int, int] | None:
        """(token, key) that the target said before instead of the source's token here."""
        tokens = self.tokens
        if position + 1 < len(tokens):
            key = _pair_key(tokens[position], tokens[position + 1])
            token = self.corrections.get(key)
            if token is not None:
                return token, key
        key = tokens[position]
        token = self.corrections.get(key)
        return None if token is None else (token, key)

    def advance(
        self,
        copies: Copies,
        token: int,
        guesses: Sequence[CopyGuess | None],
        leap: tuple[int, int] | None,
    ) -> Copies:
        """The copies after `token`, said or drafted: gone on, resumed, or broken off."""
        moved: list[Copy | None] = []
        for copy, guess in zip(copies, guesses, strict=True):
            if copy is None:
                moved.append(None)
            elif guess is not None and guess.token == token and (copy.run or guess.kind == 8):
                moved.append(Copy(guess.position + 1, copy.run + 1, copy.leapt))
            else:
                moved.append(Copy(copy.position, 0, 0))
        first = moved[0]
        if leap is not None and leap[0] == token and first is not None and not first.run:
            moved[0] = Copy(leap[1] + 1, 1, 2)
        return moved[0], moved[1]

    def learn(
        self,
        token: int,
        guesses: Sequence[CopyGuess | None],
        leap: tuple[int, int] | None,
        pair: int,
        sources: Sequence[Source],
        correction_bits: dict[int, Bits],
    ) -> None:
        """Moves the copies past `token`, which the target said, and learns from it. To be called
        before the token is appended; `sources` are those of the context before it."""
        before = self.copies
        first, second = self.advance(before, token, guesses, leap)
        for old, new in zip(before, (first, second), strict=True):
            if old is not None and old.run and new is not None and not new.run:
                self._correct(old.position, token, correction_bits)
        broken = (first is None or not first.run, second is None or not second.run)
        if broken[0]:
            found = self._best(token, sources, before_answer=True)
            if found is not None:
                first = Copy(found + 1, 1, 0)
            elif first is not None and broken[1]:
                first = self._first_leap(first, token, pair)
        if broken[1]:
            found = self._best(token, sources, before_answer=False)
            if found is not None:
                second = Copy(found + 1, 1, 0)
        self.copies = first, second

    def _correct(self, position: int, token: int, bits: dict[int, Bits]) -> None:
        tokens = self.tokens
        keys = [tokens[position]]
        if position + 1 < len(tokens):
            keys.append(_pair_key(tokens[position], tokens[position + 1]))
        for key in keys:
            known = self.corrections.get(key)
            # One that was right last time gets a second chance.
            if known != token and (known is None or bits.get(key, NO_BITS) & 1 == 0):
                self.corrections[key] = token
                bits[key] = NO_BITS

    def _best(self, token: int, sources: Sequence[Source], *, before_answer: bool) -> int | None:
        tokens, split = self.tokens, self.split
        best = (NEW_COPY - 1, 0)
        for position, length in sources:
            if (
                (position < split) == before_answer
                and tokens[position] == token
                and (length, position) > best
                and length >= NEW_COPY
            ):
                best = (length, position)
        return best[1] or None

    def _first_leap(self, copy: Copy, token: int, pair: int) -> Copy:
        """`token` starts the source's next field, if it stands a few tokens ahead there."""
        start = copy.position + 1
        try:
            place = self.tokens.index(token, start, min(start + LEAP_REACH, self.split))
        except ValueError:
            return copy
        delimiters = self.delimiters.setdefault(pair, [])
        passed = self.tokens[place - 1]
        if passed not in delimiters:
            delimiters.append(passed)
            del delimiters[:-DELIMITERS]
        return Copy(place + 1, 1, 1)


def _pair_key(first: int, second: int) -> int:
    return -1 - (first << 20 | second)  # negative: apart from the keys of single tokens
