"""The next token, and how likely it is to be accepted: all sources of evidence compared.

Owns the comparison: the longest matches vote, copies in progress and the memory may know better,
and whoever is most likely right by the acceptance model is followed. Refuses to plan: how many
guesses to draft is the planner's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from akunu_py.ngram.acceptance import (
    NO_BITS,
    RATE,
    STREAM_RATE,
    AcceptanceModel,
    Opinion,
    match_class,
)
from akunu_py.ngram.copying import Copies, Copy, CopyGuess, Copying
from akunu_py.ngram.index import LONGEST_MATCH, Source, SuffixIndex
from akunu_py.ngram.memory import Memory

# A match that is a token longer has six times the say.
_VOTE = [6.0 ** min(length, LONGEST_MATCH) for length in range(LONGEST_MATCH + 1)]
_MEMORY_BELOW = (
    0.85  # in logits, 70 %: a surer guess of the conversation's own needs no second opinion
)
_BY_MATCH, _BY_COPY, _BY_CORRECTION, _BY_LEAP, _IN_FIELD, _BY_MEMORY = 0, 1, 3, 4, 5, 6
_EVIDENCE = ("match", "copy", "copy", "correction", "leap", "match", "memory")  # by kind


class Guess:
    """What was guessed for one position, and all that was considered."""

    __slots__ = (
        "copy_guesses",
        "kind",
        "leap",
        "logit",
        "opinions",
        "order",
        "pair",
        "probability",
        "sources",
        "stage",
        "token",
    )

    def __init__(self, pair: int, sources: Sequence[Source]) -> None:
        self.token = -1  # no guess
        self.logit = -inf  # before the last stage
        self.probability = 0.0
        self.kind = _BY_MATCH
        self.stage = 0
        self.order = 0  # tokens of context that the longest match shares
        self.pair = pair
        self.sources = sources
        self.opinions: list[Opinion] = []
        self.copy_guesses: list[CopyGuess | None] = [None, None]
        self.leap: tuple[int, int] | None = None

    @property
    def evidence(self) -> tuple[str, int]:
        """What the guess rests on, in a word, and the order of the match where it is one."""
        word = _EVIDENCE[self.kind]
        return word, self.order if word == "match" else 0

    def take(self, opinion: Opinion, kind: int) -> None:
        """Considers `opinion`, and follows it if it is more likely right than those before."""
        self.opinions.append(opinion)
        if opinion.logit > self.logit:
            self.token = opinion.token
            self.logit = opinion.logit
            self.kind = kind


class Guesser:
    """Guesses the token after the index's last, tentative ones included."""

    def __init__(
        self,
        index: SuffixIndex,
        model: AcceptanceModel,
        copying: Copying,
        memory: Memory | None = None,
    ) -> None:
        self.index = index
        self.model = model
        self.copying = copying
        self.memory = memory

    def guess(self, recent: int, sources: Sequence[Source], copies: Copies) -> Guess:
        """recent: the outcomes of the last three guesses, latest in the lowest bit."""
        tokens = self.index.tokens
        pair = tokens[-2] << 20 | tokens[-1] if len(tokens) > 1 else -1
        guess = Guess(pair, sources)
        for which in (0, 1):
            copy = copies[which]
            if copy is not None:
                guess.copy_guesses[which] = self.copying.guess(which, copy)
        own = self._by_match(guess, recent) if sources else None
        for which in (0, 1):
            copy_guess, copy = guess.copy_guesses[which], copies[which]
            if copy_guess is None or copy is None:
                continue
            self._by_copy(guess, own, which, copy_guess, recent)
            if copy.run:
                self._by_correction(guess, copy_guess)
        first = copies[0]
        if first is not None:
            self._by_leap(guess, first)
            if guess.kind == _BY_MATCH and first.leapt == 2:
                guess.kind = _IN_FIELD
        if own is None and self.memory is not None:
            self._by_memory(guess, self.memory, None, recent)
        if guess.token >= 0:
            guess.probability, guess.stage = self.model.finish(guess.kind, guess.logit)
        return guess

    def _by_match(self, guess: Guess, recent: int) -> Opinion:
        model = self.model
        token, length, share, agreeing, opposing = self._vote(guess.sources)
        guess.order = length
        after = model.pair_bits.get(guess.pair, NO_BITS)
        same = model.token_bits.get(token, NO_BITS)
        agrees = 0
        for copy_guess in guess.copy_guesses:
            if copy_guess is not None:
                if copy_guess.token == token:
                    agrees = max(agrees, 1)
                elif copy_guess.kind != 6:
                    agrees = 2
        length_class = match_class(length)
        weights = [
            (model.match, length_class),
            (model.agreeing, agreeing),
            (model.opposing, opposing),
            (model.share, share),
            (model.recent, recent),
            (model.after_pair, after),
            (model.same_token, same),
            (model.copy_agrees, agrees),
        ]
        total = (
            model.match[length_class]
            + model.agreeing[agreeing]
            + model.opposing[opposing]
            + model.share[share]
            + model.recent[recent]
            + model.after_pair[after]
            + model.same_token[same]
            + model.copy_agrees[agrees]
        )
        own = Opinion(
            token,
            total,
            RATE,
            weights,
            [(model.pair_bits, guess.pair, after), (model.token_bits, token, same)],
        )
        if self.memory is not None and own.logit < _MEMORY_BELOW:
            self._by_memory(guess, self.memory, own, recent)
        guess.take(own, _BY_MATCH)
        return own

    def _vote(self, sources: Sequence[Source]) -> tuple[int, int, int, int, int]:
        """The token that most and longest matches go on with, the longest of them, and the
        classes of its share of the votes, of those that agree, of those that do not."""
        tokens = self.index.tokens
        if len(sources) == 1:
            position, length = sources[0]
            return tokens[position], length, 0, 0, 0
        votes: dict[int, float] = {}
        longest: dict[int, int] = {}
        for position, length in sources:
            token = tokens[position]
            votes[token] = votes.get(token, 0.0) + _VOTE[length]
            if length > longest.get(token, 0):
                longest[token] = length
        share = 0
        if len(votes) > 1:
            token = max(votes, key=votes.__getitem__)
            part = votes[token] / sum(votes.values())
            share = 0 if part > 0.99 else 1 if part > 0.8 else 2 if part > 0.5 else 3
        length = longest[token]
        least = min(length, 3)
        agreeing = opposing = 0
        for position, other in sources:
            if other >= least:
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

    def _by_copy(
        self, guess: Guess, own: Opinion | None, which: int, copy_guess: CopyGuess, recent: int
    ) -> None:
        model = self.model
        token = copy_guess.token
        bits = model.copy_bits.get(token, NO_BITS)
        outcome = (model.copy_bits, token, bits)
        if own is not None and own.token == token:
            own.outcomes.append(outcome)  # the match speaks for both
            return
        weights = [
            (model.copy[which], copy_guess.kind),
            (model.copy_recent, recent),
            (model.copy_token, bits),
        ]
        total = 0.0
        for values, i in weights:
            total += values[i]
        guess.take(Opinion(token, total, STREAM_RATE, weights, [outcome]), _BY_COPY + which)

    def _by_correction(self, guess: Guess, copy_guess: CopyGuess) -> None:
        found = self.copying.correction(copy_guess.position)
        if found is None:
            return
        model = self.model
        token, key = found
        bits = model.correction_bits.get(key, NO_BITS)
        weights = [(model.correction, bits)]
        outcomes = [(model.correction_bits, key, bits)]
        guess.take(
            Opinion(token, model.correction[bits], STREAM_RATE, weights, outcomes), _BY_CORRECTION
        )

    def _by_leap(self, guess: Guess, first: Copy) -> None:
        leap = guess.leap = self.copying.leap(first, guess.pair)
        if leap is None or first.run:
            return
        model = self.model
        bits = model.leap_bits.get(guess.pair, NO_BITS)
        outcomes = [(model.leap_bits, guess.pair, bits)]
        weights = [(model.leap, bits)]
        guess.take(Opinion(leap[0], model.leap[bits], STREAM_RATE, weights, outcomes), _BY_LEAP)

    def _by_memory(self, guess: Guess, memory: Memory, own: Opinion | None, recent: int) -> None:
        """The memory backs the conversation's own guess, or has a guess of its own."""
        recalled = memory.recall(self.index.tokens)
        if recalled is None:
            return
        model = self.model
        if own is not None:
            agrees = 1 if recalled.token == own.token else 2
            own.weights.append((model.memory_agrees, agrees))
            own.logit += model.memory_agrees[agrees]
            if agrees == 1:
                return
        bits = model.memory_bits.get(recalled.token, NO_BITS)
        outcomes = [(model.memory_bits, recalled.token, bits)]
        weights = [
            (model.memory_match, min(recalled.length, 5) - 1),
            (model.memory_agreeing, min(recalled.agreeing, 3) - 1),
            (model.memory_opposing, min(recalled.opposing, 2)),
            (model.memory_against, own is not None),
            (model.memory_token, bits),
            (model.copy_recent, recent),
        ]
        total = 0.0
        for values, i in weights:
            total += values[i]
        guess.take(Opinion(recalled.token, total, RATE, weights, outcomes), _BY_MEMORY)
