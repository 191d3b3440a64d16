"""Products of 2 to 16 rows with a quantized matrix, on Apple GPUs.

On M1 and M2, MLX loads the weights again for each of a few rows. On M3 and later, it adds in
another order than for one row. This kernel loads the weights once for up to 8 rows, and adds each
row in the order of MLX's kernel for one row (`qmv_fast` and `qmv` in
mlx/backend/metal/kernels/quantized.h). A row then has the same bits alone and among others. `probe`
checks both claims on each machine.
"""

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

ROWS = range(2, 17)
_TOGETHER = 8  # more rows would not fit into the registers of a lane
_BITS, _GROUPS, _TYPES = (4, 8), (32, 64, 128), (mx.float16, mx.bfloat16)
_QUAD_INPUTS = 64, 128  # MLX has another kernel for them, which is exact and fast enough
_SIMDGROUPS, _OUTPUTS = 2, 4  # of a threadgroup; matrix rows of a SIMD group
_LEAST = _SIMDGROUPS * _OUTPUTS  # matrix rows

# A lane multiplies WORDS packed words at a time, and a SIMD group 32 times that. Activations times
# codes are exact in float32, so only the order of additions and FUSED decide the bits.
SOURCE = """
constexpr int PACK = 32 / BITS;      // values in a packed word
constexpr int VALUES = WORDS * PACK; // consecutive values of a lane
const int outputs = w_shape[0], words = w_shape[1];
const int inputs = words * PACK, groups = inputs / GROUP;
const int lane = thread_index_in_simdgroup;
const int first =
    (threadgroup_position_in_grid.y * SIMDGROUPS + simdgroup_index_in_threadgroup) * OUTPUTS;
if (first >= outputs) return;
float result[OUTPUTS][ROWS] = {};
for (int k = lane * VALUES; k < inputs; k += 32 * VALUES) {
  uint packed[OUTPUTS][WORDS];
  UNROLL for (int out = 0; out < OUTPUTS; out++) {
    const int at = min(first + out, outputs - 1) * words + k / PACK;
    UNROLL for (int word = 0; word < WORDS; word++) packed[out][word] = w[at + word];
  }
  float dot[OUTPUTS][ROWS] = {};
  float sum[ROWS] = {};
  UNROLL for (int unit = 0; unit < VALUES; unit += 4) {
    float v[ROWS][4];
    UNROLL for (int row = 0; row < ROWS; row++) {
      const vec<T, 4> values = *(const device vec<T, 4>*)(x + row * inputs + k + unit);
      UNROLL for (int i = 0; i < 4; i++) {
        v[row][i] = static_cast<float>(values[i]);
      }
      sum[row] = plus<BITS>(sum[row], v[row][0], v[row][1], v[row][2], v[row][3]);
    }
    UNROLL for (int out = 0; out < OUTPUTS; out++) {
      const uint word = packed[out][unit / PACK] >> (unit % PACK * BITS);
      float code[4];
      UNROLL for (int i = 0; i < 4; i++) {
        code[i] = static_cast<float>((word >> (i * BITS)) & ((1 << BITS) - 1));
      }
      UNROLL for (int row = 0; row < ROWS; row++) {
        dot[out][row] = plus<BITS>(dot[out][row], v[row][0] * code[0], v[row][1] * code[1],
                                   v[row][2] * code[2], v[row][3] * code[3]);
      }
    }
  }
  UNROLL for (int out = 0; out < OUTPUTS; out++) {
    const int at = min(first + out, outputs - 1) * groups + k / GROUP;
    const float scale = static_cast<float>(scales[at]), bias = static_cast<float>(biases[at]);
    UNROLL for (int row = 0; row < ROWS; row++) {
      result[out][row] += FUSED ? fma(scale, dot[out][row], sum[row] * bias)
                                : scale * dot[out][row] + sum[row] * bias;
    }
  }
}
UNROLL for (int out = 0; out < OUTPUTS; out++) {
  UNROLL for (int row = 0; row < ROWS; row++) {
    const float total = simd_sum(result[out][row]);
    if (lane == 0 && first + out < outputs) {
      y[row * outputs + first + out] = static_cast<T>(total);
    }
  }
}
"""
HEADER = f"""
#define UNROLL _Pragma("clang loop unroll(full)")
#define SIMDGROUPS {_SIMDGROUPS}
#define OUTPUTS {_OUTPUTS}
template <int BITS>
inline float plus(float total, float a, float b, float c, float d) {{
  return BITS == 4 ? total + (a + b + c + d) : total + a + b + c + d;
}}
"""


