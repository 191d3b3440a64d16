"""The kernel for several rows against MLX's kernel for one row, both compiled as C++.

`metal_shim.h` runs Metal kernels on a CPU. MLX's kernel is in the headers of its wheel.
"""

import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.kernels import quantized_rows

_HERE = Path(__file__).parent
_MLX = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels/quantized.h"
_COMPILER = shutil.which("g++") or shutil.which("clang++")
_FLAGS = ("-std=c++20", "-O0", "-pthread", "-w", "-ffp-contract=off",
          "-fsanitize=address")  # fmt: skip

pytestmark = pytest.mark.skipif(
    _COMPILER is None or not _MLX.exists(), reason="needs a C++ compiler and the headers of MLX"
)


def single_row_kernels(*, fused: bool) -> str:
    """Return MLX's source of `qmv_fast_impl`, `qmv_impl`, and what they call.

    fused: with the one fused multiplication that Metal's compiler may make of a sum of products.
    """
    text = _MLX.read_text()
    start, end = text.index("MLX_MTL_CONST int SIMD_SIZE"), text.index("METAL_FUNC void qmv_wide_")
    text = text[start : text.rindex("\ntemplate", start, end)]
    sums, count = re.subn(
        r"return scale \* accum \+ sum \* bias;", "return fma(scale, accum, sum * bias);", text
    )
    assert count == 2  # `qdot` and `qdot_safe`
    return sums if fused else text


@pytest.mark.parametrize(("bits", "fused", "kind"), [(4, True, "float16"), (8, False, "bfloat16")])
def test_each_row_has_the_bits_of_the_row_alone(
    bits: int, *, fused: bool, kind: str, tmp_path: Path
) -> None:
    assert _COMPILER is not None
    (tmp_path / "ours.h").write_text(quantized_rows.SOURCE)
    parts = ['#include "metal_shim.h"', single_row_kernels(fused=fused), quantized_rows.HEADER]
    source, program = tmp_path / "compare.cpp", tmp_path / "program"
    source.write_text("\n".join([*parts, (_HERE / "compare.cpp").read_text()]))
    defines = [f"-DCODE_BITS={bits}", f"-DFUSED_SUM={str(fused).lower()}"]
    places = [f"-I{_HERE}", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run([_COMPILER, *_FLAGS, *defines, *places], check=True)
    # Whole blocks; a last block in part, and outputs that fill no SIMD group; less than a block.
    for outputs, inputs, rows in (
        (16, 1024, set(range(2, 9))),
        (13, 1216, {3, 7}),
        (9, 192, {3, 7}),
    ):
        words = [str(program), str(outputs), str(inputs), kind]
        found = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
        assert found.returncode == 0, found.stderr
        lines = [[int(word) for word in line.split()] for line in found.stdout.splitlines()]
        assert {count for _, count, *_ in lines} >= rows
        for _, _, of_lane, from_fast, from_plain in lines:
            same, other = (from_fast, from_plain) if of_lane == 2 else (from_plain, from_fast)
            assert same == 0
            assert other != 0  # the order matters, so a wrong one is noticed
