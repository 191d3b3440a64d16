"""Save and load a token history with its KV cache and checkpoints.

A file is checked completely before use. The digest detects damage, not forgery, so the cache and
each checkpoint must also fit this model.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import cache as mlx_cache

from akunu_py.decoding import kv_cache
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache import cache_file
from akunu_py.decoding.prompt_cache.cache_file import (
    SUFFIX,
    CacheMetadata,
    CacheTensor,
    Stopped,
    disk_errors,
)
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.token_ids import first_invalid
from akunu_py.errors import DamagedCache, StoreError, UsageError
from akunu_py.files import open_regular, read_bounded, replacing
from akunu_py.models.load.model_files import MAX_TOKENIZER_BYTES
from akunu_py.models.load.safetensors import MAX_HEADER_BYTES

_COUNTS = ("offset", "_idx", "start_position")  # of a layer, of at most as many tokens
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights, to tell models apart
_DTYPES = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16",
    mx.uint32: "U32", mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16",
    mx.bfloat16: "BF16", mx.float32: "F32", mx.complex64: "C64",
}  # fmt: skip


def save(
    history: TokenHistory, engine: Engine, path: Path, stopped: Stopped = lambda: False
) -> None:
    """Write a history to `path`; see `Session.save_prompt_cache`. Raises SaveStopped."""
    _check_name(path)
    if not history.tokens:
        raise UsageError("there is nothing to save: the session has read nothing yet")
    if why := kv_cache.no_prompt_cache_reason(history.cache):
        raise UsageError(f"a session of {engine.name} cannot be saved: {why}")
    about = CacheMetadata(
        model=engine.name,
        identity=model_digest(engine.path, engine.plan.weights),
        tokenizer=engine.tokens.digest,
        weights=engine.plan.weights,
        kv_bits=engine.plan.kv_bits,
        trims=not history.needs_checkpoints,
        tokens=history.tokens,
        pending=history.pending,
        checkpoints=[each.length for each in history.checkpoints],
        conversation=history.conversation,
    )
    entries = kv_cache.compact(history.cache)
    layers = kv_cache.leaves(entries)
    checkpoints = [_layers_of(each, layers) for each in history.checkpoints]
    with disk_errors(f"cannot write {path}"), replacing(path) as temporary:
        write(temporary, about, entries, checkpoints, stopped)


def write(
    path: Path, about: CacheMetadata, entries: kv_cache.Cache, checkpoints: Sequence[Sequence[Any]],
    stopped: Stopped = lambda: False,
) -> None:  # fmt: skip
    """Write a cache and its checkpoints' own layers to `path`. Raises SaveStopped, OSError."""
    state = [entry.state for entry in entries]
    state += [[layer.state for layer in layers] for layers in checkpoints]
    scalars: list[Any] = [""]  # mlx-lm's sign for an empty list
    arrays = [(name, _as_array(name, value, scalars)) for name, value in tree_flatten(state)]
    classes = [type(entry).__name__ for entry in entries]
    metadata = {f"1.{at}": name for at, name in enumerate(classes)}
    metadata |= {f"2.{name}": value for name, value in tree_flatten(scalars)}
    with path.open("wb") as opened:
        cache_file.write(opened, about, metadata, [_tensor(*each) for each in arrays], stopped)


def load(engine: Engine, path: Path) -> TokenHistory:
    """Load the history in `path`; see `Session.load_prompt_cache`."""
    _check_name(path)
    header = cache_file.read(path)
    about = header.about
    if about.identity != model_digest(engine.path, engine.plan.weights):
        raise UsageError(
            f"{path} belongs to {about.model}, or to other weights of it than {engine.name} "
            f"has here ({engine.plan.weights}); use another file"
        )
    made = [type(entry).__name__ for entry in kv_cache.new_cache(engine.model, engine.plan.kv_bits)]
    if header.classes != made:
        raise UsageError(f"{path} was saved with another --kv-bits; use the same, or another file")
    if len(about.tokens) >= engine.plan.context_length:
        raise UsageError(
            f"{path} holds {len(about.tokens)} tokens, but the context of {engine.name} here holds "
            f"{engine.plan.context_length}; use another file, or raise --context"
        )
    try:
        return _checked(path, engine, header)
    except (OSError, StoreError) as error:
        raise StoreError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error
    except Exception as error:  # whatever MLX, mlx-lm or the model makes of it
        raise DamagedCache(f"{path} is damaged; delete it, and it is made again") from error


def _checked(path: Path, engine: Engine, header: cache_file.CacheHeader) -> TokenHistory:
    """Load and validate the history. Raises ValueError, or errors of MLX and the model."""
    about, length = header.about, len(header.about.tokens)
    if (
        not length
        or first_invalid([*about.tokens, *about.pending], engine.tokens.vocabulary) is not None
    ):
        raise ValueError("expected tokens of this model")
    like = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    engine.model(mx.zeros((1, 2), mx.int32), cache=like)  # never evaluated: for the shapes
    parts = [value for _, value in tree_flatten([entry.state for entry in like])]
    expected = sum(value.nbytes for value in parts if isinstance(value, mx.array))
    copies = 1 + len(about.checkpoints)
    if path.stat().st_size > MAX_HEADER_BYTES + expected * length * copies:
        raise ValueError("it is larger than such a cache can be")
    verified = cache_file.verify(path)
    states, digest = _read_states(path)
    if not verified == header.digest == digest:
        raise ValueError("it was replaced meanwhile")
    entries = [_layer(name, state) for name, state in zip(header.classes, states, strict=False)]
    _check_like(kv_cache.leaves(entries), kv_cache.leaves(like), length)
    _try(engine, kv_cache.compact(entries))
    history = TokenHistory(entries, about.tokens, about.pending)
    for at, layers in zip(about.checkpoints, states[len(entries) :], strict=True):
        back_to = _checkpoint(at, layers, entries, like)
        trial = kv_cache.compact(entries)
        kv_cache.restore(trial, back_to)
        _try(engine, trial)
        history.checkpoints.append(back_to)
    mx.eval([part for _, part in tree_flatten(states) if isinstance(part, mx.array)])
    return history


