"""Weights of every GGUF type equal the gguf package's, within the rounding of the type."""

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from akunu_py.errors import UnsupportedModel
from akunu_py.models.gguf import file
from akunu_py.models.gguf.file import TENSOR_TYPES, GgufTensor
from tests.support.tiny_gguf import Array

ROWS, COLUMNS = 48, 512
NAMES = {type_.name: type_ for type_ in TENSOR_TYPES.values()}
# Positions of the float16 numbers of a block; the other bytes may have any value.
HALVES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
    "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip
EXACT = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
REQUANTIZED = ["Q2_K", "Q3_K", "Q6_K"]


def random_blocks(kind: str) -> Array:
    """Blocks with random contents and scales of a usual size: uint8 [blocks, bytes]."""
    draw, type_ = np.random.default_rng(0), NAMES[kind]
    blocks = ROWS * COLUMNS // type_.block
    raw = draw.integers(0, 256, (blocks, type_.size), np.uint8)
    for at in HALVES[kind]:
        halves = draw.uniform(0.001, 0.01, blocks).astype("<f2")
        raw[:, at : at + 2] = halves.view(np.uint8).reshape(blocks, 2)
    return raw


def tensor_of(directory: Path, kind: str, raw: Array) -> GgufTensor:
    path = directory / "blocks"
    path.write_bytes(raw.tobytes())
    return GgufTensor("blk.0.ffn_up.weight", NAMES[kind], (ROWS, COLUMNS), path, 0)


def theirs(kind: str, raw: Array) -> Array:
    values: Array = gguf.dequantize(raw.reshape(ROWS, -1), gguf.GGMLQuantizationType[kind])
    return values


def ours(tensor: GgufTensor, dtype: str) -> tuple[Array, Array]:
    """Return MLX's values of the converted tensor, and the quantization step per weight."""
    made = file.convert_quantized(tensor, dtype)
    scales, biases = file.load(made["scales"], dtype), file.load(made["biases"], dtype)
    values = mx.dequantize(
        mx.array(made["weight"]),
        mx.array(scales),
        mx.array(biases),
        group_size=file.GROUP_SIZE,
        bits=tensor.type.bits,
    )
    return np.array(values), np.abs(scales).repeat(file.GROUP_SIZE, -1)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("kind", HALVES)
def test_weights_are_within_the_rounding_of_their_type(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Types with one scale for 32 weights are exact. Q4_K and Q5_K multiply two scales, and the
    types with a scale for 16 weights are quantized again, with an error of half a step."""
    raw = random_blocks(kind)
    expected = theirs(kind, raw)
    values, steps = ours(tensor_of(tmp_path, kind, raw), dtype)
    error = np.abs(values - expected)
    if kind in REQUANTIZED:  # a scale that is rounded down adds more at the last code
        assert (error <= (1.2 if dtype == "BF16" else 0.6) * steps + 1e-6).all()
    elif dtype == "F32" or (dtype == "F16" and kind in EXACT):
        assert np.array_equal(values, expected)
    elif dtype == "F16":
        # Both terms of scale * code + bias round by 2**-11 of themselves at most.
        spread = steps * (2 ** NAMES[kind].bits - 1)
        assert (error <= 2.0**-11 * (2 * spread + np.abs(expected)) * 1.01 + 1e-7).all()
        assert error.mean() < 3e-4 * np.abs(expected).mean()
    if dtype == "BF16":
        relative = np.sqrt((error**2).mean() / (expected**2).mean())
        assert relative < (0.05 if kind in REQUANTIZED else 0.003)


def test_bfloat_rounds_as_mlx_does() -> None:
    draw = np.random.default_rng(0)
    values = (draw.standard_normal(5000) * 10.0 ** draw.integers(-30, 30, 5000)).astype(np.float32)
    values[:4] = [0.0, -0.0, np.inf, 1.00390625]
    rounded = file.round_to(values, "BF16")
    expected = np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(rounded, expected)
    assert np.array_equal(file.load(file.store(rounded, "BF16"), "BF16"), expected)


def test_slices_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks("Q6_K")
    tensor = tensor_of(tmp_path, "Q6_K", raw)
    whole, _ = ours(tensor, "F16")
    monkeypatch.setattr(file, "_SLICE_WEIGHTS", 5 * 256)
    assert np.array_equal(ours(tensor, "F16")[0], whole)


@pytest.mark.parametrize(
    ("kind", "value"), [("Q4_0", 60_000.0), ("Q8_0", np.nan), ("Q6_K", np.inf)]
)
def test_scales_that_overflow_are_refused(tmp_path: Path, kind: str, value: float) -> None:
    raw = random_blocks(kind)
    at = HALVES[kind][0]
    raw[7, at : at + 2] = np.array([value], "<f2").view(np.uint8)
    with pytest.raises(UnsupportedModel, match="F16"):
        file.convert_quantized(tensor_of(tmp_path, kind, raw), "F16")
