"""Find and remove leftovers of the store and of our pulls, but nothing intact or locked."""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.models import catalog
from akunu_py.models.store.directories import (
    PARTIAL,
    directory_size,
    is_name,
    lock_model,
    store_errors,
)
from akunu_py.models.store.migration import migrate
from akunu_py.models.store.names import read_names, remove_entry
from akunu_py.text import human_size

_PARTIAL_BLOB = re.compile(r"[0-9a-f]{40,64}\.incomplete")


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files that can be removed, and maybe a name."""

    what: str  # description for the user
    name: str  # the model whose lock protects the files
    paths: tuple[Path, ...] = ()
    size: int = 0  # bytes
    pull_command: str = ""  # resumes an unfinished pull
    is_named: bool = True  # the name can be removed, too


def unfinished_pulls() -> list[Leftover]:
    """Return the interrupted pulls by name. Raises StoreError."""
    found = []
    for name, entry in sorted(read_names().items()):
        if entry.unfinished and entry.repository and is_name(name):
            blobs = [path for path in entry.cached.root.glob("blobs/*") if path.is_file()]
            done = min(sum(path.stat().st_size for path in blobs), entry.unfinished)
            partials = tuple(path for path in blobs if _PARTIAL_BLOB.fullmatch(path.name))
            size = sum(path.lstat().st_size for path in partials)
            share = f"{human_size(done)} of {human_size(entry.unfinished)}"
            what = f"an unfinished pull of {entry.repository}, {share}"
            command = catalog.pull_command(entry.repository, name, entry.pinned)
            found.append(Leftover(what, name, partials, size, command))
    return found


def find_leftovers() -> list[Leftover]:
    """Return everything that can be removed. Raises StoreError."""
    migrate()
    with store_errors(f"cannot read {paths.models_dir()}"):
        missing = [
            Leftover(f"{name}, whose files are missing from the hub's cache", name)
            for name, entry in read_names().items()
            if entry.repository and not entry.unfinished and not entry.snapshot.exists()
        ]
        found = [*partial_models(), *unfinished_pulls(), *missing]
        return [each for each in found if _is_unlocked(each.name)]


def remove_leftover(leftover: Leftover) -> int:
    """Remove `leftover`. Returns the bytes freed: 0 if another process holds the lock."""
    with contextlib.suppress(StoreError), lock_model(leftover.name):
        with store_errors("cannot remove leftover files"):
            for path in leftover.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        if leftover.is_named:
            remove_entry(leftover.name)
        return leftover.size
    return 0


def partial_models() -> Iterator[Leftover]:
    """Yield the directories of imports and removals, whose process may still run."""
    for path in sorted(paths.models_dir().glob(f"{PARTIAL}*")):
        name = path.name.removeprefix(PARTIAL).rpartition("-")[0]
        if is_name(name):
            what = f"leftover of an interrupted import of {name}"
            yield Leftover(what, name, (path,), directory_size(path), is_named=False)


def _is_unlocked(name: str) -> bool:
    with contextlib.suppress(StoreError), lock_model(name):
        return True
    return False
