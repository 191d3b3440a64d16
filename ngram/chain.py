"""Chains of predictions: after the history, and after the tokens of a neural drafter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from akunu_py.ngram.index import LONGEST_MATCH, SuffixMatch
from akunu_py.ngram.prediction import FROM_GRAMMAR, TokenPrediction, TokenPredictor
from akunu_py.types import DraftGuide

NEGLIGIBLE = 0.1  # a chain ends below this chance

# Acceptance of a forced token: first, inside and last of a text; then the same of a text that is
# only probably forced. Priors of running averages.
_FORCED_PRIORS = (0.99, 0.99, 0.85, 0.95, 0.99, 0.8)
# Acceptance of the prediction that a value ends after its first token, its second, ...
_ENDING_PRIORS = (0.3, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1)
_FORCED_RATE = 0.05
_SUREST = 0.99
_Forced = tuple[list[int], bool]  # see `DraftGuide.forced`
_NOTHING_FORCED: _Forced = [], True


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

    def first(self, recent: int) -> TokenPrediction:
        """Return the prediction after the history. recent: see `TokenPrediction`."""
        return self._predictor.predict(recent, self.index.matches(), self.tracker.copies)

    def after_history(
        self, recent: int, longest: int, guide: DraftGuide | None
    ) -> list[TokenPrediction]:
        """Return at most `longest` predictions after the history."""
        if guide is not None:
            guide.begin_draft()
        predictions = self.chain_from(self.first(recent), longest, guide)
        self.index.drop_tentative()
        if guide is not None:
            guide.end_draft()
        return predictions

    def chain_from(
        self, prediction: TokenPrediction, longest: int, guide: DraftGuide | None
    ) -> list[TokenPrediction]:
        """Return `prediction`, for the token after the tentative ones, and those that follow."""
        chance, forced = 1.0, _NOTHING_FORCED
        predictions: list[TokenPrediction] = []
        while True:
            if guide is not None:
                forced = self._apply_guide(prediction, guide, forced)
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

    def _apply_guide(
        self, prediction: TokenPrediction, guide: DraftGuide, forced: _Forced
    ) -> _Forced:
        """Apply the grammar; return what it forces next. forced: the previous result."""
        tokens, sure = forced if forced[0] else guide.forced()
        place = 2 if len(tokens) == 1 else int(bool(forced[0]))
        bucket = place + 3 * (not sure)
        if not tokens:
            tokens, written = guide.ending()
            bucket = len(_FORCED_PRIORS) - 1 + min(written, len(_ENDING_PRIORS))
            sure = False
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
                prediction.token, prediction.source, prediction.bucket = (
                    tokens[0],
                    FROM_GRAMMAR,
                    bucket,
                )
                prediction.probability = chance
        if prediction.token >= 0 and not guide.advance(prediction.token):
            prediction.token, prediction.probability = -1, 0.0
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
