"""Drafting with one MTP head, or with several in a chain.

A single head drafts every token: it takes its own state for each further one. In a chain, head k
drafts token k: at every position it takes the state of head k - 1 there (or the target's), and the
token k + 1 positions later. So its keys and values end k positions before those of the first head.
DeepSeek-V3 (arXiv:2412.19437), section 2.2; sgl-project/sglang, srt/models/step3p5_mtp.py and
srt/speculative/multi_layer_eagle_worker_v2.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from akunu_py.models.mtp import Head

_LONGEST = 8  # heads trained for one token are rarely right further on

Rows = list[mx.array]
"""For each head, the states that it passed on, [1, rows, width], fewer for each further head.

If further heads take the target's states, those come last.
"""


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
            known = max(0, states.shape[1] - number)  # rows whose tokens are known
            made = (rows[-1] if head.chained else states)[:, :known]
            if known:
                made = head(embeddings[:, number:], made, cache[number : number + 1])
            rows.append(made)
        return rows if self.heads[-1].chained else [*rows, states]

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
    ) -> HeadDraft:
        """Begin a draft. embed, lm_head: of the target. rows: from the last `extend`."""
        return HeadDraft(self, embed, lm_head, rows, cache)


class HeadDraft:
    """One draft. `end` removes it from the cache."""

    def __init__(
        self,
        chain: HeadChain,
        embed: Callable[[mx.array], mx.array],
        lm_head: Callable[[mx.array], mx.array],
        rows: Rows,
        cache: list[Any],
    ) -> None:
        """See `HeadChain.start`."""
        self.appended = [0] * len(chain.heads)  # rows of each entry of the cache
        self._heads, self._embed, self._lm_head, self._cache = chain.heads, embed, lm_head, cache
        self._rows = list(rows)
        self._embeddings: Rows = []  # of the draft, [1, 1, width] each
        self._last = [rows[0][:, -1:]]  # states by depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`.

        previous: the preceding draft token; without effect at depth 0.
        """
        heads = len(self._heads)
        if depth == len(self._last) and (heads == 1 or depth < heads):
            self._embeddings.append(self._embed(mx.array(previous).reshape(1, 1)))
            self._last.append(self._run(depth))
        last = self._last[min(depth, len(self._last) - 1)]  # chains repeat their last token
        return self._heads[min(depth, heads - 1)].logits(last[:, -1], self._lm_head)

    def _run(self, depth: int) -> mx.array:
        """Run the head of draft token `depth`. Returns its last state, [1, 1, width]."""
        if len(self._heads) == 1:
            self.appended[0] += 1
            return self._heads[0](self._embeddings[-1], self._last[-1], self._cache)
        head, entry = self._heads[depth], self._cache[depth : depth + 1]
        before = self._rows[depth - 1 if head.chained else -1][:, -depth:]
        rows = before.shape[1]
        made = head(mx.concatenate(self._embeddings[-rows:], axis=1), before, entry)
        self.appended[depth] = rows
        self._rows[depth] = mx.concatenate([self._rows[depth], made], axis=1)
        return made[:, -1:]

    def end(self) -> None:
        """Remove the draft from the cache."""
        for entry, count in zip(self._cache, self.appended, strict=True):
            entry.trim(count)
