"""The KV cache: new ones, and rolling them back, for every cache kind of mlx-lm.

Each kind is rolled back in the cheapest way that is correct for it:

- attention caches that only grow (KVCache, QuantizedKVCache, ChunkedKVCache) are trimmed;
- ConcatenateKVCache and RotatingKVCache are cut: their own `trim` moves the offset and leaves the
  stale rows where the next write would keep them;
- recurrent state (ArraysCache) has no rows to take away, and deepseek_v41's LayerCache folds rows
  together. They are restored to where they were before the pass, all other layers with them, and
  the caller runs the accepted tokens again, as the first rows of its next pass.

A kind that is not known here is never rolled back: `why_no_rollback` says so, and the caller
decodes without drafts. A `PassState` undoes one pass and costs nothing; a `Checkpoint` holds copies
of what cannot be trimmed, and can be restored many passes later.
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
PassState = list[dict[str, Any] | None]  # by layer; None where it is trimmed

GROWING = (KVCache, QuantizedKVCache, ConcatenateKVCache)  # they keep every row until trimmed
_TRIMMABLE = (KVCache, QuantizedKVCache, ChunkedKVCache)  # by their own `trim`
_KNOWN = (*_TRIMMABLE, ConcatenateKVCache, RotatingKVCache, ArraysCache)
_LAYER_CACHE = "mlx_lm.models.deepseek_v41.LayerCache"  # by name: not every mlx-lm has it


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """A cache as it was when it held `length` tokens.

    entries: by layer its whole state, or how many rows it had where it keeps all of them.
    nbytes: what the checkpoint takes beyond the cache itself.
    """

    length: int
    entries: list[dict[str, Any] | int]
    nbytes: int


class SharedCache(list[Any]):
    """A cache of which this process has a part: entries of its own layers, then stand-ins, one for
    each kind that only others have, so that what is possible here is possible everywhere.

    `note` is called after what is done to it, by the name of the function here that did it.
    """

    def __init__(self, own: Cache, stand_ins: Cache) -> None:
        super().__init__([*own, *stand_ins])
        self._own = len(own)

    @property
    def own(self) -> Cache:
        return self[: self._own]

    @property
    def stand_ins(self) -> Cache:
        return self[self._own :]

    def like(self, entries: Cache) -> SharedCache:
        """Another one, of these entries, which hold the same."""
        return SharedCache(entries[: self._own], entries[self._own :])

    def note(self, done: str, *numbers: int) -> None:
        """Something was done to it."""

    def note_checkpoint(self, done: str, place: Checkpoint) -> None:
        """A checkpoint was set, or restored."""

    def write_stand_ins(self, rows: int) -> None:
        """A pass wrote so many rows into its own entries; stand-ins have them without values."""
        nothing = mx.zeros((1, 1, rows, 1))
        for entry in leaves(self.stand_ins):
            if not _is_recurrent(entry):
                mx.async_eval(entry.update_and_fetch(nothing, nothing))


def new_cache(model: Any, kv_bits: int | None = None) -> Cache:
    """An empty cache for `model`, one entry a layer.

    kv_bits: 4 or 8 to quantize what grows with the text; windows and recurrent state stay as they
    are. Raises UsageError where that is impossible.
    """
    cache: Cache = make_prompt_cache(model)
    return cache if kv_bits is None else _quantized(model, cache, kv_bits)


def why_no_rollback(cache: Cache) -> str | None:
    """Why this cache cannot be rolled back, or None where it can."""
    # Exact types: a subclass may keep state that we know nothing of.
    unknown = [
        entry for entry in leaves(cache) if type(entry) not in _KNOWN and not _is_recurrent(entry)
    ]
    return f"its cache ({_kinds(unknown)}) cannot be rolled back" if unknown else None


def is_recurrent(cache: Cache) -> bool:
    """Whether rolling back means running the accepted tokens again."""
    return any(_is_recurrent(entry) for entry in leaves(cache))


def pass_state(cache: Cache) -> PassState:
    """What `roll_back` needs to undo the pass of several rows that follows. Costs nothing.

    References suffice: a pass of several rows makes new arrays for the kinds that need them.
    """
    return [_entry_state(entry) for entry in leaves(cache)]


def roll_back(cache: Cache, before: PassState, written: int, kept: int) -> int:
    """Undoes the last pass but for its first `kept` of `written` rows (2 or more).

    Returns how many of those rows the cache holds then: `kept`, or 0 for recurrent state.
    """
    _note(cache, "roll_back", written, kept)
    if not is_recurrent(cache):
        _trim_all(cache, written - kept)
        return kept
    for entry, state in zip(leaves(cache), before, strict=True):
        _restore(entry, state, written)
    return 0


def can_trim(cache: Cache, rows: int) -> bool:
    """Whether the last `rows` rows can be taken away, whichever passes wrote them."""
    return all(_can_trim(entry, rows) for entry in leaves(cache))


def holds(cache: Cache, length: int) -> bool:
    """Whether it holds `length` tokens, as far as its entries keep a row for each."""
    growing = [entry for entry in leaves(cache) if type(entry) in GROWING and not entry.empty()]
    return all(entry.offset == length for entry in growing)


def trim(cache: Cache, rows: int) -> None:
    """Takes the last `rows` rows away; see `can_trim`."""
    _note(cache, "trim", rows)
    _trim_all(cache, rows)


def needs_checkpoints(cache: Cache) -> bool:
    """Whether `trim` may be impossible where `restore` is not."""
    return not (why_no_rollback(cache) or all(type(entry) in GROWING for entry in leaves(cache)))


def checkpoint(cache: Cache, length: int) -> Checkpoint:
    """What `restore` needs to come back here, to `length` tokens, whatever is written meanwhile.

    Rows that the cache keeps anyway are not copied: until then it may not be trimmed further.
    """
    # Recurrent state may be the end of an array of many rows, which it would hold in memory.
    entries = tree_map(
        lambda part: mx.contiguous(part) if isinstance(part, mx.array) else part,
        [_checkpoint_entry(entry) for entry in leaves(cache)],
    )
    arrays = [part for _, part in tree_flatten(entries) if isinstance(part, mx.array)]
    mx.eval(arrays)  # or it would hold whatever they are computed from
    made = Checkpoint(length, entries, sum(array.nbytes for array in arrays))
    if isinstance(cache, SharedCache):
        cache.note_checkpoint("checkpoint", made)
    return made


def restore(cache: Cache, back_to: Checkpoint) -> None:
    """Makes the cache what it was at that checkpoint, any number of times."""
    if isinstance(cache, SharedCache):
        cache.note_checkpoint("restore", back_to)
    for entry, state in zip(leaves(cache), back_to.entries, strict=True):
        if isinstance(state, int):
            _trim(entry, entry.offset - state)
        else:
            vars(entry).update(_new_handles(state))


def why_no_prompt_cache(cache: Cache) -> str | None:
    """Why mlx-lm's prompt cache files cannot hold this cache, or None where they can."""
    unknown = [entry for entry in leaves(cache) if type(entry) not in _KNOWN]
    return f"mlx-lm has no format for its cache ({_kinds(unknown)})" if unknown else None


