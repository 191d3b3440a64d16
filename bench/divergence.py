"""Whether two contestants said the same, and how near a tie it was where they first differed.

In low precision a pass over five rows rounds otherwise than a pass over one. Where two tokens are
nearly as likely as each other, that can decide which one is said. So it is reported, with the
margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.target import common_prefix

Turns = Sequence[tuple[list[int], list[int]]]
"""The answers of a conversation: (prompt, tokens said), both as token ids."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two conversations first differ. position: tokens into the answer of turn `turn`.

    margin: by how much the likeliest token's logit exceeds the second's there, None where the
    prompts differed already, or the model is not at hand. expected, found: token ids, -1 for the
    end of an answer.
    """

    turn: int
    position: int
    expected: int
    found: int
    margin: float | None


def first_difference(engine: Engine | None, expected: Turns, found: Turns) -> Difference | None:
    """None where both said the same, token for token. engine: what said it, for the margin."""
    for turn, ((prompt, left), (other, right)) in enumerate(zip(expected, found, strict=True)):
        if prompt != other:
            return Difference(turn, 0, -1, -1, None)
        if left != right:
            at = common_prefix(left, right)
            margin = top_two_margin(engine, [*prompt, *left[:at]]) if engine else None
            ours, theirs = (side[at] if at < len(side) else -1 for side in (left, right))
            return Difference(turn, at, ours, theirs, margin)
    return None


def top_two_margin(engine: Engine, tokens: Sequence[int]) -> float:
    """The likeliest next token's logit less the second likeliest's, after `tokens`."""
    cache = kvcache.new_cache(engine.model, engine.kv_bits)
    logits = engine.model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)
    second, first = mx.sort(logits)[-2:].tolist()
    return float(first - second)
