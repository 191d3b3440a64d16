"""Long prompts: memory grows with the cache only, and prefill stops between chunks."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.types import GenerateOptions
from tests.support.families import build
from tests.support.targets import read, some

MB = 1 << 20
# A CPU computes the attention scores of a chunk at once: for 16,000 tokens 4 heads x 512 x 16,000
# x 4 bytes = 125 MB, twice if the mask is as large. This is the working space per token.
WORKING_SPACE = 25 * 1024
# One of each cache kind.
TINY = ["llama", "llama-sliding", "llama4", "deepseek_v3", "llama-kv8", "qwen3_next", "mamba2"]


def settled() -> int:
    """Bytes that MLX holds when nothing is under way."""
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 5000) for name in ("llama-sliding", "qwen3_next")),
        *(pytest.param(name, 16_000, marks=pytest.mark.slow) for name in TINY),
    ],
)
def test_a_long_prompt_takes_what_its_cache_needs(name: str, count: int) -> None:
    model, prompt = build(name), some(count, 1)
    before = settled()
    mx.reset_peak_memory()
    target = Target(model)
    target.reuse_prefix(prompt)
    read(target)
    held, peak = settled() - before, int(mx.get_peak_memory()) - before
    needed = sum(entry.nbytes for entry in target.cache)
    kept = sum(each.nbytes for each in target.history.checkpoints)
    assert held <= needed + kept + 1 * MB
    assert peak <= needed + kept + WORKING_SPACE * count


@pytest.mark.long
def test_a_cancelled_prefill_continues_from_its_last_chunk(shallow_starter: Engine) -> None:
    prompt = list(range(1000, 2100))
    session = Session(shallow_starter)
    cancelled = session.generate(prompt, GenerateOptions(max_tokens=4))
    progress: list[int] = []

    for step in cancelled.steps():
        assert isinstance(step, PrefillProgress)
        progress.append(step.done)
        if step.done:
            cancelled.cancel()
    assert cancelled.finish_reason == "cancelled"
    assert progress == [0, PREFILL_ROWS]  # the speed is not known before
    assert len(session.target.tokens) == PREFILL_ROWS
    whole = session.generate(prompt, GenerateOptions(max_tokens=4)).answer()
    assert whole.stats.cached_tokens == PREFILL_ROWS
