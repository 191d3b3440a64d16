"""Read a GGUF file (docs/gguf.md of the ggml project) and convert its weights to MLX arrays.

Every count and offset is checked before any allocation, so a hostile header costs neither memory
nor time. ggml and MLX both store w = scale * q + bias, MLX in groups of 32 weights. If a ggml type
has one scale for 32 weights, its bits are kept and only reordered:

    Q4_0, Q5_0  w = d * (q - 8), d * (q - 16)   ->  scales d, biases -8 d, -16 d
    Q4_1, Q5_1  w = d * q + m                   ->  scales d, biases m
    Q8_0        w = d * q, q signed             ->  q + 128, scales d, biases -128 d
    Q4_K, Q5_K  w = d * s * q - e * m           ->  scales d * s, biases -e * m

The first five are exact in half precision; in the last two the products are rounded. Q2_K, Q3_K and
Q6_K have one scale for 16 weights, which MLX cannot express: the gguf package dequantizes them, and
they are quantized again in a width that adds little error (docs/models-import.md has figures).
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from gguf.quants import Q4_K

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.files import open_regular

MAX_HEADER_BYTES = 128_000_000  # the largest vocabularies in use take about 15 MB
MAX_STRINGS = 4_000_000  # in all arrays together; those vocabularies have about 260,000 tokens
MAX_DIMENSIONS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type of ggml."""

    name: str
    block: int  # weights per block
    size: int  # bytes per block
    bits: int = 0  # width of a weight after the conversion to MLX, 0 for floats


# Supported types: the width of a weight after the conversion to MLX, 0 for floats.
_BITS = {
    "F32": 0, "F16": 0, "BF16": 0, "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8,
    "Q2_K": 4, "Q3_K": 5, "Q4_K": 4, "Q5_K": 5, "Q6_K": 8,
}  # fmt: skip
_TYPE_NAMES = {kind.value: kind.name for kind in GGMLQuantizationType}
TENSOR_TYPES = {
    kind.value: TensorType(kind.name, block, size, _BITS[kind.name])
    for kind, (block, size) in GGML_QUANT_SIZES.items()
    if kind.name in _BITS
}
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    type: TensorType
    shape: tuple[int, ...]  # with the contiguous dimension last
    path: Path
    offset: int  # bytes into `path`

    @property
    def nbytes(self) -> int:
        return self.blocks * self.type.size

    @property
    def blocks(self) -> int:
        return math.prod(self.shape) // self.type.block

    def read(self, first: int = 0, count: int | None = None) -> npt.NDArray[np.uint8]:
        """Return `count` blocks as stored (default: all blocks from `first` on).

        Shape: uint8 [blocks, block bytes]. Raises DamagedModel if blocks are missing. The file is
        not mapped: access to a map of a truncated file kills the process.
        """
        size, left = self.type.size, self.blocks - first
        count = left if count is None else min(count, left)
        with open_regular(self.path) as file:
            file.seek(self.offset + first * size)
            values = np.fromfile(file, np.uint8, count * size)
        if len(values) != count * size:
            raise damaged(self.path, f"tensor {self.name[:80]!r} is cut off")
        return values.reshape(count, size)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path  # of the first part if the file is split
    metadata: dict[str, Any]  # arrays of numbers are numpy arrays, arrays of strings are lists
    tensors: dict[str, GgufTensor]  # of all parts


def read_gguf(path: Path) -> GgufFile:
    """Read the headers of all parts of a file. Raises DamagedModel, UnsupportedModel, OSError."""
    first = _read_part(path)
    parts = first.metadata.get("split.count", 0)
    if parts in (0, 1):
        return first
    tensors = dict(first.tensors)
    for part in _other_parts(first, parts):
        if not part.is_file():
            raise DamagedModel(
                f"{path.name} is one of {parts} parts: expected {part.name} in the same "
                "directory, found nothing; fetch that part too"
            )
        for name, tensor in _read_part(part).tensors.items():
            if name in tensors:
                raise damaged(part, f"tensor {name[:80]!r} is in another part too")
            tensors[name] = tensor
    return GgufFile(path, first.metadata, tensors)


