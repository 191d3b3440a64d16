"""What holds on an Apple GPU, as far as it can be asserted. `make check-mac` measures the rest.

They were written without one: where a test fails, the test may be what is wrong.
"""

from __future__ import annotations

import mlx.core as mx
import pytest

from akunu_py.bench.divergence import first_divergence
from akunu_py.decoding import device
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.models.store.model_store import StoredModel
from akunu_py.types import DraftMode, GenerateOptions, LoadOptions, Message
from tests.measure.check import ROUNDING
from tests.measure.mac_checks import attention_rows, quantized_rows, wired_limit

# The virtual GPU of a hosted runner computes as it likes.
HAS_GPU = device.on_metal() and "Paravirtual" not in device.device_name()
pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not HAS_GPU, reason="there is no Apple GPU"),
]
FORMATS = [mx.bfloat16, mx.float16]
TEXT = "The quick brown fox jumps over the lazy dog, and then the quick brown fox jumps again. "


@pytest.fixture(scope="module")
def kept(starter: StoredModel) -> Engine:
    """The starter as it is used on a GPU: in the checkpoint's own format."""
    return Engine.load(starter.path, LoadOptions(weights="keep"), name="starter")


def answer(engine: Engine, mode: DraftMode, count: int = 48) -> tuple[list[int], list[int]]:
    """A prompt that repeats itself, and the greedy answer to it."""
    prompt = engine.tokens.encode_chat([Message("user", f"Repeat this text: {TEXT * 3}")])
    options = GenerateOptions(max_tokens=count, draft=mode)
    return prompt, list(Session(engine).generate(prompt, options).answer().tokens)


def test_the_device_says_what_it_is() -> None:
    assert device.device_name().endswith("(Metal)")
    assert device.available_memory() == mx.device_info()["max_recommended_working_set_size"]
    assert 0 < device.available_memory() <= device.total_memory()


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", [(2048, 2048), (2560, 9728)])
def test_rows_together_are_rows_alone_but_for_rounding(
    bits: int, kind: mx.Dtype, sizes: tuple[int, int]
) -> None:
    found = quantized_rows(bits, kind, *sizes)
    assert max(found["difference"]) <= ROUNDING * mx.finfo(kind).eps


@pytest.mark.parametrize("kind", FORMATS, ids=str)
@pytest.mark.parametrize("context", [0, 512, 4096])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_attention_of_several_rows_is_that_of_one_at_a_time(
    kind: mx.Dtype, context: int, group: int
) -> None:
    found = attention_rows(kind, context, group)
    assert max(found["difference"]) <= ROUNDING * mx.finfo(kind).eps


def test_weights_keep_their_format(starter: StoredModel, kept: Engine) -> None:
    assert Engine.load(starter.path, name="starter").plan.weights == kept.plan.weights
    assert "4-bit" in kept.plan.weights


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
    Session(kept).generate(prompt, GenerateOptions(max_tokens=1, draft="off")).answer()
    estimate = kept.plan.fit.at(len(prompt))
    assert mx.get_peak_memory() - before <= 1.1 * (estimate.total - estimate.weights)


def test_weights_stay_wired_between_answers_too(kept: Engine) -> None:
    options = GenerateOptions(max_tokens=2, draft="off")
    limits = {wired_limit()}
    limits |= {wired_limit() for _ in Session(kept).generate(kept.tokens.encode("hi"), options)}
    (limit,) = limits
    assert device.weight_bytes(kept.model) <= limit < 1.1 * device.weight_bytes(kept.model) + 2**21
