"""Prompt caches: the KV cache and the token history of a session on disk, in mlx-lm's format.

mlx-lm's `load_prompt_cache` reads these files too. Ours carry in their metadata which tokens the
cache holds, which model wrote it and a digest of all values, and nothing is used before all of
that was checked: a cache of other weights, or with a flipped bit, would give wrong answers
unnoticed. Checkpoints are not saved.
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
from akunu_py.decoding.target import Target
from akunu_py.errors import DamagedCache, DamagedModel, StoreError, UsageError
from akunu_py.files import replacing
from akunu_py.models.safetensors import read_header

SUFFIX = ".safetensors"  # MLX tells formats by it
_FORMAT = 2
_KEY = "akunu"  # of our own metadata
_CLASSES = "1."  # mlx-lm's metadata: ours, a class name a layer, what was not an array
_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights, to tell models apart


def save(target: Target, engine: Engine, path: Path) -> None:
    """Writes the target's cache and history to `path`; see `Session.save_prompt_cache`."""
    _check_name(path)
    if not target.tokens:
        raise UsageError("there is nothing to save: the session has read nothing yet")
    if why := kvcache.why_no_prompt_cache(target.cache):
        raise UsageError(f"a session of {engine.name} cannot be saved: {why}")
    entries = kvcache.compact(target.cache)
    about = {
        "format": _FORMAT,
        "model": engine.name,
        "identity": model_digest(engine.path, engine.weights),
        "digest": _digest(entries, target.tokens, target.pending),
        "tokens": target.tokens,
        "pending": target.pending,
    }
    with _disk_errors(f"cannot write {path}"), replacing(path) as temporary:
        try:
            mlx_cache.save_prompt_cache(str(temporary), entries, {_KEY: json.dumps(about)})
        except RuntimeError as error:  # MLX's word for a full disk
            raise OSError(f"{error}") from error


def load(target: Target, engine: Engine, path: Path) -> None:
    """Makes the cache and history in `path` the target's; see `Session.load_prompt_cache`."""
    _check_name(path)
    with _disk_errors(f"cannot read {path}"):
        about, classes = _read_about(path)
    if about["format"] != _FORMAT:
        raise UsageError(
            f"{path} was saved by another version of akunu (format {about['format']}, this one "
            f"reads {_FORMAT}); delete it, and it is made again"
        )
    if about["identity"] != model_digest(engine.path, engine.weights):
        raise UsageError(
            f"{path} belongs to {about['model']}, or to other weights of it than {engine.name} "
            f"has here ({engine.weights}); use another file"
        )
    made = [type(entry).__name__ for entry in kvcache.new_cache(engine.model, engine.kv_bits)]
    if classes != made:
        raise UsageError(f"{path} was saved with another --kv-bits; use the same, or another file")
    damaged = DamagedCache(f"{path} is damaged; delete it, and it is made again")
    try:
        with _disk_errors(f"cannot read {path}"):
            entries = mlx_cache.load_prompt_cache(str(path))
        digest = _digest(entries, about["tokens"], about["pending"])
        whole = digest == about["digest"] and len(about["tokens"]) > 0
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise damaged from error
    if not whole:
        raise damaged
    target.adopt(entries, about["tokens"], about["pending"])


@cache
def model_digest(model: Path, weights: str) -> str:
    """Tells models apart: their configuration, tokenizer, and samples of their weights.

    weights: how they are laid out in memory, which shows in how values round.
    """
    digest = hashlib.sha256(weights.encode())
    for name in ("config.json", "tokenizer.json"):
        with contextlib.suppress(FileNotFoundError):
            digest.update((model / name).read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
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
        about = json.loads(metadata[f"0.{_KEY}"])
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
