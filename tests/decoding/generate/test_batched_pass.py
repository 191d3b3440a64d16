"""Passes of several requests, and output heads that compute only the sampled rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from akunu_py.decoding import kv_cache, output_rows
from akunu_py.decoding.generate import batched_pass
from akunu_py.decoding.generate.batched_pass import Part, why_not_batched
from akunu_py.decoding.target import Target
from tests.support.families import UNSHARED, Cached, build, every_family, families_of_each_kind
from tests.support.targets import read, some
from tests.support.tiny import VOCABULARY


@families_of_each_kind()
def test_trial_decides_by_family(name: str) -> None:
    assert (why_not_batched(build(name)) is None) == (name not in UNSHARED)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_trial_finds_a_layer_that_ignores_its_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = batched_pass._AttentionView.__init__

    def without_offset(self: Any, *args: Any) -> None:
        start(self, *args)
        self.offset = mx.zeros_like(self.offset)

    monkeypatch.setattr(batched_pass._AttentionView, "__init__", without_offset)
    assert why_not_batched(build(name)) == "its layers give other results in a batch"


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
def test_the_head_computes_only_the_wanted_rows(name: str) -> None:
    target, prompt = Target(model_of(name)), some(70, 1)
    target.reuse_prefix(prompt)
    read(target)
    run_trial(target.model)
    for drafted in ([], [1, 2, 3]):
        pending = list(target.pending) if target.history.needs_checkpoints else prompt[-17:]
        rows = [*pending, *drafted]
        wanted = 1 + len(drafted)
        before = target.pass_state()
        with counted_rows(target.model) as counts:
            target.read(target.launch(rows, wanted))
        assert counts == [wanted]
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
    with counted_rows(model) as counts:
        batched_pass.run(model, parts)
    assert counts == [4]
