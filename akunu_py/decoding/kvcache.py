"""Rolling the KV cache back to what was accepted, for every cache kind of mlx-lm.

Each kind goes back in the cheapest way that is correct for it:

- attention caches that only grow (KVCache, QuantizedKVCache, ChunkedKVCache) are trimmed;
- ConcatenateKVCache and RotatingKVCache are cut: their own `trim` moves the offset and leaves the
  stale rows where the next write would keep them;
- recurrent state (ArraysCache) has no rows to take away, and deepseek_v41's LayerCache folds rows
  together. They go back to where they were before the pass, all other layers with them, and the
  caller reads the accepted tokens again, as the first rows of its next pass.

A kind that is not known here is not rolled back: `why_no_rollback` says so, and the caller does
without drafting.

A roll back undoes one pass. To go back over many, `checkpoint` keeps what cannot be trimmed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from akunu_py.errors import UsageError, one_line

Cache = list[Any]
PassState = list[dict[str, Any] | None]

_TRIMMED = (KVCache, QuantizedKVCache, ChunkedKVCache)
_KNOWN = (*_TRIMMED, ConcatenateKVCache, RotatingKVCache, ArraysCache)
_KEEPS_ALL = (KVCache, QuantizedKVCache, ConcatenateKVCache)  # until told to forget it
_LAYER_CACHE = "mlx_lm.models.deepseek_v41.LayerCache"  # by name: not every mlx-lm has it


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A cache as it was: whole, but for layers that keep every row; of those how many they had.

    nbytes: what it takes beyond the cache itself.
    """

    entries: list[dict[str, Any] | int]
    nbytes: int


def new_cache(model: Any, kv_bits: int | None = None) -> Cache:
    """An empty cache for `model`, one entry a layer.

    kv_bits: 4 or 8 to quantise what grows with the text; windows and recurrent state stay as they
    are. Raises UsageError where that is impossible.
    """
    cache = list(make_prompt_cache(model))
    return cache if kv_bits is None else _quantised(model, cache, kv_bits)


def why_no_rollback(cache: Cache) -> str | None:
    """Why this cache cannot be rolled back, or None where it can."""
    # Exact types: a subclass may keep state that we know nothing of.
    unknown = sorted(
        {
            type(entry).__name__
            for entry in _leaves(cache)
            if type(entry) not in _KNOWN and not _is_recurrent(entry)
        }
    )
    return f"its cache ({', '.join(unknown)}) cannot be rolled back" if unknown else None


def is_recurrent(cache: Cache) -> bool:
    """Whether going back means reading accepted tokens again."""
    return any(_is_recurrent(entry) for entry in _leaves(cache))


def pass_state(cache: Cache) -> PassState:
    """What `roll_back` needs to undo the pass of several rows that follows. Costs nothing.

    References suffice: a pass of several rows makes new arrays for the kinds that need them.
    """
    return [_save(entry) for entry in _leaves(cache)]


def roll_back(cache: Cache, before: PassState, written: int, kept: int) -> int:
    """Undoes the last pass but for its first `kept` of `written` rows (2 or more).

    Returns how many of those rows the cache holds then: `kept`, or 0 for recurrent state.
    """
    if is_recurrent(cache):
        for entry, saved in zip(_leaves(cache), before, strict=True):
            _restore(entry, saved, written)
        return 0
    for entry in _leaves(cache):
        _forget(entry, written - kept)
    return kept


def can_rewind(cache: Cache, positions: int) -> bool:
    """Whether the last `positions` positions can be forgotten, whichever passes wrote them."""
    return all(_can_forget(entry, positions) for entry in _leaves(cache))


def rewind(cache: Cache, positions: int) -> None:
    """Forgets the last `positions` positions; see `can_rewind`."""
    for entry in _leaves(cache):
        _forget(entry, positions)


def needs_checkpoints(cache: Cache) -> bool:
    """Whether `rewind` may fail where `restore` would not."""
    return not (
        why_no_rollback(cache) or all(type(entry) in _KEEPS_ALL for entry in _leaves(cache))
    )


def checkpoint(cache: Cache) -> Checkpoint:
    """What `restore` needs to come back here, however much is written in between.

    Rows that the cache keeps anyway are not copied: they may be forgotten only down to here.
    """
    # Recurrent state may be the end of an array of many rows, which it would hold in memory.
    entries = tree_map(
        lambda part: mx.contiguous(part) if isinstance(part, mx.array) else part,
        [_freeze(entry) for entry in _leaves(cache)],
    )
    arrays = [part for _, part in tree_flatten(entries) if isinstance(part, mx.array)]
    mx.eval(arrays)  # or it would hold whatever they are computed from
    return Checkpoint(entries, sum(array.nbytes for array in arrays))


def restore(cache: Cache, back_to: Checkpoint) -> None:
    """Makes the cache what it was at `checkpoint`, any number of times."""
    for entry, saved in zip(_leaves(cache), back_to.entries, strict=True):
        if isinstance(saved, int):
            _forget(entry, entry.offset - saved)
        else:
            vars(entry).update(_handles(saved))


def why_no_prompt_cache(cache: Cache) -> str | None:
    """Why mlx-lm's format cannot keep this cache, or None where it can."""
    kinds = {type(entry) for entry in _leaves(cache)}
    unknown = sorted(kind.__name__ for kind in kinds if kind not in _KNOWN)
    return f"mlx-lm has no format for its cache ({', '.join(unknown)})" if unknown else None


