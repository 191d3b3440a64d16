"""The device: its name, its memory limits, and the fastest format for weights."""

import contextlib
import ctypes
import functools
import os
import platform
import plistlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from akunu_py.models.catalog.recommend import Machine
from akunu_py.types import WeightMode
from akunu_py.workarounds.private_kernels import keep_kernels_private

Pressure = Literal["normal", "warning", "critical"]

_GPU_BANDWIDTH = 400.0  # GB/s of a GPU that is not Apple's
_CORE_BANDWIDTH, _MAX_CPU_BANDWIDTH = 10.0, 80.0  # measured: 32 tokens/s of the starter on 2 cores
_MODEL_SHARE = 0.8  # of a machine's memory, without a GPU that reports a limit
_WEIGHTS_SHARE = 0.7  # of free memory; the rest is for KV cache, activations, other programs
# By name: GB/s of each variant, with its fewest GPU cores. Source: Apple's technical specifications
# of each Mac.
_CHIPS: dict[str, tuple[tuple[int, float], ...]] = {
    "Apple M1": ((0, 68),), "Apple M1 Pro": ((0, 200),),
    "Apple M1 Max": ((0, 400),), "Apple M1 Ultra": ((0, 800),),
    "Apple M2": ((0, 100),), "Apple M2 Pro": ((0, 200),),
    "Apple M2 Max": ((0, 400),), "Apple M2 Ultra": ((0, 800),),
    "Apple M3": ((0, 100),), "Apple M3 Pro": ((0, 150),),
    "Apple M3 Max": ((0, 300), (40, 400)), "Apple M3 Ultra": ((0, 819),),
    "Apple M4": ((0, 120),), "Apple M4 Pro": ((0, 273),),
    "Apple M4 Max": ((0, 410), (40, 546)),
    "Apple M5": ((0, 153),), "Apple M5 Pro": ((0, 307),),
    "Apple M5 Max": ((0, 460), (40, 614)),
}  # fmt: skip
_PER_CORE = {1: 8.5, 2: 10.0, 3: 10.0, 4: 12.0, 5: 15.3}  # GB/s per GPU core, by generation
_CORES = {"": 10, "Pro": 20, "Max": 40, "Ultra": 80}  # of full variants, if macOS does not say
_IOREG = ("/usr/sbin/ioreg", "-a", "-r", "-c", "AGXAccelerator", "-d", "1")
_IOREG_S = 5.0

keep_kernels_private()


def on_metal() -> bool:
    """Return whether MLX computes on an Apple GPU."""
    return bool(mx.metal.is_available() and mx.default_device() == mx.gpu)


def on_cpu() -> bool:
    return bool(mx.default_device() == mx.cpu)


def device_name() -> str:
    """Return the name of the chip or processor, with MLX's backend."""
    info = mx.device_info()
    name = info.get("device_name") or platform.processor() or platform.machine()
    return f"{name} ({'Metal' if on_metal() else mx.default_device().type.name.upper()})"


def total_memory() -> int:
    """Return the bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_pressure() -> Pressure:
    """Return the memory pressure that macOS reports; "normal" on other systems."""
    level = ctypes.c_int()
    if sys.platform == "darwin":
        size = ctypes.c_size_t(ctypes.sizeof(level))
        name = b"kern.memorystatus_vm_pressure_level"  # levels: <dispatch/source.h>
        ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    levels: dict[int, Pressure] = {2: "warning", 4: "critical"}
    return levels.get(level.value, "normal")


def available_memory() -> int:
    """Return the bytes that a model may use: Metal's working set, or free memory."""
    return working_set() or min(_free_memory(), *_control_group_limits(Path("/proc/self/cgroup")))


def working_set() -> int:
    """Return the bytes that a GPU can wire, 0 without a GPU that reports them."""
    return int(mx.device_info().get("max_recommended_working_set_size") or 0)


def memory_left(limit: int | None = None) -> int:
    """Return the bytes that MLX may still allocate. limit: for all of MLX's memory."""
    used = mx.get_active_memory()
    # Free memory does not include the buffers that MLX caches.
    left = available_memory() + (-used if working_set() else mx.get_cache_memory())
    return left if limit is None else min(left, limit - used)


