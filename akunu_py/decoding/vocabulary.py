"""Token ids that become indices. MLX reads and writes wherever an index points, so what comes from
a tokenizer, a file or a user passes through here."""

from __future__ import annotations

from collections.abc import Sequence


def first_outside(tokens: Sequence[int], vocabulary: int) -> int | None:
    """Where the first token stands that is no index into `vocabulary` rows; None for all well."""
    if not tokens or 0 <= min(tokens) <= max(tokens) < vocabulary:
        return None
    return next(at for at, token in enumerate(tokens) if not 0 <= token < vocabulary)


def inside(tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Those of `tokens` that the vocabulary has."""
    return [token for token in tokens if 0 <= token < vocabulary]