def compact(cache: Cache) -> Cache:
    """A cache that holds the same, without trimmed rows and without room to write into."""
    entries = [_compact(entry) for entry in cache]
    return cache.like(entries) if isinstance(cache, SharedCache) else entries


def detached(cache: Cache) -> Cache:
    """The same cache, in memory of its own."""
    _note(cache, "detach")
    for entry in leaves(cache):
        vars(entry).update(
            tree_map(
                lambda part: mx.contiguous(part) if isinstance(part, mx.array) else part,
                vars(entry),
            )
        )
    mx.eval(_arrays(cache))
    return cache


def shrink(cache: Cache) -> None:
    """Gives back the room that it has to write into, a layer at a time."""
    _note(cache, "shrink")
    for entry in leaves(cache):
        vars(entry).update(vars(detached([_compact(entry)])[0]))


def held(cache: Cache) -> int:
    """How many rows it holds, -1 where no entry keeps one for each."""
    growing = (entry for entry in leaves(cache) if type(entry) in GROWING)
    return next((int(entry.offset) for entry in growing), -1)


def states(cache: Cache) -> list[mx.array]:
    """The arrays that a pass left in it: what is evaluated where nobody wants its logits."""
    own = cache.own if isinstance(cache, SharedCache) else cache
    parts = [part for _, part in tree_flatten([entry.state for entry in own])]
    return [part for part in parts if isinstance(part, mx.array) and part.size]


def nbytes(cache: Cache) -> int:
    """Bytes of memory that a cache takes, room to write into included."""
    return sum(array.nbytes for array in _arrays(cache))


def _arrays(cache: Cache) -> list[mx.array]:
    parts = tree_flatten([vars(entry) for entry in leaves(cache)])
    return [part for _, part in parts if isinstance(part, mx.array)]


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