def _read_states(path: Path) -> tuple[list[Any], str]:
    """Return the lazy state of each layer and checkpoint, and the digest.

    Like mlx-lm's `load_prompt_cache`, which omits checkpoints.
    """
    arrays, metadata = mx.load(str(path), return_metadata=True)
    _, _, scalars = tree_unflatten(list(metadata.items()))
    for name, kind in scalars[1:]:
        if kind == "scalar":
            arrays[name] = arrays[name].item()
        elif kind == "string":
            arrays[name] = "".join(chr(code) for code in arrays[name].tolist())
        else:
            arrays[name] = None
    states: list[Any] = tree_unflatten(list(arrays.items()))
    return states, cache_file.digest_in(metadata)


def _layer(name: str, state: Any) -> Any:
    return getattr(mlx_cache, name).from_state(state)


def _try(engine: Engine, entries: kv_cache.Cache) -> None:
    """Build a pass over a cache, which alters it; never evaluated."""
    engine.model(mx.zeros((1, 1), mx.int32), cache=entries)


def _layers_of(back_to: kv_cache.Checkpoint, layers: Sequence[Any]) -> list[Any]:
    """Return a checkpoint's own layers as they were."""
    found = []
    for layer, state in zip(layers, back_to.entries, strict=True):
        if not isinstance(state, int):
            found.append(copy.copy(layer))
            vars(found[-1]).update(state)
    return found


def _checkpoint(
    length: int, states: Sequence[Any], entries: kv_cache.Cache, like: kv_cache.Cache
) -> kv_cache.Checkpoint:
    """Return the checkpoint with its own layers' `states`. Raises ValueError."""
    left = list(states)
    made: list[dict[str, Any] | int] = []
    for entry, other in zip(kv_cache.leaves(entries), kv_cache.leaves(like), strict=True):
        if type(entry) in kv_cache.GROWING:
            made.append(0 if entry.empty() else length)
            continue
        layer = _layer(type(entry).__name__, left.pop(0))
        _check_like([layer], [other], length)
        made.append(vars(layer))
    if left:
        raise ValueError("more layers than the model has")
    parts = [part for _, part in tree_flatten(made) if isinstance(part, mx.array)]
    return kv_cache.Checkpoint(length, made, sum(part.nbytes for part in parts))


def _check_like(entries: Sequence[Any], like: Sequence[Any], length: int) -> None:
    """Raise ValueError unless `entries` match the layers of `like` after `length` tokens."""
    for entry, other in zip(entries, like, strict=True):
        if type(entry) is not type(other) or vars(entry).keys() != vars(other).keys():
            raise ValueError("layers of another kind")
        for name, ours in vars(other).items():
            theirs, parts = vars(entry)[name], dict(tree_flatten(ours))
            if isinstance(ours, mx.array | list | tuple):
                kept = dict(tree_flatten(theirs))
                fits = kept.keys() == parts.keys() and all(
                    _fits(other, kept[key], parts[key], length) for key in parts
                )
            elif name in _COUNTS:
                fits = type(theirs) is int and 0 <= theirs <= length
                fits = fits and (name != "offset" or theirs == length)
            else:
                fits = type(theirs) is type(ours) and theirs == ours
            if not fits:
                raise ValueError(f"{name} is not that of this model's cache")


def _fits(entry: Any, theirs: Any, ours: Any, length: int) -> bool:
    """Return whether a part of a cache matches this model's part."""
    if not (isinstance(theirs, mx.array) and isinstance(ours, mx.array)):
        return type(theirs) is type(ours)
    if theirs.dtype != ours.dtype or theirs.ndim != ours.ndim:
        return False
    if not kv_cache.is_recurrent([entry]):
        rows = theirs.shape[-2]
        right = rows == length if type(entry) in kv_cache.GROWING else 0 < rows <= length
        return right and theirs.shape[:-2] == ours.shape[:-2] and theirs.shape[-1] == ours.shape[-1]
    # Integers are the last tokens, of which there were fewer (longcat_flash_ngram, which takes what
    # it looks up with them modulo the size of its tables).
    return theirs.shape == ours.shape or bool(mx.issubdtype(ours.dtype, mx.integer))


@cache
def model_digest(model: Path, weights: str) -> str:
    """Return a digest of configuration, tokenizer, weight samples and weights format."""
    digest = hashlib.sha256(weights.encode())
    for name in ("config.json", "tokenizer.json"):
        with contextlib.suppress(FileNotFoundError):
            digest.update(read_bounded(model / name, MAX_TOKENIZER_BYTES))
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with open_regular(file) as opened:
            for sample in range(_SAMPLES):
                opened.seek(sample * size // _SAMPLES)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


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


def _tensor(name: str, array: mx.array) -> CacheTensor:
    def data() -> memoryview:
        return memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))

    return CacheTensor(name, _DTYPES[array.dtype], tuple(array.shape), array.nbytes, data)


def _check_name(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise UsageError(f"the name of a saved session must end in {SUFFIX}, got {path}")
