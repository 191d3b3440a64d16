"""Save and load a token history with its KV cache and checkpoints.

A file's header and digest are checked before use. The digest detects damage, not forgery.
"""

import copy
import hashlib
import tempfile
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from akunu_py.engine import kv_cache
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories import cache_file
from akunu_py.engine.histories.cache_file import SUFFIX, CacheMetadata, Stopped
from akunu_py.engine.histories.history import Owner, TokenHistory
from akunu_py.engine.model.token_ids import first_invalid
from akunu_py.errors import StoreError, UsageError
from akunu_py.files import disk_errors, replacing
from akunu_py.models.load.safetensors import Entry

_DTYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.float32: "F32", mx.complex64: "C64",
}  # fmt: skip
_STEP_BYTES = 32 << 20  # of a file, between which other requests run: about 30 ms


def save(
    history: TokenHistory | None, engine: Engine, path: Path, stopped: Stopped = lambda: False
) -> None:
    """Write a history to `path`. Raises UsageError, StoreError, SaveStopped."""
    if history is None or not history.tokens:
        raise UsageError("nothing to save: no prompt was processed yet")
    if why := kv_cache.no_prompt_cache_reason(history.cache):
        raise UsageError(f"a prompt cache of {engine.name} cannot be saved: {why}")
    metadata = CacheMetadata(
        model=engine.name,
        identity=engine.identity,
        tokenizer=engine.tokens.digest,
        weights=engine.plan.weights,
        kv_bits=engine.plan.kv_bits,
        trims=not history.needs_checkpoints,
        tokens=history.tokens,
        pending=history.pending,
        checkpoints=[each.length for each in history.checkpoints],
        conversation=history.owner.conversation,
        requested_at=history.owner.requested_at,
    )
    entries = kv_cache.compact(history.cache)
    layers = kv_cache.leaves(entries)
    checkpoints = [_checkpoint_layers(each, layers) for each in history.checkpoints]
    state = [entry.state for entry in entries]
    state += [[layer.state for layer in layers] for layers in checkpoints]
    scalars: list[Any] = [""]  # mlx-lm's sign for an empty list
    arrays = [(name, _as_array(name, value, scalars)) for name, value in tree_flatten(state)]
    tensors = [tensor_entry(*each) for each in arrays]
    classes = [type(entry).__name__ for entry in entries]
    mlx_metadata = {f"1.{at}": name for at, name in enumerate(classes)}
    mlx_metadata |= {f"2.{name}": value for name, value in tree_flatten(scalars)}
    with (
        disk_errors(f"cannot write {path}"),
        replacing(path) as temporary,
        temporary.open("wb") as opened,
    ):
        cache_file.write(opened, metadata, mlx_metadata, tensors, str(len(state)), stopped)


def load(engine: Engine, path: Path) -> TokenHistory:
    """Load the history in `path` at once; see `load_in_steps`."""
    steps = load_in_steps(engine, path)
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return end.value


def load_in_steps(engine: Engine, path: Path) -> Generator[None, None, TokenHistory]:
    """Load a history, yielding every few layers. Raises StoreError; UsageError if it mismatches."""
    metadata, names = cache_file.read(path)
    if metadata.identity != engine.identity:
        raise UsageError(
            f"{path} belongs to {metadata.model}, or to other weights of it than {engine.name} "
            f"has here ({engine.plan.weights}), or to another version of MLX; use another file"
        )
    if metadata.kv_bits != engine.plan.kv_bits:
        raise UsageError(f"{path} was saved with another --kv-bits; use the same, or another file")
    if len(metadata.tokens) >= engine.plan.context_length:
        raise UsageError(
            f"{path} holds {len(metadata.tokens)} tokens, but the context of {engine.name} "
            f"here holds {engine.plan.context_length}; use another file, or raise --context"
        )
    try:
        return (yield from _load(path, engine, metadata, names))
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # any error of MLX, mlx-lm or the model
        raise cache_file.damaged(path) from error


