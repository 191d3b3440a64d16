"""Turns ggml's storage types into MLX's arrays.

ggml and MLX both store w = scale * q + bias, MLX in groups of 32 weights. Where a type of ggml has
one scale for 32 weights, its bits are kept and only put into another order:

    Q4_0, Q5_0  w = d * (q - 8), d * (q - 16)   ->  scales d, biases -8 d, -16 d
    Q4_1, Q5_1  w = d * q + m                   ->  scales d, biases m
    Q8_0        w = d * q, q signed             ->  q + 128, scales d, biases -128 d
    Q4_K, Q5_K  w = d * s * q - e * m           ->  scales d * s, biases -e * m

The first five are exact in half precision (the biases are d times a power of two); in the last two
the products are rounded to it, which moves weights by a hundredth of a step. Q2_K, Q3_K and Q6_K
have one scale for 16 weights, which MLX cannot express: they are dequantized by the gguf package
and quantized again in the narrowest width that adds less than a tenth to the squared error that the
type itself has made (docs/models-import.md has the figures). Work goes through the tensor in
slices, so that memory stays bounded. Scales that overflow the float type are UnsupportedModel; no
real model has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from akunu_py.errors import UnsupportedModel
from akunu_py.models.gguf.file import Tensor

GROUP_SIZE = 32
BITS = {
    "Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8,
    "Q2_K": 4, "Q3_K": 5, "Q4_K": 4, "Q5_K": 5, "Q6_K": 8,
}  # fmt: skip
_SLICE_WEIGHTS = 1 << 22

Array = npt.NDArray[Any]
Groups = tuple[Array, Array, Array]
"""Codes uint8 [groups, 32], scales and biases float32 [groups]."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix as MLX stores it: `packed` uint32 [..., columns * bits / 32], `scales` and `biases`
    in the storage form of a float type [..., columns / 32]."""

    packed: Array
    scales: Array
    biases: Array


def convert_quantized(tensor: Tensor, dtype: str) -> QuantizedMatrix:
    """Converts a quantized tensor; scales and biases get the float type `dtype`.

    Raises UnsupportedModel where they overflow it.
    """
    bits = BITS[tensor.type.name]
    *rows, columns = tensor.shape
    groups = tensor.blocks * tensor.type.block // GROUP_SIZE
    packed = np.empty((groups, bits), np.uint32)
    scales = np.empty(groups, np.float32)
    biases = np.empty(groups, np.float32)
    blocks = _SLICE_WEIGHTS // tensor.type.block
    for first in range(0, tensor.blocks, blocks):
        part = tensor.read(first, blocks)
        at = first * tensor.type.block // GROUP_SIZE
        here = slice(at, at + len(part) * tensor.type.block // GROUP_SIZE)
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is refused below
            codes, scales[here], biases[here] = _groups(tensor, part, dtype)
        packed[here] = pack(codes, bits)
    if not np.isfinite(scales).all() or not np.isfinite(biases).all():
        raise UnsupportedModel(
            f"{tensor.path.name}: the scales of {tensor.name[:80]} exceed what {dtype} holds"
        )
    shape = (*rows, columns // GROUP_SIZE)
    return QuantizedMatrix(
        packed.reshape(*rows, columns * bits // 32),
        store(scales, dtype).reshape(shape),
        store(biases, dtype).reshape(shape),
    )


def convert_float(tensor: Tensor, dtype: str) -> Array:
    """An F16, BF16 or F32 tensor in the storage form of the float type `dtype`.

    Raises UnsupportedModel where a value overflows it.
    """
    if tensor.type.name == dtype:
        return tensor.read().view(_STORAGE[dtype]).reshape(tensor.shape)
    out = np.empty(tensor.blocks, _STORAGE[dtype])
    for first in range(0, tensor.blocks, _SLICE_WEIGHTS):
        part = tensor.read(first, _SLICE_WEIGHTS)
        values = load(part.view(_STORAGE[tensor.type.name])[:, 0], tensor.type.name)
        rounded = round_to(values, dtype)
        if not np.array_equal(np.isfinite(rounded), np.isfinite(values)):
            raise UnsupportedModel(
                f"{tensor.path.name}: values of {tensor.name[:80]} exceed what {dtype} holds"
            )
        out[first : first + _SLICE_WEIGHTS] = store(rounded, dtype)
    return out.reshape(tensor.shape)


def unpermute(values: Array, heads: int) -> Array:
    """Puts the rows of a llama Q or K matrix back: [heads * head_dim, ...].

    GGUF keeps the two halves of a head's rotary pairs interleaved, MLX (as transformers) one
    after the other. Rows move whole, so packed weights, scales and biases are treated alike.
    """
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def pack(codes: Array, bits: int) -> Array:
    """Codes uint8 [groups, 32] as MLX packs them, lowest bits first: uint32 [groups, bits]."""
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    elif bits != 8:
        planes = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
        codes = np.packbits(planes.reshape(len(codes), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(codes).view("<u4")


# Float types. BF16 has no type in numpy: its values are float32 with an empty lower half, stored
# as the upper halves.

_STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def round_to(values: Array, dtype: str) -> Array:
    """float32 `values` rounded to the nearest of `dtype`, still float32. Overflow is infinite."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        even = bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32) & np.uint32(0xFFFF0000)
        return np.where(np.isfinite(values), even.view(np.float32), values)
    with np.errstate(over="ignore"):
        return values.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def store(values: Array, dtype: str) -> Array:
    """float32 `values`, already rounded to `dtype`, in its storage form."""
    if dtype == "BF16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype("<u2")
    return values.astype(_STORAGE[dtype])


