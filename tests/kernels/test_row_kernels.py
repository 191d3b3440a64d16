"""The kernels for several rows against MLX's kernels for one row, both compiled as C++.

`metal_shim.h` runs Metal kernels on a CPU. MLX's kernels are in the headers of its wheel.
"""

import re
import shutil
import subprocess
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.kernels import row_kernels
from akunu_py.kernels.row_kernels import MatrixShape, Order

_HERE = Path(__file__).parent
_MLX = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
_COMPILER = shutil.which("g++") or shutil.which("clang++")
_FLAGS = ("-std=c++20", "-O0", "-w", "-ffp-contract=off", "-fsanitize=address")

_MISSING = _COMPILER is None or not _MLX.exists()
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(_MISSING, reason="needs a C++ compiler and the headers of MLX"),
]


def quantized_kernels(*, fused: bool) -> str:
    """Return MLX's source of `qmv_fast_impl`, `qmv_impl`, and what they call.

    fused: with the one fused multiplication that Metal's compiler may make of a sum of products.
    """
    text = (_MLX / "quantized.h").read_text()
    start, end = text.index("MLX_MTL_CONST int SIMD_SIZE"), text.index("METAL_FUNC void qmv_wide_")
    text = text[start : text.rindex("\ntemplate", start, end)]
    sums, count = re.subn(
        r"return scale \* accum \+ sum \* bias;", "return fma(scale, accum, sum * bias);", text
    )
    assert count == 2  # `qdot` and `qdot_safe`
    return sums if fused else text


def dense_kernel() -> str:
    """Return MLX's source of `GEMVKernel`, without the attributes of Metal."""
    text = (_MLX / "gemv.h").read_text()
    start, end = text.index("struct GEMVKernel {"), text.index("struct GEMVTKernel {")
    start, end = text.rindex("\ntemplate", 0, start), text.rindex("\n};", start, end)
    sums = "template <typename T> struct DefaultAccT { using type = float; };"
    return re.sub(r"\[\[.*?\]\]", "", sums + text[start:end] + "\n};")


def as_coroutines(kernels: str) -> str:
    """Return kernels whose lanes wait for each other, as in `metal_shim.h`."""
    kernels = re.sub(r"METAL_FUNC void (?=(run|qmv_impl|qmv_fast_impl)\()", "inline Lane ", kernels)
    kernels = kernels.replace("return;", "co_return;")
    return re.sub(r"(?=\b(simd_sum|simd_shuffle_down|threadgroup_barrier)\()", "co_await ", kernels)


def build(name: str, kernels: str, ours: str, tmp_path: Path, **defines: object) -> Path:
    """Compile `name` with MLX's kernels and ours."""
    assert _COMPILER is not None
    (tmp_path / "ours.h").write_text(as_coroutines(ours))
    source, program = tmp_path / name, tmp_path / "program"
    kernels = as_coroutines(kernels) + row_kernels.HEADER
    parts = ['#include "metal_shim.h"', kernels, (_HERE / name).read_text()]
    source.write_text("\n".join(parts))
    values = [f"-D{define}={value}" for define, value in defines.items()]
    places = [f"-I{_HERE}", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run([_COMPILER, *_FLAGS, *values, *places], check=True)
    return program


def run(program: Path, outputs: int, inputs: int, kind: str) -> list[list[int]]:
    words = [str(program), str(outputs), str(inputs), kind]
    found = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    return [[int(word) for word in line.split()] for line in found.stdout.splitlines()]


@pytest.mark.parametrize(("bits", "fused", "kind"), [(4, True, "float16"), (8, False, "bfloat16")])
def test_each_quantized_row_has_the_bits_of_the_row_alone(
    bits: int, *, fused: bool, kind: str, tmp_path: Path
) -> None:
    program = build(
        "compare_quantized.cpp", quantized_kernels(fused=fused), row_kernels.QUANTIZED_SOURCE,
        tmp_path, SIMDGROUPS=row_kernels.QUANTIZED_SIMDGROUPS, CODE_BITS=bits, FUSED_SUM=int(fused),
    )  # fmt: skip
    # Whole blocks; a last block in part, and outputs that fill no SIMD group; less than a block.
    for outputs, inputs, rows in ((16, 1024, range(2, 9)), (13, 1216, (3, 7)), (9, 192, (3, 7))):
        lines = run(program, outputs, inputs, kind)
        assert {count for _, count, *_ in lines} >= set(rows)
        for _, _, of_lane, from_fast, from_plain in lines:
            same, other = (from_fast, from_plain) if of_lane == 2 else (from_plain, from_fast)
            assert same == 0
            assert other != 0  # the order matters, so a wrong one is noticed


def test_each_row_of_16_bits_has_the_bits_of_the_row_alone(tmp_path: Path) -> None:
    program = build(
        "compare_dense.cpp", dense_kernel(), row_kernels.DENSE_SOURCE, tmp_path,
        SIMDGROUPS=row_kernels.DENSE_SIMDGROUPS,
    )  # fmt: skip
    # Each of MLX's three kernels, with a last block in part, and outputs that fill no SIMD group.
    for outputs, inputs, kind, mlx_kernel, rows in (
        (29, 52, "float16", 0, {3, 7}),
        (29, 436, "bfloat16", 1, set(range(2, 9))),
        (29, 1284, "float16", 2, {2, 5}),
    ):
        shape = MatrixShape(outputs, inputs, 16, 0, getattr(mx, kind))
        lines = run(program, outputs, inputs, kind)
        assert {count for count, *_ in lines} == rows
        for _, lanes, split, *differences in lines:
            assert row_kernels.orders_of(shape) == [Order(lanes=lanes, split=split)]
            assert differences.pop(mlx_kernel) == 0
            assert all(differences)  # the order matters, so a wrong one is noticed