def compact(cache: Cache) -> Cache:
    """A cache that holds the same, without rows that were forgotten or are room to write into."""
    return [_packed(entry) for entry in cache]


def _packed(entry: Any) -> Any:
    if type(entry) is CacheList:
        return CacheList(*compact(entry.caches))
    same = copy.copy(entry)
    saved = _freeze(entry)
    if not isinstance(saved, int):
        vars(same).update(saved)
    elif not entry.empty():
        rows = tree_map(lambda part: part[..., :saved, :], (entry.keys, entry.values))
        same.keys, same.values = rows
    return same


def _quantised(model: Any, cache: Cache, bits: int) -> Cache:
    if bits not in (4, 8):
        raise UsageError(f"--kv-bits must be 4 or 8, got {bits}")
    # Two rows each, never evaluated: one tells the shapes, one whether the attention can read it.
    rows = mx.zeros((1, 2), mx.int32)
    shapes = list(make_prompt_cache(model))
    model(rows, cache=shapes)
    try:
        made, trial = (
            [_quantised_entry(entry, shape, bits) for entry, shape in zip(new, shapes, strict=True)]
            for new in (cache, list(make_prompt_cache(model)))
        )
        if not any(type(entry) is QuantizedKVCache for entry in _leaves(made)):
            raise ValueError("nothing in it grows with the text")
        model(rows, cache=trial)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        kinds = ", ".join(sorted({type(entry).__name__ for entry in cache}))
        raise UsageError(
            f"the cache of this model ({kinds}) cannot be quantized: {one_line(error, 80)}; "
            "leave out --kv-bits"
        ) from error
    return made


def _quantised_entry(entry: Any, shape: Any, bits: int) -> Any:
    """`entry` for rows like those in `shape`, quantised if it is plain."""
    if type(entry) is CacheList:
        pairs = zip(entry.caches, shape.caches, strict=True)
        return CacheList(*(_quantised_entry(each, like, bits) for each, like in pairs))
    if type(entry) is not KVCache or shape.empty():
        return entry
    widths = shape.keys.shape[-1], shape.values.shape[-1]
    for group_size in (64, 32):
        if all(width % group_size == 0 for width in widths):
            return QuantizedKVCache(group_size=group_size, bits=bits)
    raise ValueError(f"its heads of {max(widths)} values are not whole groups of 32")


def _leaves(cache: Cache) -> list[Any]:
    """The entries of the cache, those inside a CacheList one by one."""
    leaves: list[Any] = []
    for entry in cache:
        leaves += _leaves(entry.caches) if type(entry) is CacheList else [entry]
    return leaves


def _is_recurrent(entry: Any) -> bool:
    kind = type(entry)
    return kind is ArraysCache or f"{kind.__module__}.{kind.__qualname__}" == _LAYER_CACHE


def _save(entry: Any) -> dict[str, Any] | None:
    if not (_is_recurrent(entry) or type(entry) is RotatingKVCache):
        return None
    # ArraysCache keeps its arrays in a list that the model writes into.
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(entry).items()
    }


def _restore(entry: Any, saved: dict[str, Any] | None, written: int) -> None:
    if saved is None:
        _forget(entry, written)
    else:
        vars(entry).update(saved)


def _freeze(entry: Any) -> dict[str, Any] | int:
    """The entry without what it only keeps as room to write into."""
    if type(entry) in _KEEPS_ALL:
        return int(entry.offset)
    saved = _handles(vars(entry))
    if type(entry) is ChunkedKVCache and not entry.empty():
        rows = entry.offset - entry.start_position
        saved |= {name: mx.contiguous(saved[name][..., :rows, :]) for name in ("keys", "values")}
    elif type(entry) is RotatingKVCache and not (entry.empty() or entry.keep):
        # In order, and only what a next row can see: `keep` rows would not be the last ones.
        for name in ("keys", "values"):
            rows = entry._temporal_order(saved[name])[..., -entry.max_size :, :]
            saved |= {name: mx.contiguous(rows), "_idx": rows.shape[-2]}
    return saved


def _handles(state: dict[str, Any]) -> dict[str, Any]:
    """The same values behind new handles: caches write into theirs in place."""
    return tree_map(lambda part: part[...] if isinstance(part, mx.array) else part, state)


def _can_forget(entry: Any, positions: int) -> bool:
    if positions == 0:
        return True
    if type(entry) is ChunkedKVCache:
        # What came before its chunk is gone, and the earlier position may need it.
        left = entry.offset - positions
        return bool(left // entry.chunk_size * entry.chunk_size >= entry.start_position)
    if type(entry) is RotatingKVCache:
        return bool(entry.offset <= entry.max_size and positions <= entry.offset)
    return type(entry) in _KEEPS_ALL


def _forget(entry: Any, positions: int) -> None:
    if positions == 0:
        return
    if type(entry) in _TRIMMED:
        entry.trim(positions)
        return
    rows = entry.keys.shape[-2] if entry.offset >= entry.keys.shape[-2] else entry.offset
    entry.offset -= positions
    entry.keys = entry.keys[..., : rows - positions, :]
    entry.values = entry.values[..., : rows - positions, :]
    if type(entry) is RotatingKVCache:
        entry._idx = rows - positions
        if entry.offset == 0:
            entry.keys = entry.values = None