def machine() -> Machine:
    """Return this machine's memory and bandwidth, including memory that is in use."""
    groups = _control_group_limits(Path("/proc/self/cgroup"), in_use=False)
    memory = working_set() or int(_MODEL_SHARE * min(groups))
    gb_per_s = _GPU_BANDWIDTH
    if on_cpu():
        gb_per_s = min(_MAX_CPU_BANDWIDTH, _CORE_BANDWIDTH * len(os.sched_getaffinity(0)))
    elif on_metal():
        gb_per_s = chip_bandwidth(str(mx.device_info().get("device_name", "")), gpu_cores())
    return Machine(memory, 1e9 * gb_per_s, float32=on_cpu())


def _free_memory() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return total_memory()


def _control_group_limits(
    membership: Path, root: Path = Path("/sys/fs/cgroup"), *, in_use: bool = True
) -> Iterator[int]:
    """Yield the bytes of the machine and of our control groups. in_use: subtract used memory."""
    yield total_memory()
    with contextlib.suppress(OSError):
        lines = membership.read_text().splitlines()
        name = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        for part in (Path(name), *Path(name).parents):
            group = root / part
            with contextlib.suppress(OSError, ValueError):  # "max" means no limit
                most = int((group / "memory.max").read_text())
                used = int((group / "memory.current").read_text())
                yield max(0, most - used + _file_cache(group)) if in_use else most


def _file_cache(group: Path) -> int:
    """Return the bytes of cached files in a control group, which the system can reclaim."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(counts["inactive_file"]) + int(counts["active_file"])
    return 0


def convert_weights(model: nn.Module, mode: WeightMode) -> int:
    """Convert `model`'s weights to the device's fastest format, before they are loaded.

    MLX's CPU kernels for quantized and half-precision weights are several times slower than
    float32 through OpenBLAS, so "auto" uses float32 on a CPU if memory allows. On a GPU the
    checkpoint's format stays. Returns the bytes per activation value.
    """
    if (plain := plain_format(model, mode)) is None:
        return 2
    # Convert scales and biases first: dequantizing in half precision would round.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    model.set_dtype(plain)
    return plain.size


def plain_format(model: nn.Module, mode: WeightMode) -> mx.Dtype | None:
    """Return the format that `convert_weights` produces, None if the weights stay as they are."""
    if mode == "auto" and on_cpu():
        plain = mx.float32.size * _weight_count(model) < _WEIGHTS_SHARE * available_memory()
        return mx.float32 if plain else None
    return {"float32": mx.float32, "bfloat16": mx.bfloat16}.get(mode)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of the weights in their current format."""
    return sum(value.nbytes for _, value in tree_flatten(model.parameters()))


def _weight_count(model: nn.Module) -> int:
    """Return the number of weights after dequantization: unpacked, without scales and biases."""
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
    """Describe the format of the weights, such as "4-bit + bfloat16"."""
    bits = {f"{m.bits}-bit" for _, m in model.named_modules() if hasattr(m, "bits")}
    floats: set[str] = {
        str(value.dtype).removeprefix("mlx.core.")
        for _, value in tree_flatten(model.parameters())
        if mx.issubdtype(value.dtype, mx.floating)
    }
    return " + ".join(sorted(bits) + sorted(floats))


def chip_bandwidth(name: str, cores: int | None) -> float:
    """Return the GB/s of the chip `name`, such as "Apple M5 Max"; estimated for unknown chips.

    cores: GPU cores. If None, assumes the smallest variant of the chip.
    """
    if name in _CHIPS:
        return max(value for fewest, value in _CHIPS[name] if fewest <= (cores or 0))
    family = re.match(r"Apple M(\d+)(?: (\w+))?", name)
    generation, kind = (int(family[1]), family[2] or "") if family else (1, "")
    per_core = _PER_CORE.get(generation, max(_PER_CORE.values()))
    return per_core * (cores or _CORES.get(kind, _CORES[""]))


@functools.cache
def gpu_cores() -> int | None:
    """Return the number of GPU cores that macOS reports, None elsewhere."""
    if sys.platform == "darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(_IOREG, capture_output=True, timeout=_IOREG_S, check=True)
            return cores_in(done.stdout)
    return None


def cores_in(report: bytes) -> int | None:
    """Return the GPU cores in a property list of `ioreg`, None if it has none."""
    try:
        entries = plistlib.loads(report)
        found = (each.get("gpu-core-count") for each in entries)
        return next((count for count in found if isinstance(count, int) and count > 0), None)
    except Exception:  # noqa: BLE001 - a report of another form
        return None
