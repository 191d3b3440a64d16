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
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig, count
from akunu_py.models.drafters.state_drafter import Embed, Project, fill, read_weights
from akunu_py.models.load.model_files import as_error, text_config

_LONGEST = 8  # tokens; publishers draft 3
_ORDERING = "masked_embedding.token_ordering"
_FULL = "full_attention"


def load_assistant(config: DrafterConfig, target: dict[str, Any]) -> Gemma4Assistant:
    """Open an assistant. Its weights are read on first use.

    target: the target's config.json. Raises UnsupportedModel, for an assistant of another target,
    too, and DamagedModel.
    """
    config.check(target)
    weights = read_weights(config)
    with as_error(f"the drafter in {config.path} cannot be loaded", UnsupportedModel):
        assistant = Gemma4Assistant(config, gemma4_text.ModelArgs.from_dict(text_config(target)))
        if _ORDERING in weights:
            ordering = weights[_ORDERING].astype(mx.int32)
            if ordering.min().item() < 0 or ordering.max().item() >= config.vocabulary:
                raise DamagedModel(
                    f"the drafter in {config.path} orders token {ordering.max().item()}, but has "
                    f"{config.vocabulary} tokens"
                )
            weights[_ORDERING] = ordering
        fill(assistant, weights, config)
    return assistant


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
                f"{config.vocabulary} tokens, {self._top} of them scored"
            )
        self.centroids = nn.Linear(config.width, number, bias=False)
        self.token_ordering = mx.zeros((config.vocabulary,), mx.int32)

    def __call__(self, hidden: mx.array, embed: nn.Embedding) -> mx.array:
        """Return logits [1, vocabulary] of a hidden state [1, width]."""
        best = mx.argpartition(self.centroids(hidden), -self._top, axis=-1)[0, -self._top :]
        clusters = self.token_ordering.reshape(self.centroids.weight.shape[0], -1)
        tokens = clusters[best].reshape(1, -1)
        scores = hidden @ embed(tokens[0]).T
        spread = mx.full((1, self.token_ordering.shape[0]), -mx.inf, scores.dtype)
        return mx.put_along_axis(spread, tokens, scores, axis=-1)


class Gemma4Assistant(nn.Module):
    """An assistant of a Gemma 4 model."""

    kind = "gemma4-assistant"
    taps = ()
    needs_final = True
    is_parallel = False
    longest = _LONGEST

    def __init__(self, config: DrafterConfig, target: gemma4_text.ModelArgs) -> None:
        super().__init__()
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
        self._window = target.sliding_window
        own = range(target.num_hidden_layers - target.num_kv_shared_layers)
        # By type of a layer: the entry of the target's cache.
        self._entries = {target.layer_types[number]: number for number in own}
        self._check_attention(config, args, target)

    def _check_attention(
        self, config: DrafterConfig, args: gemma4_text.ModelArgs, target: gemma4_text.ModelArgs
    ) -> None:
        """Raise UnsupportedModel if its layers cannot attend to the target's keys."""
        differences = [
            f"its {name} is {getattr(args, name)}, the model's is {getattr(target, name)}"
            for name in ("head_dim", "global_head_dim", "sliding_window")
            if getattr(args, name) != getattr(target, name)
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

    def states(self, hidden: mx.array) -> mx.array:
        """Return `hidden`: an assistant keeps it as it is."""
        return hidden

    def extend(self, states: mx.array, embeddings: mx.array, cache: list[Any]) -> mx.array:
        """Return `states`, of which `start` takes the last."""
        return states

    def start(
        self, embed: Embed, lm_head: Project, hidden: mx.array, cache: list[Any]
    ) -> AssistantDraft:
        """Begin a draft behind the positions in `cache`, which is the target's.

        hidden: from the last `extend`, [1, rows, target width]. embed: of the target, scaled.
        """
        return AssistantDraft(self, embed, hidden[:, -1:], self.attach(cache))

    def attach(self, cache: list[Any]) -> dict[str, tuple[mx.array, mx.array, int]]:
        """Return keys, values and the position for each type of layer, from the target's cache."""
        found = {}
        for kind, number in self._entries.items():
            keys, values = _keys_and_values(cache[number])
            if kind != _FULL:
                keys, values = keys[..., -self._window :, :], values[..., -self._window :, :]
            found[kind] = keys, values, cache[number].offset - 1
        return found

    def step(
        self, embedding: mx.array, hidden: mx.array, attached: dict[str, Any]
    ) -> tuple[mx.array, mx.array]:
        """Return logits [1, vocabulary] and the next hidden state [1, 1, target width].

        embedding: of the token before, [1, 1, target width]. hidden: the state before it.
        """
        weight = self.norm.weight
        inputs = mx.concatenate([embedding.astype(weight.dtype), hidden.astype(weight.dtype)], -1)
        x = self.pre_projection(inputs)
        for layer in self.layers:
            keys, values, position = attached[layer.layer_type]
            shared = keys.astype(x.dtype), values.astype(x.dtype)
            x, _, _ = layer(x, shared_kv=shared, offset=position)
        x = self.norm(x)
        if "masked_embedding" in self:
            logits = self.masked_embedding(x[:, -1], self.embed_tokens)
        elif "lm_head" in self:
            logits = self.lm_head(x[:, -1])
        else:
            logits = self.embed_tokens.as_linear(x[:, -1])
        return logits, self.post_projection(x)


class AssistantDraft:
    """One draft. It appends nothing to the target's cache."""

    def __init__(
        self, assistant: Gemma4Assistant, embed: Embed, hidden: mx.array, attached: dict[str, Any]
    ) -> None:
        """See `Gemma4Assistant.start`."""
        self._assistant, self._embed, self._attached = assistant, embed, attached
        self._hidden, self._logits = [hidden], list[mx.array]()  # by depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`, from 0 on in order.

        previous: the preceding draft token; at depth 0 the newest known token.
        """
        if depth == len(self._logits):
            embedding = self._embed(mx.array(previous).reshape(1, 1))
            logits, hidden = self._assistant.step(embedding, self._hidden[-1], self._attached)
            self._logits.append(logits)
            self._hidden.append(hidden)
        return self._logits[depth]

    def end(self) -> None:
        """Do nothing: the cache is unchanged."""


def _keys_and_values(entry: Any) -> tuple[mx.array, mx.array]:
    """Return the keys and values of a cache's entry, [1, heads, positions, size] each.

    Those beyond a window are in any order if they are no more than the window.
    """
    if isinstance(entry, RotatingKVCache):
        keys, values = entry.keys_and_values()
    elif isinstance(entry, QuantizedKVCache):
        packed = [[part[..., : entry.offset, :] for part in entry.state[at]] for at in (0, 1)]
        keys, values = (mx.dequantize(*each, entry.group_size, entry.bits) for each in packed)
    elif isinstance(entry, KVCache):
        keys, values = entry.keys[..., : entry.offset, :], entry.values[..., : entry.offset, :]
    else:
        raise UnsupportedModel(f"a drafter cannot attend to a cache of type {type(entry).__name__}")
    return keys, values
