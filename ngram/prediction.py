"""Predict the next tokens, each the likeliest of several candidates, and their chances."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter

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
)
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.copies import (
    Copies,
    CopyPrediction,
    CopyPredictions,
    CopyTracker,
    EditPrediction,
    EditPredictions,
)
from akunu_py.ngram.index import LONGEST_MATCH, SuffixIndex, SuffixMatch
from akunu_py.types import DraftGuide

# A match has six times the votes of a match that is a token shorter.
_VOTES = [6.0 ** min(length, LONGEST_MATCH) for length in range(LONGEST_MATCH + 1)]
_ANSWER_VOTES = 4.0  # weight of a match inside an answer
_SURE_WITHOUT_CACHE = 0.85  # logit (70 %) above which the answer cache is not consulted
_logit = attrgetter("logit")
# Origins of a prediction. Plain constants: enum lookups are seven times slower on Python 3.11.
FROM_MATCH, FROM_PROMPT, FROM_ANSWER = 0, 1, 2
FROM_EDIT, FROM_SKIP, FROM_FIELD, FROM_ANSWER_CACHE, FROM_GRAMMAR = 3, 4, 5, 6, 7
NEGLIGIBLE = 0.1  # a chain ends below this chance

# Acceptance of a forced token: first, inside and last of a text; then the same of a text that is
# only probably forced. Priors of running averages.
_FORCED_PRIORS = (0.99, 0.99, 0.85, 0.95, 0.99, 0.8)
# Acceptance of the prediction that a value ends after its first token, its second, ...
_ENDING_PRIORS = (0.3, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1)
_FORCED_RATE = 0.05
_SUREST = 0.99
# Chance that a choice of the grammar is right where the prediction is wrong. Prior of an average.
_CHOICES_PRIOR = 0.9
_ERRORS_PRIOR = 10.0  # expected errors, and as many real ones
_Forced = tuple[list[int], bool]  # see `DraftGuide.forced`
_NOTHING_FORCED: _Forced = [], True


@dataclass(slots=True)
class TokenPrediction:
    """The prediction for one position, and everything that was considered."""

    pair: int  # key of the last two tokens
    recent: int  # outcomes of the last three predictions, latest in the lowest bit
    matches: Sequence[SuffixMatch]
    copies: Copies
    copy_predictions: CopyPredictions
    edits: EditPredictions
    skip: tuple[int, int] | None  # see `CopyTracker.skip`
    candidates: Sequence[Candidate]
    token: int  # -1 for no prediction
    probability: float
    source: int
    bucket: int  # index in `AcceptanceModel.calibration[source]`
    others: Sequence[tuple[int, float]] = ()  # choices of the grammar, and their chances


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
        tokens, tracker = self.index.tokens, self.tracker
        pair = tokens[-2] << 20 | tokens[-1] if len(tokens) > 1 else -1
        first, second = copies
        copied = other_copied = edit = other_edit = skip = None
        if first is not None:
            copied, edit = tracker.predict(0, first)
            if pair in tracker.delimiters:
                skip = tracker.skip(first, pair)
        if second is not None:
            other_copied, other_edit = tracker.predict(1, second)
        candidates: list[Candidate] = []
        best_match = None
        if matches:
            best_match = self._match(pair, recent, matches, (copied, other_copied))
        if self.answer_cache is not None and (
            best_match is None or best_match.logit < _SURE_WITHOUT_CACHE
        ):
            self._consult_answer_cache(self.answer_cache, candidates, best_match, recent)
        if best_match is not None:
            candidates.append(best_match)
        if copied is not None:
            self._add_copy(candidates, best_match, 0, copied, edit, recent)
        if other_copied is not None:
            self._add_copy(candidates, best_match, 1, other_copied, other_edit, recent)
        if skip is not None and first is not None and not first.run:
            candidates.append(self._skip(skip[0], pair))
        token, probability, source, bucket = -1, 0.0, FROM_MATCH, 0
        if candidates:
            best = candidates[0] if len(candidates) == 1 else max(candidates, key=_logit)
            token, source = best.token, best.source
            if source == FROM_MATCH and first is not None and first.resumed == KNOWN_SKIP:
                source = FROM_FIELD
            probability, bucket = self.model.calibrate(source, best.logit)
        return TokenPrediction(
            pair,
            recent,
            matches,
            copies,
            (copied, other_copied),
            (edit, other_edit),
            skip,
            candidates,
            token,
            probability,
            source,
            bucket,
        )

    def _match(
        self,
        pair: int,
        recent: int,
        matches: Sequence[SuffixMatch],
        copy_predictions: CopyPredictions,
    ) -> Candidate:
        model = self.model
        token, length, share, agreeing, opposing = self._vote(matches)
        by_pair = model.pair_outcomes.get(pair, NO_OUTCOMES)
        by_token = model.token_outcomes.get(token, NO_OUTCOMES)
        agrees = 0
        for copied in copy_predictions:
            if copied is not None:
                if copied[0] == token:
                    agrees = agrees or 1
                elif copied[1] != CONTEXT_1:
                    agrees = 2
        candidate = Candidate(
            token,
            FROM_MATCH,
            RATE,
            model.match_tables,
            (MATCH_CLASS[length], agreeing, opposing, share, recent, by_pair, by_token, agrees),
            [(model.pair_outcomes, pair, by_pair), (model.token_outcomes, token, by_token)],
        )
        if self.index.answers:
            place, support = self._in_answers(token, length, matches)
            candidate.add(model.in_answers, place)
            candidate.add(model.answers_for, support)
        return candidate

    def _in_answers(
        self, token: int, length: int, matches: Sequence[SuffixMatch]
    ) -> tuple[int, int]:
        """Return the classes of IN_ANSWERS and ANSWERS_FOR of `token`."""
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
        return place + ANSWER_CLASS[length], 4 * min(agreeing, 3) + min(opposing, 3)

    def _vote(self, matches: Sequence[SuffixMatch]) -> tuple[int, int, int, int, int]:
        """Return (token, longest match, classes: share of votes, agreeing, opposing)."""
        tokens = self.index.tokens
        if len(matches) == 1:
            position, length = matches[0]
            return tokens[position], length, 0, 0, 0
        token, length, share = tokens[matches[0][0]], 0, 0
        for position, match_length in matches:
            if tokens[position] != token:
                token, length, share = self._winner(matches)
                break
            if match_length > length:
                length = match_length
        least = length if length < 3 else 3
        agreeing = opposing = 0
        for position, match_length in matches:
            if match_length >= least:
                if tokens[position] == token:
                    agreeing += 1
                else:
                    opposing += 1
        return (
            token,
            length,
            share,
            0 if agreeing == 1 else 1 if agreeing == 2 else 2 if agreeing < 5 else 3,
            opposing if opposing < 3 else 3 if opposing < 6 else 4,
        )

    def _winner(self, matches: Sequence[SuffixMatch]) -> tuple[int, int, int]:
        """Return the token with the most votes, its longest match, the class of its share."""
        tokens = self.index.tokens
        answers, start = self.index.answers, self.tracker.answer_start
        votes: dict[int, float] = {}
        for position, length in matches:
            token, vote = tokens[position], _VOTES[length]
            if answers and (position >= start or position - 1 in answers):
                vote *= _ANSWER_VOTES
            votes[token] = votes.get(token, 0.0) + vote
        token = max(votes, key=votes.__getitem__)
        part = votes[token] / sum(votes.values())
        share = 0 if part > 0.99 else 1 if part > 0.8 else 2 if part > 0.5 else 3
        return token, max([each[1] for each in matches if tokens[each[0]] == token]), share

    def _add_copy(
        self,
        candidates: list[Candidate],
        best_match: Candidate | None,
        which: int,
        copied: CopyPrediction,
        edit: EditPrediction | None,
        recent: int,
    ) -> None:
        """Add the token of a copy (`which` of `Copies`), and the known edit there."""
        model, (token, state, _) = self.model, copied
        before = model.copy_outcomes.get(token, NO_OUTCOMES)
        outcome = (model.copy_outcomes, token, before)
        if best_match is not None and best_match.token == token:
            best_match.outcomes.append(outcome)  # no second candidate for the same token
        else:
            source, places = FROM_ANSWER if which else FROM_PROMPT, (state, recent, before)
            tables = model.copy_tables[which]
            candidates.append(Candidate(token, source, COPY_RATE, tables, places, [outcome]))
        if edit is not None:
            before = model.edit_outcomes.get(edit.key, NO_OUTCOMES)
            outcome = (model.edit_outcomes, edit.key, before)
            candidates.append(
                Candidate(edit.token, FROM_EDIT, COPY_RATE, model.edit_tables, (before,), [outcome])
            )

    def _skip(self, token: int, pair: int) -> Candidate:
        """Return the start of the source's next field, where a broken copy may resume."""
        model = self.model
        before = model.skip_outcomes.get(pair, NO_OUTCOMES)
        outcomes = [(model.skip_outcomes, pair, before)]
        return Candidate(token, FROM_SKIP, COPY_RATE, model.skip_tables, (before,), outcomes)

    def _consult_answer_cache(
        self,
        answer_cache: AnswerCache,
        candidates: list[Candidate],
        best_match: Candidate | None,
        recent: int,
    ) -> None:
        """Support the matches' candidate with the answer cache, or add another candidate."""
        found = answer_cache.lookup(self.index.tokens)
        if found is None:
            return
        model = self.model
        if best_match is not None:
            agrees = 1 if found.token == best_match.token else 2
            best_match.add(model.cache_agrees, agrees)
            if agrees == 1:
                return
        before = model.cache_outcomes.get(found.token, NO_OUTCOMES)
        places = (
            *(min(found.length, 5) - 1, min(found.agreeing, 3) - 1, min(found.opposing, 2)),
            *(int(best_match is not None), before, recent),
        )
        outcomes = [(model.cache_outcomes, found.token, before)]
        candidates.append(
            Candidate(found.token, FROM_ANSWER_CACHE, RATE, model.cache_tables, places, outcomes)
        )


