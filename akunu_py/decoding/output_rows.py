"""Passes that compute logits for selected rows only.

mlx-lm's models compute logits for every row of a pass. Only the last row of a prompt and the rows
of a draft are sampled from; with a large vocabulary the other rows cost time and memory.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

Select = Callable[[mx.array], mx.array]  # selects rows of [requests, rows, width]


def run(model: Any, tokens: mx.array, cache: Any, select: Select) -> mx.array:
    """Return lazy logits for the rows that `select` keeps of `tokens` [requests, rows]."""
    narrow = _narrow_model(model)
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
                self.model = _replaced(
                    self.model, path.split("."), _OutputHead(module, self.selection)
                )
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


def _replaced(module: Any, path: Sequence[str], part: _OutputHead) -> Any:
    """Return a shallow copy of `module` with `part` at `path`."""
    copied = copy.copy(module)
    copied[path[0]] = _replaced(module[path[0]], path[1:], part) if path[1:] else part
    return copied


# By id of the model; None if all rows have to be computed.
_by_model: dict[int, tuple[weakref.ref[Any], _NarrowModel | None]] = {}


def _narrow_model(model: Any) -> _NarrowModel | None:
    if not isinstance(model, nn.Module):  # split over several hosts
        return None
    known, narrow = _by_model.get(id(model), (None, None))
    if known is None or known() is not model:
        try:
            narrow = _NarrowModel(model)
        except Exception:  # noqa: BLE001 - any failure of a model's code means all rows
            narrow = None
        number = id(model)
        reference = weakref.ref(model, lambda _: _by_model.pop(number, None))
        _by_model[number] = reference, narrow
    return narrow
