"""Memory bandwidth of Apple's chips: a table, and an estimate for chips that it does not have."""

from __future__ import annotations

import contextlib
import functools
import plistlib
import re
import subprocess
import sys
from dataclasses import dataclass

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
_OLDEST = 1
_CORES = {"": 10, "Pro": 20, "Max": 40, "Ultra": 80}  # of full variants, if macOS does not say
_IOREG = ("/usr/sbin/ioreg", "-a", "-r", "-c", "AGXAccelerator", "-d", "1")
_IOREG_S = 5.0


@dataclass(frozen=True, slots=True)
class ChipBandwidth:
    """The memory bandwidth of a chip."""

    gb_per_s: float
    estimated: bool  # from the chip's family and GPU cores, because the table does not have it


def chip_bandwidth(name: str, cores: int | None) -> ChipBandwidth:
    """Return the bandwidth of the chip `name`, such as "Apple M5 Max".

    cores: GPU cores; None: unknown, and then the smallest variant of a known chip is assumed.
    """
    if (variants := _CHIPS.get(name)) is not None:
        fitting = (value for fewest, value in variants if fewest <= (cores or 0))
        return ChipBandwidth(max(fitting), estimated=False)
    family = re.match(r"Apple M(\d+)(?: (\w+))?", name)
    generation = min(int(family[1]), max(_PER_CORE)) if family else _OLDEST
    assumed = _CORES.get((family[2] or "") if family else "", _CORES[""])
    per_core = _PER_CORE.get(generation, _PER_CORE[_OLDEST])
    return ChipBandwidth(per_core * (cores or assumed), estimated=True)


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
