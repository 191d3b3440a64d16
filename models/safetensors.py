"""Reads headers of safetensors files and writes such files one tensor at a time.

Owns the container only. Writing streams, so a model larger than memory can be converted. A header
is checked against the file's size before it is believed (DamagedModel).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from akunu_py.errors import DamagedModel

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_TYPES = {"F32": ("<f4", 4), "F16": ("<f2", 2), "U32": ("<u4", 4)}  # for numpy, and bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that will be written: `load` makes its values when their turn has come."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], npt.NDArray[Any]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _TYPES[self.dtype][1]


def write_safetensors(
    path: Path, entries: Iterable[Entry], progress: Callable[[int], None] = lambda done: None
) -> None:
    """Writes `entries` in the order given. `progress` hears the bytes written so far."""
    import numpy as np  # here, so that checking a model before a load stays light

    entries = list(entries)
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.nbytes],
        }
        at += entry.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    done = 0
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            values = np.ascontiguousarray(entry.load(), _TYPES[entry.dtype][0])
            if values.shape != entry.shape:
                raise ValueError(f"{entry.name}: {values.shape} instead of {entry.shape}")
            file.write(values.data)
            done += entry.nbytes
            progress(done)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, after a check that the file holds what it promises."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedModel(f"{path} is cut off or not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [header[name]["data_offsets"][1] for name in header if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise DamagedModel(f"{path} is not a safetensors file: its header is unreadable") from error
    if size != expected:
        raise DamagedModel(f"{path} is damaged: expected {expected} bytes, found {size}")
    assert isinstance(header, dict)
    return header
