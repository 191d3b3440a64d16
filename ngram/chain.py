"""Chains of guesses: after the history, and after the tokens of a neural drafter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from akunu_py.ngram.guess import FROM_GRAMMAR, Guess, Guesser
from akunu_py.ngram.index import LONGEST_MATCH, SuffixMatch
from akunu_py.types import DraftGuide

NEGLIGIBLE = 0.1  # a chain ends below this chance

# Acceptance of a forced token: first, inside and last of a text; then the same of a text that is
# only probably forced. Priors of running averages.
_FORCED_PRIORS = (0.99, 0.99, 0.85, 0.95, 0.99, 0.8)
# Acceptance of the guess that a value ends after its first token, its second, ...
_ENDING_PRIORS = (0.3, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1)
_FORCED_RATE = 0.05
_SUREST = 0.99
_Forced = tuple[list[int], bool]  # see `DraftGuide.forced`
_NOTHING_FORCED: _Forced = [], True


class GuessChain:
    """Chains guesses, each of which assumes that the previous one is accepted.

    A chain ends at a position without a guess, at an unlikely guess, or at a stop token. With a
    guide, it guesses forced tokens and no forbidden ones.
    """

    def __init__(self, guesser: Guesser, stop_tokens: Collection[int]) -> None:
        self.stop_tokens = stop_tokens
        self.index, self.tracker = guesser.index, guesser.tracker
        self._guesser = guesser
        self._forced_chances = [*_FORCED_PRIORS, *_ENDING_PRIORS]

    def first(self, recent: int) -> Guess:
        """Return the guess after the history. recent: see `Guess`."""
        return self._guesser.guess(recent, self.index.matches(), self.tracker.copies)

    def after_history(self, recent: int, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return at most `longest` guesses after the history."""
        if guide is not None:
            guide.begin_draft()
        guesses = self.chain_from(self.first(recent), longest, guide)
        self.index.drop_tentative()
        if guide is not None:
            guide.end_draft()
        return guesses

    def chain_from(self, guess: Guess, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return `guess`, which follows the last tentative token, and the guesses after it."""
        chance, forced = 1.0, _NOTHING_FORCED
        guesses: list[Guess] = []
        while True:
            if guide is not None:
                forced = self._apply_guide(guess, guide, forced)
            guesses.append(guess)
            token = guess.token
            chance *= guess.probability
            if (
                token < 0
                or chance < NEGLIGIBLE
                or len(guesses) >= longest
                or token in self.stop_tokens
            ):
                return guesses
            guess = self.after(guess, token)

    def after(self, guess: Guess, token: int) -> Guess:
        """Append `token` as tentative in the place of `guess`; return the guess after it."""
        index, tracker = self.index, self.tracker
        tokens, matches = index.tokens, guess.matches
        copies = tracker.advance(guess.copies, token, guess.copy_guesses, guess.edits, guess.skip)
        copies = tracker.restart(copies, token, matches)
        continued: list[SuffixMatch] = []
        long = False  # only short matches can have missed a better place
        for position, length in matches:
            if tokens[position] == token:
                continued.append((position + 1, length + (length < LONGEST_MATCH)))
                long = long or length > 1
        tokens.append(token)
        recent = (guess.recent << 1 | (guess.token == token)) & 7
        return self._guesser.guess(recent, continued if long else index.matches(), copies)

    def learn_forced(self, guess: Guess, hit: bool) -> None:
        """Record whether a guess from the grammar was right."""
        chance = self._forced_chances[guess.bucket]
        self._forced_chances[guess.bucket] = min(chance + _FORCED_RATE * (hit - chance), _SUREST)

    def _apply_guide(self, guess: Guess, guide: DraftGuide, forced: _Forced) -> _Forced:
        """Apply the grammar to `guess`; return what it forces next. forced: previous result."""
        tokens, sure = forced if forced[0] else guide.forced()
        place = 2 if len(tokens) == 1 else int(bool(forced[0]))
        bucket = place + 3 * (not sure)
        if not tokens:
            tokens, written = guide.ending()
            bucket = len(_FORCED_PRIORS) - 1 + min(written, len(_ENDING_PRIORS))
            sure = False
        if tokens:
            chance = self._forced_chances[bucket]
            other = guess.token != tokens[0]
            if other and not sure and guess.probability > chance and guide.advance(guess.token):
                return [], sure
            if other or guess.probability < chance:
                guess.token, guess.source, guess.bucket = tokens[0], FROM_GRAMMAR, bucket
                guess.probability = chance
        if guess.token >= 0 and not guide.advance(guess.token):
            guess.token, guess.probability = -1, 0.0
        return tokens[1:], sure


class Continuation:
    """Guesses that follow the tokens of a neural drafter."""

    def __init__(
        self,
        chain: GuessChain,
        guesses: Sequence[Guess],
        prefix: Sequence[int],
        longest: int,
        guide: DraftGuide | None,
    ) -> None:
        """guesses: after the history, or none. prefix: the tokens before the neural ones."""
        self.guesses: list[Guess] = []  # after the latest neural token
        self._chain, self._guide, self._longest = chain, guide, longest
        self._draft = list(prefix)
        self._guess: Guess | None = None  # at the position of the next neural token
        chain.index.tokens += prefix
        if len(prefix) < len(guesses):
            self._guess = guesses[len(prefix)]
        elif guesses:
            del chain.index.tokens[-1]
            self._guess = chain.after(guesses[-1], prefix[-1])
        if guide is not None:
            self._advance_guide(guide)

    def add(self, token: int) -> list[float] | None:
        """Append neural `token`; return the chances of the guesses after it, None if forbidden."""
        if self._guide is not None and not self._guide.advance(token):
            return None
        self._draft.append(token)
        self.guesses = []
        if self._guess is None or token in self._chain.stop_tokens:
            return []
        tokens, room = self._chain.index.tokens, self._longest - len(self._draft)
        self._guess = self._chain.after(self._guess, token)
        if room > 0:
            size = len(tokens)
            found = self._chain.chain_from(self._guess, room, self._guide)
            del tokens[size:]
            self.guesses = [guess for guess in found if guess.token >= 0]
            if self._guide is not None:  # return to the position after `token`
                self._guide.end_draft()
                self._advance_guide(self._guide)
        return [guess.probability for guess in self.guesses]

    def end(self) -> None:
        """Discard the tentative tokens and end the guide's draft."""
        self._chain.index.drop_tentative()
        if self._guide is not None:
            self._guide.end_draft()

    def _advance_guide(self, guide: DraftGuide) -> None:
        guide.begin_draft()
        for token in self._draft:
            guide.advance(token)