class PredictionChain:
    """Chains predictions, each of which assumes that the previous one is accepted.

    A chain ends at a position without a prediction, at an unlikely one, or at a stop token. With a
    guide, it contains the forced tokens and no forbidden ones.
    """

    def __init__(self, predictor: TokenPredictor, stop_tokens: Collection[int]) -> None:
        self.stop_tokens = stop_tokens
        self.index, self.tracker = predictor.index, predictor.tracker
        self._predictor = predictor
        self._forced_chances = [*_FORCED_PRIORS, *_ENDING_PRIORS]
        self._others_chance = _CHOICES_PRIOR
        self._errors = self._expected_errors = _ERRORS_PRIOR  # of predictions with alternatives

    def first(self, recent: int) -> TokenPrediction:
        """Return the prediction after the history. recent: see `TokenPrediction`."""
        return self._predictor.predict(recent, self.index.matches(), self.tracker.copies)

    def after_history(
        self, recent: int, longest: int, guide: DraftGuide | None, least_doubt: float = inf
    ) -> list[TokenPrediction]:
        """Return at most `longest` predictions after the history; see `chain_from`."""
        if guide is not None:
            guide.begin_draft()
        predictions = self.chain_from(self.first(recent), longest, guide, least_doubt)
        self.index.drop_tentative()
        if guide is not None:
            guide.end_draft()
        return predictions

    def chain_from(
        self, prediction: TokenPrediction, longest: int, guide: DraftGuide | None,
        least_doubt: float = inf,
    ) -> list[TokenPrediction]:  # fmt: skip
        """Return `prediction`, for the token after the tentative ones, and those that follow.

        Those where a draft ends with more than the chance `least_doubt` get alternatives from the
        grammar.
        """
        chance, forced = 1.0, _NOTHING_FORCED
        predictions: list[TokenPrediction] = []
        while True:
            if guide is not None:
                doubt = chance * (1.0 - prediction.probability)
                forced = self._apply_guide(prediction, guide, forced, unsure=doubt > least_doubt)
            predictions.append(prediction)
            token = prediction.token
            chance *= prediction.probability
            if (
                token < 0
                or chance < NEGLIGIBLE
                or len(predictions) >= longest
                or token in self.stop_tokens
            ):
                return predictions
            prediction = self.after(prediction, token)

    def after(self, prediction: TokenPrediction, token: int) -> TokenPrediction:
        """Append a tentative token at the position of `prediction`; return the next prediction."""
        index, tracker = self.index, self.tracker
        tokens, matches = index.tokens, prediction.matches
        copies = tracker.advance(
            prediction.copies, token, prediction.copy_predictions, prediction.edits, prediction.skip
        )
        continued: list[SuffixMatch] = []
        long = False  # Matches of one token may have missed places that continue longer.
        for position, length in matches:
            if tokens[position] == token:
                if length > 1:
                    long = True
                continued.append((position + 1, length + 1 if length < LONGEST_MATCH else length))
        if long:
            copies = tracker.restart(copies, continued)
        tokens.append(token)
        recent = (prediction.recent << 1 | (prediction.token == token)) & 7
        return self._predictor.predict(recent, continued if long else index.matches(), copies)

    def learn_forced(self, prediction: TokenPrediction, hit: bool) -> None:
        """Record whether a prediction from the grammar was right."""
        chance = self._forced_chances[prediction.bucket]
        self._forced_chances[prediction.bucket] = min(
            chance + _FORCED_RATE * (hit - chance), _SUREST
        )

    def learn_others(self, prediction: TokenPrediction, token: int) -> None:
        """Record whether a prediction with alternatives was wrong, and one of these right."""
        if prediction.token >= 0:
            self._errors += prediction.token != token
            self._expected_errors += 1.0 - prediction.probability
        if prediction.token != token:
            hit = any(other == token for other, _ in prediction.others)
            self._others_chance += _FORCED_RATE * (hit - self._others_chance)

    def _add_others(self, prediction: TokenPrediction, tokens: Sequence[int]) -> None:
        """Add `tokens` as alternatives; the same token several times is as many times as likely."""
        others = Counter(token for token in tokens if token != prediction.token)
        chance = self._others_chance * (1.0 - prediction.probability)
        if prediction.token >= 0:
            chance *= min(1.0, self._errors / self._expected_errors)
        total = others.total()
        prediction.others = [(token, chance * n / total) for token, n in others.items()]

    def _apply_guide(
        self, prediction: TokenPrediction, guide: DraftGuide, forced: _Forced, *, unsure: bool
    ) -> _Forced:
        """Apply the grammar; return what it forces next. unsure: alternatives may pay."""
        tokens, sure = forced if forced[0] else guide.forced()
        place = 2 if len(tokens) == 1 else int(bool(forced[0]))
        bucket = place + 3 * (not sure)
        if not tokens:
            tokens, written = guide.ending()
            bucket = len(_FORCED_PRIORS) - 1 + min(written, len(_ENDING_PRIORS))
            sure = False
        others = guide.choices() if unsure and not tokens else []
        if tokens:
            chance = self._forced_chances[bucket]
            other = prediction.token != tokens[0]
            if (
                other
                and not sure
                and prediction.probability > chance
                and guide.advance(prediction.token)
            ):
                return [], sure
            if other or prediction.probability < chance:
                prediction.token, prediction.probability = tokens[0], chance
                prediction.source, prediction.bucket = FROM_GRAMMAR, bucket
        if prediction.token >= 0 and not guide.advance(prediction.token):
            prediction.token, prediction.probability = -1, 0.0
        if others:
            self._add_others(prediction, others)
        return tokens[1:], sure


