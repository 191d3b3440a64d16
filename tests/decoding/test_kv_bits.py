"""Quantised KV: every family either drafts on it like on the whole one, or refuses it by name."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from akunu_py.decoding import kv_cache
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from tests.support.families import build, kinds
from tests.support.family_table import FAMILIES
from tests.support.targets import some, tokens_of
from tests.support.tiny import Adversary

COUNT = 80

# Quantisation goes by groups of 32 values, so their heads are made as wide.
_WIDE = {"head_dim": 32}
_ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
QUANTIZED: dict[str, dict[str, int]] = {
    "llama": _WIDE,
    "llama-sliding": _WIDE,
    "qwen3": _WIDE,
    "gemma3_text": _WIDE,
    "gemma3n": _WIDE,
    "llama4": _WIDE,
    "qwen3_next": _WIDE,
    "qwen3_5": _WIDE,
    "lfm2": _ONE_HEAD,
    "falcon_h1": _WIDE,
    "jamba": _ONE_HEAD,
    "nemotron_h": _WIDE,
    "gear": _WIDE,
    "baichuan_m1": _ONE_HEAD,
}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Their attention reads the rows in ways of its own.
REFUSED: dict[str, dict[str, int]] = {
    "gpt_oss": _WIDE,
    "deepseek_v3": _LATENT,
    "deepseek_v32": {**_LATENT, "index_head_dim": 32},
    "minimax_m3_vl": {**_WIDE, "index_head_dim": 32},
    "longcat_flash_ngram": _LATENT,
    "iquestloopcoder": _WIDE,
    "bailing_hybrid": _LATENT,
    "kimi_k3": _LATENT,
}
NOTHING_GROWS = ["deepseek_v41", "mamba2", "rwkv7", "recurrent_gemma"]
GIVEN = ["llama-kv8", "llama-kv4", "llama-concatenate"]  # already with another cache


def test_every_family_is_accounted_for() -> None:
    assert sorted([*QUANTIZED, *REFUSED, *NOTHING_GROWS, *GIVEN]) == sorted(FAMILIES)


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bits"), [(name, 4 + 4 * (place % 2)) for place, name in enumerate(QUANTIZED)]
)
def test_drafting_on_a_quantized_cache_changes_nothing(name: str, bits: int) -> None:
    model, prompt = build(name, **QUANTIZED[name]), some(70, bits)
    truth = plain(model, bits, prompt)
    drafter = Adversary(prompt, truth, seed=bits)
    target = Target(model, kv_bits=bits)
    assert "QuantizedKVCache" in kinds(target.cache)
    assert [*tokens_of(target, prompt, drafter, COUNT)] == truth
    assert 0.3 < drafter.accepted / drafter.proposed < 0.9
    # Back into the middle of the answer, and on from there.
    known = prompt + truth[: COUNT // 2]
    drafter = Adversary(known, truth[COUNT // 2 :], seed=bits)
    assert [*tokens_of(target, known, drafter, 20)] == truth[COUNT // 2 :][:20]


def plain(model: Any, bits: int, prompt: list[int]) -> list[int]:
    """Tokens of mlx-lm's own loop on a quantized cache."""
    entries = kv_cache.new_cache(model, bits)
    steps = generate_step(mx.array(prompt), model, max_tokens=COUNT, prompt_cache=entries)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_that_cannot_read_it_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be quantized.*leave out --kv-bits") as refused:
        kv_cache.new_cache(build(name, **REFUSED[name]), 8)
    assert "whole groups" not in str(refused.value)


@pytest.mark.parametrize("name", NOTHING_GROWS)
def test_a_cache_that_does_not_grow_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="nothing in it grows"):
        kv_cache.new_cache(build(name), 8)
