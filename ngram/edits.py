"""How an output departs from the source it copies: line numbers left out or put in, another
indentation, escapes, names replaced. What was done to a token of the source once is expected again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from akunu_py.ngram.acceptance import NO_OUTCOMES, Outcomes

MAX_PASSED = 6  # tokens of the source that an edit may pass over
MAX_WRITTEN = 8  # tokens that an edit may write
NOTHING, UNKNOWN = -1, -2  # for Edit.passed
_BEFORE = 1 << 40  # in the key of a token that an edit comes behind


class Edit(NamedTuple):
    """written: what the output has instead. passed: the token of the source behind which it goes
    on; NOTHING where it passed over none, UNKNOWN while it has not gone on, when only the first
    written token is known."""

    written: tuple[int, ...]
    passed: int


class Edits:
    """The edits of one conversation.

    tokens: the index's list, shared. outcomes: of guessed edits, by their keys, shared with the
    acceptance model.
    """

    def __init__(self, tokens: list[int], outcomes: dict[int, Outcomes]) -> None:
        self.tokens = tokens
        self.outcomes = outcomes
        self.by_key: dict[int, Edit] = {}
        self._varied: set[int] = set()  # keys whose edits differ from their second token on

    def find(self, position: int) -> tuple[int, Edit, int] | None:
        """(key, edit, where the source goes on behind it) for the source's token at `position`."""
        tokens = self.tokens
        for key in self._keys(position):
            edit = self.by_key.get(key)
            if edit is None:
                continue
            if edit.passed < 0:
                return key, edit, position
            try:
                return key, edit, tokens.index(edit.passed, position, position + MAX_PASSED) + 1
            except ValueError:
                continue
        return None

    def begin(self, position: int, token: int) -> None:
        """`token` came in place of the source's token at `position`."""
        for key in self._keys(position)[:2]:
            known = self.by_key.get(key)
            if known is None or not known.written or known.written[0] != token:
                self._replace(key, Edit((token,), UNKNOWN))

    def complete(self, position: int, began: int, place: int, end: int) -> None:
        """The output of `began` on departed from the source at `position`; its token at `end` is
        the source's at `place`, and so may be some before it."""
        tokens = self.tokens
        while end > began and place > position and tokens[end - 1] == tokens[place - 1]:
            end -= 1
            place -= 1
        if end - began > MAX_WRITTEN or place - position > MAX_PASSED:
            return
        passed = tokens[place - 1] if place > position else NOTHING
        edit = Edit(tuple(tokens[began:end]), passed)
        # What is only left out, such as a line's number, may be known by what is before it.
        for key in self._keys(position)[: 2 if edit.written else 3]:
            known = self.by_key.get(key)
            if key in self._varied:
                continue
            if known and known.passed == UNKNOWN and edit.written[:1] in ((), known.written):
                self.by_key[key] = edit
            else:
                self._replace(key, edit)

    def vary(self, key: int) -> None:
        """The edit of `key` was begun again, and went on differently."""
        self._varied.add(key)
        edit = self.by_key.pop(key, None)
        if edit is not None and edit.written:
            self.by_key[key] = Edit(edit.written[:1], UNKNOWN)

    def _replace(self, key: int, edit: Edit) -> None:
        known = self.by_key.get(key)
        # One that was right last time gets a second chance.
        if known is None or (known != edit and self.outcomes.get(key, NO_OUTCOMES) & 1 == 0):
            self.by_key[key] = edit
            self.outcomes[key] = NO_OUTCOMES

    def _keys(self, position: int) -> Sequence[int]:
        """Of the source's token with the one behind it, of the token alone, of the one before."""
        tokens = self.tokens
        token = tokens[position]
        behind = tokens[position + 1] if position + 1 < len(tokens) else 0
        return -1 - (token << 20 | behind), token, _BEFORE | tokens[position - 1]
