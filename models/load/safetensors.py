"""Read headers of safetensors files, and write such files one tensor at a time.

A header is checked so that MLX's own reader can trust it.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from akunu_py.errors import DamagedModel
from akunu_py.files import open_regular

MAX_HEADER_BYTES = 32_000_000  # shards of the largest known models have about 10 MB
MAX_DIMENSIONS = 8
_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2,
    "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to write."""

    name: str
    dtype: str  # a key of _SIZES
    shape: tuple[int, ...]
    load: Callable[[], Any]  # returns a contiguous buffer; called once, when it is written

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _SIZES[self.dtype]


def write_safetensors(
    file: BinaryIO,
    metadata: dict[str, str],
    entries: Iterable[Entry],
    before: Callable[[memoryview], object] = lambda block: None,
) -> None:
    """Write `entries` in order. `before` is called with the header and each tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset, entries = 0, list(entries)
    for entry in entries:
        offsets = [offset, offset := offset + entry.nbytes]
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": offsets,
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(struct.pack("<Q", len(text)) + text)
    before(head)
    file.write(head)
    for entry in entries:
        block = memoryview(entry.load())
        if block.nbytes != entry.nbytes:
            raise ValueError(f"{entry.name}: {block.nbytes} bytes instead of {entry.nbytes}")
        before(block)
        file.write(block)


def read_header(path: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, after a check against the file's size.

    Raises DamagedModel and OSError.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedModel(f"{path} is cut off or not a safetensors file")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_reject_duplicates)
        if not isinstance(header, dict):
            raise TypeError("expected an object")
        ranges = sorted(_byte_range(header[name]) for name in header if name != "__metadata__")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedModel(f"{path} is not a safetensors file: its header is unreadable") from error
    end = 0
    for begin, after in ranges:
        if begin != end:
            raise DamagedModel(f"{path} is damaged: its tensors overlap or leave gaps")
        end = after
    expected = 8 + length + end
    if size != expected:
        raise DamagedModel(f"{path} is damaged: expected {expected} bytes, found {size}")
    return header


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name occurs twice")
    return mapping


def _byte_range(entry: Any) -> tuple[int, int]:
    """Return the byte range of a tensor's header entry; check it against shape and type.

    Raises TypeError, ValueError or KeyError.
    """
    shape, (begin, end) = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise TypeError("expected a short list as the shape")
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number < 2**63:
            raise TypeError("expected an integer")
    if math.prod(shape) * _SIZES[entry["dtype"]] != end - begin:
        raise ValueError("the shape does not fill its place")
    return begin, end
