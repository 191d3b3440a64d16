"""What drafters of all kinds offer to the engine.

Each takes the target's hidden states: the outputs of the layers `taps` (-1: the embedding), or the
state after the final norm if `needs_final`. `states` turns them into what is kept of a position,
`extend` appends committed positions to a cache from `make_cache`, in any number of calls, and
`start` begins a `Draft` of up to `longest` tokens. A block drafter starts from the newest token,
whose states do not exist yet, the others from the last row that `extend` returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import mlx.core as mx

Embed = Callable[[mx.array], mx.array]
"""The target's embedding: tokens [1, n] to [1, n, target width], scaled as its layers take it."""
Project = Callable[[mx.array], mx.array]
"""The target's lm_head: [..., target width] to logits [..., vocabulary], without a softcap."""


class Draft(Protocol):
    """One draft. Depth 0 is the token after the newest one."""

    @property
    def length(self) -> int: ...  # draft tokens that it can give

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of the target's tokens; -inf for impossible ones.

        previous: the token before. Call it for depths 0, 1, ... in order.
        """

    def confidence(self, depth: int, previous: int | mx.array) -> float | None:
        """Return the chance that the token at `depth` is accepted, None without such a head."""
