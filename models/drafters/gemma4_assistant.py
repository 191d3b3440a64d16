"""Assistants of Gemma 4: layers that attend to the target's keys and values.

An assistant has no cache. Each layer attends to what the target's last layer of its type attends
to, from the position of the last token there, for all tokens of a draft. Its input is the embedding
of the newest token with the hidden state before it, and it returns the next hidden state. Small
assistants score the tokens of a few clusters only.

Sources: huggingface/transformers, models/gemma4_assistant and `SinglePositionMultiTokenCandidate
Generator`; sgl-project/sglang, srt/models/gemma4_mtp.py.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma4_text
from mlx_lm.models.cache import QuantizedKVCache

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig, count
from akunu_py.models.drafters.state_drafter import StateDrafter, StepDraft, TargetEnds, spread
from akunu_py.models.load.model_files import ADVICE

_ORDERING = "masked_embedding.token_ordering"
_FULL = "full_attention"


class _Clusters(nn.Module):
    """Scores of the tokens in the best clusters; all others are impossible."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        path, settings = config.path / "config.json", config.settings
        number = count(path, settings, "num_centroids", 2048)
        self._top = count(path, settings, "centroid_intermediate_top_k", 32)
        if config.vocabulary % number or self._top > number:
            raise DamagedModel(
                f"{path}: expected clusters of equal size, found {number} for "
                f"{config.vocabulary} tokens, {self._top} of them scored; {ADVICE}"
            )
        self.centroids = nn.Linear(config.width, number, bias=False)
        self.token_ordering = mx.zeros((config.vocabulary,), mx.int32)

    def __call__(self, hidden: mx.array, embed: nn.Embedding) -> mx.array:
        """Return logits [1, vocabulary] of a hidden state [1, width]."""
        best = mx.argpartition(self.centroids(hidden), -self._top, axis=-1)[0, -self._top :]
        clusters = self.token_ordering.reshape(self.centroids.weight.shape[0], -1)
        tokens = clusters[best].reshape(-1)
        return spread(hidden @ embed(tokens).T, tokens, self.token_ordering.shape[0])


class Gemma4Assistant(StateDrafter):
    """An assistant of a Gemma 4 model."""

    kind = "gemma4-assistant"
    needs_final = takes_scaled_embeddings = attends_to_target = True

    def __init__(
        self, config: DrafterConfig, weights: dict[str, mx.array], target: dict[str, Any]
    ) -> None:
        """weights: makes the order of tokens integers. target: its text configuration."""
        super().__init__()
        if _ORDERING in weights:
            ordering = weights[_ORDERING] = weights[_ORDERING].astype(mx.int32)
            if ordering.min().item() < 0 or ordering.max().item() >= config.vocabulary:
                raise DamagedModel(
                    f"the drafter in {config.path} orders token {ordering.max().item()}, but has "
                    f"{config.vocabulary} tokens; {ADVICE}"
                )
        unset = {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False}
        shared = {"num_kv_shared_layers": config.layers, "enable_moe_block": False}
        args = gemma4_text.ModelArgs.from_dict(unset | config.settings | shared)
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = [gemma4_text.DecoderLayer(args, number) for number in range(config.layers)]
        self.norm = nn.RMSNorm(config.width, eps=args.rms_norm_eps)
        self.pre_projection = nn.Linear(2 * config.target_width, config.width, bias=False)
        self.post_projection = nn.Linear(config.width, config.target_width, bias=False)
        if config.settings.get("use_ordered_embeddings"):
            self.masked_embedding = _Clusters(config)
        elif not config.settings.get("tie_word_embeddings", True):
            self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        other = gemma4_text.ModelArgs.from_dict(target)
        self._window = other.sliding_window
        own = range(other.num_hidden_layers - other.num_kv_shared_layers)
        # By type of a layer: the entry of the target's cache.
        self._entries = {other.layer_types[number]: number for number in own}
        differences = [
            f"its {name} is {getattr(args, name)}, the model's is {getattr(other, name)}"
            for name in ("head_dim", "global_head_dim", "sliding_window")
            if getattr(args, name) != getattr(other, name)
        ]
        if missing := {layer.layer_type for layer in self.layers} - self._entries.keys():
            differences.append(f"the model has no layers of type {min(missing)!r:.40}")
        if differences:
            raise UnsupportedModel(
                f"the drafter in {config.path} is for another model: {differences[0]}; use a "
                "drafter that was trained for this model"
            )

    def make_cache(self) -> list[Any]:
        """Return an empty list: `start` takes the target's cache."""
        return []

    def embed(self, tokens: mx.array, target: TargetEnds) -> mx.array:
        """Return the target's embeddings; its own embedding makes logits."""
        return target.embed(tokens)

    def extend(self, states: mx.array, embeddings: mx.array, cache: list[Any]) -> mx.array:
        """Return the input of the last position, for `start`."""
        return mx.concatenate([embeddings[:, -1:], states[:, -1:]], axis=-1)

    def start(self, target: TargetEnds, inputs: mx.array, cache: list[Any]) -> StepDraft:
        """Begin a draft. inputs: from the last `extend`. cache: the target's."""
        attached = self.attach(cache)
        return StepDraft(self, target, [self._run(inputs, attached)], attached)

    def attach(self, cache: list[Any]) -> dict[str, tuple[mx.array, mx.array, int]]:
        """Return keys, values and the position for each type of layer, from the target's cache.

        Those of a sliding window are in any order if they are no more than the window.
        """
        found = {}
        for kind, number in self._entries.items():
            entry = cache[number]
            keys, values = entry.keys_and_values()
            if isinstance(entry, QuantizedKVCache):
                packing = entry.group_size, entry.bits
                keys, values = mx.dequantize(*keys, *packing), mx.dequantize(*values, *packing)
            if kind != _FULL:
                keys, values = keys[..., -self._window :, :], values[..., -self._window :, :]
            found[kind] = keys, values, entry.offset - 1
        return found

    def __call__(self, embedding: mx.array, state: mx.array, attached: dict[str, Any]) -> mx.array:
        """Return the next state [1, 1, width] of a draft; see `StepDraft`. attached: the cache."""
        inputs = mx.concatenate([embedding, self.post_projection(state)], axis=-1)
        return self._run(inputs, attached)

    def _run(self, inputs: mx.array, attached: dict[str, Any]) -> mx.array:
        x = self.pre_projection(inputs.astype(self.norm.weight.dtype))
        for layer in self.layers:
            keys, values, position = attached[layer.layer_type]
            shared = keys.astype(x.dtype), values.astype(x.dtype)
            x, _, _ = layer(x, shared_kv=shared, offset=position)
        return self.norm(x)

    def logits(self, state: mx.array, target: TargetEnds) -> mx.array:
        """Return the logits [1, vocabulary] of a state [1, width]."""
        if "masked_embedding" in self:
            return self.masked_embedding(state, self.embed_tokens)
        return self.lm_head(state) if "lm_head" in self else self.embed_tokens.as_linear(state)