def _other_parts(first: GgufFile, parts: Any) -> list[Path]:
    found = _PART.fullmatch(first.path.name)
    if not isinstance(parts, int):
        raise damaged(first.path, f"it claims {parts!r:.40} parts")
    if found is None or int(found[3]) != parts:
        raise DamagedModel(
            f"{first.path.name} is one of {parts} parts: expected a name like "
            f"model-00001-of-{parts:05}.gguf; restore the original file names"
        )
    if int(found[2]) != 1 or first.metadata.get("split.no", 0) != 0:
        raise DamagedModel(
            f"{first.path.name} is not the first part; name {found[1]}-00001-of-{found[3]}.gguf"
        )
    name = f"{found[1]}-{{:05}}-of-{found[3]}.gguf"
    return [first.path.with_name(name.format(number)) for number in range(2, parts + 1)]


def _read_part(path: Path) -> GgufFile:
    """Read the header of one file of a model. Raises DamagedModel or UnsupportedModel."""
    with open_regular(path) as file:
        cursor = _Cursor(path, file, path.stat().st_size)
        if cursor.take(4) != b"GGUF":
            raise damaged(cursor.path, "it does not begin with GGUF")
        version = cursor.number("I")
        if version not in (2, 3):
            # A big-endian file has its version in the upper half.
            kind = "big-endian GGUF" if version & 0xFFFF == 0 and version else f"GGUF v{version}"
            raise UnsupportedModel(f"{cursor.path.name} is {kind}; akunu reads GGUF v2 and v3")
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            if key in metadata:
                raise damaged(cursor.path, f"the metadata key {key[:80]!r} occurs twice")
            metadata[key] = cursor.value(cursor.number("I"))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise damaged(cursor.path, f"alignment {alignment!r:.40} is not a power of two")
        return GgufFile(path, metadata, _read_tensors(cursor, tensor_count, alignment))


def damaged(path: Path, what: str) -> DamagedModel:
    return DamagedModel(f"{path.name} is damaged: {what}; download the file again")