def _load(
    path: Path, engine: Engine, metadata: CacheMetadata, names: Sequence[str]
) -> Generator[None, None, TokenHistory]:
    """Load the history of a file with this header. Raises ValueError, or errors of MLX."""
    known = [*metadata.tokens, *metadata.pending]
    if not metadata.tokens or first_invalid(known, engine.tokens.vocabulary) is not None:
        raise ValueError("expected tokens of this model")
    states = yield from _read_states(path, names)
    empty = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    layers = zip(empty, states[: len(empty)], strict=True)
    entries = [type(new).from_state(state) for new, state in layers]
    if not kv_cache.has_length(entries, len(metadata.tokens)):
        raise ValueError("expected a cache of these tokens")
    owner = Owner(metadata.conversation, metadata.requested_at, may_store=True)
    history = TokenHistory(entries, owner, metadata.tokens, metadata.pending)
    for length, saved in zip(metadata.checkpoints, states[len(entries) :], strict=True):
        history.checkpoints.append(_checkpoint(length, saved, entries))
    return history


def _read_states(path: Path, names: Sequence[str]) -> Generator[None, None, list[Any]]:
    """Read and verify the states of layers and checkpoints; yields after _STEP_BYTES."""
    digest = hashlib.sha256(cache_file.header_bytes(path))
    arrays, metadata = mx.load(str(path), return_metadata=True)
    if arrays.keys() != {*names}:
        raise ValueError("it was replaced meanwhile")
    size = 0
    for name in names[:-1]:
        data = _data(arrays[name])
        for start in range(0, data.nbytes, _STEP_BYTES):
            block = data[start : start + _STEP_BYTES]
            digest.update(block)
            size += block.nbytes
            if size >= _STEP_BYTES:
                size = 0
                yield
    if _data(arrays.pop(names[-1])) != digest.digest():
        raise ValueError("other bytes than were written")
    _, _, scalars = tree_unflatten(list(metadata.items()))
    for name, kind in scalars[1:]:
        if kind == "scalar":
            arrays[name] = arrays[name].item()
        elif kind == "string":
            arrays[name] = "".join(chr(code) for code in arrays[name].tolist())
        else:
            arrays[name] = None
    states: list[Any] = tree_unflatten(list(arrays.items()))
    return states


def _checkpoint_layers(checkpoint: kv_cache.Checkpoint, layers: Sequence[Any]) -> list[Any]:
    """Return copies of the layers that a checkpoint saved, with their saved state."""
    found = []
    for layer, state in zip(layers, checkpoint.entries, strict=True):
        if not isinstance(state, int):
            found.append(copy.copy(layer))
            vars(found[-1]).update(state)
    return found


def _checkpoint(length: int, states: Sequence[Any], entries: kv_cache.Cache) -> kv_cache.Checkpoint:
    remaining = iter(states)
    restored: list[dict[str, Any] | int] = []
    for entry in kv_cache.leaves(entries):
        if type(entry) in kv_cache.GROWING:
            restored.append(0 if entry.empty() else length)
        else:
            restored.append(vars(type(entry).from_state(next(remaining))))
    nbytes = sum(part.nbytes for part in kv_cache.arrays_in(restored))
    return kv_cache.Checkpoint(length, restored, nbytes)


def _as_array(name: str, value: Any, scalars: list[Any]) -> mx.array:
    """Convert a part of a layer's state as mlx-lm does; non-arrays join `scalars`."""
    if isinstance(value, mx.array):
        return value
    if value is None:
        scalars.append((name, "none"))
        return mx.array([])
    if isinstance(value, str):
        scalars.append((name, "string"))
        return mx.array([ord(character) for character in value])
    scalars.append((name, "scalar"))
    return mx.array(value)


def tensor_entry(name: str, array: mx.array) -> Entry:
    return Entry(name, _DTYPES[array.dtype], tuple(array.shape), partial(_data, array))


def _data(array: mx.array) -> memoryview:
    return memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))


def check_writable(path: Path) -> None:
    """Raise UsageError or StoreError if no prompt cache can be written to `path`."""
    if path.suffix != SUFFIX:
        raise UsageError(f"the name of a prompt cache must end in {SUFFIX}, got {path}")
    with disk_errors(f"cannot write {path}"), tempfile.TemporaryFile(dir=path.parent):
        pass
