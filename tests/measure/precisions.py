"""`python -m tests.measure.fidelity` with a GPU's rounding on a CPU.

MLX's CPU kernels for half precision sum each row alone, in one order, so drafting cannot change an
answer there. GPU kernels sum in float32, in an order that depends on the number of rows, and round
the sum to the format. The layers below do the same through the BLAS.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from akunu_py.decoding.load import load_engine
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import LoadOptions, WeightMode
from tests.measure import fidelity
from tests.measure.tool import run_tool

# Quick on a CPU; "keep" takes seconds a token there.
DEFAULT = ("float32", "bfloat16", "keep-float32", "bfloat16-blas", "keep-blas")
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


class _Rounded(nn.Module):  # type: ignore[misc]
    """A product in float32, rounded to `dtype`. weight: [out, in], float32."""

    def __init__(self, weight: mx.array, bias: mx.array | None, dtype: mx.Dtype) -> None:
        super().__init__()
        self.weight = weight
        if bias is not None:
            self.bias = bias
        self._dtype = dtype

    def __call__(self, rows: mx.array) -> mx.array:
        """[..., in] -> [..., out]"""
        product = (rows.astype(mx.float32) @ self.weight.T).astype(self._dtype)
        return product + self.bias if "bias" in self else product


class _RoundedEmbedding(_Rounded):
    """An embedding table whose transpose may yield the logits."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """[...] -> [..., in]"""
        return self.weight[tokens].astype(self._dtype)

    def as_linear(self, rows: mx.array) -> mx.array:
        """[..., in] -> [..., tokens]"""
        return super().__call__(rows)


def round_products(engine: Engine) -> Engine:
    """Make every dense or quantized layer round as on a GPU. Changes the model in place."""
    rounded = [
        (name, layer)
        for name, module in engine.model.named_modules()
        if (layer := _rounded(module)) is not None
    ]
    engine.model.update_modules(tree_unflatten(rounded))
    mx.eval(engine.model.parameters())
    return _with_weights(engine, f"{engine.plan.weights}, through the BLAS")


def compute_in_float32(engine: Engine) -> Engine:
    """Convert all but the quantized matrices to float32. Changes the model in place."""
    engine.model.set_dtype(mx.float32)
    mx.eval(engine.model.parameters())
    bits = [part for part in engine.plan.weights.split(" + ") if part.endswith("-bit")]
    return _with_weights(engine, " + ".join([*bits, "float32"]))


def _with_weights(engine: Engine, weights: str) -> Engine:
    return replace(engine, plan=replace(engine.plan, weights=weights))


def _rounded(module: Any) -> nn.Module | None:
    kind = _RoundedEmbedding if isinstance(module, _EMBEDDINGS) else _Rounded
    if not isinstance(module, (nn.Linear, nn.QuantizedLinear, *_EMBEDDINGS)):
        return None
    weight, dtype = module.weight, module.weight.dtype
    if "scales" in module:
        dtype = module.scales.dtype
        # Exact: in half precision it would round a second time.
        weight = mx.dequantize(
            weight,
            module.scales.astype(mx.float32),
            None if module.get("biases") is None else module.biases.astype(mx.float32),
            module.group_size,
            module.bits,
            module.mode,
        )
    return kind(weight.astype(mx.float32), module.get("bias"), dtype)


# The weight mode of each precision, and the change to the loaded model.
PRECISIONS: dict[str, tuple[WeightMode, Callable[[Engine], Engine] | None]] = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "keep": ("keep", None),
    "keep-float32": ("keep", compute_in_float32),
    "bfloat16-blas": ("bfloat16", round_products),
    "keep-blas": ("keep", round_products),
}


def load_precision(options: argparse.Namespace, name: str) -> Engine:
    """Load the model in the precision `name` of `PRECISIONS`."""
    weights, change = PRECISIONS[name]
    engine = load_engine(options.model, LoadOptions(weights, options.kv_bits))
    return change(engine) if change else engine


add_options = partial(fidelity.add_options, precisions=tuple(PRECISIONS))


def run(options: argparse.Namespace) -> int:
    options.weights = options.weights or DEFAULT
    return fidelity.run(options, partial(load_precision, options))


main = partial(run_tool, "precisions", "Compare answers with drafts to answers without, in "
               "precisions that round as on a GPU", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