def load(stored: Array, dtype: str) -> Array:
    """The float32 values of what is in the storage form of `dtype`."""
    if dtype == "BF16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


# The types. Each function takes blocks uint8 [blocks, bytes of a block] and gives Groups.


def _groups(tensor: Tensor, raw: Array, dtype: str) -> Groups:
    if tensor.type.name in _EXACT:
        codes, scales, biases = _EXACT[tensor.type.name](raw)
        return codes, round_to(scales, dtype), round_to(biases, dtype)
    from gguf import GGMLQuantizationType, dequantize  # its import takes a moment

    values = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType[tensor.type.name])
    return requantize(values.reshape(-1, GROUP_SIZE), BITS[tensor.type.name], dtype)


def requantize(values: Array, bits: int, dtype: str) -> Groups:
    """Quantizes float32 [groups, 32] from each group's smallest value to its largest.

    Scales and biases are rounded to `dtype` first, so that the codes make up for it.
    """
    last = (1 << bits) - 1
    biases = round_to(values.min(1), dtype)
    scales = round_to((values.max(1) - biases) / last, dtype)
    steps = (values - biases[:, None]) / np.where(scales > 0, scales, 1)[:, None]
    return np.clip(np.rint(steps), 0, last).astype(np.uint8), scales, biases


def _half(raw: Array, at: int) -> Array:
    """The float16 at byte `at` of every block, as float32 [blocks]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _nibbles(packed: Array) -> Array:
    """Bytes [blocks, 16] -> codes [blocks, 32]: code j in the low half of byte j, code j + 16 in
    the high half."""
    return np.concatenate([packed & 0x0F, packed >> 4], 1)


def _fifth_bits(raw: Array, at: int) -> Array:
    """The 32 bits at byte `at` of every block, as 16 or 0: [blocks, 32]."""
    return np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << 4


def _q4_0(raw: Array) -> Groups:
    scales = _half(raw, 0)
    return _nibbles(raw[:, 2:]), scales, -8 * scales


def _q4_1(raw: Array) -> Groups:
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Array) -> Groups:
    scales = _half(raw, 0)
    return _nibbles(raw[:, 6:]) | _fifth_bits(raw, 2), scales, -16 * scales


def _q5_1(raw: Array) -> Groups:
    return _nibbles(raw[:, 8:]) | _fifth_bits(raw, 4), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Array) -> Groups:
    scales = _half(raw, 0)
    return raw[:, 2:] ^ np.uint8(0x80), scales, -128 * scales


def _q4_k(raw: Array) -> Groups:
    scales, biases = _k_scales(raw)
    return _k_nibbles(raw[:, 16:]), scales, biases


def _q5_k(raw: Array) -> Groups:
    scales, biases = _k_scales(raw)
    # Bit g of byte j is the fifth bit of weight j in group g.
    planes = np.unpackbits(raw[:, 16:48, None], axis=2, bitorder="little")
    fifth = planes.swapaxes(1, 2).reshape(-1, GROUP_SIZE) << 4
    return _k_nibbles(raw[:, 48:]) | fifth, scales, biases


def _k_nibbles(packed: Array) -> Array:
    """Bytes [blocks, 128] -> codes [blocks * 8, 32]: two groups share 32 bytes, halves of each."""
    quarters = packed.reshape(-1, 4, 1, GROUP_SIZE)
    return np.concatenate([quarters & 0x0F, quarters >> 4], 2).reshape(-1, GROUP_SIZE)


def _k_scales(raw: Array) -> tuple[Array, Array]:
    """Scales and biases float32 [blocks * 8] of Q4_K and Q5_K, 6 bits each in the file."""
    from gguf.quants import Q4_K

    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(raw[:, 4:16]))
    scales = _half(raw, 0)[:, None] * scales.astype(np.float32)
    minima = _half(raw, 2)[:, None] * minima.astype(np.float32)
    return scales.reshape(-1), -minima.reshape(-1)


_EXACT: dict[str, Callable[[Array], Groups]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
    "Q4_K": _q4_k, "Q5_K": _q5_k,
}  # fmt: skip
