"""Tiny random-weight models of mlx-lm's families, from mlx-lm's own classes."""

import importlib
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map_with_path

from akunu_py.engine import kv_cache
from tests.support.family_table import COMMON, FAMILIES, ONE_OF_EACH_KIND, Family

# Families that cannot be batched: their layers use the keys directly, or have caches of their own.
UNSHARED = {"llama-concatenate", "llama4", "deepseek_v32", "minimax_m3_vl", "deepseek_v41"}

# Trimmed, cut, quantized, restored.
_QUICK = ("llama", "llama-sliding", "llama-kv8", "qwen3_next")

every_family = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ONE_OF_EACH_KIND else pytest.mark.long)
        for name in FAMILIES
    ],
)


def families_of_each_kind(*without: str, quick: Collection[str] = _QUICK) -> pytest.MarkDecorator:
    """Return a parameter `name`: `quick` families; long: one of each kind; slow: all others."""
    long = ONE_OF_EACH_KIND if quick is _QUICK else ()
    marks = {name: [pytest.mark.long if name in long else pytest.mark.slow] for name in FAMILIES}
    marks |= {name: [] for name in quick}
    names = [name for name in FAMILIES if name not in without]
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks[n]) for n in names])


class Cached:
    """A model with another cache than its own."""

    def __init__(self, model: Any, make: Callable[[], Any]) -> None:
        self.model, self.layers, self._make = model, model.layers, make

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in self.layers]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.model(*args, **options)


@cache
def build(name: str, **more: int) -> Any:
    """The tiny model of the family, with `more` arguments or others."""
    family = FAMILIES[name]
    model, _ = make(family, **more)
    model.eval()
    mx.eval(model.parameters())
    return Cached(model, family.caches) if family.caches else model


def make(family: Family, **more: Any) -> tuple[Any, dict[str, Any]]:
    """A new tiny model of the family, with `more` arguments or others, and its configuration."""
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    args = {**COMMON, **family.args, **more, "model_type": family.module}
    if family.inner:
        args = {family.inner: args, "model_type": family.module}
    mx.random.seed(family.seed)
    model = module.Model(module.ModelArgs.from_dict(args))
    model.update(tree_map_with_path(partial(_randomise, family), model.parameters()))
    return model, args


def _randomise(family: Family, path: str, weight: mx.array) -> mx.array:
    scale = family.embedding if path.endswith("embed_tokens.weight") else family.scale
    noise = mx.random.normal(weight.shape) * scale
    # Norms, decays and biases stay near what their module starts them with.
    return noise if weight.ndim > 1 else weight.astype(mx.float32) + noise


def kinds(entries: Sequence[Any]) -> set[str]:
    """The names of the classes in a cache, CacheList itself among them."""
    return {type(entry).__name__ for entry in [*entries, *kv_cache.leaves(list(entries))]}
