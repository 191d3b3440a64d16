"""KV caches and their rollback, for every cache kind of mlx-lm.

Growing attention caches are trimmed. ConcatenateKVCache and RotatingKVCache are cut, because their
own `trim` keeps stale rows. Recurrent state (ArraysCache, deepseek_v41's LayerCache) is restored
with all other layers, and the next pass repeats the accepted tokens. Unknown kinds are never rolled
back (`no_rollback_reason`). A `PassState` undoes one pass and is free; a `Checkpoint` copies what
cannot be trimmed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
from mlx_lm.models.deepseek_v41 import LayerCache

from akunu_py.errors import UsageError, one_line
from akunu_py.weak_cache import cached_weakly

Cache = list[Any]
PassState = list[dict[str, Any] | None]  # by layer; None if it is trimmed

GROWING = (KVCache, QuantizedKVCache, ConcatenateKVCache)  # keep every row until trimmed
_TRIMMABLE = (KVCache, QuantizedKVCache, ChunkedKVCache)  # by their own `trim`
_RECURRENT = (ArraysCache, LayerCache)
_IN_FILES = (*_TRIMMABLE, ConcatenateKVCache, RotatingKVCache, ArraysCache)  # of mlx-lm
_APPENDED = "compress_kv", "index_k"  # fields of LayerCache that passes only append to


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """The state of a cache at `length` tokens."""

    length: int
    entries: list[dict[str, Any] | int]  # by layer: its state, or the row count if it grows
    nbytes: int  # of the copies


class SharedCache(list[Any]):
    """The cache of one rank's layers, then stand-ins for cache kinds of other ranks' layers.

    With stand-ins all ranks agree on what can be rolled back.
    """

    def __init__(self, own: Cache, stand_ins: Cache) -> None:
        super().__init__([*own, *stand_ins])
        self._own = len(own)

    @property
    def own(self) -> Cache:
        return self[: self._own]

    def like(self, entries: Cache) -> SharedCache:
        """Return a shared cache with these entries."""
        return SharedCache(entries[: self._own], entries[self._own :])

    def note(self, operation: str, *arguments: int | Checkpoint) -> None:
        """Called for each operation with the name of its function in this module."""

    def write_stand_ins(self, rows: int) -> None:
        """Record that a pass wrote `rows` rows: stand-ins get rows without values."""
        nothing = mx.zeros((1, 1, rows, 1))
        for entry in leaves(self[self._own :]):
            if type(entry) not in _RECURRENT:
                mx.async_eval(entry.update_and_fetch(nothing, nothing))


def new_cache(model: Any, kv_bits: int | None = None) -> Cache:
    """Return an empty cache for `model`, one entry per layer.

    kv_bits: 4 or 8 to quantize growing entries. Raises UsageError if that is impossible.
    """
    if kv_bits is None:
        return make_prompt_cache(model)
    if kv_bits not in (4, 8):
        raise UsageError(f"--kv-bits must be 4 or 8, got {kv_bits}")
    cache = copy.deepcopy(_quantized_cache(model))
    for entry in leaves(cache):
        if type(entry) is QuantizedKVCache:
            entry.bits = kv_bits
    return cache


def no_rollback_reason(cache: Cache) -> str | None:
    """Return why this cache cannot be rolled back, or None if it can."""
    # Exact types: a subclass may keep unknown state.
    unknown = [entry for entry in leaves(cache) if type(entry) not in (*_IN_FILES, LayerCache)]
    return f"its cache ({kinds(unknown)}) cannot be rolled back" if unknown else None


def is_recurrent(cache: Cache) -> bool:
    """Return whether accepted tokens must run again after a rollback."""
    return any(type(entry) in _RECURRENT for entry in leaves(cache))


def pass_state(cache: Cache) -> PassState:
    """Return the state that `roll_back` needs to undo the next pass of several rows.

    References suffice: such a pass allocates new arrays for the kinds that need them.
    """
    return [_entry_state(entry) for entry in leaves(cache)]


def roll_back(cache: Cache, before: PassState, written: int, kept: int) -> int:
    """Undo the last pass of `written` rows (2 or more), except its first `kept` rows.

    Returns the number of these rows that remain: `kept`, or 0 for recurrent state.
    """
    _notify(cache, "roll_back", written, kept)
    if not is_recurrent(cache):
        for entry in leaves(cache):
            _trim(entry, written - kept)
        return kept
    for entry, state in zip(leaves(cache), before, strict=True):
        if state is None:
            _trim(entry, written)
        else:
            vars(entry).update(state)
    return 0


def move_rows(cache: Cache, written: int, rows: Sequence[int]) -> None:
    """Move `rows`, in their order, to the first of the `written` rows of the last pass.

    Call before `roll_back`, for caches that are not recurrent.
    """
    fixed = next((at for at, row in enumerate(rows) if at != row), len(rows))
    chosen, count = mx.array(rows[fixed:]), len(rows) - fixed
    for entry in leaves(cache):
        keys = entry.keys if isinstance(entry.keys, mx.array) else entry.keys[0]
        start = min(entry.offset, keys.shape[-2]) - written
        for _, part in tree_flatten([entry.keys, entry.values]):
            part[..., start + fixed : start + fixed + count, :] = part[..., start + chosen, :]


def can_trim(cache: Cache, rows: int) -> bool:
    """Return whether the last `rows` rows can be removed, from any passes."""
    return all(_can_trim(entry, rows) for entry in leaves(cache))


def has_length(cache: Cache, length: int) -> bool:
    """Return whether the growing entries have `length` rows."""
    growing = [entry for entry in leaves(cache) if type(entry) in GROWING and not entry.empty()]
    return all(entry.offset == length for entry in growing)


def trim(cache: Cache, rows: int) -> None:
    """Remove the last `rows` rows. `can_trim` must allow it."""
    _notify(cache, "trim", rows)
    for entry in leaves(cache):
        _trim(entry, rows)


def needs_checkpoints(cache: Cache) -> bool:
    """Return whether `trim` may be impossible where `restore` is possible."""
    return not (no_rollback_reason(cache) or all(type(entry) in GROWING for entry in leaves(cache)))


def checkpoint(cache: Cache, length: int) -> Checkpoint:
    """Return a checkpoint at `length` tokens, valid until the cache is trimmed below."""
    # Copy: recurrent state may be a view that would keep a large array alive.
    entries = _copied([_compact_entry(entry) for entry in leaves(cache)])
    arrays = arrays_in(entries)
    mx.async_eval(arrays)  # arrays that are not launched would keep their inputs alive
    point = Checkpoint(length, entries, sum(array.nbytes for array in arrays))
    _notify(cache, "checkpoint", point)
    return point


def restore(cache: Cache, point: Checkpoint) -> None:
    """Restore the cache to checkpoint `point`, any number of times."""
    _notify(cache, "restore", point)
    for entry, state in zip(leaves(cache), point.entries, strict=True):
        if isinstance(state, int):
            _trim(entry, entry.offset - state)
        else:
            counts = {name: state[name] for name in _APPENDED if state.get(name)}
            trimmed = {name: vars(entry)[name][:, :count] for name, count in counts.items()}
            vars(entry).update(_new_handles(state) | trimmed)


def no_prompt_cache_reason(cache: Cache) -> str | None:
    """Return why mlx-lm's prompt cache files cannot hold this cache, or None."""
    unknown = [entry for entry in leaves(cache) if type(entry) not in _IN_FILES]
    return f"mlx-lm has no format for its cache ({kinds(unknown)})" if unknown else None