class Order(NamedTuple):
    """The order of additions of MLX's kernel for one row."""

    words: int  # packed words of a lane: 2 in `qmv_fast`, 1 in `qmv`
    fused: bool  # whether the compiler fuses a multiplication with its addition


# The most likely order is first.
ORDERS = (Order(2, True), Order(2, False), Order(1, True), Order(1, False))


class MatrixShape(NamedTuple):
    """What kernels depend on."""

    outputs: int
    inputs: int
    bits: int
    group: int
    kind: str  # data type of the activations

    def __str__(self) -> str:
        kind = self.kind.removeprefix("mlx.core.")
        return f"{self.outputs}x{self.inputs} {self.bits}-bit/{self.group} {kind}"


def shape_of(layer: nn.Module) -> MatrixShape | None:
    """Return the shape of a layer, None if the kernel does not support it."""
    if type(layer) not in _LAYERS or layer.mode != "affine":
        return None
    (outputs, words), kind = layer["weight"].shape, layer["scales"].dtype
    shape = MatrixShape(outputs, words * 32 // layer.bits, layer.bits, layer.group_size, str(kind))
    known = shape.bits in _BITS and shape.group in _GROUPS and kind in _TYPES
    return shape if known and shape.inputs not in _QUAD_INPUTS and outputs >= _LEAST else None


def orders_of(shape: MatrixShape) -> list[Order]:
    """Return the orders that MLX may have for a shape: `qmv_fast` needs whole blocks of inputs."""
    whole = shape.inputs % (2 * 32 * 32 // shape.bits) == 0
    return [each for each in ORDERS if whole or each.words == 1]


def multiply(layer: nn.Module, x: mx.array, order: Order) -> mx.array:
    """Return `x` [..., inputs], of 2 to 16 rows, times the matrix of `layer`, without its bias."""
    outputs, rows = layer["weight"].shape[0], x.size // x.shape[-1]
    if rows > _TOGETHER:
        halves = mx.split(x.reshape(rows, -1), [rows // 2])
        product = mx.concatenate([multiply(layer, half, order) for half in halves])
        return product.reshape(*x.shape[:-1], outputs)
    found: list[mx.array] = _kernel()(
        inputs=[x, layer["weight"], layer["scales"], layer["biases"]],
        template=[("T", x.dtype), ("BITS", layer.bits), ("GROUP", layer.group_size),
                  ("ROWS", rows), ("WORDS", order.words), ("FUSED", order.fused)],
        grid=(32, _SIMDGROUPS * -(-outputs // _LEAST), 1),
        threadgroup=(32, _SIMDGROUPS, 1),
        output_shapes=[(*x.shape[:-1], outputs)],
        output_dtypes=[x.dtype],
    )  # fmt: skip
    return found[0]


@functools.cache
def _kernel() -> Any:
    names = ["x", "w", "scales", "biases"]
    return mx.fast.metal_kernel("akunu_quantized_rows", names, ["y"], SOURCE, HEADER)


class RowKernel(NamedTuple):
    """The numbers of rows that a layer uses the kernel for."""

    order: Order
    rows: Collection[int]

    def product(self, layer: nn.Module, x: mx.array) -> mx.array | None:
        """Return the product without the bias, None if MLX has to compute it."""
        fits = x.size // x.shape[-1] in self.rows and x.dtype == layer["scales"].dtype
        return multiply(layer, x, self.order) if fits else None


class RowLinear(nn.QuantizedLinear):
    """A quantized layer with a `RowKernel`."""

    def __call__(self, x: mx.array) -> mx.array:
        product = self._kernel.product(self, x)
        if product is None:
            return super().__call__(x)
        return product + self["bias"] if "bias" in self else product


class RowEmbedding(nn.QuantizedEmbedding):
    """A quantized embedding that is the output head, too, with a `RowKernel`."""

    def as_linear(self, x: mx.array) -> mx.array:
        product = self._kernel.product(self, x)
        return super().as_linear(x) if product is None else product


def install(layer: nn.Module, kernel: RowKernel) -> None:
    """Let `layer` use `kernel`."""
    layer.__class__ = RowLinear if isinstance(layer, nn.QuantizedLinear) else RowEmbedding
    object.__setattr__(layer, "_kernel", kernel)  # a module would list a tuple as a parameter


_LAYERS = (nn.QuantizedLinear, nn.QuantizedEmbedding, RowLinear, RowEmbedding)
