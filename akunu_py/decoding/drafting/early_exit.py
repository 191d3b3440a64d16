"""Early exit: draft with the target's first layers, and reuse their states for verification.

LayerSkip (Elhoushi et al. 2024), sections 4.3.1 to 4.3.3. Few models besides those trained for it
agree with their first layers, so this drafts only on request.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from akunu_py.decoding import kv_cache
from akunu_py.decoding.drafting.neural import NeuralDrafterBase
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.errors import UnsupportedModel
from akunu_py.models.load.model_files import as_error
from akunu_py.ngram.cost import PRIOR_SHAPE, interpolate
from akunu_py.ngram.token_view import TokenView

LONGEST = 8  # tokens per draft
_MEASURED = 96  # tokens for measuring agreement
_CANDIDATES = 8  # exits to try, evenly spaced
_READ, _ROWS = 5, 3  # prefilled tokens and decoded rows for testing the split model
_EXACT = 1e-3  # tolerance relative to the largest logit
# Prose, an answer, code.
_TEXT = """The river rises in the hills to the north and reaches the sea after two hundred miles. \
In spring, when the snow melts, it is too wide to cross on foot.

Q: What is the difference between a list and a tuple in Python?
A: A list can be changed after it was created, and a tuple cannot. Use a list where the number of \
items changes, and a tuple where it is fixed.

def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)
"""


class FirstLayers:
    """A model split after its first `count` layers.

    Each part is the model itself with the other layers replaced, so that embedding, masks, norm and
    lm_head stay as they are.
    """

    def __init__(self, model: Any, count: int) -> None:
        path, layers = _find_layers(model)
        self.count = count
        self._states = mx.zeros((0,))  # [1, rows, width], output of the first layers
        skipped = [_LayerStub(layer, lambda states: states) for layer in layers]
        capture = _LayerStub(layers[count], self._capture)
        inject = _LayerStub(layers[0], lambda states: self._states)
        self._first = _with_layers(model, path, [*layers[:count], capture, *skipped[count + 1 :]])
        self._rest = _with_layers(model, path, [inject, *skipped[1:count], *layers[count:]])

    def _capture(self, states: mx.array) -> mx.array:
        self._states = states
        return states

    def run_first(self, tokens: mx.array, cache: kv_cache.Cache) -> tuple[mx.array, mx.array]:
        """Run `tokens` [rows] through the first layers. Returns logits [rows, vocab] and states."""
        own = cache[: self.count]
        logits = self._first(tokens[None], cache=[*own, *own[:1] * (len(cache) - len(own))])[0]
        return logits, self._states

    def run_rest(self, tokens: mx.array, states: mx.array, cache: kv_cache.Cache) -> mx.array:
        """Run the other layers. Returns the model's logits, [rows, vocab]."""
        self._states, own = states, cache[self.count :]
        logits: mx.array = self._rest(tokens[None], cache=[*own[:1] * self.count, *own])[0]
        return logits


class ExitDrafter(NeuralDrafterBase):
    """A `NeuralDrafter` of the target's first layers, which use the target's cache.

    Until the verifying pass the cache entries of these layers also contain the draft.
    """

    name = "exit"
    longest = LONGEST
    in_auto = False

    @classmethod
    def unavailable(cls, engine: Engine) -> str:
        """Return why `engine` has no exit. The first call measures, with a few passes."""
        if engine.host_group is not None:
            return "the model is divided among hosts"
        found = _find_exit(engine)
        return found if isinstance(found, str) else ""

    @classmethod
    def create(cls, engine: Engine, target: Target) -> ExitDrafter:
        found = _find_exit(engine)
        assert isinstance(found, EarlyExit)
        layers = FirstLayers(engine.model, found.layers)
        return cls(layers, target, found.share, found.reused)

    def __init__(self, layers: FirstLayers, target: Target, share: float, reused: float) -> None:
        super().__init__(target)
        self.relative_cost, self.reused, self.key = share, reused, f"exit {layers.count}"
        self._layers = layers
        self._ahead: list[int] = []  # tokens that only the first layers have processed
        self._states: list[mx.array] = []  # their hidden states
        target.run = self._run

    @property
    def prefilled(self) -> int:
        return len(self._target.tokens)

    def release(self) -> None:
        """Do nothing: all state is the target's."""

    def start_draft(self, known: Sequence[int]) -> bool:
        self._known = TokenView.of(known)
        return True

    def draft_token(self) -> tuple[int, float]:
        target = self._target
        rows = self._known[len(target.tokens) + len(self._ahead) :]
        logits, states = self._layers.run_first(mx.array(rows, mx.int32), target.cache)
        self._ahead += rows
        self._states.append(states)
        return self._sample(logits[-1:])

    def _run(self, tokens: mx.array, cache: kv_cache.Cache, wanted: int) -> mx.array:
        """Run a target pass (`Target.run`), skipping what the first layers have computed."""
        ahead, states = self._ahead, self._states
        self._ahead, self._states = [], []
        if not ahead:
            return self._target.run_model(tokens, cache, wanted)
        read = common_prefix(ahead, tokens.tolist())
        kv_cache.trim(cache[: self._layers.count], len(ahead) - read)
        hidden = mx.concatenate(states, axis=1)[:, :read]
        if read < tokens.shape[0]:
            _, more = self._layers.run_first(tokens[read:], cache)
            hidden = mx.concatenate([hidden, more], axis=1)
        return self._layers.run_rest(tokens, hidden, cache)[-wanted:]


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """An exit after the first `layers`."""

    layers: int
    agreement: float  # how often the most likely token is that of the whole model
    share: float  # cost in plain steps, with the lm_head
    reused: float  # the same without the lm_head: verification reuses it

    @property
    def promise(self) -> float:
        """Expected speedup at the best draft length, below 1 if drafting loses."""
        best = 0.0
        for drafted in range(1, LONGEST + 1):
            tokens = sum(self.agreement**place for place in range(drafted + 1))
            rows = interpolate(PRIOR_SHAPE, 1 + drafted)
            cost = rows - self.reused * (rows - 1) + drafted * self.share
            best = max(best, tokens / cost)
        return best

    def as_dict(self) -> dict[str, float]:
        """Return the fields and `promise`, ready for JSON."""
        return asdict(self) | {"promise": self.promise}


