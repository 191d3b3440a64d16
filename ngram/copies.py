"""Follow copies through the edits that interrupt them.

Up to two copies run at a time: one from before the answer (a file to rewrite, rows to convert), one
from the answer itself (its previous row). A differing output token breaks a copy. The copy resumes
at the same place, where its context recurs nearby, after a delimiter, or after a known edit.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from akunu_py.ngram.acceptance_model import (
    CONTEXT_1,
    CONTEXT_2,
    CONTEXT_3,
    FIRST_SKIP,
    IN_PLACE,
    KNOWN_SKIP,
    NO_OUTCOMES,
    REPLACED,
    RUN_CLASS,
    Outcomes,
    keep_newest,
)
from akunu_py.ngram.index import SuffixMatch

WINDOW = 48  # maximum distance between a break and where the copy resumes
MAX_SKIP = 6  # maximum tokens in a skip
NEW_COPY = 3  # matching tokens that start a copy in the output
NEW_COPY_IN_DRAFT = 6  # the same in a draft, whose tokens are uncertain
LONG_RUN = 17  # copied tokens after which a replacement is expected to be a single token
RESUME_TOKENS = 2  # copied tokens after a known edit that confirm it
# Copied tokens after a new edit that confirm it. Edits between two rows of the answer vary more.
CONFIRMING_TOKENS = (RESUME_TOKENS, 12)  # by copy
MAX_DELIMITERS = 4  # maximum per context


class Copy(NamedTuple):
    """A copy in progress."""

    position: int  # of the token expected next
    run: int  # tokens copied since the copy last resumed, 0 when broken
    resumed: int  # how: IN_PLACE, FIRST_SKIP, KNOWN_SKIP (offsets in COPY) or REPLACED
    written: tuple[int, ...] = ()  # tokens of a known edit, not yet in the output
    continue_at: int = 0  # position in the source after that edit


_copy = partial(tuple.__new__, Copy)  # half the time of Copy(...); takes all fields

Copies = tuple[Copy | None, Copy | None]  # from before the answer, and from the answer itself

# Prediction of a copy: (token, index in `acceptance_model.COPY`, position of the token).
CopyPrediction = tuple[int, int, int]
CopyPredictions = tuple[CopyPrediction | None, CopyPrediction | None]  # one for each of `Copies`


class EditPrediction(NamedTuple):
    """Prediction of a known edit."""

    token: int
    key: int  # of the edit
    after: Copy  # the copy after this token


EditPredictions = tuple[EditPrediction | None, EditPrediction | None]  # one for each of `Copies`


class CopyTracker:
    """The copies of one conversation."""

    def __init__(self, tokens: list[int], outcomes: dict[int, Outcomes]) -> None:
        self.tokens = tokens  # shared with the index
        self.edits = Edits(tokens, outcomes)
        self.delimiters: dict[int, list[int]] = {}  # by pair of tokens: the last skipped tokens
        self.begin_answer(0)

    def begin_answer(self, start: int) -> None:
        """Start a new answer at position `start`; earlier text can be copied."""
        self.answer_start = start
        self.copies: Copies = (None, None)
        # By copy: (source position, output position) where it broke.
        self._breaks: list[tuple[int, int] | None] = [None, None]
        # By copy: (key, tokens left to confirm) of the edit that it follows.
        self._followed: list[tuple[int, int] | None] = [None, None]

    def forget(self) -> None:
        """Forget the edits and skips of earlier texts."""
        self.edits = Edits(self.tokens, self.edits.outcomes)
        self.delimiters.clear()

    def drop_oldest(self, most: int) -> None:
        """Keep at most `most` edits and skips."""
        self.edits.drop_oldest(most)
        keep_newest(self.delimiters, most)

    def predict(
        self, index: int, copy: Copy
    ) -> tuple[CopyPrediction | None, EditPrediction | None]:
        """Return the next token of `copy`, number `index`, and of a known edit there, or None."""
        position, run, resumed, written, _ = copy
        if not run:
            return self._resume(index, position, resumed), None
        state = resumed + RUN_CLASS[run if run < LONG_RUN else LONG_RUN]
        if written:
            return (written[0], state, position), None
        tokens = self.tokens
        if position >= len(tokens):
            return None, None
        edit = self._predict_edit(copy) if self.edits.by_key else None
        return (tokens[position], state, position), edit

    def _resume(self, index: int, position: int, resumed: int) -> CopyPrediction | None:
        tokens = self.tokens
        if len(tokens) < 3:
            return None
        if resumed == REPLACED and position + 1 < (len(tokens) if index else self.answer_start):
            return tokens[position + 1], REPLACED, position + 1
        end = min(position + WINDOW, len(tokens) - 1 if index else self.answer_start) - 1
        last, place, nearest = tokens[-1], position, -1
        for _ in range(tokens[position:end].count(last)):
            place = tokens.index(last, place) + 1
            if place > 2 and tokens[place - 2] == tokens[-2]:
                state = CONTEXT_3 if tokens[place - 3] == tokens[-3] else CONTEXT_2
                return tokens[place], state, place
            if nearest < 0:
                nearest = place
        return (tokens[nearest], CONTEXT_1, nearest) if nearest >= 0 else None

    def skip(self, copy: Copy, pair: int) -> tuple[int, int] | None:
        """Return (token, position) of the source's next field if this pair preceded a skip."""
        delimiters = self.delimiters.get(pair)
        if delimiters is None:
            return None
        tokens = self.tokens
        start = copy.position + 1
        for place in range(start, min(start + MAX_SKIP, self.answer_start)):
            if tokens[place - 1] in delimiters:
                return tokens[place], place
        return None

    def _predict_edit(self, copy: Copy) -> EditPrediction | None:
        found = self.edits.find(copy.position)
        if found is None:
            return None
        position, run, resumed, _, _ = copy
        key, edit, place = found
        if edit.replaced == UNKNOWN:
            return EditPrediction(edit.written[0], key, Copy(position, 0, IN_PLACE))
        if not edit.written:
            if place >= len(self.tokens):
                return None
            return EditPrediction(self.tokens[place], key, Copy(place + 1, run, resumed))
        token, *rest = edit.written
        after = Copy(position, run, resumed, tuple(rest), place)
        return EditPrediction(token, key, after if rest else Copy(place, run, resumed))

    def advance(
        self,
        copies: Copies,
        token: int,
        predictions: CopyPredictions,
        edits: EditPredictions,
        skip: tuple[int, int] | None,
    ) -> Copies:
        """Return the copies after `token`: continued, resumed or broken."""
        first, second = copies
        if first is not None:
            first = _advance(first, token, predictions[0], edits[0])
            if skip is not None and skip[0] == token and not first.run:
                first = Copy(skip[1] + 1, 1, KNOWN_SKIP)
        if second is not None:
            second = _advance(second, token, predictions[1], edits[1])
        return first, second

    def restart(self, copies: Copies, matches: Sequence[SuffixMatch]) -> Copies:
        """Return `copies`; a broken copy from the answer restarts at the longest of `matches`.

        matches: those after the last draft token.
        """
        first, second = copies
        if second is not None and second.run:
            return copies
        longest, latest, start = NEW_COPY_IN_DRAFT, -1, self.answer_start
        for position, length in matches:
            if position > start and (length, position) > (longest, latest):
                longest, latest = length, position
        return copies if latest < 0 else (first, Copy(latest, 1, IN_PLACE))

    def observe(
        self,
        token: int,
        predictions: CopyPredictions,
        edits: EditPredictions,
        skip: tuple[int, int] | None,
        pair: int,
        matches: Sequence[SuffixMatch],
    ) -> None:
        """Move the copies past `token`; learn edits and skips. Call before appending the token."""
        copies = self.copies
        first, second = self.advance(copies, token, predictions, edits, skip)
        if copies[0] is not None and copies[0].run and first is not None:
            self._learn_edit(0, token, copies[0], first, edits[0])
        if copies[1] is not None and copies[1].run and second is not None:
            self._learn_edit(1, token, copies[1], second, edits[1])
        first_runs = first is not None and first.run
        second_runs = second is not None and second.run
        if not (first_runs and second_runs):
            before, inside = self._longest_matches(token, matches)
            if not first_runs:
                if before >= 0:
                    first = Copy(before + 1, 1, IN_PLACE)
                elif first is not None and not second_runs:
                    first = self._first_skip(first, token, pair)
            if not second_runs and inside >= 0:
                second = Copy(inside + 1, 1, IN_PLACE)
        self.copies = first, second
        if any(self._breaks):
            self._complete_edit(0, first)
            self._complete_edit(1, second)

    def _complete_edit(self, index: int, copy: Copy | None) -> None:
        """Learn the whole edit where copy number `index` broke, if the copy resumed after it."""
        broke = self._breaks[index]
        if broke is None or copy is None or copy.run < CONFIRMING_TOKENS[index]:
            return
        self._breaks[index] = None
        position, start = broke
        # After the first copied token, in the source and in the output.
        place, end = copy.position - copy.run + 1, len(self.tokens) - copy.run + 2
        if position <= place < position + WINDOW:
            self.edits.complete(position, start, place, end)

    def _learn_edit(
        self, index: int, token: int, old: Copy, new: Copy, edit: EditPrediction | None
    ) -> None:
        """Learn from copy number `index`, which `token` turned from running `old` into `new`."""
        followed = self._followed[index]
        if new.run:
            if followed is not None:
                key, left = followed
                self._followed[index] = (key, left - (not new.written)) if left else None
            elif edit is not None and new == edit.after:
                self._followed[index] = edit.key, RESUME_TOKENS
            return
        self._followed[index] = None
        self._breaks[index] = None
        if followed is not None:
            self.edits.mark_varying(followed[0])
        if not old.written:
            self.edits.begin(old.position, token)
            self._breaks[index] = old.position, len(self.tokens)

    def _longest_matches(self, token: int, matches: Sequence[SuffixMatch]) -> tuple[int, int]:
        """Return where `token` follows the longest match before and in the answer, -1 for none."""
        tokens, start = self.tokens, self.answer_start
        before = inside = 0, -1  # (length, position)
        for position, length in matches:
            if length >= NEW_COPY and tokens[position] == token:
                found = length, position
                if position < start:
                    if found > before:
                        before = found
                elif found > inside:
                    inside = found
        return before[1], inside[1]

    def _first_skip(self, copy: Copy, token: int, pair: int) -> Copy:
        """Return `copy`, resumed after the next `token` in the source; learn its delimiter."""
        start = copy.position + 1
        near = self.tokens[start : min(start + MAX_SKIP, self.answer_start)]
        if token not in near:
            return copy
        place = start + near.index(token)
        delimiters = self.delimiters.setdefault(pair, [])
        skipped = self.tokens[place - 1]
        if skipped not in delimiters:
            delimiters.append(skipped)
            del delimiters[:-MAX_DELIMITERS]
        return Copy(place + 1, 1, FIRST_SKIP)


