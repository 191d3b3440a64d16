"""Precisions that round as on a GPU, compared with float32."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.bench.fidelity import compare_answers
from akunu_py.decoding import kv_cache
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import LoadOptions, WeightMode
from tests.measure.precisions import PRECISIONS, main
from tests.support.tiny_model import tiny_directory

pytestmark = pytest.mark.rotating


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small quantized model."""
    return tiny_directory(tmp_path_factory.mktemp("tiny"))


def logits(engine: Engine) -> mx.array:
    cache = kv_cache.new_cache(engine.model)
    return engine.model(mx.array([[1, 2, 3, 4, 5]]), cache=cache)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("keep", "4-bit + 8-bit + float16"),
        ("keep-float32", "4-bit + 8-bit + float32"),
        ("bfloat16-blas", "bfloat16, through the BLAS"),
        ("keep-blas", "4-bit + 8-bit + float16, through the BLAS"),
    ],
)
def test_each_precision_has_nearly_the_same_logits(tiny: Path, name: str, words: str) -> None:
    exact = logits(Engine.load(tiny, LoadOptions(weights="float32")))
    weights, altered = PRECISIONS[name]
    engine = Engine.load(tiny, LoadOptions(weights=weights))
    engine = altered(engine) if altered else engine
    assert engine.plan.weights == words
    found = logits(engine)
    wide = mx.float32 if "float32" in words else mx.bfloat16 if "bfloat16" in words else mx.float16
    assert found.dtype == wide
    error = float(mx.abs(found.astype(mx.float32) - exact).max() / mx.abs(exact).max())
    assert error < (1e-5 if wide == mx.float32 else 0.05)
    assert {each.weights for each in compare_answers(engine, ["Hello"], 4)} == {words}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="of MLX's CPU kernels")
@pytest.mark.parametrize("weights", ["bfloat16", "keep"])
def test_cpu_kernels_of_half_precision_sum_each_row_separately(
    tiny: Path, weights: WeightMode
) -> None:
    """Drafting cannot change an answer there, so the BLAS emulates GPU kernels."""
    engine = Engine.load(tiny, LoadOptions(weights=weights))
    cache = kv_cache.new_cache(engine.model)
    alone = [engine.model(mx.array([[token]]), cache=cache)[0, 0] for token in (1, 2, 3, 4, 5)]
    assert mx.array_equal(mx.stack(alone), logits(engine)).item()


@pytest.mark.usefixtures("loaded_shallow_starter")
def test_the_tool_compares_a_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--answers", "1", "--max-tokens", "4", "--weights", "float32"]) == 0
    assert "fixed" in capsys.readouterr().out
