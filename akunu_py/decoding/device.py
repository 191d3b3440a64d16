"""The device: what it is, what it can hold, and the weight layout that suits it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from akunu_py.models.catalog import Machine
from akunu_py.types import WeightMode
from akunu_py.workarounds.openblas import load_openblas
from akunu_py.workarounds.private_kernels import keep_kernels_private

Pressure = Literal["normal", "warning", "critical"]

# GB/s of memory. Apple's own figures (support.apple.com, technical specifications of each Mac), the
# smaller one where there are two; the longer name first. Of a core of a CPU: the starter's 32
# tokens/s on two.
_OF_CHIPS = {
    "Apple M1 Ultra": 800, "Apple M1 Max": 400, "Apple M1 Pro": 200, "Apple M1": 68,
    "Apple M2 Ultra": 800, "Apple M2 Max": 400, "Apple M2 Pro": 200, "Apple M2": 100,
    "Apple M3 Ultra": 800, "Apple M3 Max": 300, "Apple M3 Pro": 150, "Apple M3": 100,
    "Apple M4 Max": 410, "Apple M4 Pro": 273, "Apple M4": 120,
    "Apple M5 Max": 460, "Apple M5 Pro": 300, "Apple M5": 153,
}  # fmt: skip
_OF_ANY_CHIP, _OF_A_GPU = 100.0, 400.0
_OF_A_CORE, _MOST_OF_A_CPU = 10.0, 80.0
_SHARE_FOR_A_MODEL = 0.8  # of a machine's memory, where no GPU says how much
_SHARE_OF_FREE_MEMORY = 0.7  # the rest is for the KV cache, activations and everybody else

_wiring = threading.RLock()  # a model may be collected while another one is loaded
_wired_for: set[int] = set()  # ids of models
_limits_before: list[int] = []  # the limit to go back to, while there are any

keep_kernels_private()


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
    return load_openblas()


def total_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_pressure() -> Pressure:
    """How short of memory the system is, as macOS tells it; elsewhere it is always "normal"."""
    level = ctypes.c_int()
    if sys.platform == "darwin":
        size = ctypes.c_size_t(ctypes.sizeof(level))
        name = b"kern.memorystatus_vm_pressure_level"  # as <dispatch/source.h> numbers them
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    levels: dict[int, Pressure] = {2: "warning", 4: "critical"}
    return levels.get(level.value, "normal")


def available_memory() -> int:
    """Bytes that a model may take now.

    On Metal what can be wired (the recommended working set); elsewhere what is free, within what
    the control group of this process allows.
    """
    limit = mx.device_info().get("max_recommended_working_set_size")
    if limit:
        return int(limit)
    return min(_free_memory(), *_control_group_limits(Path("/proc/self/cgroup")))


def memory_left(limit: int | None = None) -> int:
    """Bytes that MLX may take now beyond what it holds, which `limit` may be set for in all."""
    held = mx.get_active_memory()
    if mx.device_info().get("max_recommended_working_set_size"):
        left = available_memory() - held
    else:  # buffers that it keeps for later are not free to others
        left = available_memory() + mx.get_cache_memory()
    return left if limit is None else min(left, limit - held)


def machine() -> Machine:
    """What this machine can give a model when nothing else needs it: advice must not change with
    the moment."""
    limit = mx.device_info().get("max_recommended_working_set_size")
    groups = _control_group_limits(Path("/proc/self/cgroup"), in_use=False)
    memory = int(limit or _SHARE_FOR_A_MODEL * min(groups))
    return Machine(memory, 1e9 * _bandwidth(), plain=on_cpu())


def _bandwidth() -> float:
    """GB of memory a second, of a chip of this kind."""
    if on_cpu():
        return min(_MOST_OF_A_CPU, _OF_A_CORE * len(os.sched_getaffinity(0)))
    name = str(mx.device_info().get("device_name", ""))
    chips = (bandwidth for chip, bandwidth in _OF_CHIPS.items() if name.startswith(chip))
    return next(chips, _OF_ANY_CHIP if on_metal() else _OF_A_GPU)


def _free_memory() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory()


def _control_group_limits(
    membership: Path, root: Path = Path("/sys/fs/cgroup"), *, in_use: bool = True
) -> Iterator[int]:
    """What is left in this process's control group and those around it (versions 1 and 2); what
    they may take at all where nothing counts as `in_use`.

    membership: the file that says which group that is, root: where the groups are mounted.
    """
    yield total_memory()
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    files = {"": ("memory.max", "memory.current"),
             "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes")}  # fmt: skip
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if controllers not in files:
            continue
        group = root / controllers / name.strip("/")
        while True:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number, and no limit
                most, used = (int((group / file).read_text()) for file in files[controllers])
                yield max(0, most - used + _file_cache(group)) if in_use else most
            if group == root / controllers:
                break
            group = group.parent


def _file_cache(group: Path) -> int:
    """Bytes of files that a control group holds; the system gives them back where it must."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        prefix = "total_" if "total_inactive_file" in counts else ""  # version 1: with its children
        return sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("inactive", "active"))
    return 0


