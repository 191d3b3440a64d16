"""The device: what it is, what it can hold, and the weight layout that suits it.

Owns every question about memory and number formats. Refuses nothing: a model that will not fit is
for the caller to turn away, with the figures from here.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from akunu_py.blas import load_openblas

WeightMode = Literal["auto", "keep", "float32"]
WEIGHT_MODES: tuple[WeightMode, ...] = ("auto", "keep", "float32")

_FLOAT32_BYTES = 4
_SHARE_OF_FREE_MEMORY = 0.7  # the rest is for the KV cache, activations and everybody else


def on_metal() -> bool:
    """Whether MLX computes on an Apple GPU."""
    return bool(mx.metal.is_available() and mx.default_device() == mx.gpu)


def on_cpu() -> bool:
    """Whether MLX computes on the processor."""
    return bool(mx.default_device() == mx.cpu)


def device_name() -> str:
    """The chip or processor, in words."""
    info = mx.device_info()
    name = info.get("device_name") or platform.processor() or platform.machine()
    return f"{name} ({'Metal' if on_metal() else mx.default_device().type.name.upper()})"


def blas_name() -> str:
    """The BLAS behind MLX's CPU backend, and why it is not OpenBLAS where it is not."""
    blas = load_openblas()
    return f"{blas.name}: {blas.reason}" if blas.reason else blas.name


def total_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Bytes that a model may take now: the GPU's recommended working set, or free memory."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit:
        return int(limit)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory()


def lay_out_weights(model: nn.Module, mode: WeightMode) -> str:
    """Puts `model`'s weights, in place, into the format that the device is fastest with.

    MLX's CPU kernels for quantised and half-precision weights are several times slower than
    float32 through OpenBLAS, so "auto" takes float32 on a CPU where memory allows. On a GPU the
    checkpoint's own format stays. Returns the format in words.
    """
    wide = mode == "float32" or (mode == "auto" and on_cpu() and _fits(_float32_bytes(model)))
    if wide:
        # Scales and biases first: dequantising in half precision would round.
        model.set_dtype(mx.float32)
        dequantize_model(model)
    mx.eval(model.parameters())
    return "float32" if wide else _describe_format(model)


@contextlib.contextmanager
def wired_memory() -> Iterator[None]:
    """Keeps a large model's weights wired on Metal, as mlx-lm does; elsewhere does nothing."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    if not (limit and on_metal()):
        yield
        return
    before = mx.set_wired_limit(limit)
    try:
        yield
    finally:
        mx.synchronize()
        mx.set_wired_limit(before)


def _fits(size: int) -> bool:
    return size < _SHARE_OF_FREE_MEMORY * available_memory()


def _float32_bytes(model: nn.Module) -> int:
    """Bytes of the weights as float32; packed words count for the weights inside them."""
    total = 0
    for _, module in model.named_modules():
        bits = module.get("bits") or getattr(module, "bits", None)
        for name, value in module.items():
            if isinstance(value, mx.array):
                per_word = (
                    32 // bits if name == "weight" and value.dtype == mx.uint32 and bits else 1
                )
                total += value.size * per_word * _FLOAT32_BYTES
    return total


def _describe_format(model: nn.Module) -> str:
    bits = {f"{m.bits}-bit" for _, m in model.named_modules() if hasattr(m, "bits")}
    floats: set[str] = {
        str(value.dtype).removeprefix("mlx.core.")
        for _, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    }
    return " + ".join(sorted(bits) + sorted(floats))
