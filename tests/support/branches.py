"""Several candidates for a token, verified in one pass: the rules of acceptance, in numbers alone.

The product verifies one draft; docs/log/2026-11.md says what a second branch is worth. These rules
would accept one, and the tests show that they are exact.

Draws that depend on the seed and the position only make the rule simple: whatever was drafted, each
row draws the target's token, and the branch that has it is followed. A candidate never decides what
is drawn, so any number of them, chosen in any way, leaves distribution and tokens as they are.

Drawing after the candidates needs the multi-round rule (Miao et al. 2024, SpecInfer, algorithm 2;
Leviathan et al. 2023 for one candidate): each candidate x that a drafter drew from q is accepted
with min(1, p(x) / q(x)), and a rejected one leaves p = norm(max(0, p - q)) to the next. A guess is
a q of one token. Exact, too, but the tokens are others with drafts than without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np


@dataclass(slots=True)
class Branches:
    """Candidates for the next token, each with those for the token behind it. A pass has a row for
    each, and one for what is known."""

    after: dict[int, Branches] = field(default_factory=dict)

    def add(self, tokens: Sequence[int]) -> None:
        """One more branch; what it shares with others takes no more rows."""
        here = self
        for token in tokens:
            here = here.after.setdefault(token, Branches())

    @property
    def rows(self) -> int:
        return 1 + sum(branch.rows for branch in self.after.values())


def follow(branches: Branches, drawn: Callable[[Sequence[int]], int]) -> list[int]:
    """The tokens that a pass over `branches` yields, the bonus included.

    drawn: the target's token behind so many of them, drawn with the noise of its position.
    """
    tokens: list[int] = []
    here: Branches | None = branches
    while here is not None:
        tokens.append(drawn(tokens))
        here = here.after.get(tokens[-1])
    return tokens


def multi_round(
    target: np.ndarray, candidates: Sequence[tuple[int, np.ndarray]], random: np.random.Generator
) -> int:
    """The token that is kept, by the multi-round rule. target: probabilities, [vocab].
    candidates: in their order, each drawn from the probabilities beside it, [vocab]."""
    for token, drafted in candidates:
        if random.random() * drafted[token] < target[token]:
            return token
        rest = np.maximum(target - drafted, 0.0)
        if not rest.sum():  # equal but for rounding
            return token
        target = rest / rest.sum()
    return pick(target, random)


def pick(chances: np.ndarray, random: np.random.Generator) -> int:
    """A token, with these probabilities, [vocab]."""
    place = np.searchsorted(np.cumsum(chances), random.random(), side="right")
    return min(int(place), len(chances) - 1)


def best_shape(
    accepted: Sequence[float],
    cost: float,
    second: float,
    curve: Callable[[int], float],
    *,
    branches: bool = True,
) -> tuple[float, int, tuple[int, ...]]:
    """The most tokens for a unit of cost, and the draft that has them: its length, and the places
    from 1 on where it has a second candidate too.

    accepted: by place, the share of drafts that are right up to there. second: how often a second
    candidate, which costs a row alone, is right where the first was wrong. cost: of a token, where
    a plain step costs 1.
    """
    reached = (1.0, *accepted)
    best: tuple[float, int, tuple[int, ...]] = (1.0 / curve(1), 0, ())
    for length in range(1, len(reached)):
        places = range(1, length + 1)
        for count in range(length + 1 if branches else 1):
            for where in combinations(places, count):
                tokens = sum(reached[: length + 1])
                tokens += sum(second * (reached[place - 1] - reached[place]) for place in where)
                value = tokens / (curve(1 + length + count) + cost * length)
                best = max(best, (value, length, where))
    return best
