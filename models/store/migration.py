"""Migrate a store of earlier versions: a directory with akunu.json for each model.

Directories of links into the hub's cache become names in models.toml; imports stay where they are.
A kill at any point leaves every model usable, as what it was or what it becomes, and the next start
continues. A store that cannot be written stays as it is: its directories are listed as imports.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import read_json
from akunu_py.models.store.directories import is_name, lock_model, remove_directory
from akunu_py.models.store.names import Entry, changing, parse_entry, read_names, write_entry

_FILE = "akunu.json"
_NOTES = ".pulling"
_MAX_BYTES = 16_000_000
_WRONG = (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError)


def migrate() -> None:
    """Migrate what is left of a store of earlier versions."""
    root = paths.models_dir()
    names = [path.parent.name for path in root.glob(f"*/{_FILE}") if is_name(path.parent.name)]
    if not names and not (root / _NOTES).exists():
        return
    with suppress(OSError, StoreError):
        with changing() as document:
            for name in names:
                if name not in document["models"] and (entry := _model(root / name)):
                    write_entry(document, "models", name, entry)
            for name, entry in _unfinished(root / _NOTES):
                write_entry(document, "unfinished", name, entry)
        entries = read_names()
        for name in names:
            with lock_model(name):
                entry = entries.get(name, Entry())
                if entry.repository:
                    move_caches(root / name, entry.snapshot)
                    remove_directory(name)
                else:
                    (root / name / _FILE).unlink(missing_ok=True)
        for name in (_NOTES, ".usage"):
            shutil.rmtree(root / name, ignore_errors=True)


def move_caches(before: Path, after: Path) -> None:
    """Give the caches of the model at `before` to the model at `after`, unless it has its own."""
    for root in (paths.cache_dir() / "learned", paths.prompt_caches_dir()):
        old, new = (root / paths.model_directory_name(path) for path in (before, after))
        with suppress(OSError):
            old.rename(new)


def _model(directory: Path) -> Entry | None:
    """Return the entry for a directory of the old store, None if its akunu.json is unusable."""
    with suppress(*_WRONG):
        raw = read_json(directory / _FILE, _MAX_BYTES)
        entry = parse_entry(
            {
                "repository": raw.get("repository", ""),
                "revision": raw.get("commit", ""),
                "source": raw["source"],
                "license": raw["licence"],
                "quantization": raw["quantisation"],
                "sha256": {name: record["sha256"] for name, record in raw["files"].items()},
            }
        )
        links = [path for path in directory.iterdir() if path.is_symlink()]
        if entry.repository and links:  # into CACHE/models--OWNER--NAME/snapshots/COMMIT
            pulled = replace(entry, cache=str(Path(os.readlink(links[0])).parents[3]), sha256={})
            if all((pulled.snapshot / link.name).exists() or not link.exists() for link in links):
                return pulled
        return replace(entry, repository="", revision="") if not entry.problem else None
    return None


def _unfinished(notes: Path) -> Iterator[tuple[str, Entry]]:
    """Yield the name and the entry of each interrupted pull."""
    for path in notes.glob("*.json"):
        with suppress(*_WRONG):
            note = read_json(path, _MAX_BYTES)
            entry = parse_entry(
                {
                    "repository": note["repository"],
                    "revision": note["commit"],
                    "bytes": sum(size for _, size, _, _ in note["files"]),
                    "blobs": [digest for _, _, digest, _ in note["files"]],
                }
            )
            if is_name(path.stem) and not entry.problem:
                yield path.stem, entry
