"""Find and remove leftovers of the store, and of our pulls in the hub's cache.

Other programs' files, intact models and locked models stay.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.models.store.directories import (
    directory_size,
    is_name,
    lock_model,
    partial_directories,
    store_errors,
)
from akunu_py.models.store.migration import migrate
from akunu_py.models.store.names import Table, read_names, remove_entry


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files and an entry of models.toml that can be removed."""

    what: str  # description for the user
    name: str  # the model whose lock protects the files
    paths: tuple[Path, ...] = ()
    size: int = 0  # bytes
    table: Table | None = None  # that has the entry


@dataclass(frozen=True, slots=True)
class UnfinishedPull:
    """An interrupted pull, with `done` of `total` bytes on disk."""

    name: str
    reference: str
    done: int
    total: int
    partials: tuple[Path, ...]


def unfinished_pulls() -> list[UnfinishedPull]:
    """Return the interrupted pulls by name. Skips wrong entries. Raises StoreError."""
    migrate()
    found = []
    for name, entry in sorted(read_names("unfinished").items()):
        if entry.problem or not entry.repository or not is_name(name):
            continue
        blobs = [entry.cached.root / "blobs" / digest for digest in entry.blobs]
        partials = [blob.with_name(f"{blob.name}.incomplete") for blob in blobs]
        done = sum(path.stat().st_size for path in (*blobs, *partials) if path.is_file())
        kept = tuple(path for path in partials if path.exists())
        found.append(UnfinishedPull(name, entry.repository, done, entry.bytes, kept))
    return found


def find_leftovers() -> list[Leftover]:
    """Return everything that can be removed. Raises StoreError."""
    with store_errors(f"cannot read {paths.models_dir()}"):
        return [each for each in _leftovers() if _is_unlocked(each.name)]


def remove_leftover(leftover: Leftover) -> int:
    """Remove `leftover`. Returns the bytes freed: 0 if another process holds the lock."""
    with contextlib.suppress(StoreError), lock_model(leftover.name):
        with store_errors("cannot remove leftover files"):
            for path in leftover.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        if leftover.table:
            remove_entry(leftover.table, leftover.name)
        return leftover.size
    return 0


def _leftovers() -> Iterator[Leftover]:
    for name, path in partial_directories():
        what = f"leftover of an interrupted import of {name}"
        yield Leftover(what, name, (path,), directory_size(path))
    for pull in unfinished_pulls():
        size = sum(path.lstat().st_size for path in pull.partials)
        what = f"an unfinished pull of {pull.reference}"
        yield Leftover(what, pull.name, pull.partials, size, "unfinished")
    for name, entry in read_names().items():
        if entry.repository and is_name(name) and not entry.snapshot.exists():
            yield Leftover(
                f"{name}, whose files are missing from the hub's cache", name, (), 0, "models"
            )


def _is_unlocked(name: str) -> bool:
    """Return True if no other process holds the model's lock."""
    with contextlib.suppress(StoreError), lock_model(name):
        return True
    return False
