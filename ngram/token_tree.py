"""Token trees: drafts with several alternatives after the same token, verified in one pass.

The target's own sample decides at each token which alternative is accepted, so the output is that
of plain decoding. Sources: SpecInfer (Miao et al. 2024), EAGLE-2 (Li et al. 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from akunu_py.ngram.planner import best_count, value_at

LEAST_GAIN = 0.25  # expected tokens of a tree: the highest of many estimates tends to be too high


class TokenTree(list[int]):
    """Draft tokens, each after its parent; tokens with the same parent are alternatives."""

    def __init__(self, tokens: Iterable[int], parents: Iterable[int]) -> None:
        """parents: the index of the token before each one, which is smaller; -1 for none."""
        super().__init__(tokens)
        self.parents = list(parents)

    @classmethod
    def of(cls, draft: Sequence[int]) -> TokenTree:
        """Return `draft` as a tree; a plain list is a chain."""
        return draft if isinstance(draft, cls) else cls(draft, range(-1, len(draft) - 1))

    @property
    def depths(self) -> list[int]:
        """The number of tokens up to each one."""
        return [len(self.path(node)) for node in range(len(self))]

    def first(self, count: int) -> TokenTree:
        """Return the tree of the first `count` tokens."""
        return TokenTree(self[:count], self.parents[:count])

    def path(self, node: int) -> list[int]:
        """Return the indexes of the tokens up to `node`; none for -1."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def continuations(self, node: int) -> list[list[int]]:
        """Return the tokens of each branch after `node` (-1: after the history), in draft order.

        Where a branch has alternatives itself, the first one continues it.
        """
        found, by_end = list[list[int]](), dict[int, list[int]]()
        for child, (token, parent) in enumerate(zip(self, self.parents, strict=True)):
            if parent == node:
                by_end[child] = [token]
                found.append(by_end[child])
            elif parent in by_end:
                by_end[child] = by_end.pop(parent)
                by_end[child].append(token)
        return found

    def accepted(self, sampled: Sequence[int]) -> list[int]:
        """Return the indexes of the accepted tokens.

        sampled: the target's token after the history, and after each draft token.
        """
        found, last = list[int](), -1
        for node, (token, parent) in enumerate(zip(self, self.parents, strict=True)):
            if parent == last and token == sampled[last + 1]:
                found.append(node)
                last = node
        return found


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens that may follow the first `at` tokens of a chain."""

    at: int
    tokens: Sequence[int]
    chances: Sequence[float]  # of each token, given the ones before it
    # From `best_draft`, if 1, 2, ... of the tokens are right; 0 for those that are missing.
    values: Sequence[float] = ()

    def first(self, count: int) -> Branch:
        return Branch(self.at, self.tokens[:count], self.chances[:count], self.values[:count])

    def nodes(self, reached: float) -> Iterator[tuple[float, float]]:
        """Yield for each token its chance, and the tokens that later drafts gain by it.

        That is negative for most, because rejected tokens are not lost: the target yields the
        first one, and the next pass drafts the others. reached: the chance of the chain before it.
        """
        chances = list(accumulate(self.chances, mul, initial=reached))[1:]
        lost = list(map(mul, chances, self.values))
        for place, chance in enumerate(chances):
            yield chance, value_at(lost, place + 1) - value_at(lost, place)


def likeliest(
    chain: Branch, branches: Sequence[Branch], drafted: int = 0
) -> list[tuple[float, float, int]]:
    """Return the tokens after the first `drafted` ones of the chain, the likeliest first.

    Of each: its chance, the tokens that later drafts gain by it, and its branch (-1: the chain).
    Each token is after the one before it.
    """
    reached = list(accumulate(chain.chances, mul, initial=1.0))
    found = [(*node, -1) for node in list(chain.nodes(1.0))[drafted:]]
    for index, each in enumerate(branches):
        found += [(*node, index) for node in each.nodes(reached[each.at])]
    return sorted(found, key=lambda node: -node[0])


def best_tree(
    chain: Branch,
    branches: Sequence[Branch],
    drafted: int,
    costs: Sequence[float],
    rate: float,
    least_gain: float = LEAST_GAIN,
) -> tuple[int, list[Branch], float]:
    """Return how many tokens of the chain to draft, which branches, and their gain in tokens.

    Takes the likeliest tokens, each after the one before it, while they are worth their rows; see
    `best_count`. drafted: tokens of the chain to draft in any case. costs: of a pass over 1, 2, ...
    rows; they limit the draft.
    """
    found = likeliest(chain, branches, drafted)
    rows = costs[drafted + 1 :]
    chances, later = ([node[part] for node in found[: len(rows)]] for part in (0, 1))
    values = list(accumulate(later, initial=0.0))
    count, gain = best_count(chances, rows, rate, costs[drafted], values=values)
    order = [index for _, _, index in found[:count] if gain >= least_gain]
    more, chosen = split(order, branches)
    return drafted + more if chosen else drafted, chosen, gain


def split(order: Sequence[int], branches: Sequence[Branch]) -> tuple[int, list[Branch]]:
    """Return the number of tokens of the chain, and the branches. order: from `likeliest`."""
    counts = Counter(order)
    taken = [each.first(counts[index]) for index, each in enumerate(branches) if counts[index]]
    return counts[-1], taken


def grow(chain: Sequence[int], branches: Sequence[Branch]) -> list[int]:
    """Return the draft of a chain and its branches, which is a plain list without branches."""
    tokens, parents = list(chain), list(range(-1, len(chain) - 1))
    for branch in branches:
        parent = branch.at - 1
        for token in branch.tokens:
            parents.append(parent)
            parent = len(tokens)
            tokens.append(token)
    return TokenTree(tokens, parents) if branches else tokens
