"""Reads the header of a GGUF file: metadata and where each tensor lies.

Versions 2 and 3, little-endian, split files included; the specification is docs/gguf.md of the ggml
project. Every count and offset is checked against the file's size and against limits of our own
before anything is allocated for it, so a damaged or hostile header costs neither memory nor time.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.files import open_regular

MAX_KEYS = 65_536
MAX_TENSORS = 65_536
MAX_HEADER_BYTES = 128_000_000  # the largest vocabularies in use take about 15 MB
MAX_STRINGS = 4_000_000  # in all arrays together; those vocabularies have about 260,000 tokens
MAX_KEY_BYTES = 65_535  # the specification's own limit
MAX_DIMENSIONS = 4
MAX_PARTS = 1_000

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
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
# Types that are known by name only, so that a refusal says what was found.
_OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor: `shape` with the contiguous dimension last, `offset` in bytes into `path`."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    path: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.block * self.type.size

    @property
    def blocks(self) -> int:
        return math.prod(self.shape) // self.type.block

    def read(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """`count` blocks as stored, or all from `first` on: [blocks, bytes of a block].

        Read, not mapped: touching a map of a file that was cut off meanwhile ends the program.
        Raises DamagedModel where they are not there any more.
        """
        size, left = self.type.size, self.blocks - first
        count = left if count is None else min(count, left)
        with open_regular(self.path) as file:
            file.seek(self.offset + first * size)
            values = np.fromfile(file, np.uint8, count * size)
        if len(values) != count * size:
            raise _damaged(self.path, f"tensor {self.name[:80]!r} is cut off")
        return values.reshape(count, size)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header. In `metadata`, arrays of numbers are numpy arrays, of strings lists.

    Of a file that was split, `path` is the first part, and `tensors` are those of all parts.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


def read_gguf(path: Path) -> GgufFile:
    """Reads the header of the GGUF file at `path`, and those of its other parts if it is split.

    Raises DamagedModel where the file is not GGUF, is cut off or contradicts itself, where a part
    is missing, and UnsupportedModel for a version or a tensor type that we do not read. OSError
    passes through.
    """
    first = _read_one(path)
    parts = first.metadata.get("split.count", 0)
    if parts in (0, 1):
        return first
    tensors = dict(first.tensors)
    for part in _other_parts(first, parts):
        if not part.is_file():
            raise DamagedModel(
                f"{path.name} is one of {parts} parts: expected {part.name} beside it, found "
                "nothing; fetch that part too"
            )
        for name, tensor in _read_one(part).tensors.items():
            if name in tensors:
                raise _damaged(part, f"tensor {name[:80]!r} is in another part too")
            tensors[name] = tensor
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise _damaged(path, f"its parts hold {len(tensors)} tensors instead of {expected!r:.40}")
    return GgufFile(path, first.metadata, tensors)


def _other_parts(first: GgufFile, parts: Any) -> list[Path]:
    """The paths of parts 2 and up. They are made from the name of the file that the user gave."""
    found = _PART.fullmatch(first.path.name)
    if not isinstance(parts, int) or not 0 < parts <= MAX_PARTS:
        raise _damaged(first.path, f"it claims {parts!r:.40} parts")
    if found is None or int(found[3]) != parts:
        raise DamagedModel(
            f"{first.path.name} is one of {parts} parts: expected a name like "
            f"model-00001-of-{parts:05}.gguf; give the files their names back"
        )
    if int(found[2]) != 1 or first.metadata.get("split.no", 0) != 0:
        raise DamagedModel(
            f"{first.path.name} is not the first part; name {found[1]}-00001-of-{found[3]}.gguf"
        )
    name = f"{found[1]}-{{:05}}-of-{found[3]}.gguf"
    return [first.path.with_name(name.format(number)) for number in range(2, parts + 1)]


def _read_one(path: Path) -> GgufFile:
    with open_regular(path) as file:
        if (size := file.seek(0, 2)) < 24:
            raise _damaged(path, "it is too short to be a GGUF file")
        file.seek(0)
        return _read(_Cursor(path, file, size))


def _damaged(path: Path, what: str) -> DamagedModel:
    return DamagedModel(f"{path.name} is damaged: {what}; fetch the file again")


class _Cursor:
    """Walks through the header; every step is checked against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.file = file
        self.size = size
        self.at = 0
        self.strings = 0  # read from arrays so far

    def damaged(self, what: str) -> DamagedModel:
        return _damaged(self.path, what)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        if count > self.size - self.at:
            raise self.damaged(f"its header asks for {count} bytes beyond the end of the file")
        if self.at + count > MAX_HEADER_BYTES:
            raise self.damaged(f"its header is longer than {MAX_HEADER_BYTES} bytes")
        self.at += count
        if len(data := self.file.read(count)) != count:
            raise self.damaged(f"it is cut off at byte {self.at - count + len(data)}")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the string before byte {self.at} is not UTF-8") from None

    def key(self) -> str:
        key = self.string()
        if len(key) > MAX_KEY_BYTES:
            raise self.damaged(f"a name of {len(key)} characters")
        return key

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        raise self.damaged(f"metadata of unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind] if kind != 7 else "?")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _STRING:
            raise self.damaged(f"an array of type {kind} in the metadata")
        self.strings += count
        if self.strings > MAX_STRINGS or count * 8 > self.size - self.at:
            raise self.damaged(f"an array that claims {count} strings")
        return [self.string() for _ in range(count)]


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
        raise cursor.damaged(f"alignment {alignment!r:.40} is not a power of two")
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
        tensor = Tensor(name, TENSOR_TYPES[kind], shape, cursor.path, start + offset)
        if min(shape) < 1 or shape[-1] % tensor.type.block:
            raise cursor.damaged(f"tensor {name[:80]!r} has the shape {list(shape)}")
        if tensor.offset + tensor.nbytes > cursor.size:
            raise cursor.damaged(
                f"tensor {name[:80]!r} ends at byte {tensor.offset + tensor.nbytes}, "
                f"the file at {cursor.size}"
            )
        tensors[name] = tensor
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.damaged(f"tensors {before.name[:80]!r} and {after.name[:80]!r} overlap")
    return tensors
