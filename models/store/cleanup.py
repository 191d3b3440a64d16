"""Leftovers in the store, and in the hub's cache because of us: found and removed.

Never touched: what another process is at work on, intact models, and files of the hub's cache that
we did not leave unfinished ourselves. Pulls note what they fetch under `.pulling` in the store, so
that an interrupted one can be found.
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
from akunu_py.models.store import hub_cache, store
from akunu_py.models.store.disk import lock_model, store_errors
from akunu_py.models.store.hub_cache import CachedRepository
from akunu_py.models.store.store import USAGE

_PULLING = ".pulling"
_LONGEST_NOTE = 1_000_000  # bytes


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something to remove: what it is, in words; where, and how many bytes that frees.

    name: the model whose lock protects it.
    """

    what: str
    name: str
    paths: tuple[Path, ...]
    size: int


@dataclass(frozen=True, slots=True)
class UnfinishedPull:
    """A pull that was interrupted: of the `total` bytes, `done` are here."""

    name: str
    reference: str
    done: int
    total: int
    partials: tuple[Path, ...]


def begin_pull(name: str, model: hub_cache.HubModel) -> None:
    """Notes that `model` is being fetched, so that its unfinished files can be found again."""
    path = _note(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [[file.name, file.size, file.digest, file.large] for file in model.files]
    note = {"repository": model.repository, "commit": model.commit, "files": files}
    write_atomically(path, json.dumps(note).encode())


def end_pull(name: str) -> None:
    """Removes the note of `begin_pull`: the model is complete."""
    _note(name).unlink(missing_ok=True)


def unfinished_pulls() -> list[UnfinishedPull]:
    """Pulls that were interrupted, by name. Notes that cannot be read are left out."""
    found = []
    for path in sorted((paths.models_dir() / _PULLING).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = read_json(path, _LONGEST_NOTE)
            model = _noted(note["repository"], note["commit"], note["files"])
            if model is None or not store.is_name(path.stem):
                continue
            cached = CachedRepository(model.repository)
            partials = tuple(p for p in map(cached.partial_path, model.files) if p.exists())
            done = sum(cached.fetched_bytes(model, file) for file in model.files)
            found.append(UnfinishedPull(path.stem, model.repository, done, model.size, partials))
    return found


def _noted(repository: str, commit: str, files: list[list[Any]]) -> hub_cache.HubModel | None:
    """The model of a note, None where the note is not one of ours."""
    found = tuple(hub_cache.HubFile(*file) for file in files)
    valid = hub_cache.is_commit(commit) and all(hub_cache.is_valid_file(file) for file in found)
    if hub_cache.parse_reference(repository) != (repository, None) or not valid:
        return None
    return hub_cache.HubModel(repository, "main", commit, found, "")


def find_leftovers() -> list[Leftover]:
    """Everything that can be removed. Raises StoreError where the store cannot be read."""
    root = paths.models_dir()
    with store_errors(f"cannot read {root}"):
        return [*_partial(), *_dangling(), *_unfinished(), *_old_usage(root)]


def remove_leftover(leftover: Leftover) -> int:
    """Removes it. Returns the bytes that this freed: none where a process is at work on it."""
    with contextlib.suppress(StoreError), lock_model(leftover.name, wait=False):
        with store_errors("cannot remove what is left over"):
            for path in leftover.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        return leftover.size
    return 0


def _partial() -> Iterator[Leftover]:
    for name, path in store.partial_directories():
        if _unlocked(name):
            what = f"left over from an interrupted pull of {name}"
            yield Leftover(what, name, (path,), _size(path))


def _dangling() -> Iterator[Leftover]:
    for model in store.list_models():
        if model.manifest is None or not model.repository:
            continue
        if not any((model.path / name).exists() for name in model.manifest.files):
            what = f"{model.name}: all its files are gone from the hub's cache"
            yield Leftover(what, model.name, (model.path,), _size(model.path))


def _unfinished() -> Iterator[Leftover]:
    for pull in unfinished_pulls():
        if _unlocked(pull.name):
            size = sum(_size(path) for path in pull.partials)
            what = f"an unfinished pull of {pull.reference}"
            yield Leftover(what, pull.name, (*pull.partials, _note(pull.name)), size)


def _old_usage(root: Path) -> Iterator[Leftover]:
    for path in sorted((root / USAGE).glob("*.json")):
        if store.is_name(path.stem) and not (root / path.stem).exists():
            yield Leftover(f"notes on {path.stem}, which is gone", path.stem, (path,), _size(path))


def _unlocked(name: str) -> bool:
    """Whether no process is at work on the model."""
    with contextlib.suppress(StoreError), lock_model(name, wait=False):
        return True
    return False


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size(inside) for inside in path.iterdir())
    return path.lstat().st_size


def _note(name: str) -> Path:
    return paths.models_dir() / _PULLING / f"{name}.json"
