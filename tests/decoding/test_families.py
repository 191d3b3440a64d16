"""Every cache kind of mlx-lm has a tested family; each layer's rollback matters; quantized caches.

tests/decoding/test_identity.py compares the tokens of all families with those of mlx-lm's loop.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx_lm.models
import pytest
from mlx_lm.models.cache import QuantizedKVCache

from akunu_py.decoding import kv_cache
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from tests.support.families import build, families_of_each_kind, kinds, leaves
from tests.support.family_answers import greedy, prompt_of
from tests.support.family_table import FAMILIES, ONE_OF_EACH_KIND
from tests.support.targets import tokens_of
from tests.support.tiny import Adversary

# Classes of mlx-lm that no model makes for a single conversation.
NOT_FOR_US = {
    "BatchKVCache": "for several prompts at once",
    "BatchRotatingKVCache": "for several prompts at once",
    "LRUPromptCache": "keeps whole caches of other kinds, for a server",
}


@pytest.mark.long
def test_every_cache_class_of_mlx_lm_is_tested() -> None:
    tested = {kind for name in FAMILIES for kind in kinds(kv_cache.new_cache(build(name)))}
    missing = cache_classes() - tested - set(NOT_FOR_US)
    assert not missing, (
        "mlx-lm has cache classes that no family of tests/support/family_table.py uses: "
        f"{sorted(missing)}. "
        "Teach akunu_py/decoding/kv_cache.py to roll them back and add a family, or say in "
        "NOT_FOR_US why no model can come with one."
    )


def test_there_is_one_of_each_kind() -> None:
    mixtures = [kinds(kv_cache.new_cache(build(name))) for name in ONE_OF_EACH_KIND]
    assert all(mixtures.count(mixture) == 1 for mixture in mixtures)
    assert all(kinds(kv_cache.new_cache(build(name))) in mixtures for name in FAMILIES)


@families_of_each_kind()
def test_each_layer_that_is_not_rolled_back_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the table would pass whatever the cache holds."""
    prompt, truth = prompt_of(name), greedy(name)[:200]

    def generated_without(index: int, seed: int) -> list[int]:
        target = Target(build(name))
        skipped = partial(_skip, leaves(target.cache)[index])
        sampled: list[int] = []
        with monkeypatch.context() as patch, contextlib.suppress(ValueError):
            # A cache and a mask that no longer fit together are noticed too, by the ValueError.
            patch.setattr(kv_cache, "_trim", skipped(kv_cache._trim))
            patch.setattr(kv_cache, "_restore", skipped(kv_cache._restore))
            for token in tokens_of(target, prompt, Adversary(prompt, truth, seed), len(truth)):
                sampled.append(token)
                if token != truth[len(sampled) - 1]:
                    break
        return sampled

    for index in range(len(leaves(kv_cache.new_cache(build(name))))):
        # What one layer adds may be too little to change a word under every pattern of drafts.
        noticed = any(generated_without(index, seed) != truth for seed in range(4))
        assert noticed, f"layer {index} could hold anything"


def _skip(skipped: Any, function: Callable[..., None]) -> Callable[..., None]:
    """`function` for all entries of a cache but one."""

    def some(entry: Any, *args: Any) -> None:
        if entry is not skipped:
            function(entry, *args)

    return some


# Quantisation goes by groups of 32 values, so their heads are made as wide.
_WIDE = {"head_dim": 32}
_ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
QUANTIZED: dict[str, dict[str, int]] = {
    **dict.fromkeys(("llama", "llama-sliding", "qwen3", "gemma3_text", "gemma3n", "llama4"), _WIDE),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "falcon_h1", "nemotron_h", "gear"), _WIDE),
    **dict.fromkeys(("lfm2", "jamba", "baichuan_m1"), _ONE_HEAD),
}
_LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
# Their own attention processes the rows of the cache.
REFUSED: dict[str, dict[str, int]] = {
    **dict.fromkeys(("gpt_oss", "iquestloopcoder"), _WIDE),
    **dict.fromkeys(("deepseek_v3", "longcat_flash_ngram", "bailing_hybrid", "kimi_k3"), _LATENT),
    "deepseek_v32": {**_LATENT, "index_head_dim": 32},
    "minimax_m3_vl": {**_WIDE, "index_head_dim": 32},
}
NOTHING_GROWS = ["deepseek_v41", "mamba2", "rwkv7", "recurrent_gemma"]
GIVEN = ["llama-kv8", "llama-kv4", "llama-concatenate"]  # already with another cache


def test_every_family_is_accounted_for() -> None:
    assert sorted([*QUANTIZED, *REFUSED, *NOTHING_GROWS, *GIVEN]) == sorted(FAMILIES)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_cache_that_grows_is_quantized(name: str, bits: int) -> None:
    cache = leaves(kv_cache.new_cache(build(name, **QUANTIZED[name]), bits))
    quantized = [entry for entry in cache if isinstance(entry, QuantizedKVCache)]
    assert quantized
    assert "KVCache" not in kinds(cache)
    assert {(entry.bits, entry.group_size, entry.offset) for entry in quantized} == {(bits, 32, 0)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_that_cannot_read_it_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be quantized.*leave out --kv-bits") as refused:
        kv_cache.new_cache(build(name, **REFUSED[name]), 8)
    assert "whole groups" not in str(refused.value)


@pytest.mark.parametrize("name", NOTHING_GROWS)
def test_a_cache_that_does_not_grow_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="nothing in it grows"):
        kv_cache.new_cache(build(name), 8)


def cache_classes() -> set[str]:
    """The cache classes that mlx-lm defines, wherever it does."""
    return {
        node.name
        for source in Path(mlx_lm.models.__path__[0]).glob("*.py")
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "Cache" in node.name and node.name[0] != "_"
    }
