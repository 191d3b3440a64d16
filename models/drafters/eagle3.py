"""EAGLE-3 drafters: decoder layers over hidden states of three layers of the target.

Li et al. (2025), "EAGLE-3: Scaling up inference acceleration of large language models via
training-time test". Row i combines the target's hidden states of position i with token i + 1 and
predicts token i + 2. Behind the last committed position, a row takes the drafter's own hidden
state. P-EAGLE has mask tokens there, so that one pass drafts all tokens.

Checkpoints come from SafeAILab (SafeAILab/EAGLE, eagle/model/cnets.py), in the "speculators"
container (vllm-project/speculators, models/eagle3 and models/peagle), and from SpecForge and
ModelOpt (sgl-project/sglang, srt/models/llama_eagle3.py).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from akunu_py.errors import DamagedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig, nested
from akunu_py.models.drafters.state_drafter import (
    StateDrafter,
    StepDraft,
    TargetEnds,
    draft_tokens,
    spread,
)
from akunu_py.models.load.model_files import ADVICE

Weights = dict[str, mx.array]


class Eagle3(StateDrafter):
    """An EAGLE-3 or P-EAGLE drafter. Its cache lacks only the newest committed position."""

    kind = "eagle3"

    def __init__(self, config: DrafterConfig, weights: Weights) -> None:
        """weights: by `Eagle3`'s names; removes the parts that are unused."""
        super().__init__()
        settings = config.settings | nested(config.settings, "eagle_config")
        parallel = "mask_hidden" in weights
        layer = _layer_settings(config, weights)
        eps = float(layer["rms_norm_eps"])
        self.taps, width, inputs = config.taps, config.width, config.target_width
        self._norm_before_residual = bool(settings.get("norm_before_residual"))
        self._norm_output = bool(settings.get("norm_output"))
        kinds = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
        window = layer.get("sliding_window")  # positions that a query sees
        self._windows = [window if kind == "sliding_attention" else None for kind in kinds]
        self.fc = nn.Linear(inputs * len(self.taps), width, bias=False)
        if settings.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(inputs * len(self.taps), eps=eps)
        else:
            weights.pop("input_norm.weight", None)
        if "fc_norm.0.weight" in weights:
            self.fc_norm = [nn.RMSNorm(inputs, eps=eps) for _ in self.taps]
        self.layers = _layers(layer, qk_norm="layers.0.self_attn.q_norm.weight" in weights)
        self.norm = nn.RMSNorm(width, eps=eps)
        # P-EAGLE trains its embedding. Others freeze it, so that it equals the target's.
        trained = settings.get("embed_requires_grad", parallel) or width != inputs
        if trained and "embed_tokens.weight" in weights:
            self.embed_tokens = nn.Embedding(config.vocabulary, width)
        else:
            weights.pop("embed_tokens.weight", None)
        self._ids, self._vocabulary = draft_tokens(config, weights), config.vocabulary
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(width, config.draft_vocabulary, bias=False)
        if parallel:
            if config.mask_token is None:
                raise DamagedModel(f"{config.path}: config.json has no mask_token_id; {ADVICE}")
            self.mask_hidden = mx.zeros((1, 1, inputs * len(self.taps)))
            self.is_parallel, self._mask_token = True, config.mask_token
            self.longest = config.suggested_tokens or self.longest
        modules = dict(self.named_modules())
        for name, value in weights.items():
            if name.endswith(".bias") and (path := name.removesuffix(".bias")) in modules:
                modules[path].bias = mx.zeros(value.shape)

    @property
    def target_ids(self) -> mx.array:
        """The target's ids of the draft vocabulary."""
        return mx.arange(self._vocabulary) if self._ids is None else self._ids

    def make_cache(self) -> list[KVCache]:
        """Return an empty cache."""
        return [KVCache() for _ in self.layers]

    def states(self, hidden: mx.array) -> mx.array:
        hidden = hidden.astype(self.norm.weight.dtype)
        if "input_norm" in self:
            hidden = self.input_norm(hidden)
        if "fc_norm" in self:
            parts = mx.split(hidden, len(self.taps), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            hidden = mx.concatenate(normed, axis=-1)
        return self.fc(hidden)

    def extend(self, states: mx.array, embeddings: mx.array, cache: list[KVCache]) -> mx.array:
        """Append positions to `cache`, in any number of calls. Returns [1, rows, width].

        states: from `states`. embeddings: of the token after each position, [1, rows, width]. The
        result's last row predicts the token after these; `start` takes it.
        """
        first = self.layers[0]
        normed = first.hidden_norm(states)
        embeddings = first.input_layernorm(embeddings.astype(states.dtype))
        mask = create_attention_mask(states, cache[0], window_size=self._windows[0])
        hidden = normed if self._norm_before_residual else states
        inputs = mx.concatenate([embeddings, normed], axis=-1)
        hidden = hidden + first.self_attn(inputs, mask, cache[0])
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        rest = zip(self.layers[1:], cache[1:], self._windows[1:], strict=True)
        for layer, entry, window in rest:
            hidden = layer(hidden, create_attention_mask(hidden, entry, window_size=window), entry)
        return hidden

    def start(self, target: TargetEnds, hidden: mx.array, cache: list[KVCache]) -> StepDraft:
        """Begin a draft after the positions in `cache`. hidden: from the last `extend`."""
        states, masks = [hidden[:, -1:]], self.longest - 1
        if self.is_parallel and masks:
            embeddings = self.embed(mx.full((1, masks), self._mask_token, mx.int32), target)
            state = mx.repeat(self.states(self.mask_hidden), masks, axis=1)
            states += mx.split(self.extend(state, embeddings, cache), masks, axis=1)
        return StepDraft(self, target, states, cache)

    def __call__(self, embedding: mx.array, hidden: mx.array, cache: list[KVCache]) -> mx.array:
        """Return the next row of a draft; see `StepDraft`. hidden: the row before."""
        return self.extend(self.drafted_state(hidden), embedding, cache)

    def drafted_state(self, hidden: mx.array) -> mx.array:
        """Return the state of a drafted position, from the row before."""
        return self.norm(hidden) if self._norm_output else hidden

    def logits(self, hidden: mx.array, target: TargetEnds) -> mx.array:
        """Return the logits [1, vocabulary] of a row [1, width] from `extend`."""
        return spread(self.raw_logits(self.norm(hidden), target), self._ids, self._vocabulary)


def _layer_settings(config: DrafterConfig, weights: Weights) -> dict[str, Any]:
    found, heads = config.settings, int(config.settings["num_attention_heads"])
    rope: dict[str, Any] = found.get("rope_parameters") or {}
    rope = rope.get("sliding_attention", rope)  # as speculators chooses
    default = {"model_type": "llama", "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    layer: dict[str, Any] = default | found
    return layer | {
        "rope_theta": float(rope.get("rope_theta") or found.get("rope_theta") or 1e4),
        "rope_scaling": found.get("rope_scaling") or rope or None,
        "head_dim": int(found.get("head_dim") or config.width // heads),
        "num_hidden_layers": len({n.split(".")[1] for n in weights if n.startswith("layers.")}),
    }


def _layers(settings: dict[str, Any], *, qk_norm: bool) -> list[Any]:
    """Return decoder layers; the first takes twice the width. qk_norm: as Qwen3's attention."""
    module: Any = qwen3 if qk_norm else llama
    unset = {"attention_bias": False, "mlp_bias": False, "layer_types": None}
    default = {"tie_word_embeddings": False, "max_position_embeddings": 131072}
    args = module.ModelArgs.from_dict(default | settings | unset)
    layers = [module.TransformerBlock(args) for _ in range(args.num_hidden_layers)]
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = layers[0].self_attn[name].weight.shape[0]
        layers[0].self_attn[name] = nn.Linear(2 * args.hidden_size, rows, bias=False)
    layers[0].hidden_norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
    return layers
