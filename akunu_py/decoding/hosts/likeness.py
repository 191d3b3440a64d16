"""What must be the same on all hosts: the programs, and the files of the model."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular
from akunu_py.models.manifest import FILE_NAME, read_manifest
from akunu_py.version import __version__

_WHOLE = 4 << 20  # bytes; of a larger file its ends and places between are read
_PLACES = 64
_PIECE = 64 << 10  # bytes

_NAMES = {"mlx": "MLX", "mlx-lm": "mlx-lm", "transformers": "transformers"}


def likeness(model: Path) -> dict[str, str]:
    """By name, what must be the same; the text shows the difference where it is not."""
    found = {"akunu": __version__, "Python": platform.python_version()}
    for package, name in _NAMES.items():
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            found[name] = "none"
    return found | {"the model's files": files_digest(model)}


def difference(here: dict[str, str], there: dict[str, str]) -> str:
    """What is not the same, "" where everything is."""
    for name, value in here.items():
        if there.get(name) != value:
            return f"{name}: {value} here, {there.get(name, 'none')} there"
    return ""


def files_digest(directory: Path) -> str:
    """Of the names and sizes of a model's files, of what was in them when they came into the store,
    and of what is in them now: of large ones that is their beginning and end and 63 pieces between,
    as reading all would take minutes."""
    whole, recorded = hashlib.sha256(), _recorded(directory)
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken"):
            continue
        if path.name == FILE_NAME:  # says when it was fetched, too
            continue
        size = path.stat().st_size
        whole.update(f"{path.name}\0{size}\0{recorded.get(path.name, '')}\0".encode())
        with open_regular(path) as file:
            if size <= _WHOLE:
                whole.update(file.read())
                continue
            for place in range(_PLACES + 1):
                file.seek((size - _PIECE) * place // _PLACES, os.SEEK_SET)
                whole.update(file.read(_PIECE))
    return whole.hexdigest()[:16]


def _recorded(directory: Path) -> dict[str, str]:
    """The hashes of all bytes, by file; none outside the store."""
    try:
        return {name: record.sha256 for name, record in read_manifest(directory).files.items()}
    except DamagedModel:
        return {}
