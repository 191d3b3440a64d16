"""Rolling the KV cache back to what was accepted.

Knows which of mlx-lm's cache kinds can forget their last positions. A kind that is not known here
is not rolled back: `why_not` says so, and the caller does without drafting.
"""

from __future__ import annotations

from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

Cache = list[Any]


def new_cache(model: Any) -> Cache:
    """An empty cache for `model`, one entry a layer."""
    return list(make_prompt_cache(model))


def why_not(cache: Cache) -> str | None:
    """Why this cache cannot be rolled back, or None where it can."""
    unknown = sorted({type(entry).__name__ for entry in cache if type(entry) is not KVCache})
    return f"its cache ({', '.join(unknown)}) cannot be rolled back" if unknown else None


def roll_back(cache: Cache, positions: int) -> None:
    """Forgets the last `positions` positions of every layer."""
    if positions:
        for entry in cache:
            entry.trim(positions)
