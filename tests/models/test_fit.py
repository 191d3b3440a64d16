"""Memory estimates compared with measured caches and passes, and their messages."""

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.engine import kv_cache
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.engine.model import load_plan as plan
from akunu_py.errors import DoesNotFit, UsageError
from akunu_py.models.load import fit
from akunu_py.models.load.fit import (
    GIB,
    Activations,
    CacheGrowth,
    MemoryNeeds,
    choose_context,
    largest_context,
)
from akunu_py.models.load.mlx_loader import OpenModel
from akunu_py.models.load.model_files import ModelFiles
from akunu_py.models.store.model_store import StoredModel
from akunu_py.ngram.cost import MAX_ROWS
from akunu_py.types import GenerateOptions, LoadOptions
from tests.support.families import build, families_of_each_kind
from tests.support.family_table import WINDOW

# Caches of these models do not grow by 256 tokens.
_ROUNDED = ("llama-concatenate", "llama4", "deepseek_v41")
TIGHT = MemoryNeeds(1000, CacheGrowth(10), Activations(0, 0, 0, 2), 8192)


def test_the_logits_of_the_widest_pass_are_planned() -> None:
    assert fit._DECODE_ROWS == MAX_ROWS


def cache_bytes(model: Any, tokens: int) -> int:
    """Return the bytes of the cache after `tokens` tokens, prefilled in chunks."""
    cache = kv_cache.new_cache(model)
    rows = mx.arange(tokens)[None] % 96
    for start in range(0, tokens, fit.PREFILL_ROWS):
        model(rows[:, start : start + fit.PREFILL_ROWS], cache=cache)
        mx.eval([entry.state for entry in kv_cache.leaves(cache)])
    parts = tree_flatten([vars(entry) for entry in kv_cache.leaves(cache)])
    return sum(part.nbytes for _, part in parts if isinstance(part, mx.array))


@families_of_each_kind()
def test_cache_bytes_are_known_before_anything_runs(name: str) -> None:
    model = build(name)
    mx.clear_cache()
    before = mx.get_active_memory()
    growth = plan.growth(model)
    assert mx.get_active_memory() - before < 1000
    for tokens in (WINDOW - 8, 2 * fit.PREFILL_ROWS):
        real, expected = cache_bytes(model, tokens), growth.at(tokens)
        if name in _ROUNDED:
            rows = growth.per_token + sum(each for _, each in growth.windows)
            slack = 256 * rows + growth.fixed
            assert abs(expected - real) <= slack, tokens
        else:
            assert expected == pytest.approx(real, rel=1e-3), tokens


def test_long_passes_over_a_prompt_need_fused_attention_and_memory() -> None:
    fused = MemoryNeeds(GIB, CacheGrowth(1000), Activations(10_000, 0, 0, 2), 8192)
    wide = fused.at(8192, fit.WIDE_PREFILL_ROWS).total
    assert wide - fused.at(8192).total == 1536 * 10_000 * 2
    for limit, rows in [(2 * wide, 2048), (wide, 512), (fused.at(8192).total, 512)]:
        granted = choose_context("m", fused, limit)
        assert (granted.context, granted.prefill_rows) == (8192, rows)
        assert granted.estimate == fused.at(8192, rows)
    scores = MemoryNeeds(GIB, CacheGrowth(1000), Activations(10_000, 8, 0, 2), 8192)
    assert choose_context("m", scores, 100 * GIB).prefill_rows == 512


def test_float32_and_quantized_caches_are_counted_as_such() -> None:
    model = build.__wrapped__("llama")  # separate from the shared model
    model.set_dtype(mx.bfloat16)
    half = plan.growth(model)
    model.set_dtype(mx.float32)
    assert plan.growth(model) == CacheGrowth(half.per_token * 2)
    with pytest.raises(UsageError, match="groups of 32"):  # its heads have 8 values
        plan.growth(model, 8)
    files = ModelFiles(Path("m"), {"config.json": {}}, [], {})
    opened = OpenModel(files, model, {}, 96)
    with pytest.raises(DoesNotFit) as refused:
        plan.make_plan("m", opened, plan.needs(opened), LoadOptions(memory_limit=1))
    assert "--kv-bits" not in str(refused.value)


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_and_peak_of_the_starter(starter: StoredModel, chunks: int) -> None:
    gc.collect()  # models of earlier tests would be freed during the measurement
    before = mx.get_active_memory()
    engine = Engine.load(starter.path, name="starter")
    loaded = mx.get_active_memory() - before
    estimate = engine.plan.fit.estimate
    assert estimate.context == engine.plan.context_length == 8192
    assert abs(estimate.weights - loaded) / loaded < 0.01
    needs = engine.plan.fit.needs
    tokens = {1: 100, 2: 540}[chunks]
    mx.clear_cache()
    mx.reset_peak_memory()
    loop = StepLoop(engine)
    loop.answer(list(range(5, 5 + tokens)), GenerateOptions(max_tokens=2, draft="off"))
    peak = mx.get_peak_memory() - before
    assert abs(needs.at(tokens).total - peak) / peak < 0.1


