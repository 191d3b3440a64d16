"""Models on disk, and akunu.json, the file that describes one model of the store.

Every field is checked, because a broken entry must never break the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular, read_blocks, read_json

FILE_NAME = "akunu.json"
FORMAT = 1
_MAX_BYTES = 16_000_000
_JSON: dict[type, str] = {str: "a string", int: "an integer", dict: "an object"}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a model."""

    size: int  # bytes
    sha256: str  # hex


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts about a model, collected before its installation."""

    source: str = ""  # origin, for display
    context_length: int  # tokens
    parameters: int  # number of weights
    quantization: str  # storage types and their numbers of matrices
    license: str = ""
    files: dict[str, FileRecord] = field(default_factory=dict)  # files hashed so far, by path
    repository: str = ""  # on the hub; the files are then links into the hub's cache
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ModelFacts):
    """The facts of an installed model, with all its files."""

    name: str
    created: str  # ISO 8601, UTC

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk."""

    name: str
    path: Path
    size: int = 0  # bytes
    context_length: int = 0  # tokens, 0 if unknown
    source: str = ""
    quantization: str = ""
    created: str = ""
    license: str = ""
    damaged: str = ""  # the problem, if one is known without reading the files
    repository: str = ""  # on the hub; `path` then contains links into the hub's cache
    commit: str = ""
    program: str = ""  # that downloaded and manages the model, if it is not akunu
    manifest: Manifest | None = None  # None for a directory outside the store


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write akunu.json into `directory`."""
    raw = {"format": FORMAT} | asdict(manifest)
    # The format has British spelling.
    raw["quantisation"], raw["licence"] = raw.pop("quantization"), raw.pop("license")
    text = json.dumps(raw, indent=2, ensure_ascii=False)
    (directory / FILE_NAME).write_text(text + "\n", "utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read akunu.json in `directory`. Raises DamagedModel with the problem."""
    path = directory / FILE_NAME
    try:
        raw = read_json(path, _MAX_BYTES)
    except FileNotFoundError:
        raise DamagedModel(f"{FILE_NAME} is missing") from None
    except (OSError, ValueError) as error:
        raise DamagedModel(f"{FILE_NAME} is unreadable ({type(error).__name__})") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise DamagedModel(f"{FILE_NAME}: expected format {FORMAT}, found {found!r:.40}")
    texts = {key: _field(raw, key, str) for key in ("name", "source", "created")}
    numbers = {key: _field(raw, key, int) for key in ("context_length", "parameters")}
    on_hub = {key: _field({key: ""} | raw, key, str) for key in ("repository", "commit")}
    quantization, license = _field(raw, "quantisation", str), _field(raw, "licence", str)
    files = _parse_files(_field(raw, "files", dict))
    american = {"quantization": quantization, "license": license}
    return Manifest(**texts, **numbers, **on_hub, **american, files=files)


def record_files(
    directory: Path,
    progress: Callable[[int], None] = lambda done: None,
    known: Mapping[str, FileRecord] | None = None,
) -> dict[str, FileRecord]:
    """Return the sizes and hashes of all files below `directory`.

    progress: called with the bytes read so far. known: records of files that are hashed already.
    """
    records: dict[str, FileRecord] = dict(known or {})
    done = sum(record.size for record in records.values())
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name not in (FILE_NAME, *records):
            base = done
            digest = sha256_file(path, lambda read, base=base: progress(base + read))  # type: ignore[misc]
            size = path.stat().st_size
            done += size
            records[path.relative_to(directory).as_posix()] = FileRecord(size, digest)
    return records


def sha256_file(path: Path, progress: Callable[[int], None] = lambda done: None) -> str:
    """Return the file's SHA-256 in hex. `progress` is called with the bytes read so far."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for block in read_blocks(file, progress):
            digest.update(block)
    return digest.hexdigest()


def _field(raw: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedModel(f"{FILE_NAME}: expected {_JSON[kind]} for {key}, found {value!r:.40}")
    return value


def _parse_files(raw: dict[str, Any]) -> dict[str, FileRecord]:
    if not raw:
        raise DamagedModel(f"{FILE_NAME} lists no files")
    files: dict[str, FileRecord] = {}
    for name, record in raw.items():
        relative = PurePosixPath(name)
        if not name or relative.is_absolute() or ".." in relative.parts or "\0" in name:
            raise DamagedModel(f"{FILE_NAME} lists a file outside the model: {name[:60]!r}")
        if not isinstance(record, dict):
            raise DamagedModel(f"{FILE_NAME}: no size for {name[:60]}")
        files[name] = FileRecord(_field(record, "size", int), _field(record, "sha256", str))
    return files
