"""models.toml: the names of pulled and imported models, in the directory of the imports.

`[models.NAME]` describes a model, `[unfinished.NAME]` an interrupted pull. A wrong table is one
damaged model and never hides the others.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import locked, read_bounded, write_atomically
from akunu_py.models.store.directories import store_errors, sync
from akunu_py.models.store.hub_cache import CachedRepository, is_commit, parse_reference

FILE_NAME = "models.toml"
_MAX_BYTES = 4_000_000
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TYPES = {str: "a string", int: "an integer", dict: "a table", list: "a list"}
Table = Literal["models", "unfinished"]
Document = MutableMapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One table of models.toml."""

    repository: str = ""  # on the hub; empty for an import, whose files are in a directory here
    revision: str = ""  # a commit
    cache: str = ""  # the hub's cache at the time of the pull
    source: str = ""  # origin, for display
    license: str = ""
    quantization: str = ""  # storage types and their numbers of matrices
    sha256: dict[str, str] = field(default_factory=dict)  # of an import's files
    bytes: int = 0  # of an unfinished pull
    blobs: list[str] = field(default_factory=list)  # of an unfinished pull, in the hub's cache
    problem: str = field(default="", compare=False)  # of a wrong table; never written

    @property
    def cached(self) -> CachedRepository:
        """The repository in the cache that has the revision; the cache may have moved."""
        recorded = CachedRepository(self.repository, Path(self.cache) if self.cache else None)
        current = CachedRepository(self.repository)
        moved = not recorded.root.exists() and current.root.exists()
        return current if moved else recorded

    @property
    def snapshot(self) -> Path:
        """The directory with the model's files in the hub's cache."""
        return self.cached.snapshot_path(self.revision)


def read_names(table: Table = "models") -> dict[str, Entry]:
    """Return the entries of a table by name. Raises StoreError if the file is unreadable."""
    found = _parse(_read()).get(table, {})
    return {name: parse_entry(raw) for name, raw in found.items()}


@contextmanager
def changing() -> Iterator[Document]:
    """Yield the content of models.toml, and write it after the block. Raises StoreError.

    Other processes wait. Comments in the file stay.
    """
    import tomlkit

    path = paths.models_dir() / FILE_NAME
    with store_errors(f"cannot write {path}"), locked(path.parent / ".lock"):
        data = _read()
        _parse(data)
        document = tomlkit.parse(data)
        for table in ("models", "unfinished"):
            document.setdefault(table, tomlkit.table(is_super_table=True))
        yield document
        for table in ("models", "unfinished"):
            if not document[table]:
                del document[table]
        write_atomically(path, tomlkit.dumps(document).encode("utf-8", "replace"), durable=True)
        sync(path.parent)


def write_entry(document: Document, table: Table, name: str, entry: Entry) -> None:
    """Replace an entry of a document of `changing`; a model's entry ends its unfinished pull."""
    document["unfinished"].pop(name, None)
    document[table][name] = {key: value for key, value in asdict(entry).items() if value}


def save_entry(table: Table, name: str, entry: Entry) -> None:
    """Write an entry to the file. Raises StoreError."""
    with changing() as document:
        write_entry(document, table, name, entry)


def remove_entry(table: Table, name: str) -> None:
    """Remove an entry from the file, if it is there. Raises StoreError."""
    if name in read_names(table):
        with changing() as document:
            document[table].pop(name, None)


def _read() -> bytes:
    path = paths.models_dir() / FILE_NAME
    with store_errors(f"cannot read {path}"):
        try:
            return read_bounded(path, _MAX_BYTES)
        except (FileNotFoundError, NotADirectoryError):
            return b""


def _parse(data: bytes) -> dict[str, Any]:
    """Return the content of models.toml. Raises StoreError."""
    try:
        found = tomllib.loads(data.decode())
        for table in ("models", "unfinished"):
            if not isinstance(found.get(table, {}), dict):
                raise ValueError(f"{table} is not a table")
    except (ValueError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
        raise StoreError(
            f"{paths.models_dir() / FILE_NAME} is damaged: {reason:.200}; correct it, or delete it "
            "and pull the models again, which downloads no file twice"
        ) from error
    return found


def parse_entry(raw: object) -> Entry:
    """Return the entry of a table, with only the problem if a value is wrong."""
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"expected a table, found {raw!r:.40}")
        values = {}
        for each in fields(Entry):
            if each.name in raw and each.name != "problem":
                values[each.name] = value = raw[each.name]
                expected = type(getattr(_EMPTY, each.name))
                if type(value) is not expected:
                    raise ValueError(f"expected {_TYPES[expected]} for {each.name}")
        entry = Entry(**values)
        _check_values(entry)
    except ValueError as error:
        return Entry(problem=f"{FILE_NAME}: {error}")
    return entry


def _check_values(entry: Entry) -> None:
    """Raise ValueError for a value that could name a file outside the model."""
    on_hub = bool(entry.repository or entry.revision)
    if on_hub and parse_reference(entry.repository) != (entry.repository, None):
        raise ValueError(f"expected OWNER/REPOSITORY as repository, found {entry.repository!r:.60}")
    if on_hub and not is_commit(entry.revision):
        raise ValueError(f"expected a commit as revision, found {entry.revision!r:.60}")
    if entry.cache and (not os.path.isabs(entry.cache) or "\0" in entry.cache):
        raise ValueError(f"expected an absolute path as cache, found {entry.cache!r:.60}")
    for name in entry.sha256:
        if Path(name).name != name or "\0" in name:
            raise ValueError(f"sha256 lists a file outside the model: {name!r:.60}")
    for digest in (*entry.sha256.values(), *entry.blobs):
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise ValueError(f"expected a hash, found {digest!r:.80}")


_EMPTY = Entry()
