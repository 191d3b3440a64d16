"""Prompt caches: the KV cache and the token history of a session on disk, in mlx-lm's format.

mlx-lm's `load_prompt_cache` reads these files too. Ours carry in their metadata which tokens the
cache holds, which model wrote it and a digest of all values, and nothing is used before all of
that was checked: a cache of other weights, or with a flipped bit, would give wrong answers
unnoticed. A digest tells damage, not forgery, so the cache must also be one that this model can
have after as many tokens. Checkpoints are not saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import cache as mlx_cache

from akunu_py.decoding import kvcache
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.token_ids import first_outside
from akunu_py.errors import DamagedCache, DamagedModel, StoreError, UsageError, one_line
from akunu_py.files import open_regular, parse_json, read_bounded, replacing
from akunu_py.models.model_files import MAX_TOKENIZER_BYTES
from akunu_py.models.safetensors import MAX_HEADER_BYTES, read_header

SUFFIX = ".safetensors"  # MLX tells formats by it
_FORMAT = 2
_COUNTS = ("offset", "_idx", "start_position")  # of a layer, of at most as many tokens
_KEY = "akunu"  # of our own metadata
_CLASSES = "1."  # mlx-lm's metadata: ours, a class name a layer, what was not an array
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights, to tell models apart


def save(history: TokenHistory, engine: Engine, path: Path) -> None:
    """Writes a history and its cache to `path`; see `Session.save_prompt_cache`."""
    _check_name(path)
    if not history.tokens:
        raise UsageError("there is nothing to save: the session has read nothing yet")
    if why := kvcache.why_no_prompt_cache(history.cache):
        raise UsageError(f"a session of {engine.name} cannot be saved: {why}")
    entries = kvcache.compact(history.cache)
    about = {
        "format": _FORMAT,
        "model": engine.name,
        "identity": model_digest(engine.path, engine.weights),
        "digest": _digest(entries, history.tokens, history.pending),
        "tokens": history.tokens,
        "pending": history.pending,
    }
    with _disk_errors(f"cannot write {path}"), replacing(path) as temporary:
        try:
            mlx_cache.save_prompt_cache(str(temporary), entries, {_KEY: json.dumps(about)})
        except RuntimeError as error:  # MLX's word for a full disk
            raise OSError(f"{error}") from error


def load(engine: Engine, path: Path) -> TokenHistory:
    """The history in `path`, with its cache; see `Session.load_prompt_cache`."""
    _check_name(path)
    with _disk_errors(f"cannot read {path}"):
        about, classes = _read_about(path)
    if about["format"] != _FORMAT:
        raise UsageError(
            f"{path} was saved by another version of akunu (its format is not {_FORMAT}); delete "
            "it, and it is made again"
        )
    if about["identity"] != model_digest(engine.path, engine.weights):
        raise UsageError(
            f"{path} belongs to {about['model']}, or to other weights of it than {engine.name} "
            f"has here ({engine.weights}); use another file"
        )
    made = [type(entry).__name__ for entry in kvcache.new_cache(engine.model, engine.kv_bits)]
    if classes != made:
        raise UsageError(f"{path} was saved with another --kv-bits; use the same, or another file")
    tokens, pending = about["tokens"], about["pending"]
    if len(tokens) >= engine.context_length:
        raise UsageError(
            f"{path} holds {len(tokens)} tokens, but the context of {engine.name} here holds "
            f"{engine.context_length}; use another file, or raise --context"
        )
    try:
        entries = _checked_entries(path, engine, tokens, pending)
        if _digest(entries, tokens, pending) != about["digest"]:
            raise ValueError("altered values")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever MLX, mlx-lm or the model makes of it
        raise DamagedCache(f"{path} is damaged; delete it, and it is made again") from error
    return TokenHistory(entries, tokens, pending)


def _checked_entries(
    path: Path, engine: Engine, tokens: Sequence[int], pending: Sequence[int]
) -> kvcache.Cache:
    """The cache in the file, not yet evaluated: one that this model can have after `tokens`.

    Raises ValueError, or whatever comes of a cache that the model cannot continue from.
    """
    if not tokens or first_outside([*tokens, *pending], engine.vocabulary) is not None:
        raise ValueError("expected tokens of this model")
    like = kvcache.new_cache(engine.model, engine.kv_bits)
    engine.model(mx.zeros((1, 2), mx.int32), cache=like)  # never evaluated: for the shapes
    arrays = [value for _, value in tree_flatten([entry.state for entry in like])]
    expected = sum(value.nbytes for value in arrays if isinstance(value, mx.array))
    if path.stat().st_size > MAX_HEADER_BYTES + expected * len(tokens):
        raise ValueError("it is larger than such a cache can be")
    entries = list(mlx_cache.load_prompt_cache(str(path)))
    _check_like(entries, like, len(tokens))
    trial = mlx_cache.load_prompt_cache(str(path))  # a pass alters it
    engine.model(mx.zeros((1, 1), mx.int32), cache=trial)  # never evaluated either
    return entries


def _check_like(entries: kvcache.Cache, like: kvcache.Cache, length: int) -> None:
    """Raises ValueError where `entries` are none that a model whose caches are `like` those has
    after `length` tokens."""
    for entry, other in zip(kvcache.leaves(entries), kvcache.leaves(like), strict=True):
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
    """Whether a part of a cache is an array like the one that `entry` has there."""
    if not (isinstance(theirs, mx.array) and isinstance(ours, mx.array)):
        return type(theirs) is type(ours)
    if theirs.dtype != ours.dtype or theirs.ndim != ours.ndim:
        return False
    if not kvcache.is_recurrent([entry]):
        rows = theirs.shape[-2]
        right = rows == length if type(entry) in kvcache.GROWING else 0 < rows <= length
        return right and theirs.shape[:-2] == ours.shape[:-2] and theirs.shape[-1] == ours.shape[-1]
    # Integers are the last tokens, of which there were fewer (longcat_flash_ngram, which takes what
    # it looks up with them modulo the size of its tables).
    return theirs.shape == ours.shape or bool(mx.issubdtype(ours.dtype, mx.integer))


@cache
def model_digest(model: Path, weights: str) -> str:
    """Tells models apart: their configuration, tokenizer, and samples of their weights.

    weights: how they are laid out in memory, which shows in how values round.
    """
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


def _digest(entries: kvcache.Cache, tokens: Sequence[int], pending: Sequence[int]) -> str:
    """Of the tokens and of every value in the cache, whatever it is."""
    digest = hashlib.sha256(json.dumps([list(tokens), list(pending)]).encode())
    for name, value in tree_flatten([entry.state for entry in entries]):
        if isinstance(value, mx.array):
            digest.update(f"{name} {value.dtype} {value.shape} ".encode())
            digest.update(memoryview(mx.contiguous(value).reshape(-1).view(mx.uint8)))
        else:
            digest.update(f"{name} {value} ".encode())
    return digest.hexdigest()


def _read_about(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Our metadata and the classes of the layers, from the file's header."""
    try:
        metadata = read_header(path)["__metadata__"]
        about = parse_json(metadata[f"0.{_KEY}"])
        for key, kind in (("tokens", list), ("pending", list), ("model", str), ("format", int)):
            if not isinstance(about[key], kind):
                raise TypeError(key)
        if not all(type(token) is int for token in (*about["tokens"], *about["pending"])):
            raise TypeError("tokens")
        layers = {
            int(key.removeprefix(_CLASSES)): value
            for key, value in metadata.items()
            if key.startswith(_CLASSES)
        }
        about["model"] = one_line(about["model"], 80)
        return {"identity": "", "digest": ""} | about, [layers[at] for at in sorted(layers)]
    except (DamagedModel, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DamagedCache(
            f"{path} is not a session that akunu saved, or is cut off; use another file"
        ) from error


def _check_name(path: Path) -> None:
    if path.suffix != SUFFIX:
        raise UsageError(f"the name of a saved session must end in {SUFFIX}, got {path}")


@contextlib.contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {error.strerror or error}") from error
