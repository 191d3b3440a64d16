"""Promises on an Apple GPU. `make check-mac` measures those that cannot be asserted.

Written without such a GPU: if a test fails, the test itself may be wrong.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from akunu_py.bench.speed import first_divergence
from akunu_py.engine.engine import Engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device
from akunu_py.models.store.model_store import StoredModel
from akunu_py.types import DraftMode, GenerateOptions, LoadOptions, Message

# The virtual GPU of a hosted runner computes as it likes.
HAS_GPU = device.on_metal() and "Paravirtual" not in device.device_name()
pytestmark = [pytest.mark.metal, pytest.mark.skipif(not HAS_GPU, reason="there is no Apple GPU")]
TEXT = "The quick brown fox jumps over the lazy dog, and then the quick brown fox jumps again. "


@pytest.fixture(scope="module")
def kept(starter: StoredModel) -> Engine:
    """The starter as it is used on a GPU: in the checkpoint's own format."""
    return Engine.load(starter.path, LoadOptions(weights="keep"), name="starter")


def answer(engine: Engine, mode: DraftMode, count: int = 48) -> tuple[list[int], list[int]]:
    """A prompt that repeats itself, and the greedy answer to it."""
    prompt = engine.tokens.encode_chat([Message("user", f"Repeat this text: {TEXT * 3}")])
    options = GenerateOptions(max_tokens=count, draft=mode)
    return prompt, list(StepLoop(engine).answer(prompt, options).tokens)


@pytest.mark.parametrize("mode", ["fixed", "auto"])
def test_drafts_change_answers_at_near_ties_only(kept: Engine, mode: DraftMode) -> None:
    off, drafted = answer(kept, "off"), answer(kept, mode)
    difference = first_divergence(kept, [off], [drafted])
    assert difference is None or (difference.margin is not None and difference.margin < 0.5)


def test_the_memory_of_a_prompt_is_what_was_expected(kept: Engine) -> None:
    text = TEXT * 200
    prompt = kept.tokens.encode(text)[:4096]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    StepLoop(kept).answer(prompt, GenerateOptions(max_tokens=1, draft="off"))
    estimate = kept.plan.fit.at(len(prompt))
    assert mx.get_peak_memory() - before <= 1.1 * (estimate.total - estimate.weights)
