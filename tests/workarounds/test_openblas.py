"""When OpenBLAS is loaded, and which of its builds a CPU can run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from akunu_py.workarounds.openblas import _missing_instructions, load_openblas

_ZEN3 = " fpu sse2 avx fma avx2 bmi2"
_SKYLAKE = _ZEN3 + " avx512f avx512dq"


@pytest.mark.parametrize(
    ("config", "flags", "missing"),
    [
        ("OpenBLAS 0.3.31 NO_AFFINITY SKYLAKEX MAX_THREADS=4", _ZEN3, "avx512f"),
        ("OpenBLAS 0.3.31 NO_AFFINITY SKYLAKEX MAX_THREADS=4", _SKYLAKE, None),
        ("OpenBLAS 0.3.29 NO_AFFINITY ZEN MAX_THREADS=4", _ZEN3, None),
        ("OpenBLAS 0.3.29 NO_AFFINITY ZEN MAX_THREADS=4", " fpu sse2", "avx2"),
        ("OpenBLAS 0.3.21 DYNAMIC_ARCH NO_AFFINITY SkylakeX MAX_THREADS=64", " fpu sse2", None),
        ("OpenBLAS 0.3.29 NEOVERSEN1 MAX_THREADS=4", "", None),
    ],
)
def test_a_build_that_the_cpu_cannot_run_is_refused(
    config: str, flags: str, missing: str | None
) -> None:
    assert _missing_instructions(config, flags) == missing


def test_importing_mlx_loads_it_first() -> None:
    import mlx.core  # noqa: F401 - with the import of akunu_py above

    assert load_openblas.cache_info().currsize == 1
    assert "imported before" not in load_openblas()


def test_the_finder_imports_nothing() -> None:
    """It runs under the global import lock; a thread that imports ctypes would wait for ever."""
    code = """
import sys, akunu_py
before = set(sys.modules)
import mlx
before.update(each for each in sys.modules if each.startswith("mlx"))
assert sys.meta_path[0].find_spec("mlx.core", mlx.__path__)
print(*set(sys.modules) - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("\n", "", 0)
