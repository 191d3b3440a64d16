"""Several passes with a drafter that takes hidden states, each of which accepts some tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tests.support.tiny_drafters import ACCEPTED, LENGTHS, draw_states, draw_tokens


@dataclass(frozen=True)
class Target:
    """A target whose hidden states are random."""

    embed: Callable[[mx.array], mx.array]
    lm_head: Callable[[mx.array], mx.array]
    width: int  # of the hidden states that the drafter takes
    vocabulary: int


def greedy(logits: mx.array) -> int:
    assert logits.shape[0] == 1
    return int(mx.argmax(logits[0]).item())


def draft_rounds(drafter: Any, target: Target, seed: int) -> list[list[int]]:
    """Return the drafts of all passes, as `make_drafters` records them."""
    prompt, longest = LENGTHS
    tokens = draw_tokens(seed, prompt + 1 + len(ACCEPTED), target.vocabulary)
    cache = drafter.make_cache()

    def extend(taps: mx.array, known: list[int]) -> Any:
        return drafter.extend(drafter.states(taps), target.embed(mx.array([known])), cache)

    rows = extend(mx.array(draw_states(seed, prompt, target.width)), tokens[1 : prompt + 1])
    drafts = []
    for number, accepted in enumerate(ACCEPTED):
        last = rows if isinstance(rows, list) else rows[:, -1:]
        draft = drafter.start(target.embed, target.lm_head, last, cache, longest)
        made: list[int] = []
        for depth in range(longest):
            made.append(greedy(draft.logits(depth, made[-1] if made else -1)))
        draft.end()
        drafts.append(made)
        taps = draw_states(seed + number + 1, longest + 1, target.width)[:, : accepted + 1]
        rows = extend(mx.array(taps), [*made[:accepted], tokens[prompt + 1 + number]])
        assert cache[0].offset == prompt + sum(ACCEPTED[: number + 1]) + number + 1
    return drafts
