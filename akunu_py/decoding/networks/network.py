"""What the networks that draft beside the n-grams have in common."""

from __future__ import annotations

import mlx.core as mx

from akunu_py.decoding.target import Target


class Network:
    """A `DraftNetwork` of a target's: tokens are drawn as the target draws its own."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: list[int] = []  # the history, and guesses behind it

    def clock(self) -> float:
        """See `DraftNetwork`: that of the target's passes."""
        return self._target.clock()

    def _draw(self, logits: mx.array) -> tuple[int, float]:
        """The token behind what is known, which is known then, and how likely it is. logits: [1,
        vocab]."""
        guess = self._target.guess(logits, self._known)
        self._known.append(guess[0])
        return guess
