"""Neural drafters: a draft model with its own KV cache, and the first layers of the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.batched_pass import PassFollower
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories.history import NO_OWNER, TokenHistory
from akunu_py.engine.model.drafters import DraftModel
from akunu_py.engine.model.output_rows import find_layers, with_part
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.engine.target import Target
from akunu_py.errors import UnsupportedModel
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.models.load.model_files import as_error
from akunu_py.ngram.cost import PRIOR_SHAPE, interpolate
from akunu_py.ngram.neural_plan import TokenView
from akunu_py.types import NeuralDrafter
from akunu_py.weak_cache import cached_weakly

_LEAST_REST = 1e-6  # probability of all tokens but the sampled one


class NeuralDrafterBase(PassFollower, NeuralDrafter):
    """Base class of neural drafters, which sample with the target's sampler."""

    parallel = False
    most_others = 0

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known = TokenView(())  # the history, then the draft
        self.others: Sequence[tuple[int, float]] = ()
        self._compared: Any = None  # the drafter's history of the last draft

    def attach(self, target: Target) -> None:
        """Draft for another target, of the same model, from now on."""
        self._target = target

    def release(self) -> None:
        """Release the drafter's history, which stays with the target's; others may change it."""
        self._compared = None

    def clock(self) -> float:
        return self._target.clock()

    def _sample(self, logits: mx.array) -> tuple[int, float]:
        """Sample the token after `_known` from logits [1, vocab] and append it."""
        drafted, *others = self._target.sample_draft(logits, self._known, self.most_others)
        rest = max(1.0 - drafted[1], *[chance for _, chance in others], _LEAST_REST)
        self.others = [(token, chance / rest) for token, chance in others]
        self._known.append(drafted[0])
        return drafted


class ModelDrafter(NeuralDrafterBase):
    """A `NeuralDrafter` of a smaller model.

    It samples with the target's sampler and noise, and the target accepts equal tokens. So the
    output never depends on drafts, unlike with the rule of Leviathan et al.
    Equal draws have at least the probability s / (2 - s), with s = sum(min(p, q)) (Daliri et al.
    2025, "Coupling without communication and drafter-invariant speculative decoding", theorem 3).
    """

    longest = 16

    def __init__(self, draft_model: DraftModel, target: Target) -> None:
        super().__init__(target)
        self.key, self.relative_cost = draft_model.key, draft_model.relative_cost
        self._model = draft_model.model
        self._vocabulary = draft_model.vocabulary
        self._has_drafted = False

    @property
    def prefilled(self) -> int:
        return len(self._history.tokens)

    @property
    def _history(self) -> TokenHistory:
        histories = self._target.history.drafter_histories
        if self.key not in histories:
            histories[self.key] = TokenHistory(kv_cache.new_cache(self._model), NO_OWNER)
        return histories[self.key]

    def start_draft(self, known: Sequence[int]) -> bool:
        """Start a draft after `known`, or prefill one chunk so that answers stay cancellable."""
        self._known, self._has_drafted = TokenView.of(known), False
        history = self._history
        same = self._known.unchanged if history is self._compared else 0
        same = common_prefix(history.tokens, known, min(same, len(history.tokens)))
        reached = history.reach(min(same, len(known) - 1))
        if reached:
            history.truncate(reached)
        elif history.tokens:
            del self._target.history.drafter_histories[self.key]
        self._compared = self._history
        if len(known) - reached <= PREFILL_ROWS:
            return True
        self._forward(PREFILL_ROWS)
        mx.eval([entry.state for entry in self._history.cache])
        self._checkpoint()
        return False

    def draft_token(self) -> tuple[int, float]:
        logits = self._forward(len(self._known) - len(self._history.tokens))
        if not self._has_drafted:  # later tokens may be rejected
            self._checkpoint()
        self._has_drafted = True
        return self._sample(logits)

    def _forward(self, count: int) -> mx.array:
        """Run the next `count` known tokens. Returns the last row's logits, [1, vocab]."""
        start = len(self._history.tokens)
        rows = self._known[start : start + count]
        # Replace tokens that only the target has: a wrong draft does not change the output.
        seen = [token if token < self._vocabulary else 0 for token in rows]
        logits = self._model(mx.array([seen]), cache=self._history.cache)[0, -1:]
        self._history.tokens += rows
        return logits

    def _sample(self, logits: mx.array) -> tuple[int, float]:
        """Pad the logits to the target's width, because the noise depends on it."""
        width = self._target.vocabulary or self._vocabulary
        if (more := width - logits.shape[-1]) > 0:
            logits = mx.pad(logits, [(0, 0), (0, more)], constant_values=-math.inf)
        return super()._sample(logits[:, :width])

    def _checkpoint(self) -> None:
        """Set a checkpoint if trimming is impossible. Keeps the last two."""
        self._history.checkpoint()
        del self._history.checkpoints[:-2]


