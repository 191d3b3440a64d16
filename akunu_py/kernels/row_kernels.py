"""Products of 2 to 16 rows with a matrix, on Apple GPUs.

On M1 and M2, MLX loads quantized weights again for each of a few rows. Elsewhere, and for matrices
of 16 bits, it adds in another order than for one row. These kernels load the weights once for up to
8 rows, and add each row in the order of MLX's kernels for one row: `qmv_fast`, `qmv` and `gemv` in
mlx/backend/metal/kernels/quantized.h and gemv.h. A row then has the same bits alone and among
others. `probe` checks both claims on each machine.
"""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

ROWS = range(2, 17)
_TOGETHER = 8  # more rows would not fit into the registers of a lane
_BITS, _GROUPS = (4, 8), (32, 64, 128)
_QUAD_INPUTS = 64, 128  # MLX has another kernel for them, which is exact and fast enough
_OUTPUTS = 4  # matrix rows of a lane
QUANTIZED_SIMDGROUPS, DENSE_SIMDGROUPS = 2, 8  # of a threadgroup

_HERE = Path(__file__).parent
QUANTIZED_SOURCE = (_HERE / "quantized_rows.metal").read_text("utf-8")
DENSE_SOURCE = (_HERE / "dense_rows.metal").read_text("utf-8")
HEADER = f"""
#define UNROLL _Pragma("clang loop unroll(full)")
constant constexpr int OUTPUTS = {_OUTPUTS}; // matrix rows per lane
template <int BITS>
inline float plus(float total, float a, float b, float c, float d) {{
  return BITS == 4 ? total + (a + b + c + d) : total + a + b + c + d;
}}
"""


class MatrixShape(NamedTuple):
    """What kernels depend on."""

    outputs: int
    inputs: int
    bits: int
    group: int  # 0: not quantized
    kind: mx.Dtype  # of the activations


class Order(NamedTuple):
    """The order of additions of MLX's kernel for one row."""

    words: int = 0  # quantized: packed words of a lane: 2 in `qmv_fast`, 1 in `qmv`
    fused: bool = False  # quantized: whether the compiler fuses a multiplication with its addition
    lanes: int = 32  # that share a matrix row
    split: int = 1  # SIMD groups that share a matrix row


# The most likely order is first.
QUANTIZED_ORDERS = (Order(2, True), Order(2, False), Order(1, True), Order(1, False))


def orders_of(shape: MatrixShape) -> list[Order]:
    """Return the orders that MLX may have for a shape, none if no kernel supports it."""
    outputs, inputs, bits, group, _ = shape
    if not group:  # as `gemv_axbpy` in matmul.cpp chooses; one output has another kernel
        split = 8 if inputs >= 16 * outputs else 1
        order = Order(lanes=4) if inputs <= 64 else Order(split=split)
        return [order] if outputs > 1 and inputs % 4 == 0 else []
    known = bits in _BITS and group in _GROUPS and inputs not in _QUAD_INPUTS
    if not known or outputs < QUANTIZED_SIMDGROUPS * _OUTPUTS:
        return []
    whole = inputs % (2 * 32 * 32 // bits) == 0  # `qmv_fast` needs whole blocks of inputs
    return [each for each in QUANTIZED_ORDERS if whole or each.words == 1]


def multiply(layer: nn.Module, x: mx.array, order: Order) -> mx.array:
    """Return `x` [..., inputs], of 2 to 16 rows, times the matrix of `layer`, without its bias."""
    outputs, rows = layer["weight"].shape[0], x.size // x.shape[-1]
    if rows > _TOGETHER:
        halves = mx.split(x.reshape(rows, -1), [rows // 2])
        product = mx.concatenate([multiply(layer, half, order) for half in halves])
        return product.reshape(*x.shape[:-1], outputs)
    inputs = [x, layer["weight"]]
    template = [("LANES", order.lanes), ("SPLIT", order.split)]
    simdgroups, quantized = DENSE_SIMDGROUPS, "scales" in layer
    if quantized:
        inputs += [layer["scales"], layer["biases"]]
        template = [("BITS", layer.bits), ("GROUP", layer.group_size), ("WORDS", order.words),
                    ("FUSED", order.fused)]  # fmt: skip
        simdgroups = QUANTIZED_SIMDGROUPS
    covered = simdgroups // order.split * (32 // order.lanes) * _OUTPUTS
    return _kernel(quantized)(
        inputs=inputs,
        template=[("T", x.dtype), ("ROWS", rows), ("SIMDGROUPS", simdgroups), *template],
        grid=(32, simdgroups * -(-outputs // covered), 1),
        threadgroup=(32, simdgroups, 1),
        output_shapes=[(*x.shape[:-1], outputs)],
        output_dtypes=[x.dtype],
    )[0]


@functools.cache
def _kernel(quantized: bool) -> Any:
    kind, source = ("quantized", QUANTIZED_SOURCE) if quantized else ("dense", DENSE_SOURCE)
    names = ["x", "w", "scales", "biases"] if quantized else ["x", "w"]
    return mx.fast.metal_kernel(f"akunu_{kind}_rows", names, ["y"], source, HEADER)


def _with_kernel(plain: Any) -> Any:
    """Return a subclass of an MLX layer that multiplies by a kernel for some numbers of rows."""
    method = "as_linear" if hasattr(plain, "as_linear") else "__call__"

    def call(self: nn.Module, x: mx.array) -> Any:
        kind, order, rows = self._kernel
        if x.size // x.shape[-1] not in rows or x.dtype != kind:
            return getattr(plain, method)(self, x)
        product = multiply(self, x, order)
        # MLX's kernels for one row, too, round the product before they add the bias.
        return product + self["bias"] if "bias" in self else product

    return type(f"Row{plain.__name__}", (plain,), {method: call})


_SUPPORTED = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding)
_LAYERS = {plain: _with_kernel(plain) for plain in _SUPPORTED}


def install(layer: nn.Module, kind: mx.Dtype, order: Order, rows: Collection[int]) -> None:
    """Let `layer` use a kernel for these numbers of rows, of this type."""
    layer.__class__ = _LAYERS.get(type(layer), type(layer))
    # A module would list a tuple as a parameter.
    object.__setattr__(layer, "_kernel", (kind, order, rows))


def shape_of(layer: nn.Module) -> MatrixShape | None:
    """Return the shape of a layer, None if no kernel supports it."""
    known = type(layer) in {*_LAYERS, *_LAYERS.values()}
    if not known or getattr(layer, "mode", "affine") != "affine":
        return None
    kind = layer["scales" if "scales" in layer else "weight"].dtype
    (outputs, inputs), bits, group = layer["weight"].shape, 16, 0
    if "scales" in layer:
        bits, group, inputs = layer.bits, layer.group_size, inputs * 32 // layer.bits
    shape = MatrixShape(outputs, inputs, bits, group, kind)
    return shape if kind in (mx.float16, mx.bfloat16) and orders_of(shape) else None


def mlx_product(layer: nn.Module, x: mx.array) -> mx.array:
    """Return MLX's product of `x` and the matrix of `layer`, without its bias."""
    if "scales" not in layer:
        return x @ layer["weight"].T
    return mx.quantized_matmul(
        x, layer["weight"], layer["scales"], layer["biases"],
        transpose=True, group_size=layer.group_size, bits=layer.bits,
    )  # fmt: skip
