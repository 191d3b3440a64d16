"""What every drafter with its own directory has, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

Embed = Callable[[mx.array], mx.array]
"""The target's embedding: tokens [1, n] to [1, n, target width], scaled as its layers take it."""
Project = Callable[[mx.array], mx.array]
"""The target's lm_head: [..., target width] to logits [..., vocabulary], without a softcap."""


class Draft(Protocol):
    """One draft. Depth 0 is the token after the anchor."""

    @property
    def length(self) -> int: ...  # draft tokens that it can give

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of the target's tokens; -inf for impossible ones.

        previous: the token at `depth - 1`, or the anchor. Call it for depths 0, 1, ... in order.
        """

    def confidence(self, depth: int, previous: int | mx.array) -> float | None:
        """Return the chance that the token at `depth` is accepted, None without such a head."""


class StateDrafter(Protocol):
    """A drafter that takes hidden states of its target at every committed position."""

    kind: str  # of `DrafterConfig`
    taps: tuple[int, ...]  # the target's layers whose outputs it takes, -1: the embedding
    needs_final: bool  # it takes the state after the target's final norm, not `taps`
    longest: int  # most draft tokens of one draft

    def make_cache(self) -> list[Any]:
        """Return an empty cache of the committed positions."""

    def states(self, hidden: mx.array) -> mx.array:
        """Return what is kept of each position [1, rows, width].

        hidden: the concatenated outputs of the `taps`, [1, rows, len(taps) * target width].
        """

    def extend(self, states: mx.array, embeddings: mx.array | None, cache: list[Any]) -> None:
        """Append committed positions to `cache`, in any number of calls.

        embeddings: of the tokens that follow the positions, for kinds that need them.
        """

    def start(
        self, embed: Embed, lm_head: Project, anchor: int, cache: list[Any], length: int | None
    ) -> Draft:
        """Begin a draft after `anchor`, the newest token, whose states are not in `cache` yet.

        length: draft tokens needed (None: `longest`). `cache` stays as it is.
        """