class Continuation:
    """Predictions that follow the tokens of a neural drafter."""

    def __init__(
        self,
        chain: PredictionChain,
        predictions: Sequence[TokenPrediction],
        prefix: Sequence[int],
        longest: int,
        guide: DraftGuide | None,
    ) -> None:
        """predictions: after the history, or none. prefix: the tokens before the neural ones."""
        self.predictions: list[TokenPrediction] = []  # after the latest neural token
        self._chain, self._guide, self._longest = chain, guide, longest
        self._draft = list(prefix)
        self._prediction: TokenPrediction | None = None  # at the position of the next neural token
        chain.index.tokens += prefix
        if len(prefix) < len(predictions):
            self._prediction = predictions[len(prefix)]
        elif predictions:
            del chain.index.tokens[-1]
            self._prediction = chain.after(predictions[-1], prefix[-1])
        if guide is not None:
            self._advance_guide(guide)

    def add(self, token: int) -> list[float] | None:
        """Append a neural token; return the chances of what follows, None if it is forbidden."""
        if self._guide is not None and not self._guide.advance(token):
            return None
        self._draft.append(token)
        self.predictions = []
        if self._prediction is None or token in self._chain.stop_tokens:
            return []
        tokens, room = self._chain.index.tokens, self._longest - len(self._draft)
        self._prediction = self._chain.after(self._prediction, token)
        if room > 0:
            size = len(tokens)
            found = self._chain.chain_from(self._prediction, room, self._guide)
            del tokens[size:]
            self.predictions = [prediction for prediction in found if prediction.token >= 0]
            if self._guide is not None:  # return to the position after `token`
                self._guide.end_draft()
                self._advance_guide(self._guide)
        return [prediction.probability for prediction in self.predictions]

    def end(self) -> None:
        """Discard the tentative tokens and end the guide's draft."""
        self._chain.index.drop_tentative()
        if self._guide is not None:
            self._guide.end_draft()

    def _advance_guide(self, guide: DraftGuide) -> None:
        guide.begin_draft()
        for token in self._draft:
            guide.advance(token)