def compact(cache: Cache) -> Cache:
    """Return a cache with the same content, without trimmed rows and spare capacity."""
    entries = [_compact(entry) for entry in cache]
    return cache.like(entries) if isinstance(cache, SharedCache) else entries


def detach(cache: Cache) -> Cache:
    """Replace the cache's arrays with copies, so that it shares no memory."""
    _notify(cache, "detach")
    for entry in leaves(cache):
        vars(entry).update(_copied(vars(entry)))
    mx.eval(_arrays(cache))
    return cache


def own_states(cache: Cache) -> list[mx.array]:
    """Replace recurrent states, often views of larger arrays, with lazy copies; return these."""
    own = cache.own if isinstance(cache, SharedCache) else cache
    recurrent = [entry for entry in leaves(own) if type(entry) in _RECURRENT]
    for entry in recurrent:
        vars(entry).update(_copied(vars(entry)))
    return _arrays(recurrent)


def shrink(cache: Cache) -> None:
    """Release spare capacity, one layer at a time."""
    _notify(cache, "shrink")
    for entry in leaves(cache):
        vars(entry).update(vars(detach([_compact(entry)])[0]))


def row_count(cache: Cache) -> int:
    """Return the number of rows, -1 if no entry has a row per token."""
    growing = (entry for entry in leaves(cache) if type(entry) in GROWING)
    return next((int(entry.offset) for entry in growing), -1)


def state_arrays(cache: Cache) -> list[mx.array]:
    """Return the arrays that a pass wrote. Evaluate them if its logits are not needed."""
    own = cache.own if isinstance(cache, SharedCache) else cache
    return [part for part in arrays_in([entry.state for entry in own]) if part.size]


def nbytes(cache: Cache) -> int:
    """Return the bytes of memory including spare capacity."""
    return sum(array.nbytes for array in _arrays(cache))


def _copied(tree: Any) -> Any:
    def copied(part: Any) -> Any:  # an empty array is never evaluated and would keep its inputs
        return (mx.contiguous if part.size else mx.zeros_like)(part)

    return tree_map(lambda part: copied(part) if isinstance(part, mx.array) else part, tree)


def _arrays(cache: Cache) -> list[mx.array]:
    return arrays_in([vars(entry) for entry in leaves(cache)])


def arrays_in(tree: Any) -> list[mx.array]:
    """Return all arrays in nested lists and dictionaries."""
    return [part for _, part in tree_flatten(tree) if isinstance(part, mx.array)]


def _compact(entry: Any) -> Any:
    if type(entry) is CacheList:
        return CacheList(*compact(entry.caches))
    same = copy.copy(entry)
    state = _checkpoint_entry(entry)
    if not isinstance(state, int):
        vars(same).update(state)
    elif not entry.empty():
        same.keys = tree_map(lambda part: part[..., :state, :], entry.keys)
        same.values = tree_map(lambda part: part[..., :state, :], entry.values)
    return same


