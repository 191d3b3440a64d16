"""Drafting with one MTP head, or with several in a chain.

A single head drafts every token: it takes its own state for each further one. In a chain, head k
drafts token k: at every position it takes the state of head k - 1 there, and the token k + 1
positions later. So its keys and values end k positions before those of the first head.
DeepSeek-V3 (arXiv:2412.19437), section 2.2; sgl-project/sglang, srt/models/step3p5_mtp.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from akunu_py.models.mtp import Head

_LONGEST = 8  # heads trained for one token are rarely right further on

Rows = list[mx.array]
"""For each head, the states that it passed on, [1, rows, width], fewer for each further head."""


class HeadChain:
    """The heads of a model, as drafters with a directory of their own behave."""

    kind = "mtp"

    def __init__(self, head: Head, layers: int) -> None:
        """layers: of the target."""
        self.heads = [head, *head.following]
        self.needs_final = head.normed  # the state after the target's final norm, not `taps`
        self.taps = () if head.normed else (layers - 1,)
        self.longest = len(self.heads) if head.following else _LONGEST
        self.overlap = len(self.heads) - 1  # positions that each `extend` repeats

    def make_cache(self) -> list[Any]:
        """Return an empty cache of the committed positions, with one entry for each head."""
        return [entry for head in self.heads for entry in head.make_cache()]

    def states(self, hidden: mx.array) -> mx.array:
        """Return `hidden`: a head keeps it as it is."""
        return hidden

    def extend(self, states: mx.array, embeddings: mx.array, cache: list[Any]) -> Rows:
        """Append positions to `cache`, and return what `start` needs.

        states: of the positions, [1, rows, width]. embeddings: of the token after each. All calls
        but the first begin with the last `overlap` positions again, behind `keep`.
        """
        rows = [self.heads[0](embeddings, states, cache[:1])]
        for number, head in enumerate(self.heads[1:], 1):
            before = rows[-1][:, :-1]  # the last row's token is unknown
            if before.shape[1]:
                before = head(embeddings[:, number:], before, cache[number : number + 1])
            rows.append(before)
        return rows

    def keep(self, cache: Sequence[Any], positions: int) -> None:
        """Remove all but the first `positions` from `cache`."""
        for entry in cache:
            length = entry[0].offset if hasattr(entry, "caches") else entry.offset
            entry.trim(max(0, length - positions))

    def start(
        self,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        rows: Rows,
        cache: list[Any],
        length: int | None = None,
    ) -> HeadDraft:
        """Begin a draft of up to `length` tokens (default: `longest`).

        embed, lm_head: of the target. rows: from the last `extend`.
        """
        return HeadDraft(self, embed, lm_head, rows, cache, length or self.longest)


class HeadDraft:
    """One draft. `end` removes it from the cache."""

    def __init__(
        self,
        chain: HeadChain,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        rows: Rows,
        cache: list[Any],
        length: int,
    ) -> None:
        """See `HeadChain.start`."""
        self.length = min(length, chain.longest)
        self.appended = [0] * len(chain.heads)  # rows of each entry of the cache
        self._heads, self._embed, self._lm_head, self._cache = chain.heads, embed, lm_head, cache
        self._rows = list(rows)
        self._embeddings: Rows = []  # of the draft, [1, 1, width] each
        self._last = [rows[0][:, -1:]]  # states by depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`; see `Draft`.

        previous: the preceding draft token; without effect at depth 0.
        """
        chained = len(self._heads) > 1
        if depth == len(self._last):
            self._embeddings.append(self._embed(mx.array(previous).reshape(1, 1)))
            number = depth if chained else 0
            head, entry = self._heads[number], self._cache[number : number + 1]
            if chained:
                before = self._rows[depth - 1][:, -depth:]
                embeddings = mx.concatenate(self._embeddings[-before.shape[1] :], axis=1)
            else:
                before, embeddings = self._last[-1], self._embeddings[-1]
            made = head(embeddings, before, entry)
            self.appended[number] += before.shape[1]
            if chained:
                self._rows[depth] = mx.concatenate([self._rows[depth], made], axis=1)
            self._last.append(made[:, -1:])
        head = self._heads[depth if chained else 0]
        return head.logits(self._last[depth][:, -1], self._lm_head)

    def confidence(self, depth: int, previous: int | mx.array) -> None:
        """See `Draft`."""

    def end(self) -> None:
        """Remove the draft from the cache."""
        for entry, count in zip(self._cache, self.appended, strict=True):
            entry.trim(count)