def convert_weights(model: nn.Module, mode: WeightMode) -> int:
    """Put `model`'s weights, before they are read, into the format that the device is fastest with.

    MLX's CPU kernels for quantized and half-precision weights are several times slower than
    float32 through OpenBLAS, so "auto" takes float32 on a CPU where memory allows. On a GPU the
    checkpoint's own format stays. Returns the bytes of a value between the layers.
    """
    plain = plain_format(model, mode)
    if plain is not None:
        # Scales and biases first: dequantizing in half precision would round.
        model.set_dtype(mx.float32)
        dequantize_model(model)
        model.set_dtype(plain)
    return 4 if plain is not None and plain == mx.float32 else 2


def plain_format(model: nn.Module, mode: WeightMode) -> mx.Dtype | None:
    """What `convert_weights` makes of this model's weights, None where they stay as they are."""
    if mode == "auto" and on_cpu() and _fits(mx.float32.size * _weights(model)):
        return mx.float32
    return {"float32": mx.float32, "bfloat16": mx.bfloat16}.get(mode)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights in the format that they have."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def wire_memory(model: nn.Module) -> None:
    """Keeps memory wired on Metal for as long as there is `model`; elsewhere does nothing.

    What is not wired goes cold within seconds, and the next pass waits a quarter of a second.
    """
    limit = mx.device_info().get("max_recommended_working_set_size")
    if not (limit and on_metal()):
        return
    with _wiring:
        first = not _wired_for
        _wired_for.add(id(model))
        if first:
            _limits_before.append(mx.set_wired_limit(limit))
    weakref.finalize(model, _unwire, id(model))


def _unwire(key: int) -> None:
    with _wiring:
        _wired_for.discard(key)
        if not _wired_for:
            mx.synchronize()  # a limit must not change while something is computed
            mx.set_wired_limit(_limits_before.pop())


def _fits(size: int) -> bool:
    return size < _SHARE_OF_FREE_MEMORY * available_memory()


def _weights(model: nn.Module) -> int:
    """How many weights there are: packed words count for those inside them, and the scales of a
    quantized matrix are gone by the time it is dequantized."""
    total = 0
    for _, module in model.named_modules():
        bits = getattr(module, "bits", None)
        packed = bits and "scales" in module
        for name, value in module.items():
            if not isinstance(value, mx.array) or (packed and name in ("scales", "biases")):
                continue
            total += value.size * 32 // bits if packed and name == "weight" else value.size
    return total


def describe_format(model: nn.Module) -> str:
    """Return the format of the weights in words."""
    bits = {f"{m.bits}-bit" for _, m in model.named_modules() if hasattr(m, "bits")}
    floats: set[str] = {
        str(value.dtype).removeprefix("mlx.core.")
        for _, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    }
    return " + ".join(sorted(bits) + sorted(floats))
