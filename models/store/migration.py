"""Migrate a store of earlier versions: a directory with akunu.json for each model.

Directories of links into the hub's cache become names in models.toml; imports stay where they are.
A kill at any point leaves every model usable, as what it was or what it becomes, and the next start
continues. A store that cannot be written stays as it is: its directories are listed as imports.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import read_json
from akunu_py.models.store.directories import is_name, lock_model, remove_directory
from akunu_py.models.store.names import NameEntry, as_table, changing, parse_entry, read_names

_FILE = "akunu.json"
_MAX_BYTES = 16_000_000


def migrate() -> None:
    """Migrate what is left of a store of earlier versions."""
    root = paths.models_dir()
    names = [path.parent.name for path in root.glob(f"*/{_FILE}") if is_name(path.parent.name)]
    if not names:
        return
    with suppress(OSError, StoreError):
        with changing() as document:
            for name in names:
                if name not in document and (entry := _entry(root / name)):
                    document[name] = as_table(entry)
        for name in (".pulling", ".usage"):
            shutil.rmtree(root / name, ignore_errors=True)
        entries = read_names()
        for name in names:
            with lock_model(name):
                entry = entries.get(name, NameEntry())
                if entry.repository:
                    move_caches(root / name, entry.snapshot)
                    remove_directory(name)
                else:
                    (root / name / _FILE).unlink(missing_ok=True)


def move_caches(before: Path, after: Path) -> None:
    """Give the caches of the model at `before` to the model at `after`, unless it has its own."""
    for root in (paths.cache_dir() / "learned", paths.prompt_caches_dir()):
        old, new = (root / paths.model_directory_name(path) for path in (before, after))
        with suppress(OSError):
            old.rename(new)


def _entry(directory: Path) -> NameEntry | None:
    """Return the entry for a directory of the old store, None if its akunu.json is unusable."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        raw = read_json(directory / _FILE, _MAX_BYTES)
        facts = {"source": raw["source"], "license": raw["licence"]}
        facts["quantization"] = raw["quantisation"]
        links = [path for path in directory.iterdir() if path.is_symlink()]
        if raw.get("repository") and links:  # into CACHE/models--OWNER--NAME/snapshots/COMMIT
            cache = str(Path(os.readlink(links[0])).parents[3])
            hub = {"repository": raw["repository"], "revision": raw["commit"], "cache": cache}
            entry = parse_entry(facts | hub)
            if all((entry.snapshot / link.name).exists() or not link.exists() for link in links):
                return entry if not entry.problem else None
        hashes = {name: record["sha256"] for name, record in raw["files"].items()}
        entry = parse_entry(facts | {"sha256": hashes})
        return entry if not entry.problem else None
    return None
