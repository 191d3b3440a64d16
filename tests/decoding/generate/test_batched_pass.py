"""Which models can be batched: a trial finds layers that compute something else in a batch."""

from __future__ import annotations

import mlx.core as mx
import pytest

from akunu_py.decoding import kv_cache
from akunu_py.decoding.generate import batched_pass
from akunu_py.decoding.generate.batched_pass import Part, why_not_batched
from tests.support.families import UNSHARED, build, families_of_each_kind
from tests.support.slow import slow
from tests.support.targets import some


@families_of_each_kind()
def test_trial_decides_by_family(name: str) -> None:
    assert (why_not_batched(build(name)) is None) == (name not in UNSHARED)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("fault", ["offset", "mask", "keys"])
def test_trial_finds_a_layer_that_ignores_its_request(
    name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = batched_pass._AttentionView
    if fault == "offset":
        plain = view.__init__

        def without_offset(self: object, *args: object) -> None:
            plain(self, *args)  # type: ignore[arg-type]
            self.offset = mx.zeros_like(self.offset)  # type: ignore[attr-defined]

        monkeypatch.setattr(view, "__init__", without_offset)
    elif fault == "mask":
        rows = lambda self, count, **options: mx.zeros((1, 1))  # noqa: E731
        monkeypatch.setattr(view, "make_mask", rows)
    else:
        fetch = view.update_and_fetch

        def swapped(self: object, *args: mx.array) -> tuple[list[object], list[object]]:
            keys, values = fetch(self, *args)  # type: ignore[arg-type]
            return type(keys)(reversed(keys)), values

        monkeypatch.setattr(view, "update_and_fetch", swapped)
    assert why_not_batched(build(name)) is not None


@families_of_each_kind(*UNSHARED)
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_logits_of_a_batch_equal_those_alone(name: str, seed: int) -> None:
    """Several passes over 1 to 6 rows a request, past sliding windows, with rollbacks."""
    model = build(name)
    recurrent = kv_cache.is_recurrent(kv_cache.new_cache(model))
    prompts = [some(5 + 13 * index, seed + index) for index in range(4)]
    caches = [[kv_cache.new_cache(model) for _ in prompts] for _ in range(2)]
    for each in caches:
        for prompt, cache in zip(prompts, each, strict=True):
            mx.eval(model(mx.array([prompt]), cache=cache))
    for number in range(12):
        rows = [1 if recurrent else 1 + (number + index) % 6 for index in range(len(prompts))]
        tokens = [mx.array(some(count, 100 * number + index)) for index, count in enumerate(rows)]
        before = [[kv_cache.pass_state(cache) for cache in each] for each in caches]
        parts = [Part(each, cache) for each, cache in zip(tokens, caches[0], strict=True)]
        together = batched_pass.run(model, parts)
        alone = [
            model(each[None], cache=cache)[0] for each, cache in zip(tokens, caches[1], strict=True)
        ]
        mx.eval(together, alone)
        for one, other in zip(together, alone, strict=True):
            error = mx.sqrt(mx.mean(mx.square(one - other))) / mx.std(other)
            assert error.item() < 0.01  # rounding, more of it in quantized caches
        for each, states in zip(caches, before, strict=True):
            for cache, state, count in zip(each, states, rows, strict=True):
                if count > 1:
                    kv_cache.roll_back(cache, state, count, 1 + number % count)
