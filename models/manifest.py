"""akunu.json, the file that describes one model of the store: its format, reading and writing.

Reading checks every field, because a broken entry must never break the others: whatever is wrong
comes out as DamagedModel.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular, read_json

FILE_NAME = "akunu.json"
FORMAT = 1
_MAX_BYTES = 16_000_000
_JSON: dict[type, str] = {str: "a string", int: "an integer", dict: "an object"}


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a model: `size` in bytes, `sha256` in hex."""

    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is found out about a model on its way into the store.

    source: where it came from, for people. context_length: tokens. parameters: number of weights.
    quantization: storage types and how many matrices use them. repository, commit: where on the hub
    it is from; its files are links into the hub's cache then. files: those read so far, by path
    relative to the model's directory.
    """

    source: str = ""
    context_length: int
    parameters: int
    quantization: str
    licence: str = ""
    files: dict[str, FileRecord] = field(default_factory=dict)
    repository: str = ""
    commit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest(ModelFacts):
    """The facts of an installed model, all its files included. created: ISO 8601, UTC."""

    name: str
    created: str

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes akunu.json into `directory`."""
    raw = {"format": FORMAT} | asdict(manifest)
    raw["quantisation"] = raw.pop("quantization")  # as the format spells it
    text = json.dumps(raw, indent=2, ensure_ascii=False)
    (directory / FILE_NAME).write_text(text + "\n", "utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Reads akunu.json in `directory`. Raises DamagedModel with what is wrong with it."""
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
    return Manifest(
        name=_field(raw, "name", str),
        source=_field(raw, "source", str),
        created=_field(raw, "created", str),
        context_length=_field(raw, "context_length", int),
        parameters=_field(raw, "parameters", int),
        quantization=_field(raw, "quantisation", str),
        licence=_field(raw, "licence", str),
        files=_files(_field(raw, "files", dict)),
        repository=_field({"repository": ""} | raw, "repository", str),
        commit=_field({"commit": ""} | raw, "commit", str),
    )


def record_files(
    directory: Path,
    progress: Callable[[int], None] = lambda done: None,
    known: Mapping[str, FileRecord] | None = None,
) -> dict[str, FileRecord]:
    """Sizes and hashes of all files below `directory`.

    progress: called with the bytes read so far. known: records of files that were read already.
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
    """The file's SHA-256 in hex. `progress` is called with the bytes read so far."""
    digest, done = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
            done += len(block)
            progress(done)
    return digest.hexdigest()


def _field(raw: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = raw.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise DamagedModel(f"{FILE_NAME}: expected {_JSON[kind]} for {key}, found {value!r:.40}")
    return value


def _files(raw: dict[str, Any]) -> dict[str, FileRecord]:
    if not raw:
        raise DamagedModel(f"{FILE_NAME} names no files")
    files: dict[str, FileRecord] = {}
    for name, record in raw.items():
        inside = PurePosixPath(name)
        if not name or inside.is_absolute() or ".." in inside.parts or "\0" in name:
            raise DamagedModel(f"{FILE_NAME} names a file outside the model: {name[:60]!r}")
        if not isinstance(record, dict):
            raise DamagedModel(f"{FILE_NAME}: no size for {name[:60]}")
        files[name] = FileRecord(_field(record, "size", int), _field(record, "sha256", str))
    return files