_LONGEST_EXIT_DRAFT = 8  # tokens
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
    """The first `count` layers of a model, with its embedding, masks, norm and lm_head."""

    def __init__(self, model: Any, count: int) -> None:
        path, layers = find_layers(model)
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
    """A `NeuralDrafter` of the target's first layers, norm and lm_head, which use its cache.

    LayerSkip (Elhoushi et al. 2024), section 4.3.1. Few models besides those trained for it agree
    with their first layers, so this drafts only on request.
    Until the verifying pass the cache entries of these layers also contain the draft.
    """

    longest = _LONGEST_EXIT_DRAFT

    def __init__(self, layers: FirstLayers, target: Target) -> None:
        super().__init__(target)
        self.relative_cost = layers.count / len(target.model.layers)
        self._layers, self.key = layers, f"exit {layers.count}"
        self._ahead = 0  # tokens that only the first layers have processed

    @property
    def prefilled(self) -> int:
        return len(self._target.tokens)

    def start_draft(self, known: Sequence[int]) -> bool:
        self._known = TokenView.of(known)
        self.before_pass(self._target.cache)  # no pass may have followed the last draft
        return True

    def draft_token(self) -> tuple[int, float]:
        target = self._target
        rows = self._known[len(target.tokens) + self._ahead :]
        logits = self._layers.run(mx.array(rows, mx.int32), target.cache)
        self._ahead += len(rows)
        return self._sample(logits[-1:])

    def before_pass(self, cache: kv_cache.Cache) -> None:
        """Remove the rows of the draft."""
        kv_cache.trim(cache[: self._layers.count], self._ahead)
        self._ahead = 0


@cached_weakly
def find_exit(model: Any, engine: Engine) -> int | str:
    """Return the layers before the best early exit on a sample text, or why there is none."""
    if engine.host_group is not None:
        return "the model is divided among hosts"
    count = len(model.layers)
    tried = {count * part // _CANDIDATES for part in range(1, _CANDIDATES)} - {0}
    others = [each for each in _new_cache(engine) if type(each) not in kv_cache.GROWING]
    if others or not tried:
        kinds = kv_cache.kinds(others) or f"{count} layer"
        return f"{engine.name} ({kinds}) cannot draft with its first layers"
    tokens, gains = mx.array(engine.tokens.encode_text(_TEXT)[:_MEASURED]), dict[int, float]()
    try:
        with as_error(f"the first layers of {engine.name} cannot be run alone", UnsupportedModel):
            truth = mx.argmax(model(tokens[None], cache=_new_cache(engine))[0], axis=-1)
            for layers in sorted(tried):
                logits = FirstLayers(model, layers).run(tokens, _new_cache(engine))
                agreement = float(mx.mean(mx.argmax(logits, axis=-1) == truth).item())
                gains[layers] = _speedup(agreement, layers / count)
    except UnsupportedModel as error:
        return str(error)
    return max(gains, key=gains.__getitem__)


def _speedup(agreement: float, share: float) -> float:
    """Return the expected speedup at the best draft length, below 1 if drafting loses.

    agreement: how often a draft token is right. share: its cost in plain steps.
    """
    best = 0.0
    for drafted in range(1, _LONGEST_EXIT_DRAFT + 1):
        tokens = sum(agreement**place for place in range(drafted + 1))
        best = max(best, tokens / (interpolate(PRIOR_SHAPE, 1 + drafted) + drafted * share))
    return best


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
