"""Early exit: draft with the target's first layers and its own norm and lm_head.

LayerSkip (Elhoushi et al. 2024), section 4.3.1. Few models besides those trained for it agree with
their first layers, so this drafts only on request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from akunu_py.decoding import device, kv_cache
from akunu_py.decoding.drafting.neural import NeuralDrafterBase
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.output_rows import cached_per_model, with_part
from akunu_py.decoding.target import Target
from akunu_py.errors import UnsupportedModel
from akunu_py.models.load.model_files import as_error
from akunu_py.ngram.cost import PRIOR_SHAPE, interpolate
from akunu_py.ngram.neural_plan import TokenView

LONGEST = 8  # tokens per draft
_MEASURED = 96  # tokens for measuring agreement
_CANDIDATES = 8  # exits to try, evenly spaced
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
    """The first `count` layers of a model.

    It is the model itself with the other layers replaced, so that embedding, masks, norm and
    lm_head stay as they are.
    """

    def __init__(self, model: Any, count: int) -> None:
        path, layers = _find_layers(model)
        self.count = count
        skipped = [_SkippedLayer(layer) for layer in layers[count:]]
        self._model = with_part(model, path, [*layers[:count], *skipped])

    def run(self, tokens: mx.array, cache: kv_cache.Cache) -> mx.array:
        """Run `tokens` [rows] through the first layers. Returns logits [rows, vocab]."""
        own = cache[: self.count]
        filled = [*own, *own[:1] * (len(cache) - len(own))]
        logits: mx.array = self._model(tokens[None], cache=filled)[0]
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
        found = _find_exit(engine.model, engine)
        return found if isinstance(found, str) else ""

    @classmethod
    def create(cls, engine: Engine, target: Target) -> ExitDrafter:
        found = _find_exit(engine.model, engine)
        assert isinstance(found, EarlyExit)
        return cls(FirstLayers(engine.model, found.layers), target, found.share)

    def __init__(self, layers: FirstLayers, target: Target, share: float) -> None:
        super().__init__(target)
        self.relative_cost, self.key = share, f"exit {layers.count}"
        self._layers = layers
        self._ahead = 0  # tokens that only the first layers have processed
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
        rows = self._known[len(target.tokens) + self._ahead :]
        logits = self._layers.run(mx.array(rows, mx.int32), target.cache)
        self._ahead += len(rows)
        return self._sample(logits[-1:])

    def _run(self, tokens: mx.array, cache: kv_cache.Cache, wanted: int) -> mx.array:
        """Run a target pass (`Target.run`) without the rows of the draft."""
        kv_cache.trim(cache[: self._layers.count], self._ahead)
        self._ahead = 0
        return self._target.run_model(tokens, cache, wanted)


@dataclass(frozen=True, slots=True)
class EarlyExit:
    """An exit after the first `layers`."""

    layers: int
    agreement: float  # how often the most likely token is that of the whole model
    share: float  # cost in plain steps, with the lm_head

    @property
    def promise(self) -> float:
        """Expected speedup at the best draft length, below 1 if drafting loses."""
        best = 0.0
        for drafted in range(1, LONGEST + 1):
            tokens = sum(self.agreement**place for place in range(drafted + 1))
            cost = interpolate(PRIOR_SHAPE, 1 + drafted) + drafted * self.share
            best = max(best, tokens / cost)
        return best


def measure_exits(engine: Engine, counts: Sequence[int]) -> list[EarlyExit]:
    """Measure exits after `counts` layers on a built-in text.

    Raises UnsupportedModel if the first layers cannot be run alone.
    """
    model = engine.model
    tokens = mx.array(engine.tokens.encode_text(_TEXT)[:_MEASURED])
    _, layers = _find_layers(model)
    each = sum(map(device.weight_bytes, layers)) / len(layers)
    lm_head = device.weight_bytes(model) - each * len(layers)
    if any(path.endswith("lm_head") for path, _ in model.named_modules()):
        lm_head /= 2  # the other half is the embedding, of which a pass reads few rows
    total = each * len(layers) + lm_head
    with as_error(f"the first layers of {engine.name} cannot be run alone", UnsupportedModel):
        truth = mx.argmax(model(tokens[None], cache=_new_cache(engine))[0], axis=-1)
        exits = []
        for count in counts:
            logits = FirstLayers(model, count).run(tokens, _new_cache(engine))
            agreement = float(mx.mean(mx.argmax(logits, axis=-1) == truth).item())
            exits.append(EarlyExit(count, agreement, (each * count + lm_head) / total))
    return exits


def choose_exit(engine: Engine) -> EarlyExit:
    """Return the most promising exit. Raises UnsupportedModel if there is none."""
    count = len(engine.model.layers)
    tried = {count * part // _CANDIDATES for part in range(1, _CANDIDATES)} - {0}
    others = [each for each in _new_cache(engine) if type(each) not in kv_cache.GROWING]
    if others or not tried:
        kinds = ", ".join(sorted({type(each).__name__ for each in others})) or f"{count} layer"
        raise UnsupportedModel(f"{engine.name} ({kinds}) cannot draft with its first layers")
    return max(measure_exits(engine, sorted(tried)), key=lambda each: each.promise)


def _new_cache(engine: Engine) -> kv_cache.Cache:
    return kv_cache.new_cache(engine.model, engine.plan.kv_bits)


class _SkippedLayer:
    """Stand-in for a layer, with its attributes, that changes nothing."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, states: mx.array, *args: Any, **options: Any) -> mx.array:
        return states


def _find_layers(model: Any) -> tuple[list[str], list[Any]]:
    """Return the path to the list of layers, and this list. Raises UnsupportedModel."""
    modules = model.named_modules() if isinstance(model, nn.Module) else []
    for path, module in modules:
        layers = module.get("layers")
        if isinstance(layers, list) and len(layers) == len(model.layers) > 1:
            return [*filter(None, path.split(".")), "layers"], layers
    raise UnsupportedModel("its layers are not found")


@cached_per_model
def _find_exit(model: Any, engine: Engine) -> EarlyExit | str:
    """Return the best early exit of the engine's model, or why there is none."""
    try:
        return choose_exit(engine)
    except UnsupportedModel as error:
        return str(error)
