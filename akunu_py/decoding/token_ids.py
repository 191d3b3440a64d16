"""Plain functions on sequences of token ids.

MLX reads and writes wherever an index points, so what comes from a tokenizer, a file or a user
passes through here before it becomes one.
"""

from __future__ import annotations

from collections.abc import Sequence

_BLOCK = 256  # tokens compared at once


def first_outside(tokens: Sequence[int], vocabulary: int) -> int | None:
    """Where the first token stands that is no index into `vocabulary` rows; None for all well."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocabulary:
        return None
    return next(at for at, token in enumerate(tokens) if not 0 <= token < vocabulary)


def inside(tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Those of `tokens` that the vocabulary has."""
    return [token for token in tokens if 0 <= token < vocabulary]


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both start with."""
    length = min(len(left), len(right))
    same = 0
    while same < length and left[same : same + _BLOCK] == right[same : same + _BLOCK]:
        same += _BLOCK  # lists are compared ten times as fast as token by token
    while same < length and left[same] == right[same]:
        same += 1
    return min(same, length)
