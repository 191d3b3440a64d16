"""What drafters of all kinds share: their interface to the engine, and how weights are read.

`make_cache` returns an empty cache of committed positions. `extend` appends positions to it, in any
number of calls. `start` begins a draft. A block drafter starts from the newest token, whose states
do not exist yet, the others from what the last `extend` returned. Rows of a draft stay in the cache
until the engine removes them.
"""

import os
import re
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig
from akunu_py.models.load import safetensors
from akunu_py.models.load.model_files import ADVICE, as_error, no_weights

_UNUSED = re.compile(r"t2d|verifier_|.*\brotary_emb\.")  # for training, or computed again
_OTHER_NAMES = {  # in some packagings
    r"^model\.": "",
    r"^midlayer\.": "layers.0.",
    r"^aux_norm_low\.": "fc_norm.0.",
    r"^aux_norm_mid\.": "fc_norm.1.",
    r"^aux_norm_high\.": "fc_norm.2.",
    r"_codebook$": "_codebook.weight",
}


class TargetEnds(Protocol):
    """Embedding and output head of a target, which drafters share."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings [1, n, target width] of tokens [1, n]."""

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [..., vocabulary] of [..., target width], without a softcap."""


class StateDrafter(nn.Module):
    """A drafter of the target's hidden states."""

    kind: str
    taps: tuple[int, ...]  # layers whose outputs it takes, -1: the embedding
    needs_final = False  # takes the state after the target's final norm instead
    longest = 8  # tokens of a draft; the planner drafts fewer if that pays
    overlap = 0  # positions that each `extend` repeats
    is_parallel = False  # all tokens of a draft come from one pass
    takes_scaled_embeddings = False  # as the target's first layer, not as its embedding has them
    attends_to_target = False  # its drafts attend to the target's cache

    def embed(self, tokens: mx.array, target: TargetEnds) -> mx.array:
        """Return the embeddings of tokens, its own if it has any."""
        return (self.embed_tokens if "embed_tokens" in self else target.embed)(tokens)

    def raw_logits(self, hidden: mx.array, target: TargetEnds) -> mx.array:
        """Return the logits of its hidden states, by its own lm_head if it has one."""
        return (self.lm_head if "lm_head" in self else target.logits)(hidden)

    def states(self, hidden: mx.array) -> mx.array:
        """Return what is kept of each position, [1, rows, width].

        hidden: the concatenated outputs of the `taps`, [1, rows, len(taps) * target width].
        """
        return hidden


class StepDraft:
    """A draft for which the drafter runs once per token, on the state of the one before it."""

    def __init__(
        self, drafter: Any, target: TargetEnds, states: list[mx.array], cache: Any
    ) -> None:
        """states: of the first tokens, from `extend`, [1, rows, width] each."""
        self._drafter, self._target, self._cache = drafter, target, cache
        self._states = states  # by depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`, from 0 on in order.

        previous: the preceding draft token; without effect at depth 0.
        """
        if depth == len(self._states):
            embedding = self._drafter.embed(mx.array(previous).reshape(1, 1), self._target)
            self._states.append(self._run(embedding))
        return self._drafter.logits(self._states[depth][:, -1], self._target)

    def _run(self, embedding: mx.array) -> mx.array:
        """Return the state of the next token. embedding: of the one before, [1, 1, width]."""
        return self._drafter(embedding, self._states[-1], self._cache)


def spread(scores: mx.array, tokens: mx.array | None, vocabulary: int) -> mx.array:
    """Return scores [..., n] of `tokens` [n] (None: all) as logits [..., vocabulary], or -inf."""
    if tokens is None:
        return scores
    logits = mx.full((*scores.shape[:-1], vocabulary), -mx.inf, scores.dtype)
    return mx.put_along_axis(logits, mx.broadcast_to(tokens, scores.shape), scores, axis=-1)


def draft_tokens(config: DrafterConfig, weights: dict[str, mx.array]) -> mx.array | None:
    """Return the target's ids of draft tokens, None for all; pop d2t. Raises DamagedModel."""
    size, offsets = config.draft_vocabulary, weights.pop("d2t", None)
    if size == config.vocabulary and (offsets is None or offsets.size == size):
        return None
    if offsets is None or "lm_head.weight" not in weights:
        problem = f"no {'d2t' if offsets is None else 'lm_head'}"
    elif offsets.size != size:
        problem = f"a table of {offsets.size} (d2t)"
    else:
        ids = mx.arange(size) + offsets.astype(mx.int32)
        first, last = ids.min().item(), ids.max().item()
        if first >= 0 and last < config.vocabulary:
            return ids
        problem = f"drafts token {last if first >= 0 else first}"
    raise DamagedModel(
        f"the drafter in {config.path} has {size} of the model's {config.vocabulary} tokens, but "
        f"{problem}; {ADVICE}"
    )


def read_weights(config: DrafterConfig) -> dict[str, mx.array]:
    """Return lazy tensors by our modules' names. Raises UnsupportedModel, DamagedModel."""
    path = config.path
    files = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not files:
        raise no_weights(path, os.listdir(path), "*.safetensors")
    method = config.settings.get("quantization_config") or {}
    if isinstance(method, dict) and (name := method.get("quant_method")):
        raise UnsupportedModel(
            f"the drafter in {path} is quantized by {name!r:.40}; use one in bfloat16 or one that "
            "mlx-lm quantized"
        )
    weights: dict[str, mx.array] = {}
    for file in files:
        safetensors.read_header(file)
        with as_error(f"{file} is unreadable"):
            weights |= mx.load(str(file))
    for pattern, name in _OTHER_NAMES.items():
        weights = {re.sub(pattern, name, other): value for other, value in weights.items()}
    return {name: value for name, value in weights.items() if not _UNUSED.match(name)}


def quantize_packed(module: nn.Module, weights: dict[str, mx.array]) -> bool:
    """Quantize the layers of `module` whose `weights` are quantized. Returns False if none are."""

    def packing(path: str, layer: nn.Module) -> bool | dict[str, int | str]:
        if f"{path}.scales" not in weights or not hasattr(layer, "to_quantized"):
            return False
        return infer_quant_config(path, layer, weights)

    if not any(name.endswith(".scales") for name in weights):
        return False
    nn.quantize(module, class_predicate=packing)
    return True


def fill(module: nn.Module, weights: dict[str, mx.array], config: DrafterConfig) -> None:
    """Load `weights` into `module`, quantized as they are. Raises UnsupportedModel."""
    quantize_packed(module, weights)
    expected = dict(tree_flatten(module.parameters()))
    for problem, names in (
        ("misses", expected.keys() - weights.keys()),
        ("has the unknown", weights.keys() - expected.keys()),
    ):
        if names:
            raise UnsupportedModel(
                f"the drafter in {config.path} {problem} tensor {min(names)!r:.80} ({len(names)} "
                f"in all), so it is not of the kind {config.kind} in its config.json; {ADVICE}"
            )
    module.load_weights(list(weights.items()))
    module.eval()
