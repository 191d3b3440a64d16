"""Every cache kind of mlx-lm has a tested family; each layer's rollback matters; quantized caches.

tests/decoding/test_identity.py compares the tokens of all families with those of mlx-lm's loop.
"""

from __future__ import annotations

import ast
import contextlib
import pkgutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx_lm.models
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from tests.support.families import build, every_family, families_of_each_kind, kinds, leaves
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


@every_family
def test_every_family_can_draft(name: str) -> None:
    assert kv_cache.no_rollback_reason(kv_cache.new_cache(build(name))) is None


@families_of_each_kind()
def test_each_layer_that_is_not_rolled_back_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the table would pass whatever the cache holds."""
    prompt, truth = prompt_of(name, False), greedy(name, False)[:200]

    def said_without(index: int, seed: int) -> list[int]:
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
        noticed = any(said_without(index, seed) != truth for seed in range(4))
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
        for module in _names()
        for node in _tree(module).body
        if isinstance(node, ast.ClassDef) and "Cache" in node.name and node.name[0] != "_"
    }


@cache
def _names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)]


@cache
def _tree(module: str) -> ast.Module:
    source = Path(mlx_lm.models.__path__[0]) / f"{module}.py"
    return ast.parse(source.read_text(encoding="utf-8"))
