"""Whether the guesses of the n-grams draft, a network does, or one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from akunu_py.ngram.guess import Guess
from akunu_py.ngram.networks import Division, PlannedNetwork, Terms, futures
from akunu_py.ngram.planner import best_draft

# How often guesses are right that were preferred to a network's tokens, for each time that they
# promise it, at first, and how many guesses that counts for.
_HOLDS, _PREFERRED = 0.95, 10.0


class Chooser:
    """What earns most, by the chances and costs that were learned, drafts.

    How far preferred guesses hold what they promise is learned, too: of several estimates, all as
    good, the highest is too high.
    """

    def __init__(self, networks: Sequence[PlannedNetwork]) -> None:
        self._networks = networks
        self._promised, self._held = _PREFERRED, _PREFERRED * _HOLDS

    def choose(
        self, chances: Sequence[float], terms: Terms, longest: int, *, stops: bool
    ) -> tuple[Division, PlannedNetwork] | None:
        """The network that drafts, and behind how many guesses; None where those alone do.

        chances: of the guesses. stops: the last of them is a stop token, behind which nothing
        comes."""
        if any(network.competes(longest, terms) for network in self._networks):
            trust = min(1.0, self._held / self._promised)
            chances = [trust * chance for chance in chances]
        length, values = best_draft(
            chances,
            terms.costs,
            terms.rate,
            longest,
            ongoing=terms.ongoing,
            rerun_on_reject=terms.rerun,
        )
        coming = futures(chances, values)
        before = chances[:-1] if stops else chances
        least = values[0]
        best: tuple[Division, PlannedNetwork] | None = None
        for network in self._networks:
            division = network.division(before, coming, longest, terms)
            if division.value > least:
                least, best = division.value, (division, network)
            elif not length and best is None and (trial := network.trial(longest, terms)):
                best = trial, network
        return best

    def learn(self, preferred: Sequence[Guess], tokens: Sequence[int]) -> None:
        """`tokens` came."""
        for guess, token in zip(preferred, tokens, strict=False):
            self._promised += guess.probability
            self._held += guess.token == token
            if guess.token != token:
                break
