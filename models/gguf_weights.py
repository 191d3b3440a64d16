"""Turns ggml's storage types into MLX's arrays, bit for bit.

ggml and MLX both store w = scale * q + bias in groups of 32 with half-precision scales, only in
another order of the nibbles:

    Q4_0  w = d * (q - 8)      ->  scales d, biases -8 d
    Q4_1  w = d * q + m        ->  scales d, biases m
    Q8_0  w = d * q, q signed  ->  q + 128, scales d, biases -128 d

The biases are exact because they are d times a power of two. Refuses scales so large that this
power overflows half precision (UnsupportedModel); no real model has them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from akunu_py.errors import UnsupportedModel
from akunu_py.models.gguf import GgufFile, Tensor

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}

Array = npt.NDArray[Any]


def packed(file: GgufFile, tensor: Tensor) -> Array:
    """A quantised tensor's weights as MLX packs them: uint32 [..., columns * bits / 32]."""
    raw = file.raw(tensor)
    *rows, columns = tensor.shape
    if tensor.type.name == "Q8_0":
        words = (raw[:, 2:] ^ np.uint8(0x80)).view("<u4")
        return words.reshape(*rows, columns // 4)
    nibbles = raw[:, -16:]  # weight j in the low half of byte j, weight j + 16 in the high half
    # [blocks, half of the block, byte pairs, even or odd]
    halves = np.stack([nibbles & 0x0F, nibbles >> 4], 1).reshape(-1, 2, 8, 2)
    words = (halves[..., 0] | halves[..., 1] << 4).reshape(-1, 16).view("<u4")
    return words.reshape(*rows, columns // 8)


def scales(file: GgufFile, tensor: Tensor) -> Array:
    """A quantised tensor's scales: float16 [..., columns / 32]."""
    return _halves(file, tensor, 0)


def biases(file: GgufFile, tensor: Tensor) -> Array:
    """A quantised tensor's biases: float16 [..., columns / 32]."""
    if tensor.type.name == "Q4_1":
        return _halves(file, tensor, 1)
    factor = np.float16(-8 if tensor.type.name == "Q4_0" else -128)
    with np.errstate(over="ignore"):
        values: Array = scales(file, tensor) * factor
    if not np.isfinite(values).all():
        raise UnsupportedModel(
            f"{file.path.name}: the scales of {tensor.name} exceed what half precision holds"
        )
    return values


def plain(file: GgufFile, tensor: Tensor) -> Array:
    """An F16 or F32 tensor as it is."""
    dtype = "<f2" if tensor.type.name == "F16" else "<f4"
    return file.raw(tensor).view(dtype).reshape(tensor.shape)


def fits_half(values: Array) -> bool:
    """Whether float32 `values` survive the way to float16 and back."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def unpermute(values: Array, heads: int) -> Array:
    """Puts the rows of a llama Q or K matrix back: [heads * head_dim, columns].

    GGUF keeps the two halves of a head's rotary pairs interleaved, MLX (as transformers) one
    after the other. Rows move whole, so packed weights, scales and biases are treated alike.
    """
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _halves(file: GgufFile, tensor: Tensor, index: int) -> Array:
    *rows, columns = tensor.shape
    values = np.ascontiguousarray(file.raw(tensor)[:, 2 * index : 2 * index + 2]).view("<f2")
    return values.reshape(*rows, columns // GROUP_SIZE)
