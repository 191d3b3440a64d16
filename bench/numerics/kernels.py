"""Outputs of MLX's kernels for 1 to 33 rows, compared with one row at a time.

The kernel for a quantized matrix depends on the rows, the matrix and the chip
(mlx/backend/metal/quantized.cpp): few rows run one by one, or up to five together since M3; from 6
rows (M1) to 32 (Ultra) on, they run in tiles of 32. The attention kernel changes above 8 rows, and
if rows times query heads per KV head exceed 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx

MOST_ROWS = 33  # more than a tile, and than the longest draft with its token
FORMATS = (mx.bfloat16, mx.float16)
_GROUP, _KV_HEADS, _HEAD = 64, 2, 64


def quantized_rows(bits: int, kind: mx.Dtype, inputs: int, outputs: int) -> dict[str, list[float]]:
    """Compare products with a quantized matrix, [rows, inputs] -> [rows, outputs]."""
    mx.random.seed(bits)
    rows = mx.random.normal((MOST_ROWS, inputs)).astype(kind)
    weight = mx.quantize(
        mx.random.normal((outputs, inputs)).astype(kind), group_size=_GROUP, bits=bits
    )

    def product(start: int, stop: int) -> mx.array:
        return mx.quantized_matmul(
            rows[start:stop], *weight, transpose=True, group_size=_GROUP, bits=bits
        )

    return compare_rows(product)


def attention_rows(kind: mx.Dtype, context: int, group: int) -> dict[str, list[float]]:
    """Compare causal attention in a pass after `context` tokens. group: query heads per KV head."""
    mx.random.seed(0)
    queries, keys, values = (
        mx.random.normal((1, heads, context + MOST_ROWS, _HEAD)).astype(kind)
        for heads in (_KV_HEADS * group, _KV_HEADS, _KV_HEADS)
    )

    def attend(start: int, stop: int) -> mx.array:
        mask = "causal" if stop - start > 1 else None  # as in mlx-lm
        end = context + stop
        out = mx.fast.scaled_dot_product_attention(
            queries[:, :, context + start : end], keys[:, :, :end], values[:, :, :end],
            scale=_HEAD**-0.5, mask=mask,
        )  # fmt: skip
        return out[0].swapaxes(0, 1).flatten(1)  # [rows, heads x head]

    return compare_rows(attend)


def compare_rows(compute: Callable[[int, int], mx.array]) -> dict[str, list[float]]:
    """Compare the output for 1, 2, ... rows with the output for one row at a time.

    Returns lists by the number of rows: the share of identical values, and the largest difference
    relative to the typical value. compute: (start, stop) -> output, [stop - start, outputs].
    """
    alone = mx.concatenate([compute(row, row + 1) for row in range(MOST_ROWS)])
    typical = mx.sqrt(mx.mean(mx.square(alone.astype(mx.float32)))).item()
    identical, difference = [], []
    for count in range(1, MOST_ROWS + 1):
        together, expected = compute(0, count), alone[:count]
        apart = mx.abs(together.astype(mx.float32) - expected.astype(mx.float32))
        identical.append(mx.mean(together == expected).item())
        worst = mx.max(apart).item() / typical if mx.all(mx.isfinite(apart)).item() else math.inf
        difference.append(worst)
    return {"identical": identical, "difference": difference}