@cached_weakly
def _quantized_cache(model: Any) -> Cache:
    """Return an empty quantized cache, for any bits. Raises UsageError if there cannot be one."""
    # Two lazy trial passes: one for the shapes, one to check that the attention supports it.
    rows = mx.zeros((1, 2), mx.int32)
    cache, shapes = list(make_prompt_cache(model)), list(make_prompt_cache(model))
    model(rows, cache=shapes)
    try:
        made = [_quantized_entry(entry, like) for entry, like in zip(cache, shapes, strict=True)]
        if not any(type(entry) is QuantizedKVCache for entry in leaves(made)):
            raise ValueError("nothing in it grows with the text")
        model(rows, cache=copy.deepcopy(made))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"the cache of this model ({kinds(cache)}) cannot be quantized: "
            f"{one_line(error, 80)}; leave out --kv-bits"
        ) from error
    return made


def _quantized_entry(entry: Any, shape: Any) -> Any:
    """Return `entry`, quantized if it is plain, for rows like those in `shape`."""
    if type(entry) is CacheList:
        pairs = zip(entry.caches, shape.caches, strict=True)
        return CacheList(*(_quantized_entry(each, like) for each, like in pairs))
    if type(entry) is not KVCache or shape.empty():
        return entry
    widths = shape.keys.shape[-1], shape.values.shape[-1]
    for group_size in (64, 32):
        if all(width % group_size == 0 for width in widths):
            return QuantizedKVCache(group_size=group_size)
    raise ValueError(f"its heads of {max(widths)} values are not whole groups of 32")


def leaves(cache: Cache) -> list[Any]:
    """Return the entries of a cache, with each CacheList flattened."""
    found: list[Any] = []
    for entry in cache:
        found += leaves(entry.caches) if type(entry) is CacheList else [entry]
    return found


def kinds(entries: Cache) -> str:
    """Return the class names of entries."""
    return ", ".join(sorted({type(entry).__name__ for entry in entries}))


def _entry_state(entry: Any) -> dict[str, Any] | None:
    if type(entry) not in (*_RECURRENT, RotatingKVCache):
        return None
    # ArraysCache keeps its arrays in a list that the model writes into.
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(entry).items()
    }


def _checkpoint_entry(entry: Any) -> dict[str, Any] | int:
    """Return the entry's state without spare capacity, or the row count if it grows."""
    if type(entry) in GROWING:
        return int(entry.offset)
    state = _new_handles(vars(entry))
    if type(entry) is ChunkedKVCache and not entry.empty():
        rows = entry.offset - entry.start_position
        state |= {name: mx.contiguous(state[name][..., :rows, :]) for name in ("keys", "values")}
    elif type(entry) is RotatingKVCache and not (entry.empty() or entry.keep):
        # In temporal order, and only the window: `keep` rows would not be the last ones.
        for name in ("keys", "values"):
            rows = entry._temporal_order(state[name])[..., -entry.max_size :, :]
            state |= {name: mx.contiguous(rows), "_idx": rows.shape[-2]}
    return state


def _compact_entry(entry: Any) -> dict[str, Any] | int:
    """Return a checkpoint without rows that no pass reads; append-only arrays as row counts."""
    if type(entry) is ChunkedKVCache:
        entry = copy.copy(entry)
        entry.maybe_trim_front()
    state = _checkpoint_entry(entry)
    if isinstance(state, int):
        return state
    grown = {name: state[name] for name in _APPENDED if state.get(name) is not None}
    return state | {name: part.shape[1] for name, part in grown.items()}


def _new_handles(state: dict[str, Any]) -> dict[str, Any]:
    """Return new array objects with the same values, because caches write in place."""
    return tree_map(lambda part: part[...] if isinstance(part, mx.array) else part, state)


def _can_trim(entry: Any, rows: int) -> bool:
    if rows == 0:
        return True
    if type(entry) is ChunkedKVCache:
        # The new end may need rows before the chunk, which no longer exist.
        end = entry.offset - rows
        return bool(end // entry.chunk_size * entry.chunk_size >= entry.start_position)
    if type(entry) is RotatingKVCache:
        return bool(entry.offset <= entry.max_size and rows <= entry.offset)
    return type(entry) in GROWING


def _notify(cache: Cache, operation: str, *arguments: int | Checkpoint) -> None:
    if isinstance(cache, SharedCache):
        cache.note(operation, *arguments)


def _trim(entry: Any, rows: int) -> None:
    if rows == 0:
        return
    if type(entry) in _TRIMMABLE:
        entry.trim(rows)
        return
    row_count = min(entry.offset, entry.keys.shape[-2])
    entry.offset -= rows
    entry.keys = entry.keys[..., : row_count - rows, :]
    entry.values = entry.values[..., : row_count - rows, :]
    if type(entry) is RotatingKVCache:
        entry._idx = row_count - rows
        if entry.offset == 0:
            entry.keys = entry.values = None
