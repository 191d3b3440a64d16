"""Drafters of tests."""

import random
from collections.abc import Sequence

from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.token_tree import TokenTree
from akunu_py.types import NeuralDrafter, PassCosts


class FixedCosts(CostCurve):
    """Costs for a planner that ignores measured times."""

    def observe(self, rows: int, seconds: float, context: int) -> None:
        """Do nothing."""


class OffersAll:
    """Base of drafters that offer every token of `propose` as certain."""

    _offered: list[int]

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        raise NotImplementedError

    def offer(self, limit: int, known: PassCosts | None = None) -> list[float]:
        self._offered = self.propose(limit)
        return [1.0] * len(self._offered)

    def take(self, count: int) -> list[int]:
        offered = self._offered
        return offered.first(count) if isinstance(offered, TokenTree) else offered[:count]


class Mixture(OffersAll):
    """Drafts guesses, then tokens of a neural drafter, then guesses, up to 3 of each.

    whole: the prompt and the answer; one guess in ten is wrong.
    """

    pipelines = False

    def __init__(
        self, neural_drafter: NeuralDrafter, whole: Sequence[int], vocabulary: int, seed: int
    ) -> None:
        self._neural_drafter, self._whole = neural_drafter, list(whole)
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._known: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self._known += tokens

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        before, own, behind = (self._random.randrange(4) for _ in range(3))
        draft, left = self._guesses(0, min(before, limit)), limit
        before, made = len(draft), list[int]()
        if own and left > before and self._neural_drafter.start_draft([*self._known, *draft]):
            while len(made) < min(own, left - before):
                token, _ = self._neural_drafter.draft_token()
                if token < 0:
                    break
                made.append(token)
        draft += made
        return draft + self._guesses(len(draft), min(behind, left - len(draft)))

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        pass

    def _guesses(self, place: int, count: int) -> list[int]:
        start = len(self._known) + place
        return [
            (token + (self._random.random() < 0.1)) % self._vocabulary
            for token in self._whole[start : start + count]
        ]


class Choices:
    """A `DraftGuide` of texts of equal length, each token of which is known once it has begun."""

    def __init__(self, *texts: list[int]) -> None:
        self.texts, self.done = texts, list[int]()

    def begin_draft(self) -> None:
        self.done = []

    def forced(self) -> tuple[list[int], bool]:
        left = self._left()
        return (left[0], True) if len(left) == 1 else ([], True)

    def ending(self) -> tuple[list[int], int]:
        return [], 0

    def choices(self) -> list[int]:
        return [text[0] for text in self._left()]

    def advance(self, token: int) -> bool:
        allowed = any(text[:1] == [token] for text in self._left())
        self.done += [token] * allowed
        return allowed

    def end_draft(self) -> None:
        """Nothing is kept."""

    def _left(self) -> list[list[int]]:
        done = self.done
        return [text[len(done) :] for text in self.texts if text[: len(done)] == done]
