"""Predict the next token and the chance that it is accepted.

Matches, copies, known edits and the answer cache propose candidates; the acceptance model picks
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from akunu_py.ngram.acceptance_model import (
    ANSWER_CLASS,
    BOTH_ANSWERS,
    CONTEXT_1,
    COPY_RATE,
    EARLIER_ANSWER,
    KNOWN_SKIP,
    MATCH_CLASS,
    NO_OUTCOMES,
    OUTSIDE,
    PRESENT_ANSWER,
    RATE,
    SHORTER_IN_ANSWER,
    AcceptanceModel,
    Candidate,
    Feature,
)
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.copies import (
    Copies,
    Copy,
    CopyPrediction,
    CopyPredictions,
    CopyTracker,
    EditPrediction,
    EditPredictions,
)
from akunu_py.ngram.index import LONGEST_MATCH, SuffixIndex, SuffixMatch

# A match has six times the votes of a match that is a token shorter.
_VOTES = [6.0 ** min(length, LONGEST_MATCH) for length in range(LONGEST_MATCH + 1)]
_ANSWER_VOTES = 4.0  # weight of a match inside an answer
_SURE_WITHOUT_CACHE = 0.85  # logit (70 %) above which the answer cache is not consulted
# Origins of a prediction. Plain constants: enum lookups are seven times slower on Python 3.11.
FROM_MATCH, FROM_PROMPT, FROM_ANSWER = 0, 1, 2
FROM_EDIT, FROM_SKIP, FROM_FIELD, FROM_ANSWER_CACHE, FROM_GRAMMAR = 3, 4, 5, 6, 7


@dataclass(slots=True)
class TokenPrediction:
    """The prediction for one position, and everything that was considered."""

    pair: int  # key of the last two tokens
    recent: int  # outcomes of the last three predictions, latest in the lowest bit
    matches: Sequence[SuffixMatch]
    copies: Copies
    copy_predictions: CopyPredictions
    edits: EditPredictions
    token: int = -1  # for no prediction
    logit: float = -inf  # before calibration
    probability: float = 0.0
    bucket: int = 0  # index in `AcceptanceModel.calibration[source]`
    source: int = FROM_MATCH
    skip: tuple[int, int] | None = None  # see `CopyTracker.skip`
    best_match: Candidate | None = None  # the candidate of the matches
    candidates: list[Candidate] = field(default_factory=list)

    def consider(self, candidate: Candidate, source: int) -> None:
        """Adopt `candidate` if it is more likely than the current one."""
        self.candidates.append(candidate)
        if candidate.logit > self.logit:
            self.token = candidate.token
            self.logit = candidate.logit
            self.source = source


class TokenPredictor:
    """Predicts the token after the last one in the index, which may be tentative."""

    def __init__(
        self,
        index: SuffixIndex,
        model: AcceptanceModel,
        tracker: CopyTracker,
        answer_cache: AnswerCache | None = None,
    ) -> None:
        self.index, self.model, self.tracker = index, model, tracker
        self.answer_cache = answer_cache

    def predict(
        self, recent: int, matches: Sequence[SuffixMatch], copies: Copies
    ) -> TokenPrediction:
        """Return the prediction for the next token. Arguments: as in `TokenPrediction`."""
        tokens = self.index.tokens
        pair = tokens[-2] << 20 | tokens[-1] if len(tokens) > 1 else -1
        first, second = copies
        tracker = self.tracker
        copy_prediction = other_copy_prediction = None
        edit = other_edit = None
        if first is not None:
            copy_prediction = tracker.predict(0, first)
            edit = tracker.predict_edit(first) if first.run else None
        if second is not None:
            other_copy_prediction = tracker.predict(1, second)
            other_edit = tracker.predict_edit(second) if second.run else None
        copy_predictions, edits = (copy_prediction, other_copy_prediction), (edit, other_edit)
        prediction = TokenPrediction(pair, recent, matches, copies, copy_predictions, edits)
        if matches:
            self._consider_match(prediction)
        if copy_prediction is not None:
            self._consider_copy(prediction, 0, copy_prediction, edit)
        if other_copy_prediction is not None:
            self._consider_copy(prediction, 1, other_copy_prediction, other_edit)
        if first is not None:
            self._consider_skip(prediction, first)
            if prediction.source == FROM_MATCH and first.resumed == KNOWN_SKIP:
                prediction.source = FROM_FIELD
        if not matches and self.answer_cache is not None:
            self._consider_answer_cache(prediction, self.answer_cache)
        if prediction.token >= 0:
            prediction.probability, prediction.bucket = self.model.calibrate(
                prediction.source, prediction.logit
            )
        return prediction

    def _consider_match(self, prediction: TokenPrediction) -> None:
        """Consider the token with the most votes of the matches; set `prediction.best_match`."""
        model = self.model
        token, length, share, agreeing, opposing = self._vote(prediction.matches)
        by_pair = model.pair_outcomes.get(prediction.pair, NO_OUTCOMES)
        by_token = model.token_outcomes.get(token, NO_OUTCOMES)
        agrees = 0
        for copy_prediction in prediction.copy_predictions:
            if copy_prediction is not None:
                if copy_prediction.token == token:
                    agrees = max(agrees, 1)
                elif copy_prediction.state != CONTEXT_1:
                    agrees = 2
        best_match = prediction.best_match = Candidate(
            token,
            RATE,
            [
                (model.match, MATCH_CLASS[length]),
                (model.agreeing, agreeing),
                (model.opposing, opposing),
                (model.share, share),
                (model.recent, prediction.recent),
                (model.after_pair, by_pair),
                (model.same_token, by_token),
                (model.copy_agrees, agrees),
            ],
            [
                (model.pair_outcomes, prediction.pair, by_pair),
                (model.token_outcomes, token, by_token),
            ],
        )
        if self.index.answers:
            for feature in self._in_answers(token, length, prediction.matches):
                best_match.add(feature)
        if self.answer_cache is not None and best_match.logit < _SURE_WITHOUT_CACHE:
            self._consider_answer_cache(prediction, self.answer_cache)
        prediction.consider(best_match, FROM_MATCH)

    def _in_answers(
        self, token: int, length: int, matches: Sequence[SuffixMatch]
    ) -> tuple[Feature, Feature]:
        """Return the features of matches in answers that support or oppose `token`."""
        tokens, answers, start = self.index.tokens, self.index.answers, self.tracker.answer_start
        earlier = present = agreeing = opposing = 0
        for position, match_length in matches:
            if position < start and position - 1 not in answers:
                continue
            if tokens[position] != token:
                opposing += 1
                continue
            agreeing += 1
            if position >= start:
                present = max(present, match_length)
            else:
                earlier = max(earlier, match_length)
        if earlier and present:
            place = BOTH_ANSWERS
        elif earlier == length:
            place = EARLIER_ANSWER
        elif present == length:
            place = PRESENT_ANSWER
        else:
            place = SHORTER_IN_ANSWER if agreeing else OUTSIDE
        return (
            (self.model.in_answers, place + ANSWER_CLASS[length]),
            (self.model.answers_for, 4 * min(agreeing, 3) + min(opposing, 3)),
        )

    def _vote(self, matches: Sequence[SuffixMatch]) -> tuple[int, int, int, int, int]:
        """Return (token, longest match, classes: share of votes, agreeing, opposing)."""
        tokens = self.index.tokens
        if len(matches) == 1:
            position, length = matches[0]
            return tokens[position], length, 0, 0, 0
        answers, start = self.index.answers, self.tracker.answer_start
        votes: dict[int, float] = {}
        for position, length in matches:
            token = tokens[position]
            vote = _VOTES[length]
            if answers and (position >= start or position - 1 in answers):
                vote *= _ANSWER_VOTES
            votes[token] = votes[token] + vote if token in votes else vote
        share = 0
        if len(votes) > 1:
            token = max(votes, key=votes.__getitem__)
            part = votes[token] / sum(votes.values())
            share = 0 if part > 0.99 else 1 if part > 0.8 else 2 if part > 0.5 else 3
        length = max([length for position, length in matches if tokens[position] == token])
        least = length if length < 3 else 3
        long = [tokens[position] for position, match_length in matches if match_length >= least]
        agreeing = long.count(token)
        opposing = len(long) - agreeing
        return (
            token,
            length,
            share,
            0 if agreeing == 1 else 1 if agreeing == 2 else 2 if agreeing < 5 else 3,
            opposing if opposing < 3 else 3 if opposing < 6 else 4,
        )

    def _consider_copy(
        self,
        prediction: TokenPrediction,
        which: int,
        copy_prediction: CopyPrediction,
        edit: EditPrediction | None,
    ) -> None:
        """Consider the token of a copy, and the known edit there.

        which: 0 for the copy from before the answer, 1 for the one from the answer.
        """
        model, best_match = self.model, prediction.best_match
        token = copy_prediction.token
        before = model.copy_outcomes.get(token, NO_OUTCOMES)
        outcome = (model.copy_outcomes, token, before)
        if best_match is not None and best_match.token == token:
            best_match.outcomes.append(outcome)  # no second candidate for the same token
        else:
            features = [
                (model.copy[which], copy_prediction.state),
                (model.copy_recent, prediction.recent),
                (model.copy_token, before),
            ]
            source = FROM_ANSWER if which else FROM_PROMPT
            prediction.consider(Candidate(token, COPY_RATE, features, [outcome]), source)
        if edit is None:
            return
        before = model.edit_outcomes.get(edit.key, NO_OUTCOMES)
        features = [(model.edit, before)]
        outcomes = [(model.edit_outcomes, edit.key, before)]
        prediction.consider(Candidate(edit.token, COPY_RATE, features, outcomes), FROM_EDIT)

    def _consider_skip(self, prediction: TokenPrediction, prompt_copy: Copy) -> None:
        """Set `prediction.skip`; if the copy is broken, consider the start of the next field."""
        skip = prediction.skip = self.tracker.skip(prompt_copy, prediction.pair)
        if skip is None or prompt_copy.run:
            return
        model = self.model
        before = model.skip_outcomes.get(prediction.pair, NO_OUTCOMES)
        outcomes = [(model.skip_outcomes, prediction.pair, before)]
        prediction.consider(
            Candidate(skip[0], COPY_RATE, [(model.skip, before)], outcomes), FROM_SKIP
        )

    def _consider_answer_cache(
        self, prediction: TokenPrediction, answer_cache: AnswerCache
    ) -> None:
        """Support the matches' candidate with the answer cache, or add another candidate."""
        found = answer_cache.lookup(self.index.tokens)
        if found is None:
            return
        model, best_match = self.model, prediction.best_match
        if best_match is not None:
            agrees = 1 if found.token == best_match.token else 2
            best_match.add((model.cache_agrees, agrees))
            if agrees == 1:
                return
        before = model.cache_outcomes.get(found.token, NO_OUTCOMES)
        outcomes = [(model.cache_outcomes, found.token, before)]
        features = [
            (model.cache_match, min(found.length, 5) - 1),
            (model.cache_agreeing, min(found.agreeing, 3) - 1),
            (model.cache_opposing, min(found.opposing, 2)),
            (model.cache_against, int(best_match is not None)),
            (model.cache_token, before),
            (model.copy_recent, prediction.recent),
        ]
        prediction.consider(Candidate(found.token, RATE, features, outcomes), FROM_ANSWER_CACHE)
