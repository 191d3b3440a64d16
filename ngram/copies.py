"""Follows copies through the changes that interrupt them: two at a time, one of what was there
before the answer (a file to rewrite, rows to convert), one of the answer itself (its previous row).

A copy has a position in its source. It is broken off by an output token that differs, and resumed
at the same place: where its context comes up again a little further on, or after a skip over a
delimiter, as from one field of a table to the next. What replaced a token of the source once is
expected to replace it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from akunu_py.ngram.acceptance import (
    CONTEXT_1,
    CONTEXT_2,
    CONTEXT_3,
    FIRST_SKIP,
    IN_PLACE,
    KNOWN_SKIP,
    NO_OUTCOMES,
    Outcomes,
    run_class,
)
from akunu_py.ngram.index import SuffixMatch

WINDOW = 48  # how far ahead of where it broke off a copy may be resumed
MAX_SKIP = 6  # tokens that a skip may pass over
NEW_COPY = 3  # tokens of context that start a copy elsewhere
DELIMITERS = 4  # remembered at most for a context


class Copy(NamedTuple):
    """A copy in progress. position: of the token expected next. run: tokens copied since it was
    last resumed, 0 when broken off. resumed: IN_PLACE, or by a FIRST_SKIP or KNOWN_SKIP, which is
    where its run lengths start in acceptance.COPY."""

    position: int
    run: int
    resumed: int


Copies = tuple[Copy | None, Copy | None]
"""From before the answer, and from the answer itself."""


class CopyGuess(NamedTuple):
    """What a copy expects: a token, the copy's state in acceptance.COPY, the token's position."""

    token: int
    state: int
    position: int


CopyGuesses = tuple[CopyGuess | None, CopyGuess | None]
"""Of `Copies`; None for a copy that is broken off for good, or none at all."""


class CopyTracker:
    """The copies of one conversation.

    tokens: the index's list, shared. outcomes: of guessed substitutions, by their keys, shared
    with the acceptance model.
    """

    def __init__(self, tokens: list[int], outcomes: dict[int, Outcomes]) -> None:
        self.tokens = tokens
        self.outcomes = outcomes
        self.answer_start = 0
        self.copies: Copies = (None, None)
        self.delimiters: dict[int, list[int]] = {}  # by pair of tokens: what a skip passed over
        self.substitutions: dict[int, int] = {}  # by source token or pair: what replaced it

    def begin_answer(self, start: int) -> None:
        """A new answer starts at position `start`; what is before it can be copied from."""
        self.answer_start = start
        self.copies = (None, None)

    def guess(self, which: int, copy: Copy) -> CopyGuess | None:
        """What `copy`, 0 or 1 of `Copies`, expects next; None when it is broken off for good."""
        tokens = self.tokens
        position, run, resumed = copy
        if run:
            if position >= len(tokens):
                return None
            return CopyGuess(tokens[position], resumed + run_class(run), position)
        if len(tokens) < 3:
            return None
        third, second, last = tokens[-3:]
        end = min(position + WINDOW, len(tokens) - 1 if which else self.answer_start) - 1
        nearest = -1
        place = position
        while place < end:
            try:
                place = tokens.index(last, place, end)
            except ValueError:
                break
            if place > 1 and tokens[place - 1] == second:
                state = CONTEXT_3 if tokens[place - 2] == third else CONTEXT_2
                return CopyGuess(tokens[place + 1], state, place + 1)
            place += 1
            if nearest < 0:
                nearest = place
        return CopyGuess(tokens[nearest], CONTEXT_1, nearest) if nearest >= 0 else None

    def skip(self, copy: Copy, pair: int) -> tuple[int, int] | None:
        """(token, position) of the source's next field, when fields were filled in after this
        pair of tokens before."""
        delimiters = self.delimiters.get(pair)
        if delimiters is None:
            return None
        tokens = self.tokens
        start = copy.position + 1
        for place in range(start, min(start + MAX_SKIP, self.answer_start)):
            if tokens[place - 1] in delimiters:
                return tokens[place], place
        return None

    def substitution(self, position: int) -> tuple[int, int] | None:
        """(token, key) of what replaced the source's token at `position` before."""
        for key in self._substitution_keys(position):
            token = self.substitutions.get(key)
            if token is not None:
                return token, key
        return None

    def advance(
        self,
        copies: Copies,
        token: int,
        guesses: CopyGuesses,
        skip: tuple[int, int] | None,
    ) -> Copies:
        """The copies after `token`, of the output or a draft: continued, resumed, or broken off."""
        moved: list[Copy | None] = []
        for copy, guess in zip(copies, guesses, strict=True):
            if copy is None:
                moved.append(None)
            elif guess and guess.token == token and (copy.run or guess.state == CONTEXT_3):
                moved.append(Copy(guess.position + 1, copy.run + 1, copy.resumed))
            else:
                moved.append(Copy(copy.position, 0, IN_PLACE))
        first = moved[0]
        if skip is not None and skip[0] == token and first is not None and not first.run:
            moved[0] = Copy(skip[1] + 1, 1, KNOWN_SKIP)
        return moved[0], moved[1]

    def observe(
        self,
        token: int,
        guesses: CopyGuesses,
        skip: tuple[int, int] | None,
        pair: int,
        matches: Sequence[SuffixMatch],
    ) -> None:
        """Moves the copies past the output token `token`, and learns from it. To be called before
        the token is appended; `matches` are those of the context before it."""
        before = self.copies
        first, second = self.advance(before, token, guesses, skip)
        for old, new in zip(before, (first, second), strict=True):
            if old is not None and old.run and new is not None and not new.run:
                self._substitute(old.position, token)
        broken = (first is None or not first.run, second is None or not second.run)
        if broken[0]:
            found = self._longest_match(token, matches, before_answer=True)
            if found is not None:
                first = Copy(found + 1, 1, IN_PLACE)
            elif first is not None and broken[1]:
                first = self._first_skip(first, token, pair)
        if broken[1]:
            found = self._longest_match(token, matches, before_answer=False)
            if found is not None:
                second = Copy(found + 1, 1, IN_PLACE)
        self.copies = first, second

    def _substitution_keys(self, position: int) -> Sequence[int]:
        """Of the source's token with the one behind it, and of the token alone."""
        tokens = self.tokens
        token = tokens[position]
        if position + 1 == len(tokens):
            return (token,)
        return -1 - (token << 20 | tokens[position + 1]), token  # a pair's is negative

    def _substitute(self, position: int, token: int) -> None:
        outcomes = self.outcomes
        for key in self._substitution_keys(position):
            known = self.substitutions.get(key)
            # One that was right last time gets a second chance.
            if known != token and (known is None or outcomes.get(key, NO_OUTCOMES) & 1 == 0):
                self.substitutions[key] = token
                outcomes[key] = NO_OUTCOMES

    def _longest_match(
        self, token: int, matches: Sequence[SuffixMatch], *, before_answer: bool
    ) -> int | None:
        """The position of the longest match that `token` follows, if it can start a copy."""
        tokens, start = self.tokens, self.answer_start
        found = [
            (length, position)
            for position, length in matches
            if length >= NEW_COPY
            and (position < start) == before_answer
            and tokens[position] == token
        ]
        return max(found)[1] if found else None

    def _first_skip(self, copy: Copy, token: int, pair: int) -> Copy:
        """`token` starts the source's next field, if it stands a few tokens ahead there."""
        start = copy.position + 1
        try:
            place = self.tokens.index(token, start, min(start + MAX_SKIP, self.answer_start))
        except ValueError:
            return copy
        delimiters = self.delimiters.setdefault(pair, [])
        passed = self.tokens[place - 1]
        if passed not in delimiters:
            delimiters.append(passed)
            del delimiters[:-DELIMITERS]
        return Copy(place + 1, 1, FIRST_SKIP)