def _advance(
    copy: Copy, token: int, prediction: CopyPrediction | None, edit: EditPrediction | None
) -> Copy:
    """Return `copy` after `token`: continued or broken. prediction, edit: what it predicted."""
    position, run, resumed, written, continue_at = copy
    if written:
        if token != written[0]:
            return Copy(position, 0, IN_PLACE)
        if len(written) > 1:
            return copy._replace(written=written[1:])
        return Copy(continue_at, run, resumed)
    if prediction is not None and prediction[0] == token and (run or prediction[1] >= CONTEXT_3):
        return _copy((prediction[2] + 1, run + 1, resumed if run else IN_PLACE, (), 0))
    if edit is not None and edit.token == token:
        return edit.after
    if not run and resumed == IN_PLACE:  # broken already
        return copy
    return Copy(position, 0, REPLACED if run >= LONG_RUN and resumed == IN_PLACE else IN_PLACE)


MAX_REPLACED = 6  # tokens of the source that an edit may replace
MAX_WRITTEN = 8  # tokens that an edit may write
INSERTION, UNKNOWN = -1, -2  # for `Edit.replaced`
_PREDECESSOR_KEY = 1 << 40  # marks the key of a token before an edit


class Edit(NamedTuple):
    """An edit: replacement tokens, and where the source continues."""

    written: tuple[int, ...]  # the output's tokens
    replaced: int  # the source's last replaced token, INSERTION or (not yet) UNKNOWN


