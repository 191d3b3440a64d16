"""Passes that compute logits for selected rows only, and may return hidden states of layers.

mlx-lm's models compute logits for every row, which costs time and memory. Only a prompt's last row
and a draft's rows are sampled from. The models do not return hidden states, which drafters need.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.errors import UnsupportedModel, one_line
from akunu_py.weak_cache import cached_weakly

Select = Callable[[mx.array], mx.array]  # selects rows of [requests, rows, width]


def run(
    model: Any, tokens: mx.array, cache: Any, select: Select, taps: Sequence[int] = ()
) -> tuple[mx.array, dict[int, mx.array]]:
    """Run a pass over `tokens` [requests, rows].

    Returns lazy logits of the rows that `select` keeps, and the hidden states [requests, rows,
    width] at the `taps`: the output of a layer, from 0; -1: the embeddings; the number of layers:
    after the final norm.
    """
    # A model that is split over several hosts is no module.
    narrow = _narrow_model(model) if isinstance(model, nn.Module) else None
    runs, states = model, dict[int, mx.array]()
    if narrow is not None:
        narrow.selection.select = select
        runs = narrow.model
    if taps:
        known = _tapped_models(model)
        tapped = known.get(tuple(taps)) or known.setdefault(tuple(taps), _TappedModel(runs, taps))
        logits = tapped.model(tokens, cache=cache)
        states = dict(tapped.states)
        tapped.states.clear()
        if narrow is not None and narrow.selection.inputs is not None:
            states[tapped.layers] = narrow.selection.inputs
    else:
        logits = runs(tokens, cache=cache)
    if narrow is None:
        return select(logits), states
    narrow.selection.inputs = None  # it would keep the graph of the pass
    return logits, states


def why_no_taps(model: Any, taps: Sequence[int]) -> str:
    """Return why passes of `model` cannot return the hidden states at `taps`, "" if they can."""
    try:
        cache = make_prompt_cache(model)
        states = run(model, mx.zeros((1, 2), mx.int32), cache, lambda rows: rows, taps)[1]
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything
        return f"its layers do not show their hidden states ({one_line(error, 80)})"
    missing = [tap for tap in taps if tap not in states or states[tap].ndim != 3]
    return f"it has no hidden states of layer {missing[0]}" if missing else ""


class _TappedModel:
    """A shallow copy of a model that notes hidden states."""

    def __init__(self, model: nn.Module, taps: Sequence[int]) -> None:
        path, layers = find_layers(model)
        self.layers = len(layers)
        self.states: dict[int, mx.array] = {}  # of the last pass
        noted = {max(0, tap) for tap in taps}  # the first layer notes its input, too
        tapped = [
            _TappedLayer(layer, at, self.states) if at in noted else layer
            for at, layer in enumerate(layers)
        ]
        self.model = with_part(model, path, tapped)


class _TappedLayer:
    """A layer, with its attributes, that notes its output, and the first one its input."""

    def __init__(self, layer: Any, at: int, states: dict[int, mx.array]) -> None:
        self._layer, self._at, self._states = layer, at, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, inputs: mx.array, *args: Any, **options: Any) -> Any:
        output = self._layer(inputs, *args, **options)
        if self._at == 0:
            self._states[-1] = inputs
        self._states[self._at] = output[0] if isinstance(output, tuple) else output
        return output


def find_layers(model: Any) -> tuple[list[str], list[Any]]:
    """Return the path to the list of layers, and this list. Raises UnsupportedModel."""
    modules = model.named_modules() if isinstance(model, nn.Module) else []
    for path, module in modules:
        layers = module.get("layers")
        if isinstance(layers, list) and len(layers) == len(model.layers) > 1:
            return [*filter(None, path.split(".")), "layers"], layers
    raise UnsupportedModel("its layers are not found")


class _Selection:
    select: Select = staticmethod(lambda rows: rows[:, -1:])
    inputs: mx.array | None = None  # of the output head in this pass


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
        if hasattr(self._head, "as_linear"):
            return self._head(inputs)
        self._selection.inputs = inputs
        return self._head(self._selection.select(inputs))

    def as_linear(self, inputs: mx.array) -> mx.array:
        self._selection.inputs = inputs
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


@cached_weakly
def _narrow_model(model: Any) -> _NarrowModel | None:
    """Return the narrow model, None if all rows have to be computed."""
    try:
        return _NarrowModel(model)
    except Exception:  # noqa: BLE001 - any failure of a model's code means all rows
        return None


@cached_weakly
def _tapped_models(model: Any) -> dict[tuple[int, ...], _TappedModel]:
    """Return the tapped copies of a model, by their taps."""
    return {}