class _Cursor:
    """Reads the header, checking every step against the end of the file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = 0
        self.strings = 0  # read from arrays so far

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise damaged(
                self.path, f"its header continues {count} bytes beyond the end of the file"
            )
        if self.at + count > MAX_HEADER_BYTES:
            raise damaged(self.path, f"its header is longer than {MAX_HEADER_BYTES} bytes")
        self.at += count
        if len(data := self.file.read(count)) < count:  # another program shortened it
            raise damaged(self.path, f"it is cut off before byte {self.at}")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise damaged(self.path, f"the string before byte {self.at} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("I"), self.number("Q"))
        raise damaged(self.path, f"its metadata has the unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        if kind in _SCALARS:
            dtype = np.dtype("<" + _SCALARS[kind] if kind != 7 else "?")
            return np.frombuffer(self.take(count * dtype.itemsize), dtype)
        if kind != _STRING:
            raise damaged(self.path, f"its metadata has an array of type {kind}")
        self.strings += count
        if self.strings > MAX_STRINGS or count * 8 > self.size - self.at:
            raise damaged(self.path, f"an array claims {count} strings")
        return [self.string() for _ in range(count)]


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for _ in range(count):
        name, dimensions = cursor.string(), cursor.number("I")
        if name in tensors:
            raise damaged(cursor.path, f"tensor {name[:80]!r} occurs twice")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise damaged(cursor.path, f"tensor {name[:80]!r} claims {dimensions} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        kind, offset = cursor.number("I"), cursor.number("Q")
        if kind not in TENSOR_TYPES:
            found = _TYPE_NAMES.get(kind, f"type {kind}")
            known = ", ".join(type_.name for type_ in TENSOR_TYPES.values())
            raise UnsupportedModel(
                f"{cursor.path.name} stores {name[:80]!r} as {found}; akunu imports {known}"
            )
        if min(shape) < 1 or shape[-1] % TENSOR_TYPES[kind].block:
            raise damaged(cursor.path, f"tensor {name[:80]!r} has the shape {list(shape)}")
        tensors[name] = GgufTensor(name, TENSOR_TYPES[kind], shape, cursor.path, offset)
    start = -(-cursor.at // alignment) * alignment  # offsets in the header count from here
    tensors = {name: replace(each, offset=start + each.offset) for name, each in tensors.items()}
    before, at = "", 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < at:
            raise damaged(cursor.path, f"tensors {before[:80]!r} and {tensor.name[:80]!r} overlap")
        before, at = tensor.name, tensor.offset + tensor.nbytes
    if at > cursor.size:
        problem = f"tensor {before[:80]!r} ends at byte {at}, the file at {cursor.size}"
        raise damaged(cursor.path, problem)
    return tensors


GROUP_SIZE = 32
_SLICE_WEIGHTS = 1 << 22

Array = npt.NDArray[Any]
Groups = tuple[Array, Array, Array]
"""Codes uint8 [groups, 32], scales and biases float32 [groups]."""


def convert_quantized(tensor: GgufTensor, dtype: str) -> dict[str, Array]:
    """Convert a quantized tensor to MLX's parts of a quantized matrix.

    weight: uint32 [..., columns * bits / 32]. scales, biases: [..., columns / 32], in the storage
    form of `dtype`. Raises UnsupportedModel if they overflow it.
    """
    *rows, columns = tensor.shape
    per_block = tensor.type.block // GROUP_SIZE
    groups = tensor.blocks * per_block
    packed = np.empty((groups, tensor.type.bits), np.uint32)
    scales, biases = np.empty((2, groups), np.float32)
    blocks = _SLICE_WEIGHTS // tensor.type.block
    for first in range(0, tensor.blocks, blocks):
        part = tensor.read(first, blocks)
        target = slice(first * per_block, (first + len(part)) * per_block)
        with np.errstate(invalid="ignore", over="ignore"):  # infinite values are refused below
            codes, scales[target], biases[target] = _groups(tensor.type, part, dtype)
        packed[target] = pack(codes, tensor.type.bits)
    if not np.isfinite(scales).all() or not np.isfinite(biases).all():
        raise UnsupportedModel(
            f"{tensor.path.name}: the scales of {tensor.name[:80]} exceed the range of {dtype}"
        )
    return {
        "weight": packed.reshape(*rows, columns * tensor.type.bits // 32),
        "scales": store(scales, dtype).reshape(*rows, columns // GROUP_SIZE),
        "biases": store(biases, dtype).reshape(*rows, columns // GROUP_SIZE),
    }


def convert_float(tensor: GgufTensor, dtype: str) -> Array:
    """Return a float tensor in the storage form of `dtype`. Raises UnsupportedModel on overflow."""
    if tensor.type.name == dtype:
        return tensor.read().view(_STORAGE[dtype]).reshape(tensor.shape)
    out = np.empty(tensor.blocks, _STORAGE[dtype])
    for first in range(0, tensor.blocks, _SLICE_WEIGHTS):
        part = tensor.read(first, _SLICE_WEIGHTS)
        values = load(part.view(_STORAGE[tensor.type.name])[:, 0], tensor.type.name)
        stored = store(values, dtype)
        if not np.array_equal(np.isfinite(load(stored, dtype)), np.isfinite(values)):
            raise UnsupportedModel(
                f"{tensor.path.name}: values of {tensor.name[:80]} exceed the range of {dtype}"
            )
        out[first : first + _SLICE_WEIGHTS] = stored
    return out.reshape(tensor.shape)


def unpermute(values: Array, heads: int) -> Array:
    """Restore the row order of a llama Q or K matrix: [heads * head_dim, ...].

    GGUF interleaves the two halves of a head's rotary pairs; MLX, like transformers, stores one
    after the other. Whole rows move, so packed weights, scales and biases are treated alike.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def pack(codes: Array, bits: int) -> Array:
    """Pack codes uint8 [groups, 32] as MLX does, lowest bits first: uint32 [groups, bits]."""
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    elif bits != 8:
        planes = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        codes = np.packbits(planes.reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(codes).view("<u4")


# numpy has no BF16.
_STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def store(values: Array, dtype: str) -> Array:
    """Round float32 `values` to `dtype`, in its storage form. Overflow is infinite."""
    with np.errstate(over="ignore"):
        stored = quantize(np.ascontiguousarray(values), GGMLQuantizationType[dtype])
    return stored.view(_STORAGE[dtype])


def load(stored: Array, dtype: str) -> Array:
    """Return the float32 values of an array in the storage form of `dtype`."""
    return dequantize(np.ascontiguousarray(stored).view(np.uint8), GGMLQuantizationType[dtype])


def round_to(values: Array, dtype: str) -> Array:
    """Round float32 `values` to the nearest of `dtype`, still float32. Overflow is infinite."""
    return load(store(values, dtype), dtype)


def _groups(type_: TensorType, raw: Array, dtype: str) -> Groups:
    """Convert blocks uint8 [blocks, block bytes]."""
    if type_.name in ("Q2_K", "Q3_K", "Q6_K"):
        values = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[type_.name])
        return requantize(values.reshape(-1, GROUP_SIZE), type_.bits, dtype)
    codes, scales, biases = (_k_groups if type_.block == 256 else _simple_groups)(type_, raw)
    return codes, round_to(scales, dtype), round_to(biases, dtype)


