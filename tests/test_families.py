"""Every cache kind of mlx-lm drafts, and says what the target alone would say.

The adversarial drafter is right, partly right and wrong by turns; the plain output that ours must
equal is that of mlx-lm's own loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from akunu_py import kvcache
from akunu_py.decode import Target, decode, prefill
from tests.families import (
    FAMILIES,
    WINDOW,
    build,
    cache_classes,
    kinds,
    kinds_in_source,
    leaves,
    modules,
)
from tests.tiny import VOCABULARY, Adversary

COUNT = 400
SHORT = [1, 2, 3, 5, 9, 17, 33]  # lengths of prompts; the families take turns
LONG = [300, 260, 150, 97]

# Classes of mlx-lm that no model makes for a single conversation.
NOT_FOR_US = {
    "BatchKVCache": "for several prompts at once",
    "BatchRotatingKVCache": "for several prompts at once",
    "LRUPromptCache": "holds whole caches of other kinds, for a server",
}

by_name = pytest.mark.parametrize("name", FAMILIES)


def test_every_cache_class_of_mlx_lm_is_tested() -> None:
    tested = {kind for name in FAMILIES for kind in kinds(kvcache.new_cache(build(name)))}
    missing = cache_classes() - tested - set(NOT_FOR_US)
    assert not missing, (
        f"mlx-lm has cache classes that no family of tests/families.py uses: {sorted(missing)}. "
        "Teach akunu_py/kvcache.py to roll them back and add a family, or say in NOT_FOR_US why "
        "no model can come with one."
    )


def test_every_mixture_of_kinds_in_mlx_lm_is_tested() -> None:
    tested = {kinds_in_source(family.module) for family in FAMILIES.values()}
    missing = {module: kinds_in_source(module) for module in modules()}
    assert len(missing) > 100
    assert not {
        module: sorted(mixture) for module, mixture in missing.items() if mixture not in tested
    }, "add one of these modules to FAMILIES in tests/families.py, or its mixture stays untested"


def test_the_sources_are_read_right() -> None:
    made: dict[str, set[str]] = {}
    for name, family in FAMILIES.items():
        if family.caches is None:
            made.setdefault(family.module, set()).update(kinds(kvcache.new_cache(build(name))))
    # A configuration need not use all that its source can make.
    partly = {"muse_glimmer", "llama"}
    assert {module: kinds for module, kinds in made.items() if module not in partly} == {
        module: set(kinds_in_source(module)) for module in made if module not in partly
    }
    assert all(made[module] <= kinds_in_source(module) for module in partly)


@by_name
def test_every_family_can_draft(name: str) -> None:
    assert kvcache.why_not(kvcache.new_cache(build(name))) is None


@by_name
@pytest.mark.parametrize("long", [False, True])
def test_drafting_changes_nothing(name: str, long: bool) -> None:
    count = COUNT // 2 if long else COUNT
    prompt, truth = prompt_of(name, long), truth_of(name, long)[:count]
    assert len(set(truth)) > 20
    assert len(set(truth[-100:])) > 10
    for runs_ahead in (False, True):
        drafter = Adversary(prompt, truth, seed=len(prompt))
        target = Target(build(name))
        assert answer(target, prompt, drafter, count, runs_ahead) == truth, explain(name, long)
        assert 0.3 < drafter.accepted / drafter.proposed < 0.9
        assert target.tokens + target.pending == prompt + truth
        offsets = {leaf.offset for leaf in leaves(target.cache) if hasattr(leaf, "offset")}
        assert offsets <= {len(target.tokens)}


@by_name
def test_going_back_to_an_earlier_prefix_changes_nothing(name: str) -> None:
    prompt, truth = prompt_of(name, False), truth_of(name, False)
    target = Target(build(name))
    answer(target, prompt, Adversary(prompt, truth), COUNT, True)
    # A few tokens back, most of a window, several windows, and before the window was full.
    for kept in (COUNT - 21, COUNT - 60, 2 * WINDOW, WINDOW // 3):
        known = prompt + truth[:kept]
        drafter = Adversary(known, truth[kept:], seed=kept)
        assert answer(target, known, drafter, 20, kept % 2 == 0) == truth[kept:][:20]
    # Another continuation than the one that was forgotten.
    for kept in (WINDOW // 4, 0):
        known = [*prompt, *truth[:kept], (truth[kept] + 1) % VOCABULARY]
        expected = plain(name, known, 20)
        assert answer(target, known, Adversary(known, expected), 20, False) == expected


@by_name
def test_each_layer_that_is_not_rolled_back_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the tests above would pass with a cache that holds anything."""
    prompt, truth = prompt_of(name, False), truth_of(name, False)[:150]
    forget, restore = kvcache._forget, kvcache._restore
    for index in range(len(leaves(kvcache.new_cache(build(name))))):
        target = Target(build(name))

        def skips(entry: Any, target: Target = target, index: int = index) -> bool:
            return entry is leaves(target.cache)[index]

        with monkeypatch.context() as patch:
            patch.setattr(kvcache, "_forget", lambda e, *a, s=skips: s(e) or forget(e, *a))
            patch.setattr(kvcache, "_restore", lambda e, *a, s=skips: s(e) or restore(e, *a))
            try:
                said = answer(target, prompt, Adversary(prompt, truth), len(truth), False)
            except ValueError:  # the shapes no longer fit together
                continue
        assert said != truth, f"layer {index} could hold anything"


def prompt_of(name: str, long: bool) -> list[int]:
    turn = list(FAMILIES).index(name)
    length = LONG[turn % len(LONG)] if long else SHORT[turn % len(SHORT)]
    randomly = random.Random(length)
    return [randomly.randrange(VOCABULARY) for _ in range(length)]


@cache
def truth_of(name: str, long: bool) -> list[int]:
    return plain(name, prompt_of(name, long), COUNT // 2 if long else COUNT)


def plain(name: str, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm's own loop says."""
    model = build(name)
    entries = kvcache.new_cache(model)
    steps = generate_step(mx.array(prompt), model, max_tokens=count, prompt_cache=entries)
    return [int(token) for token, _ in steps]


def answer(
    target: Target, prompt: list[int], drafter: Adversary, count: int, runs_ahead: bool
) -> list[int]:
    target.go_to(prompt)
    assert prefill(target, lambda done: True)
    drafter.extend(prompt)
    passes = decode(target, drafter, count, (), runs_ahead=runs_ahead)
    return [token for piece in passes for token in piece.tokens]


def explain(name: str, long: bool) -> str:
    """The least distance between the two best tokens: where it is tiny, take another seed."""
    prompt, truth = prompt_of(name, long), truth_of(name, long)
    model = build(name)
    logits = model(mx.array([prompt + truth[:-1]]), cache=kvcache.new_cache(model))[0]
    best = mx.sort(logits[len(prompt) - 1 :], axis=-1)[:, -2:]
    return f"least margin of the truth: {mx.min(best[:, 1] - best[:, 0]).item():.2g}"