def _quantized(model: Any, cache: Cache, bits: int) -> Cache:
    if bits not in (4, 8):
        raise UsageError(f"--kv-bits must be 4 or 8, got {bits}")
    # Two rows each, never evaluated: one tells the shapes, one whether the attention can read it.
    rows = mx.zeros((1, 2), mx.int32)
    shapes = list(make_prompt_cache(model))
    model(rows, cache=shapes)
    try:
        made, trial = (
            [_quantized_entry(entry, shape, bits) for entry, shape in zip(new, shapes, strict=True)]
            for new in (cache, list(make_prompt_cache(model)))
        )
        if not any(type(entry) is QuantizedKVCache for entry in leaves(made)):
            raise ValueError("nothing in it grows with the text")
        model(rows, cache=trial)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise UsageError(
            f"the cache of this model ({_kinds(cache)}) cannot be quantized: "
            f"{one_line(error, 80)}; leave out --kv-bits"
        ) from error
    return made


def _quantized_entry(entry: Any, shape: Any, bits: int) -> Any:
    """`entry` for rows like those in `shape`, quantized if it is plain."""
    if type(entry) is CacheList:
        pairs = zip(entry.caches, shape.caches, strict=True)
        return CacheList(*(_quantized_entry(each, like, bits) for each, like in pairs))
    if type(entry) is not KVCache or shape.empty():
        return entry
    widths = shape.keys.shape[-1], shape.values.shape[-1]
    for group_size in (64, 32):
        if all(width % group_size == 0 for width in widths):
            return QuantizedKVCache(group_size=group_size, bits=bits)
    raise ValueError(f"its heads of {max(widths)} values are not whole groups of 32")


def leaves(cache: Cache) -> list[Any]:
    """The entries of a cache, those inside a CacheList one by one."""
    found: list[Any] = []
    for entry in cache:
        found += leaves(entry.caches) if type(entry) is CacheList else [entry]
    return found


def _kinds(entries: Cache) -> str:
    return ", ".join(sorted({type(entry).__name__ for entry in entries}))


def _is_recurrent(entry: Any) -> bool:
    kind = type(entry)
    return kind is ArraysCache or f"{kind.__module__}.{kind.__qualname__}" == _LAYER_CACHE


def _entry_state(entry: Any) -> dict[str, Any] | None:
    if not (_is_recurrent(entry) or type(entry) is RotatingKVCache):
        return None
    # ArraysCache keeps its arrays in a list that the model writes into.
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(entry).items()
    }


def _restore(entry: Any, state: dict[str, Any] | None, written: int) -> None:
    if state is None:
        _trim(entry, written)
    else:
        vars(entry).update(state)


def _checkpoint_entry(entry: Any) -> dict[str, Any] | int:
    """The entry without what it only keeps as room to write into."""
    if type(entry) in GROWING:
        return int(entry.offset)
    state = _new_handles(vars(entry))
    if type(entry) is ChunkedKVCache and not entry.empty():
        rows = entry.offset - entry.start_position
        state |= {name: mx.contiguous(state[name][..., :rows, :]) for name in ("keys", "values")}
    elif type(entry) is RotatingKVCache and not (entry.empty() or entry.keep):
        # In order, and only what a next row can see: `keep` rows would not be the last ones.
        for name in ("keys", "values"):
            rows = entry._temporal_order(state[name])[..., -entry.max_size :, :]
            state |= {name: mx.contiguous(rows), "_idx": rows.shape[-2]}
    return state


def _new_handles(state: dict[str, Any]) -> dict[str, Any]:
    """The same values behind new arrays: caches write into theirs in place."""
    return tree_map(lambda part: part[...] if isinstance(part, mx.array) else part, state)


def _can_trim(entry: Any, rows: int) -> bool:
    if rows == 0:
        return True
    if type(entry) is ChunkedKVCache:
        # What came before its chunk is gone, and the earlier position may need it.
        left = entry.offset - rows
        return bool(left // entry.chunk_size * entry.chunk_size >= entry.start_position)
    if type(entry) is RotatingKVCache:
        return bool(entry.offset <= entry.max_size and rows <= entry.offset)
    return type(entry) in GROWING


def _note(cache: Cache, done: str, *numbers: int) -> None:
    if isinstance(cache, SharedCache):
        cache.note(done, *numbers)


def _trim_all(cache: Cache, rows: int) -> None:
    for entry in leaves(cache):
        _trim(entry, rows)


def _trim(entry: Any, rows: int) -> None:
    if rows == 0:
        return
    if type(entry) in _TRIMMABLE:
        entry.trim(rows)
        return
    held = min(entry.offset, entry.keys.shape[-2])
    entry.offset -= rows
    entry.keys = entry.keys[..., : held - rows, :]
    entry.values = entry.values[..., : held - rows, :]
    if type(entry) is RotatingKVCache:
        entry._idx = held - rows
        if entry.offset == 0:
            entry.keys = entry.values = None
