"""Pure functions on logits: which token the target says. Greedy for now."""

from __future__ import annotations

import mlx.core as mx


def greedy(logits: mx.array) -> mx.array:
    """The most likely token of each row: logits [rows, vocab] -> tokens [rows]."""
    return mx.argmax(logits, axis=-1)