def measure_exits(engine: Engine, counts: Sequence[int]) -> list[EarlyExit]:
    """Measure exits after `counts` layers on a built-in text.

    Raises UnsupportedModel if the model cannot be split.
    """
    model = engine.model
    tokens = mx.array(engine.tokens.encode_text(_TEXT)[:_MEASURED])
    _, layers = _find_layers(model)
    each = sum(_nbytes(layer) for layer in layers) / len(layers)
    lm_head = _nbytes(model) - each * len(layers)
    if any(path.endswith("lm_head") for path, _ in model.named_modules()):
        lm_head /= 2  # the other half is the embedding, of which a pass reads few rows
    total = each * len(layers) + lm_head
    with as_error(f"the layers of {engine.name} cannot be run in two parts", UnsupportedModel):
        truth = mx.argmax(model(tokens[None], cache=_new_cache(engine))[0], axis=-1)
        exits = []
        for count in counts:
            logits, _ = FirstLayers(model, count).run_first(tokens, _new_cache(engine))
            agreement = float(mx.mean(mx.argmax(logits, axis=-1) == truth).item())
            first = each * count
            exits.append(EarlyExit(count, agreement, (first + lm_head) / total, first / total))
    return exits


def choose_exit(engine: Engine) -> EarlyExit:
    """Return the most promising exit. Raises UnsupportedModel if there is none."""
    count = len(engine.model.layers)
    tried = {count * part // _CANDIDATES for part in range(1, _CANDIDATES)} - {0}
    others = [
        each for each in kv_cache.new_cache(engine.model, engine.plan.kv_bits) if not _grows(each)
    ]
    if others or not tried:
        kinds = ", ".join(sorted({type(each).__name__ for each in others})) or f"{count} layer"
        raise UnsupportedModel(f"{engine.name} ({kinds}) cannot draft with its first layers")
    best = max(measure_exits(engine, sorted(tried)), key=lambda each: each.promise)
    if not _is_exact(engine, FirstLayers(engine.model, best.layers)):
        raise UnsupportedModel(
            f"{engine.name} cannot draft with its first layers: "
            "its logits change if it runs in two parts"
        )
    return best


def _is_exact(engine: Engine, layers: FirstLayers) -> bool:
    """Return whether the split model computes the same logits."""
    with as_error(f"the layers of {engine.name} cannot be run in two parts", UnsupportedModel):
        tokens = mx.array(engine.tokens.encode_text(_TEXT)[: _READ + _ROWS])
        caches = _new_cache(engine), _new_cache(engine)
        for cache in caches:
            engine.model(tokens[None, :_READ], cache=cache)
        rows = tokens[_READ:]
        whole = engine.model(rows[None], cache=caches[0])[0]
        _, states = layers.run_first(rows, caches[1])
        both = layers.run_rest(rows, states, caches[1])
        return bool((mx.abs(whole - both).max() <= _EXACT * mx.abs(whole).max()).item())


def _new_cache(engine: Engine) -> kv_cache.Cache:
    return kv_cache.new_cache(engine.model, engine.plan.kv_bits)


def _grows(entry: Any) -> bool:
    return type(entry) in kv_cache.GROWING


def _nbytes(module: Any) -> int:
    return sum(value.nbytes for _, value in tree_flatten(module.parameters()))


class _LayerStub:
    """Stand-in for a layer, with its attributes and another computation."""

    def __init__(self, layer: Any, compute: Callable[[mx.array], mx.array]) -> None:
        self._layer, self._compute = layer, compute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, states: mx.array, *args: Any, **options: Any) -> mx.array:
        return self._compute(states)


def _find_layers(model: Any) -> tuple[list[str], list[Any]]:
    """Return the path to the module with the layers, and the layers. Raises UnsupportedModel."""
    modules = model.named_modules() if isinstance(model, nn.Module) else []
    for path, module in modules:
        layers = module.get("layers")
        if isinstance(layers, list) and len(layers) == len(model.layers) > 1:
            return [name for name in path.split(".") if name], layers
    raise UnsupportedModel("its layers are not found")


def _with_layers(model: Any, path: Sequence[str], layers: list[Any]) -> Any:
    """Return a shallow copy of the model with `layers` in place of its own."""
    copied = copy.copy(model)
    if path:
        copied[path[0]] = _with_layers(model[path[0]], path[1:], layers)
    else:
        copied["layers"] = layers
    return copied


# By id of the model: the exit, or why there is none.
_exit_by_model: dict[int, tuple[weakref.ref[Any], EarlyExit | str]] = {}


def _find_exit(engine: Engine) -> EarlyExit | str:
    """Return the best early exit of a model, or why there is none; measured once per model."""
    model, (known, found) = engine.model, _exit_by_model.get(id(engine.model), (None, ""))
    if known is None or known() is not model:
        try:
            found = choose_exit(engine)
        except UnsupportedModel as error:
            found = str(error)
        number = id(model)
        reference = weakref.ref(model, lambda _: _exit_by_model.pop(number, None))
        _exit_by_model[number] = reference, found
    return found