class Edits:
    """The edits of one conversation."""

    def __init__(self, tokens: list[int], outcomes: dict[int, Outcomes]) -> None:
        self.tokens = tokens  # shared with the index
        self.outcomes = outcomes  # by key, shared with the acceptance model
        self.by_key: dict[int, Edit] = {}
        # Keys whose edits differ from their second token on; a dict, for its order.
        self._varying: dict[int, bool] = {}

    def drop_oldest(self, most: int) -> None:
        """Keep at most `most` edits."""
        keep_newest(self.by_key, most)
        keep_newest(self._varying, most)

    def find(self, position: int) -> tuple[int, Edit, int] | None:
        """Return (key, edit, source position after the edit) for the token at `position`."""
        tokens, by_key = self.tokens, self.by_key
        for key in self._keys(position):
            if key in by_key:
                edit = by_key[key]
                if edit.replaced < 0:
                    return key, edit, position
                reach = tokens[position : position + MAX_REPLACED]
                if edit.replaced in reach:
                    return key, edit, position + reach.index(edit.replaced) + 1
        return None

    def begin(self, position: int, token: int) -> None:
        """Record that `token` replaced the token at `position`, until `complete` knows more."""
        for key in self._keys(position)[:2]:
            known = self.by_key.get(key)
            if known is None or not known.written or known.written[0] != token:
                self._replace(key, Edit((token,), UNKNOWN))

    def complete(self, position: int, start: int, place: int, end: int) -> None:
        """Learn that the output [start, end) replaced the copied source [position, place).

        All are positions in the token history. Equal tokens at both ends are no part of the edit.
        """
        tokens = self.tokens
        while end > start and place > position and tokens[end - 1] == tokens[place - 1]:
            end -= 1
            place -= 1
        if end - start > MAX_WRITTEN or place - position > MAX_REPLACED:
            return
        replaced = tokens[place - 1] if place > position else INSERTION
        edit = Edit(tuple(tokens[start:end]), replaced)
        # The predecessor identifies an omission, such as a line number.
        for key in self._keys(position)[: 2 if edit.written else 3]:
            known = self.by_key.get(key)
            if key in self._varying:
                continue
            if known and known.replaced == UNKNOWN and edit.written[:1] in ((), known.written):
                self.by_key[key] = edit
            else:
                self._replace(key, edit)

    def mark_varying(self, key: int) -> None:
        """Record that the edit of `key` recurred with different tokens after the first."""
        self._varying[key] = True
        edit = self.by_key.pop(key, None)
        if edit is not None and edit.written:
            self.by_key[key] = Edit(edit.written[:1], UNKNOWN)

    def _replace(self, key: int, edit: Edit) -> None:
        """Store `edit` under `key`, unless the known edit was right last time."""
        known = self.by_key.get(key)
        if known is None or (known != edit and self.outcomes.get(key, NO_OUTCOMES) & 1 == 0):
            self.by_key[key] = edit
            self.outcomes[key] = NO_OUTCOMES

    def _keys(self, position: int) -> Sequence[int]:
        """Return three keys: of the token with its successor, the token, its predecessor."""
        tokens = self.tokens
        token = tokens[position]
        successor = tokens[position + 1] if position + 1 < len(tokens) else 0
        return -1 - (token << 20 | successor), token, _PREDECESSOR_KEY | tokens[position - 1]
