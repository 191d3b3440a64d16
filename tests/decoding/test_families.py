"""Every cache kind of mlx-lm drafts, and the output is that of the target alone.

The adversarial drafter is right, partly right and wrong by turns; the plain output that ours must
equal is that of mlx-lm's own loop (tests/support/family_answers.py).
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
from tests.support import family_answers
from tests.support.families import build, every_family, families_of_each_kind, kinds, leaves
from tests.support.family_answers import COUNT, greedy, plain, prompt_of
from tests.support.family_table import FAMILIES, ONE_OF_EACH_KIND, WINDOW
from tests.support.slow import slow
from tests.support.targets import tokens_of
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


@every_family
def test_drafting_changes_nothing(name: str) -> None:
    drafts_and_changes_nothing(name, long=False)


@families_of_each_kind()
def test_drafting_behind_a_long_prompt_changes_nothing(name: str) -> None:
    drafts_and_changes_nothing(name, long=True)


def drafts_and_changes_nothing(name: str, long: bool) -> None:
    prompt, truth = prompt_of(name, long), greedy(name, long)
    assert len(set(truth)) > 20
    assert len(set(truth[-100:])) > 10
    one_of_a_kind = name in ONE_OF_EACH_KIND and not long
    if name not in ONE_OF_EACH_KIND:
        truth = truth[:150]  # another family shows what becomes of a cache that grows
    for pipelines in [False, True] if one_of_a_kind else [None]:
        drafter = Adversary(prompt, truth, len(prompt), pipelines)
        target = Target(build(name))
        assert [*tokens_of(target, prompt, drafter, len(truth))] == truth, explain(name, long)
        assert 0.3 < drafter.accepted / drafter.proposed < 0.9
        assert target.tokens + target.pending == prompt + truth
        offsets = {leaf.offset for leaf in leaves(target.cache) if hasattr(leaf, "offset")}
        assert offsets <= {len(target.tokens)}


@pytest.mark.long
@families_of_each_kind()
def test_going_back_to_an_earlier_prefix_changes_nothing(name: str) -> None:
    prompt, truth = prompt_of(name, False), greedy(name, False)
    target = Target(build(name))
    list(tokens_of(target, prompt, Adversary(prompt, truth), 200))
    # Half a window back, several windows, and to before the window was full.
    for kept in (200 - 21, 2 * WINDOW, WINDOW // 3):
        known = prompt + truth[:kept]
        drafter = Adversary(known, truth[kept:], seed=kept)
        sampled = [*tokens_of(target, known, drafter, 20)]
        assert sampled == truth[kept:][:20]
    # Another continuation than the one that was forgotten.
    for kept in (WINDOW // 4, 0):
        known = [*prompt, *truth[:kept], (truth[kept] + 1) % VOCABULARY]
        expected = plain(name, known, 20)
        assert [*tokens_of(target, known, Adversary(known, expected), 20)] == expected


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


def explain(name: str, long: bool) -> str:
    """The least distance between the two best tokens: where it is tiny, take another seed."""
    _, margins = family_answers.choices(name, prompt_of(name, long), greedy(name, long))
    return f"least margin of the truth: {min(margins):.2g}"


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
