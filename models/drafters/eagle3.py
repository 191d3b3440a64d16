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

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig
from akunu_py.models.drafters.state_drafter import Embed, Project, fill, read_weights
from akunu_py.models.load.model_files import as_error, text_config

_LONGEST = 8  # tokens; SafeAILab drafts 5 to 7, and the planner fewer if that pays
_OLDER_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}

Weights = dict[str, mx.array]


def load_eagle3(config: DrafterConfig, target: dict[str, Any]) -> Eagle3:
    """Open an EAGLE-3 or P-EAGLE drafter. Its weights are read on first use.

    target: the target's config.json. Raises UnsupportedModel, for a drafter of another target, too,
    and DamagedModel.
    """
    weights = {_new_name(name): value for name, value in read_weights(config).items()}
    with as_error(f"the drafter in {config.path} cannot be loaded", UnsupportedModel):
        config = replace(config, taps=_taps(config, text_config(target)["num_hidden_layers"]))
        config.check(target)
        drafter = Eagle3(config, weights)
        fill(drafter, weights, config)
    return drafter


def _new_name(name: str) -> str:
    for older, new in _OLDER_NAMES.items():
        if name.startswith(older):
            return new + name.removeprefix(older)
    return name


class Eagle3(nn.Module):
    """An EAGLE-3 or P-EAGLE drafter.

    Its cache has one row for each committed position but the newest.
    """

    kind = "eagle3"
    needs_final = False

    def __init__(self, config: DrafterConfig, weights: Weights) -> None:
        """weights: by `Eagle3`'s names, without parts that are unused; changes in place."""
        super().__init__()
        eagle = config.settings.get("eagle_config")
        settings = config.settings | (eagle if isinstance(eagle, dict) else {})
        layer, eps = _layer_settings(config, weights)
        self.taps, width, inputs = config.taps, config.width, config.target_width
        self._norm_before_residual = bool(settings.get("norm_before_residual"))
        self._norm_output = bool(settings.get("norm_output"))
        self._windows = _windows(layer)

        self.fc = nn.Linear(inputs * len(self.taps), width, bias=False)
        if settings.get("norm_before_fc"):
            self.input_norm = nn.RMSNorm(inputs * len(self.taps), eps=eps)
        else:
            weights.pop("input_norm.weight", None)
        if "fc_norm.0.weight" in weights:
            self.fc_norm = [nn.RMSNorm(inputs, eps=eps) for _ in self.taps]
        self.layers = _layers(layer, qk_norm="layers.0.self_attn.q_norm.weight" in weights)
        self.norm = nn.RMSNorm(width, eps=eps)
        self._init_vocabulary(config, weights)
        self.longest, self._mask_token = _LONGEST, config.mask_token
        if "mask_hidden" in weights:
            if self._mask_token is None:
                raise DamagedModel(f"{config.path}: config.json has no mask_token_id")
            self.mask_hidden = mx.zeros((1, 1, inputs * len(self.taps)))
            self.longest = config.suggested_tokens or _LONGEST
        modules = dict(self.named_modules())
        for name, value in weights.items():
            if name.endswith(".bias") and (path := name.removesuffix(".bias")) in modules:
                modules[path].bias = mx.zeros(value.shape)

    def _init_vocabulary(self, config: DrafterConfig, weights: Weights) -> None:
        """Prepare the embedding, the lm_head, and the target's ids of a draft vocabulary."""
        width, size = config.width, config.draft_vocabulary or config.vocabulary
        # P-EAGLE trains its embedding. Others freeze it, so that it equals the target's.
        parallel = "mask_hidden" in weights
        trained = config.settings.get("embed_requires_grad", parallel)
        if "embed_tokens.weight" in weights and (trained or width != config.target_width):
            self.embed_tokens = nn.Embedding(config.vocabulary, width)
        else:
            weights.pop("embed_tokens.weight", None)
        if "lm_head.weight" in weights:
            self.lm_head = nn.Linear(width, size, bias=False)
        offsets, self._ids = weights.pop("d2t", None), None
        self._vocabulary = config.vocabulary
        if config.draft_vocabulary:
            if offsets is None or "lm_head.weight" not in weights:
                raise DamagedModel(
                    f"the drafter in {config.path} has a vocabulary of {size} tokens, but no "
                    f"{'d2t' if offsets is None else 'lm_head'}"
                )
            ids = offsets.astype(mx.int32) + mx.arange(size)
            if ids.min().item() < 0 or ids.max().item() >= config.vocabulary:
                raise DamagedModel(
                    f"the drafter in {config.path} drafts token {ids.max().item()}, but the model "
                    f"has {config.vocabulary} tokens"
                )
            self._ids = ids

    @property
    def own_embedding(self) -> Embed | None:
        """The embedding to use in place of the target's, if there is one."""
        return self.embed_tokens if "embed_tokens" in self else None

    @property
    def target_ids(self) -> mx.array | None:
        """The target's ids of the draft vocabulary, None if it is the target's vocabulary."""
        return self._ids

    @property
    def is_parallel(self) -> bool:
        """True for P-EAGLE, which drafts all tokens in one pass."""
        return "mask_hidden" in self

    def make_cache(self) -> list[KVCache]:
        """Return an empty cache."""
        return [KVCache() for _ in self.layers]

    def states(self, hidden: mx.array) -> mx.array:
        """Return what is kept of each position, [1, rows, width].

        hidden: the outputs of the `taps` of each position, concatenated.
        """
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

    def start(
        self, embed: Embed, lm_head: Project, hidden: mx.array, cache: list[KVCache]
    ) -> Eagle3Draft:
        """Begin a draft behind the positions in `cache`.

        hidden: from `extend`. embed: `own_embedding` or the target's.
        """
        return Eagle3Draft(self, embed, lm_head, hidden[:, -1:], cache)

    def keep(self, cache: list[KVCache], positions: int) -> None:
        """Remove all but the first `positions` from `cache`."""
        for entry in cache:
            entry.trim(max(0, entry.offset - positions))

    def logits(self, hidden: mx.array, lm_head: Project) -> mx.array:
        """Return the logits [1, vocabulary] of a row [1, 1, width] from `extend`."""
        normed = self.norm(hidden)[:, -1]
        logits = self.lm_head(normed) if "lm_head" in self else lm_head(normed)
        if self._ids is None:
            return logits
        spread = mx.full((1, self._vocabulary), -mx.inf, logits.dtype)
        return mx.put_along_axis(spread, self._ids[None], logits, axis=-1)

    def drafted_state(self, hidden: mx.array) -> mx.array:
        """Return the state of a drafted position, from the row before."""
        return self.norm(hidden) if self._norm_output else hidden

    def mask_rows(self, count: int, embed: Embed, cache: list[KVCache]) -> mx.array:
        """Append `count` mask rows of P-EAGLE to `cache`. Returns [1, count, width]."""
        state = self.states(self.mask_hidden)
        embeddings = embed(mx.full((1, count), self._mask_token, mx.int32))
        return self.extend(mx.broadcast_to(state, (1, count, state.shape[-1])), embeddings, cache)