def test_a_session_has_the_requested_context(starter: StoredModel) -> None:
    engine = Engine.load(starter.path, LoadOptions(weights="keep", context=300), name="starter")
    assert engine.plan.context_length == 300
    assert engine.plan.fit.estimate.weights < 100_000_000
    with pytest.raises(UsageError, match=r"8192 tokens of context, --context is 9000"):
        Engine.load(starter.path, LoadOptions(context=9000), name="starter")


def test_context_shrinks_to_what_fits_or_is_refused_with_advice() -> None:
    assert choose_context("m", TIGHT, 10**9).note == ""
    assert choose_context("m", TIGHT, 10**9, requested=4096).context == 4096
    limit = 1000 + 4096 * 10
    granted = choose_context("m", TIGHT, limit)
    assert granted.context == 4096
    assert "4,096 of its 8,192 tokens" in granted.note
    with pytest.raises(DoesNotFit, match="2,048 tokens"):
        choose_context("m", TIGHT, 1000 + 1024 * 10)
    small = MemoryNeeds(1000, CacheGrowth(10), TIGHT.activations, 128)
    assert choose_context("m", small, 4000).context == 128

    with pytest.raises(DoesNotFit, match=r"try --context 4096, or a smaller model"):
        choose_context("m", TIGHT, limit, requested=8000)
    half = MemoryNeeds(1000, CacheGrowth(5), TIGHT.activations, 8192)
    with pytest.raises(DoesNotFit, match=r"--kv-bits 8 --context 8192"):
        choose_context("m", TIGHT, limit, requested=8000, with_8_bits=lambda: half)
    shorter = choose_context("m", TIGHT, limit, with_8_bits=lambda: half)
    assert "with --kv-bits 8 it gets 8,192" in shorter.note
    tight = choose_context("m", TIGHT, limit, requested=4096)
    assert tight.note.startswith("m needs about")
    assert choose_context("m", TIGHT, limit, requested=8000, force=True).context == 8000


def test_largest_context_equals_exhaustive_search() -> None:
    needs = MemoryNeeds(500, CacheGrowth(7, ((1024, 3),), 90), Activations(3, 2, 5, 2), 5000)
    for limit in range(0, 12_000_000, 400_000):
        fitting = [n for n in range(256, 5000, 256) if needs.at(n).total <= limit]
        whole = needs.at(5000).total <= limit
        assert largest_context(needs, limit) == (5000 if whole else max(fitting, default=0))


@pytest.mark.parametrize(("installed", "usable"), [(16, 10.667), (8, 5.333), (36, 27), (64, 48)])
def test_default_gpu_memory_of_a_mac(installed: int, usable: float) -> None:
    assert fit.usable_memory(installed * GIB) == pytest.approx(usable * GIB, rel=1e-3)


def test_control_groups_bound_the_memory(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "outer" / "memory.max").write_text("5000\n")
    (tmp_path / "outer" / "memory.current").write_text("1000\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("10\n")
    member = tmp_path / "cgroup"
    member.write_text("0::/outer/inner\n")
    assert min(device._control_group_limits(member, tmp_path)) == 4000
    (tmp_path / "outer" / "memory.stat").write_text(
        "anon 300\ninactive_file 500\nactive_file 200\n"
    )
    assert min(device._control_group_limits(member, tmp_path)) == 4700  # files make room
    (inner / "memory.max").write_text("5\n")
    assert min(device._control_group_limits(member, tmp_path)) == 0
    assert list(device._control_group_limits(tmp_path / "no")) == [device.total_memory()]
