"""Token trees: drafts with several alternatives after the same token, verified in one pass.

The target's own sample decides at each token which alternative is accepted, so the output is that
of plain decoding. Sources: SpecInfer (Miao et al. 2024), EAGLE-2 (Li et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

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

    @property
    def leaves(self) -> list[int]:
        """The indexes of the last token of each path."""
        return sorted(set(range(len(self))) - set(self.parents))

    def first(self, count: int) -> list[int]:
        """Return the draft of the first `count` tokens, which is a plain list without branches."""
        tokens, parents = self[:count], self.parents[:count]
        is_chain = parents == list(range(-1, len(tokens) - 1))
        return tokens if is_chain else TokenTree(tokens, parents)

    def path(self, node: int) -> list[int]:
        """Return the indexes of the tokens up to `node`; none for -1."""
        found = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def continuations(self, node: int) -> list[list[int]]:
        """Return the tokens of each path after `node` (-1: the history), the likeliest first."""
        before = self.path(node)
        size = len(before)
        paths = sorted(path for path in map(self.path, self.leaves) if path[:size] == before)
        return [[self[each] for each in path[size:]] for path in paths if len(path) > size]

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


class Candidates:
    """Tokens that may be drafted: a chain, and branches of it; see `add`."""

    def __init__(
        self, tokens: Sequence[int], chances: Sequence[float], values: Sequence[float] = ()
    ) -> None:
        self._nodes: list[_Node] = []
        self.add(-1, tokens, chances, values)
        self._chain = len(self._nodes)

    def add(
        self, parent: int, tokens: Sequence[int], chances: Sequence[float],
        values: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Add tokens after the chain's token at `parent`, or after the history (-1).

        chances: of each token, given the ones before it. values: from `best_draft`, once 1, 2, ...
        of them are right; 0 for those that are missing.
        """
        first = self._nodes[parent].chance if parent >= 0 else 1.0
        reached = list(accumulate(chances, mul, initial=first))[1:]
        # Rejected tokens are not lost: the target yields the first one, and the next pass drafts
        # the others. So `later` is negative for most.
        after = list(map(mul, reached, values))
        for place, token in enumerate(tokens):
            later = value_at(after, place + 1) - value_at(after, place)
            self._nodes.append(_Node(reached[place], later, token, parent))
            parent = len(self._nodes) - 1

    def best(
        self, drafted: int, costs: Sequence[float], rate: float, least_gain: float = LEAST_GAIN
    ) -> tuple[list[int] | None, list[float], float]:
        """Return the best draft with branches, or None if it gains less than `least_gain` by them.

        Also the chance of each token and all before it, and the gain over the best chain in tokens.
        Takes the first `drafted` tokens of the chain, then the likeliest ones, each after the one
        before it, while they are worth their rows; see `best_count`. costs: of a pass over 1, 2,
        ... rows; they limit the draft.
        """
        nodes, rows, gain = self._nodes, costs[drafted + 1 :], 0.0
        order = sorted(range(drafted, len(nodes)), key=lambda node: -nodes[node].chance)
        for found in (range(drafted, self._chain), order):
            more = [nodes[node] for node in found[: len(rows)]]
            chances = [each.chance for each in more]
            values, chain_gain = list(accumulate((each.later for each in more), initial=0.0)), gain
            count, gain = best_count(chances, rows, rate, costs[drafted], values=values)
        taken = [*range(drafted), *order[:count]]
        if max(taken, default=-1) < self._chain or gain - chain_gain < least_gain:
            return None, [], 0.0
        places = {node: place for place, node in enumerate(taken)}
        parents = [places.get(nodes[node].parent, -1) for node in taken]
        draft = TokenTree([nodes[node].token for node in taken], parents).first(len(taken))
        return draft, [nodes[node].chance for node in taken], gain - chain_gain


class _Node(NamedTuple):
    chance: float  # of the token and all before it
    later: float  # tokens that later drafts gain by it
    token: int
    parent: int
