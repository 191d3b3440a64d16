"""Prompts for the tiny models of all families, and their greedy answers."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import kv_cache
from tests.support.families import build
from tests.support.family_table import FAMILIES
from tests.support.identity import plain_tokens
from tests.support.targets import some

COUNT = 270  # caches grow by 256 tokens
LENGTHS = [1, 2, 3, 5, 9, 17, 33]  # of prompts; the families take turns


def prompt_of(name: str) -> list[int]:
    length = LENGTHS[list(FAMILIES).index(name) % len(LENGTHS)]
    return some(length, length)


def greedy(name: str) -> list[int]:
    """Return COUNT tokens after the prompt, from mlx-lm's own loop."""
    return plain_tokens(build(name), prompt_of(name), COUNT)


def choices(
    name: str, prompt: Sequence[int], tokens: Sequence[int]
) -> tuple[list[int], list[float]]:
    """Return the most likely token at the place of each token, and its margin, from one pass."""
    model = build(name)
    logits = model(mx.array([[*prompt, *tokens[:-1]]]), cache=kv_cache.new_cache(model))[0]
    logits = logits[len(prompt) - 1 :].astype(mx.float32)
    two = mx.sort(logits, axis=-1)[:, -2:]
    return logits.argmax(-1).tolist(), (two[:, 1] - two[:, 0]).tolist()
