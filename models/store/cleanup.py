"""Find and remove leftovers of the store, and of our pulls in the hub's cache.

Pulls note their files under `.pulling` in the store, so that an interrupted pull can be found.
Other programs' files, intact models and locked models stay.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import read_json, write_atomically
from akunu_py.models.store import hub_cache, model_store
from akunu_py.models.store.directories import lock_model, store_errors
from akunu_py.models.store.hub_cache import CachedRepository
from akunu_py.models.store.model_store import USAGE

_PULLING = ".pulling"
_MAX_NOTE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files that can be removed."""

    what: str  # description for the user
    name: str  # the model whose lock protects the files
    paths: tuple[Path, ...]
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class UnfinishedPull:
    """An interrupted pull, with `done` of `total` bytes on disk."""

    name: str
    reference: str
    done: int
    total: int
    partials: tuple[Path, ...]


def begin_pull(name: str, model: hub_cache.HubModel) -> None:
    """Note the files of `model`, so that an interrupted pull can be found."""
    path = _note_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [[file.name, file.size, file.digest, file.large] for file in model.files]
    note = {"repository": model.repository, "commit": model.commit, "files": files}
    write_atomically(path, json.dumps(note).encode())


def end_pull(name: str) -> None:
    """Remove the note of `begin_pull`: the model is complete."""
    _note_path(name).unlink(missing_ok=True)


def unfinished_pulls() -> list[UnfinishedPull]:
    """Return the interrupted pulls by name. Skips unreadable notes."""
    found = []
    for path in sorted((paths.models_dir() / _PULLING).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = read_json(path, _MAX_NOTE_BYTES)
            model = _parse(note["repository"], note["commit"], note["files"])
            if model is None or not model_store.is_name(path.stem):
                continue
            cached = CachedRepository(model.repository)
            partials = tuple(p for p in map(cached.partial_path, model.files) if p.exists())
            done = sum(cached.fetched_bytes(model, file) for file in model.files)
            found.append(UnfinishedPull(path.stem, model.repository, done, model.size, partials))
    return found


def _parse(repository: str, commit: str, files: list[list[Any]]) -> hub_cache.HubModel | None:
    """Return the model in a note, None if the note is invalid."""
    found = tuple(hub_cache.HubFile(*file) for file in files)
    valid = hub_cache.is_commit(commit) and all(hub_cache.is_valid_metadata(file) for file in found)
    if hub_cache.parse_reference(repository) != (repository, None) or not valid:
        return None
    return hub_cache.HubModel(repository, "main", commit, found, "")


def find_leftovers() -> list[Leftover]:
    """Return everything that can be removed. Raises StoreError."""
    root = paths.models_dir()
    with store_errors(f"cannot read {root}"):
        return [*_partial_models(), *_empty_models(), *_partial_downloads(), *_old_usage(root)]


def remove_leftover(leftover: Leftover) -> int:
    """Remove `leftover`. Returns the bytes freed: 0 if another process holds the lock."""
    with contextlib.suppress(StoreError), lock_model(leftover.name):
        with store_errors("cannot remove leftover files"):
            for path in leftover.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        return leftover.size
    return 0


def _partial_models() -> Iterator[Leftover]:
    for name, path in model_store.partial_directories():
        if _is_unlocked(name):
            what = f"leftover of an interrupted pull of {name}"
            yield Leftover(what, name, (path,), _size(path))


def _empty_models() -> Iterator[Leftover]:
    for model in model_store.list_models():
        if model.manifest is None or not model.repository:
            continue
        if not any((model.path / name).exists() for name in model.manifest.files):
            what = f"{model.name}, whose files are missing from the hub's cache"
            yield Leftover(what, model.name, (model.path,), _size(model.path))


def _partial_downloads() -> Iterator[Leftover]:
    for pull in unfinished_pulls():
        if _is_unlocked(pull.name):
            size = sum(_size(path) for path in pull.partials)
            what = f"an unfinished pull of {pull.reference}"
            yield Leftover(what, pull.name, (*pull.partials, _note_path(pull.name)), size)


def _old_usage(root: Path) -> Iterator[Leftover]:
    for path in sorted((root / USAGE).glob("*.json")):
        if model_store.is_name(path.stem) and not (root / path.stem).exists():
            yield Leftover(
                f"usage record of the removed model {path.stem}", path.stem, (path,), _size(path)
            )


def _is_unlocked(name: str) -> bool:
    """Return True if no other process holds the model's lock."""
    with contextlib.suppress(StoreError), lock_model(name):
        return True
    return False


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size(inside) for inside in path.iterdir())
    return path.lstat().st_size


def _note_path(name: str) -> Path:
    return paths.models_dir() / _PULLING / f"{name}.json"
