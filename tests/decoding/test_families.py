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
from tests.support import family_answers
from tests.support.families import build, every_family, families_of_each_kind, kinds, leaves
from tests.support.family_answers import COUNT, greedy, plain, prompt_of
from tests.support.family_table import FAMILIES, ONE_OF_EACH_KIND
from tests.support.identity import plain_tokens
from tests.support.slow import slow
from tests.support.targets import some, tokens_of
from tests.support.tiny import VOCABULARY, Adversary

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


@pytest.mark.long
def test_every_mixture_of_kinds_in_mlx_lm_is_tested() -> None:
    tested = {kinds_in_source(family.module) for family in FAMILIES.values()}
    made = {module: kinds_in_source(module) for module in modules()}
    assert len(made) > 100
    missing = {module: sorted(kinds) for module, kinds in made.items() if kinds not in tested}
    assert not missing, (
        f"no family of tests/support/family_table.py mixes its cache kinds as these do: {missing}. "
        "Add one."
    )


def test_the_sources_are_read_right() -> None:
    made: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        if family.caches is None:
            made.setdefault(family.module, set()).update(kinds(kv_cache.new_cache(build(name))))
    assert made == {module: set(kinds_in_source(module)) for module in made}


@pytest.mark.long
@pytest.mark.parametrize("long", [False, *slow(True)])
@families_of_each_kind(quick=("llama-sliding", "qwen3_next"))
def test_the_kept_answers_are_mlx_lms(name: str, long: bool) -> None:
    """And an answer of something else would not pass for it."""
    answer = family_answers.kept()[f"{name}, {long}"]
    prompt = prompt_of(name, long)
    assert answer == plain(name, prompt, COUNT)
    assert family_answers.is_greedy(name, prompt, answer)
    for place in (0, COUNT // 2, COUNT - 1):
        altered = [*answer[:place], (answer[place] + 1) % VOCABULARY, *answer[place + 1 :]]
        assert not family_answers.is_greedy(name, prompt, altered)


@every_family
def test_every_family_can_draft(name: str) -> None:
    assert kv_cache.no_rollback_reason(kv_cache.new_cache(build(name))) is None


@families_of_each_kind()
def test_each_layer_that_is_not_rolled_back_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tests above would pass whatever the cache holds."""
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "bits"),
    [
        pytest.param(name, 4 + 4 * (place % 2), marks=() if place % 3 == 2 else pytest.mark.slow)
        for place, name in enumerate(QUANTIZED)
    ],
)
def test_drafts_on_a_quantized_cache_change_no_token(name: str, bits: int) -> None:
    model, prompt = build(name, **QUANTIZED[name]), some(70, bits)
    truth = plain_tokens(model, prompt, 80, kv_bits=bits)
    drafter = Adversary(prompt, truth, seed=bits)
    target = Target(model, kv_bits=bits)
    assert "QuantizedKVCache" in kinds(target.cache)
    assert [*tokens_of(target, prompt, drafter, 80)] == truth
    assert 0.3 < drafter.accepted / drafter.proposed < 0.9


@pytest.mark.parametrize("name", REFUSED)
def test_an_attention_that_cannot_read_it_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be quantized.*leave out --kv-bits") as refused:
        kv_cache.new_cache(build(name, **REFUSED[name]), 8)
    assert "whole groups" not in str(refused.value)


@pytest.mark.parametrize("name", NOTHING_GROWS)
def test_a_cache_that_does_not_grow_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="nothing in it grows"):
        kv_cache.new_cache(build(name), 8)


def modules() -> list[str]:
    """The modules of mlx-lm that hold a model, by name."""
    return [name for name in _names() if {"Model", "ModelArgs"} <= _bound(name)]


@cache
def kinds_in_source(module: str) -> frozenset[str]:
    """The cache kinds that `module` names where it makes its cache.

    Read from its source, not by importing it: some modules need packages that are not here, or a
    GPU. One that names none makes what the modules it takes models from make, or plain KV caches.
    """
    found = {
        name
        for function in ast.walk(_tree(module))
        if isinstance(function, ast.FunctionDef) and function.name == "make_cache"
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and "Cache" in (name := _called(call))
    }
    if not found:
        for node in ast.walk(_tree(module)):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = {node.module} if node.module else {alias.name for alias in node.names}
                for name in names & set(modules()):
                    found |= kinds_in_source(name)
    return frozenset(found) or frozenset({"KVCache"})


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


@cache
def _bound(module: str) -> set[str]:
    """The classes that a module defines, and the names that it imports."""
    names = set()
    for node in _tree(module).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
