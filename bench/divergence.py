"""The first difference of two conversations, with the margin of the two highest logits there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.token_ids import common_prefix

Turns = Sequence[tuple[list[int], list[int]]]
"""The (prompt, output) of each turn of a conversation, as token ids."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two conversations."""

    turn: int
    position: int  # in the answer of this turn, in tokens
    expected: int  # token id, -1 for the end of an answer
    found: int
    margin: float | None  # of the two highest logits; None without a model or if prompts differ


def first_divergence(engine: Engine | None, expected: Turns, found: Turns) -> Divergence | None:
    """Return the first difference of two conversations, None if all tokens are equal.

    engine: computes the margin.
    """
    for turn, ((prompt, left), (other, right)) in enumerate(zip(expected, found, strict=True)):
        if prompt != other:
            return Divergence(turn, 0, -1, -1, None)
        if left != right:
            at = common_prefix(left, right)
            margin = top_two_margin(next_logits(engine, [*prompt, *left[:at]])) if engine else None
            ours, theirs = (side[at] if at < len(side) else -1 for side in (left, right))
            return Divergence(turn, at, ours, theirs, margin)
    return None


def next_logits(engine: Engine, tokens: Sequence[int]) -> mx.array:
    """Return the logits of the next token, [vocab] of float32."""
    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    return engine.model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)


def top_two_margin(scores: mx.array) -> float:
    """Return the difference of the two highest of `scores`, [vocab]."""
    second, first = mx.sort(scores)[-2:].tolist()
    return float(first - second)
