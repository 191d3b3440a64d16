"""Every byte of a history is counted: KV cache, states, checkpoints, whatever ended its prefill."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from akunu_py.decoding import kv_cache
from akunu_py.decoding.generate import memory_guard
from akunu_py.decoding.generate.prefill import ChunkSizes, prefill
from akunu_py.decoding.load_plan import growth
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.models.load.fit import Activations, MemoryNeeds
from akunu_py.ngram.auto import AutoDrafter
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.family_table import ONE_OF_EACH_KIND
from tests.support.targets import some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("no_unused_buffers")

LENGTH, CHUNK = 1536, 512
SHARED = 16 << 10  # MLX copies an array out of a buffer that is larger by more than this
QUICK = {*ONE_OF_EACH_KIND, "minimax_m3_vl"}


@pytest.fixture
def no_unused_buffers() -> Iterator[None]:
    """A reused buffer may be larger than its array."""
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(Path(tmp_path_factory.mktemp("tiny")), ["<|end|>"])


def active() -> int:
    gc.collect()
    mx.synchronize()
    return int(mx.get_active_memory())


def slack(target: Target) -> int:
    """The bytes beside recurrent states that MLX does not copy."""
    states = [entry for entry in kv_cache.leaves(target.cache) if type(entry) is ArraysCache]
    copies = 1 + len(target.history.checkpoints)
    return SHARED * copies * len(kv_cache.own_states(states))


def unused_bytes(target: Target, per_token: int) -> int:
    """The bytes of rows behind the prompt: caches grow by 256 rows from the end of any chunk."""
    growing = [entry for entry in kv_cache.leaves(target.cache) if type(entry) in kv_cache.GROWING]
    keys = [part for entry in growing for _, part in tree_flatten(entry.keys) if part is not None]
    more = max([part.shape[-2] - LENGTH for part in keys], default=0)
    assert more < 256
    return max(0, more) * per_token


@families_of_each_kind(quick=QUICK)
def test_what_is_counted_is_what_mlx_holds(name: str, tiny: Engine) -> None:
    model = build(name)
    mx.eval(mx.random.state)
    before = active()
    target = Target(model, caches=PromptCaches(1 << 30))
    target.reuse_prefix(some(LENGTH, 1), stable=500)
    chunks = prefill(target, ChunkSizes(largest=CHUNK))
    for read in chunks:
        if read >= LENGTH // 3:
            break
    chunks.close()  # cancelled
    held = active() - before
    assert held == pytest.approx(target.history.nbytes, rel=0.05, abs=slack(target))
    list(prefill(target, ChunkSizes(largest=CHUNK)))
    needs, rest = growth(model), list(target.pending)
    filled = active() - before - unused_bytes(target, needs.per_token)
    mx.eval(target.forward(mx.array(rest)))
    mx.eval(kv_cache.state_arrays(target.cache))  # deepseek_v32 leaves zeros to the next pass
    target.commit((), len(rest))
    history, room = target.history, slack(target)
    unused = unused_bytes(target, needs.per_token)
    target.release()
    held = active() - before
    assert held == pytest.approx(history.nbytes, rel=0.05, abs=room)
    memory = MemoryNeeds(0, needs, Activations(0, 0, 0, 4), 1 << 20)
    fit = type(tiny.plan.fit)(memory, 1 << 20, 1 << 40)
    engine = altered(tiny, fit=fit, needs_checkpoints=history.needs_checkpoints)
    used = max(filled, held - unused)
    assert memory_guard.needed(engine, LENGTH) == pytest.approx(
        used, rel=0.05, abs=room + 128 * needs.per_token
    )


def test_checkpoints_of_a_long_prompt_are_counted_up_to_their_limit(tiny: Engine) -> None:
    """The figures of Qwen3.5, whose states take 50 MB."""
    cache = type(tiny.plan.fit.needs.cache)(per_token=30_000, fixed=50_000_000)
    needs = MemoryNeeds(0, cache, Activations(0, 0, 0, 4), 1 << 20)
    fit = type(tiny.plan.fit)(needs, 1 << 20, 1 << 40)
    for checkpoints in (True, False):
        engine = altered(tiny, fit=fit, needs_checkpoints=checkpoints)
        lengths = 100, 5000, 16_384, 100_000
        more = [memory_guard.checkpoint_bytes(engine, tokens) for tokens in lengths]
        expected = [100_000_000, 200_000_000, 400_000_000, 400_000_000]
        assert more == (expected if checkpoints else [0, 0, 0, 0])


def test_the_ngram_index_of_a_long_text_is_counted() -> None:
    dice = random.Random(0)
    text = [min(50_000, int(dice.paretovariate(0.7))) for _ in range(20_000)]
    tracemalloc.start()
    try:
        drafter = AutoDrafter()
        drafter.extend(text)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.7 * held < memory_guard.INDEX_BYTES * len(text) < 1.5 * held