def requantize(values: Array, bits: int, dtype: str) -> Groups:
    """Quantize float32 [groups, 32] from each group's smallest value to its largest.

    Scales and biases are rounded to `dtype` first, so that the codes compensate for it.
    """
    last = (1 << bits) - 1
    biases = round_to(values.min(1), dtype)
    scales = round_to((values.max(1) - biases) / last, dtype)
    steps = (values - biases[:, None]) / np.where(scales > 0, scales, 1)[:, None]
    return np.clip(np.rint(steps), 0, last).astype(np.uint8), scales, biases


def _float16(raw: Array, at: int) -> Array:
    """Return the float16 at byte `at` of every block, as float32 [blocks]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _simple_groups(type_: TensorType, raw: Array) -> Groups:
    """Convert blocks of 32 weights: scale, bias of the types _1, fifth bits of Q5, codes."""
    scales = _float16(raw, 0)
    if type_.name == "Q8_0":
        return raw[:, 2:] ^ np.uint8(0x80), scales, -128 * scales
    has_bias = type_.name.endswith("_1")
    biases = _float16(raw, 2) if has_bias else -(1 << type_.bits - 1) * scales
    low, high = raw[:, -16:] & 0x0F, raw[:, -16:] >> 4  # weights j and j + 16 share byte j
    codes = np.concatenate([low, high], 1)
    if type_.bits == 5:
        at = 4 if has_bias else 2
        codes |= np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << 4
    return codes, scales, biases


def _k_groups(type_: TensorType, raw: Array) -> Groups:
    """Convert blocks of 256 weights: two scales, 6-bit scales of groups, fifth bits, codes."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(raw[:, 4:16]))
    scales = _float16(raw, 0)[:, None] * scales.astype(np.float32)
    minima = _float16(raw, 2)[:, None] * minima.astype(np.float32)
    # Two groups share 32 bytes: one has the low halves, the other the high halves.
    quarters = raw[:, -128:].reshape(-1, 4, 1, GROUP_SIZE)
    codes = np.concatenate([quarters & 0x0F, quarters >> 4], 2).reshape(-1, GROUP_SIZE)
    if type_.bits == 5:  # bit g of byte j is the fifth bit of weight j in group g
        planes = np.unpackbits(raw[:, 16:48, None], axis=2, bitorder="little")
        codes |= planes.swapaxes(1, 2).reshape(-1, GROUP_SIZE) << 4
    return codes, scales.reshape(-1), -minima.reshape(-1)
