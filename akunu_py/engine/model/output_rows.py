"""Passes that compute logits for selected rows only.

mlx-lm's models compute logits for every row of a pass. Only the last row of a prompt and the rows
of a draft are sampled from; with a large vocabulary the other rows cost time and memory.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

_Result = TypeVar("_Result")
Select = Callable[[mx.array], mx.array]  # selects rows of [requests, rows, width]


def run(model: Any, tokens: mx.array, cache: Any, select: Select) -> mx.array:
    """Return lazy logits for the rows that `select` keeps of `tokens` [requests, rows]."""
    split = not isinstance(model, nn.Module)  # over several hosts
    narrow = None if split else _narrow_model(model)
    if narrow is None:
        return select(model(tokens, cache=cache))
    narrow.selection.select = select
    logits: mx.array = narrow.model(tokens, cache=cache)
    return logits


class _Selection:
    """The rows that the output head computes."""

    select: Select = staticmethod(lambda rows: rows[:, -1:])


class _NarrowModel:
    """A shallow copy of a model whose output head skips rows."""

    def __init__(self, model: nn.Module) -> None:
        """Raises an exception, of any type, if the model has no separate output head."""
        self.selection = _Selection()  # a reference to self would keep the weights in a cycle
        cache = make_prompt_cache(model)
        vocabulary = model(mx.zeros((1, 1), mx.int32), cache=cache).shape[-1]  # not computed
        self.model = model
        for path, module in model.named_modules():
            if _is_output_head(path, module, vocabulary):
                head = _OutputHead(module, self.selection)
                self.model = with_part(self.model, path.split("."), head)
        trial = self.model(mx.zeros((1, 3), mx.int32), cache=make_prompt_cache(model))
        if self.model is model or trial.shape != (1, 1, vocabulary):
            raise ValueError("its output head is not found")


class _OutputHead:
    """An output head, or an embedding that also is one, for selected rows."""

    def __init__(self, head: nn.Module, selection: _Selection) -> None:
        self._head, self._selection = head, selection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, inputs: mx.array) -> mx.array:
        embeds = hasattr(self._head, "as_linear")
        return self._head(inputs if embeds else self._selection.select(inputs))

    def as_linear(self, inputs: mx.array) -> mx.array:
        return self._head.as_linear(self._selection.select(inputs))


def _is_output_head(path: str, module: nn.Module, vocabulary: int) -> bool:
    """Return whether a module outside of the layers has a row of weights per vocabulary entry."""
    weight = module.get("weight")
    inside = any(name.isdigit() for name in path.split("."))
    return path != "" and not inside and weight is not None and weight.shape[0] == vocabulary


def with_part(module: Any, path: Sequence[str], part: Any) -> Any:
    """Return a shallow copy of `module` with `part` at `path`."""
    copied = copy.copy(module)
    copied[path[0]] = with_part(module[path[0]], path[1:], part) if path[1:] else part
    return copied


def cached_per_model(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the result of `function` for the lifetime of its first argument, a model."""
    results: dict[int, tuple[weakref.ref[Any], _Result]] = {}  # by id

    @functools.wraps(function)
    def cached(model: Any, *others: Any) -> _Result:
        number = id(model)  # models have no hash
        if number not in results or results[number][0]() is not model:
            reference = weakref.ref(model, lambda _: results.pop(number, None))
            results[number] = reference, function(model, *others)
        return results[number][1]

    return cached


@cached_per_model
def _narrow_model(model: Any) -> _NarrowModel | None:
    """Return the narrow model, None if all rows have to be computed."""
    try:
        return _NarrowModel(model)
    except Exception:  # noqa: BLE001 - any failure of a model's code means all rows
        return None
