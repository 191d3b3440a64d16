"""Reads the header of a GGUF file: metadata and where each tensor lies.

Owns the container format only (versions 2 and 3, little-endian; the specification is docs/gguf.md
of the ggml project). Every count and offset is checked against the file's size before anything is
allocated for it, so a damaged or hostile header costs neither memory nor time. Refuses what is not
GGUF or is cut off (DamagedModel) and what is intact but of a kind we do not read
(UnsupportedModel). What the tensors mean is the business of `gguf_import`.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from akunu_py.errors import DamagedModel, UnsupportedModel

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_STRINGS = 4_000_000  # in one array; the largest vocabularies in use have about 260,000
MAX_KEY_BYTES = 65_535  # the specification's own limit
MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of ggml: `block` weights are stored in `size` bytes."""

    name: str
    block: int
    size: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    8: TensorType("Q8_0", 32, 34),
}
# Types that are known by name only, so that a refusal says what was found.
_OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K",
    15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `shape` with the contiguous dimension last, `offset` in bytes into the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.size


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header. Arrays of numbers in `metadata` are numpy arrays, of text lists."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def raw(self, tensor: Tensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored, mapped from disk: [blocks, bytes of a block]."""
        shape = (tensor.nbytes // tensor.type.size, tensor.type.size)
        return np.memmap(self.path, np.uint8, "r", tensor.offset, shape)


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of the GGUF file at `path`.

    Raises DamagedModel where the file is not GGUF, is cut off or contradicts itself, and
    UnsupportedModel for a version or a tensor type that we do not read. OSError passes through.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise _damaged(path, "it is too short to be a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data)
            return _read(cursor)


def _damaged(path: Path, what: str) -> DamagedModel:
    return DamagedModel(f"{path.name} is damaged: {what}; fetch the file again")


class _Cursor:
    """Walks through the header; every step is checked against the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def damaged(self, what: str) -> DamagedModel:
        return _damaged(self.path, what)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.at:
            raise self.damaged(f"its header asks for {count} bytes beyond the end of the file")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the text before byte {self.at} is not UTF-8") from None

    def key(self) -> str:
        key = self.text()
        if len(key) > MAX_KEY_BYTES:
            raise self.damaged(f"a name of {len(key)} characters")
        return key

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        raise self.damaged(f"metadata of unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind] if kind != 7 else "?")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _STRING:
            raise self.damaged(f"an array of type {kind} in the metadata")
        if count > MAX_STRINGS or count * 8 > self.size - self.at:
            raise self.damaged(f"an array that claims {count} texts")
        return [self.text() for _ in range(count)]


def _read(cursor: _Cursor) -> GgufFile:
    if cursor.take(4) != b"GGUF":
        raise cursor.damaged("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        # A big-endian file shows its version in the upper half.
        kind = "big-endian GGUF" if version & 0xFFFF == 0 and version else f"GGUF v{version}"
        raise UnsupportedModel(f"{cursor.path.name} is {kind}; akunu reads GGUF v2 and v3")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
        raise cursor.damaged(f"it claims {tensor_count} tensors and {key_count} metadata keys")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.key()
        if key in metadata:
            raise cursor.damaged(f"the metadata key {key[:80]!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise cursor.damaged(f"alignment {alignment!r} is not a power of two")
    start = -(-cursor.at // alignment) * alignment
    return GgufFile(cursor.path, metadata, _place(cursor, entries, start))


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """One tensor's name, shape, type number and offset into the data."""
    name, dimensions = cursor.key(), cursor.number("I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise cursor.damaged(f"tensor {name[:80]!r} claims {dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.number("I"), cursor.number("Q")


def _place(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], int, int]], start: int
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise cursor.damaged(f"tensor {name[:80]!r} occurs twice")
        if kind not in TENSOR_TYPES:
            found = _OTHER_TYPES.get(kind, f"type {kind}")
            read = ", ".join(type_.name for type_ in TENSOR_TYPES.values())
            raise UnsupportedModel(
                f"{cursor.path.name} stores {name[:80]!r} as {found}; akunu imports {read}"
            )
        tensor = Tensor(name, TENSOR_TYPES[kind], shape, start + offset)
        if min(shape) < 1 or shape[-1] % tensor.type.block:
            raise cursor.damaged(f"tensor {name[:80]!r} has the shape {list(shape)}")
        if tensor.offset + tensor.nbytes > cursor.size:
            raise cursor.damaged(
                f"tensor {name[:80]!r} ends at byte {tensor.offset + tensor.nbytes}, "
                f"the file at {cursor.size}"
            )
        tensors[name] = tensor
    return tensors
