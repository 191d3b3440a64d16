"""Only the rows that are sampled from reach the output head, in all families of models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from akunu_py.decoding import kv_cache, output_rows
from akunu_py.decoding.generate import batched_pass
from akunu_py.decoding.generate.batched_pass import Part
from akunu_py.decoding.target import Target
from tests.support.families import UNSHARED, Cached, build, every_family, families_of_each_kind
from tests.support.targets import read, some
from tests.support.tiny import VOCABULARY

LENGTH = 70  # tokens of the prompt; past the sliding windows


@contextmanager
def counted_rows(model: Any) -> Iterator[list[int]]:
    """The numbers of rows that are multiplied with a row of weights for each token."""
    counts: list[int] = []
    inner = {id(module) for path, module in model.named_modules() if "layers." in path}
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((nn.Linear, "__call__"), (nn.Embedding, "as_linear")):
            plain = getattr(owner, name)

            def counting(module: Any, inputs: mx.array, plain: Any = plain) -> mx.array:
                if module.weight.shape[0] == VOCABULARY and id(module) not in inner:
                    counts.append(inputs.size // inputs.shape[-1])
                return plain(module, inputs)

            patch.setattr(owner, name, counting)
        yield counts


def model_of(name: str) -> Any:
    """The model itself where the family has another cache than its own."""
    model = build(name)
    return model.model if isinstance(model, Cached) else model


def run_trial(model: Any) -> None:
    """Have the output head of `model` tried, as its first pass does."""
    output_rows.run(model, mx.zeros((1, 1), mx.int32), None, lambda rows: rows)


@every_family
def test_the_head_computes_the_wanted_rows(name: str) -> None:
    target, prompt = Target(model_of(name)), some(LENGTH, 1)
    target.reuse_prefix(prompt)
    read(target)
    run_trial(target.model)
    for drafted in ([], [1, 2, 3]):
        pending, cache = list(target.pending), kv_cache.compact(target.cache)
        pending = pending if target.history.needs_checkpoints else prompt[-17:]
        rows = [*pending, *drafted]
        wanted = 1 + len(drafted)
        expected = target.model(mx.array([rows]), cache=cache)[0, -wanted:]
        expected = mx.argmax(expected, axis=-1).tolist()
        before = target.pass_state()
        with counted_rows(target.model) as counts:
            sampled = target.read(target.launch(rows, wanted))
        assert counts == [wanted]
        assert sampled == expected
        target.roll_back(before, len(rows), 0)


@families_of_each_kind()
def test_a_shared_pass_computes_the_wanted_rows_of_each_request(name: str) -> None:
    model = model_of(name)
    caches = [kv_cache.new_cache(model) for _ in range(2)]
    if name in UNSHARED or kv_cache.is_recurrent(caches[0]):
        return
    run_trial(model)
    for cache in caches:
        mx.eval(model(mx.array([some(20, 1)]), cache=cache))
    parts = [
        Part(mx.array(some(rows, rows)), cache, wanted)
        for rows, wanted, cache in zip((9, 4), (1, 3), caches, strict=True)
    ]
    before = [kv_cache.pass_state(cache) for cache in caches]
    whole = batched_pass.run(model, [Part(each.tokens, each.cache) for each in parts])
    mx.eval(whole)
    for each, state in zip(parts, before, strict=True):
        kv_cache.roll_back(each.cache, state, each.tokens.size, 0)
    with counted_rows(model) as counts:
        logits = batched_pass.run(model, parts)
    assert counts == [4]
    for each, all_rows in zip(logits, whole, strict=True):
        assert mx.allclose(each, all_rows[-len(each) :], rtol=1e-3, atol=1e-4).item()