class Eagle3Draft:
    """One draft; see `state_drafter.py`. `end` removes it from the cache."""

    def __init__(
        self,
        drafter: Eagle3,
        embed: Embed,
        lm_head: Project,
        hidden: mx.array,
        cache: list[KVCache],
    ) -> None:
        """See `Eagle3.start`."""
        self.appended = 0  # rows of each entry of the cache
        self._drafter, self._embed, self._lm_head = drafter, embed, lm_head
        self._cache = cache
        self._rows = [hidden]  # by depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`."""
        drafter = self._drafter
        if depth == len(self._rows):
            if not drafter.is_parallel:
                embeddings = self._embed(mx.array(previous).reshape(1, 1))
                state = drafter.drafted_state(self._rows[-1])
                self._rows.append(drafter.extend(state, embeddings, self._cache))
            elif depth == 1 < drafter.longest:
                rows = drafter.mask_rows(drafter.longest - 1, self._embed, self._cache)
                self._rows += mx.split(rows, drafter.longest - 1, axis=1)
            self.appended = len(self._rows) - 1
        last = self._rows[min(depth, len(self._rows) - 1)]  # P-EAGLE repeats its last token
        return drafter.logits(last, self._lm_head)

    def end(self) -> None:
        """Remove the draft from the cache."""
        for entry in self._cache:
            entry.trim(self.appended)


def _layer_settings(config: DrafterConfig, weights: Weights) -> tuple[dict[str, Any], float]:
    """Return the settings of the layers by mlx-lm's names, and the epsilon of the norms."""
    found, heads = config.settings, int(config.settings["num_attention_heads"])
    rope: dict[str, Any] = found.get("rope_parameters") or {}
    rope = rope.get("sliding_attention", rope)  # as speculators chooses
    default = {"model_type": "llama", "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    layer: dict[str, Any] = default | found
    layer |= {
        "rope_theta": float(rope.get("rope_theta") or found.get("rope_theta") or 1e4),
        "rope_scaling": found.get("rope_scaling") or rope or None,
        "head_dim": int(found.get("head_dim") or config.width // heads),
        "num_hidden_layers": len({n.split(".")[1] for n in weights if n.startswith("layers.")}),
    }
    return layer, float(layer["rms_norm_eps"])


def _layers(settings: dict[str, Any], *, qk_norm: bool) -> list[Any]:
    """Return decoder layers; the first takes twice the width.

    qk_norm: the attention normalizes queries and keys, as in Qwen3.
    """
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


def _windows(settings: dict[str, Any]) -> list[int | None]:
    """Return for each layer the number of positions that a query sees, None without a limit."""
    kinds = settings.get("layer_types") or ["full_attention"] * settings["num_hidden_layers"]
    window = settings.get("sliding_window")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _taps(config: DrafterConfig, layers: int) -> tuple[int, ...]:
    """Return the layers of the target whose outputs the drafter takes; -1 is the embedding.

    Publishers number inputs or outputs. In `eagle_config`, ids from 2 on and ids that reach the
    number of layers name inputs (sgl-project/sglang#25454, #32334). Containers converted from
    SpecForge have its default, which names outputs.
    """
    taps = config.tap_layers(layers)
    eagle = config.settings.get("eagle_config")
    named = isinstance(eagle, dict) and "eagle_aux_hidden_state_layer_ids" in eagle
    if named and not config.speculators and (taps[0] == 2 or max(taps) >= layers):
        return tuple(tap - 1 for tap in taps)
    if taps == (0, layers // 2 - 2, layers - 5):
        return tuple(tap + 1 for tap in taps)
    return taps
