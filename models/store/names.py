"""models.toml: the names of pulled and imported models, in the directory of the imports.

One table for each name. A wrong table is one damaged model and never hides the others.
"""

import re
import tomllib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import locked, read_bounded, remove_unfinished, write_atomically
from akunu_py.models.store.directories import store_errors, sync
from akunu_py.models.store.hub_cache import CachedRepository, is_commit, parse_reference

FILE_NAME = "models.toml"
_MAX_BYTES = 4_000_000
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameEntry:
    """A table of models.toml."""

    repository: str = ""  # on the hub; empty for an import, whose files are in a directory here
    revision: str = ""  # a commit
    pinned: str = ""  # the revision that the user named
    cache: str = ""  # the hub's cache at the time of the pull
    unfinished: int = 0  # bytes in total, if the pull was interrupted
    source: str = ""  # origin, for display
    license: str = ""
    drafter: str = ""  # name of the entry that drafts for it
    quantization: str = ""  # storage types and their numbers of matrices
    sha256: dict[str, str] = field(default_factory=dict)  # of an import's files
    problem: str = ""  # of a wrong table; never written

    @property
    def cached(self) -> CachedRepository:
        """The repository in the recorded cache, or in the current one if the cache has moved."""
        found = CachedRepository(self.repository, Path(self.cache))
        return found if found.root.exists() else CachedRepository(self.repository)

    @property
    def snapshot(self) -> Path:
        """The directory with the model's files in the hub's cache."""
        return self.cached.snapshot_path(self.revision)


def read_names() -> dict[str, NameEntry]:
    """Return the entries by name. Raises StoreError if the file is unreadable."""
    return {name: parse_entry(raw) for name, raw in _parse(_read()).items()}


@contextmanager
def changing() -> Iterator[MutableMapping[str, Any]]:
    """Yield the tables of models.toml, and write them after the block. Raises StoreError."""
    import tomlkit  # keeps the comments in the file

    path = paths.models_dir() / FILE_NAME
    with store_errors(f"cannot write {path}"), locked(path.parent / ".lock"):
        remove_unfinished(path)
        data = _read()
        _parse(data)
        document = tomlkit.parse(data)
        yield document
        write_atomically(path, tomlkit.dumps(document).encode("utf-8", "replace"), durable=True)
        sync(path.parent)


def save_entry(name: str, entry: NameEntry) -> None:
    """Write an entry to the file, with the drafter of the same model. Raises StoreError."""
    with changing() as document:
        before = read_names().get(name, NameEntry())
        drafter = before.drafter if before.source == entry.source else ""
        document[name] = as_table(replace(entry, drafter=drafter))


def set_drafter(name: str, drafter: str) -> None:
    """Let the model `name` use a drafter. Raises StoreError."""
    with changing() as document:
        document[name]["drafter"] = drafter


def remove_entry(name: str) -> None:
    """Remove an entry, if it is there, and its use as a drafter. Raises StoreError."""
    if name in read_names():
        with changing() as document:
            document.pop(name, None)
            for table in document.values():
                if isinstance(table, MutableMapping) and table.get("drafter") == name:
                    table.pop("drafter")


def as_table(entry: NameEntry) -> dict[str, Any]:
    """Return the values of an entry that are not empty."""
    return {key: value for key, value in asdict(entry).items() if value}


def parse_entry(raw: object) -> NameEntry:
    """Return the entry of a table, with only the problem if a value is wrong."""
    try:
        if not isinstance(raw, dict):
            raise TypeError("expected a table")
        known = asdict(NameEntry())
        for key, value in raw.items():
            if type(value) is not type(known.get(key)):
                raise TypeError(f"{key} is unknown or has a wrong type")
        entry = NameEntry(**raw)
        on_hub = bool(entry.repository or entry.revision)
        valid = parse_reference(entry.repository) == (entry.repository, None)
        if on_hub and not (valid and is_commit(entry.revision) and Path(entry.cache).is_absolute()):
            raise TypeError("expected a repository, the commit in revision, and a path in cache")
        for name, digest in entry.sha256.items():
            if Path(name).name != name or not _SHA256.fullmatch(digest):
                raise TypeError("expected names of files and hashes in sha256")
    except (TypeError, ValueError) as error:
        return NameEntry(problem=f"{FILE_NAME}: {error}")
    return entry


def _read() -> bytes:
    path = paths.models_dir() / FILE_NAME
    with store_errors(f"cannot read {path}"):
        try:
            return read_bounded(path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""


def _parse(data: bytes) -> dict[str, Any]:
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise StoreError(
            f"{paths.models_dir() / FILE_NAME} is damaged: {error!s:.200}; correct it, or "
            "delete it and pull the models again, which downloads no file twice"
        ) from error
