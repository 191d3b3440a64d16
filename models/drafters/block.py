"""DFlash, DFlash2 and DSpark: drafters that predict a block of tokens in one pass.

The keys and values of committed positions come from the target's hidden states, projected once
(`states`). The block is the newest token and copies of a mask token. Its rows attend to the
committed positions and to each other, and their own keys and values are dropped after the pass.
DFlash2 adds convolutions in the block and a selector of candidates; DSpark adds a bias by the token
before, and a confidence. Sources: z-lab's `dflash` 0.1.0 (`model_mlx.py`) and, for DSpark,
mlx-dspark 0.20.3 (`model.py`), deepseek-ai/DeepSpec (`deepspec/modeling/dspark/`) and speculators
0.9.0 (`models/dspark/model_definitions.py`).

Where packagings differ, the settings follow mlx-dspark (`config.py`), which measured the acceptance
of published drafters, and `dflash`. DSpark's trainers copy many settings of the target that the
drafter does not use: layer types, windows and partial rotation.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gemma3_text, qwen3
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.drafters.drafter_config import DrafterConfig, count
from akunu_py.models.drafters.state_drafter import (
    StateDrafter,
    TargetEnds,
    draft_tokens,
    spread,
)
from akunu_py.models.load.model_files import ADVICE

CONTEXT = 4096  # positions that a draft sees at most; acceptance falls beyond
_TILE = 5  # rows of an lm_head; quantized matrices take more time for 6 rows on M3 and M4
_SLACK = 1024  # rows beyond a window that are kept before they are dropped together
_SUPPORTED: dict[str, tuple[Any, ...]] = {  # values of settings; others would draft wrongly
    "projector_type": (None, "dspark", "dflash", "dflash2"),
    "hidden_act": (None, "silu"),
    "attention_k_eq_v": (None, True),
    "log_snr_conditioning": (None, False),
    "attention_value_scale": (None, 1.0),
    "use_gemma_norm": (None, False),
}


class BlockSettings:
    """Everything that shapes the backbone and its heads."""

    def __init__(self, config: DrafterConfig) -> None:
        """Raises DamagedModel, and UnsupportedModel for variants that would draft wrongly."""
        path, found = config.path / "config.json", config.settings
        model_type = str(found.get("model_type"))
        # Gemma 4's layers: keys are values, four norms, a scalar.
        self.gemma = config.kind == "dspark" and "gemma4" in model_type
        for key, supported in _SUPPORTED.items():
            if found.get(key) not in supported and not (self.gemma and key == "hidden_act"):
                raise UnsupportedModel(
                    f"{path}: akunu does not support drafters with {key} = {found[key]!r:.40}; use "
                    "another drafter"
                )
        kv_key, dim_key = "num_key_value_heads", "head_dim"
        if self.gemma:
            kv_key, dim_key = "num_global_key_value_heads", "global_head_dim"
        self.width, self.intermediate = config.width, count(path, found, "intermediate_size")
        self.heads = count(path, found, "num_attention_heads")
        self.kv_heads = count(path, found, kv_key, self.heads)
        self.head_dim = count(path, found, dim_key, config.width // self.heads)
        self.eps = float(found.get("rms_norm_eps", 1e-6))
        self.bias = bool(found.get("attention_bias"))  # of the attention's projections
        self.sink = bool(found.get("attention_sink_bias"))  # each head has a learned one
        self.gated = bool(found.get("enable_qwen35_gated_q_proj"))  # q_proj gives a gate, too
        self.offset_norms = config.kind == "dspark" and model_type == "qwen3_5"  # minus one
        partial = self.gated or self.offset_norms
        self.rope = _rope(config, self.head_dim, partial=partial, gemma=self.gemma)
        # By layer: keys that a query sees, itself included; whether rows see no later rows.
        self.windows, self.causal = _attention(config)


def _attention(config: DrafterConfig) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Return the windows (None: all), and whether the block is causal, for each layer."""
    path, found = config.path / "config.json", config.settings
    stated = [found.get(key) for key in ("is_causal", "causal", "dflash_query_causal")]
    causal = next((value for value in stated if value is not None), None)
    sink, everywhere = found.get("attention_sink_bias"), found.get("use_swa")
    plain = config.kind == "dspark" and not config.speculators and "dflash_config" not in found
    types = found.get("layer_types")
    if types is None or (plain and causal is None and not sink):  # copied from the target
        types = ["full_attention"] * config.layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != config.layers or not known.issuperset(types):
        raise DamagedModel(
            f"{path}: expected {config.layers} layer_types of {sorted(known)}, found "
            f"{types!r:.80}; {ADVICE}"
        )
    sliding = [kind == "sliding_attention" for kind in types]
    window = found.get("sliding_window") or found.get("swa_window_size")
    if window and not any(sliding) and (everywhere or sink or found.get("dflash_query_causal")):
        sliding = [True] * config.layers
    if any(sliding) and (type(window) is not int or window < 2):
        raise DamagedModel(f"{path}: expected a sliding_window, found {window!r:.40}; {ADVICE}")
    # Without a statement, sliding layers are causal and others are not.
    both = found.get("sliding_window_non_causal", config.speculators and config.kind == "dflash2")
    return (
        tuple(window if slides else None for slides in sliding),
        tuple(slides and not both if causal is None else bool(causal) for slides in sliding),
    )


def _rope(config: DrafterConfig, head_dim: int, *, partial: bool, gemma: bool) -> dict[str, Any]:
    found = config.settings
    scaling = found.get("rope_parameters") or found.get("rope_scaling") or {}
    for kind in ("full_attention",) if gemma else ("sliding_attention", "full_attention"):
        scaling = scaling.get(kind, scaling)  # some name settings for each kind of layer
    default = 1e6 if config.kind == "dspark" else 1e4
    factor = float(scaling.get("partial_rotary_factor", 0.25 if gemma else 1.0))
    if gemma:
        scaling = {"rope_type": "proportional", "partial_rotary_factor": factor} | scaling
    return {
        "dims": int(head_dim * factor) if partial else int(scaling.get("rope_dim", head_dim)),
        "base": float(scaling.get("rope_theta") or found.get("rope_theta") or default),
        "traditional": not found.get("rope_is_neox_style", True),
        "scaling_config": scaling,
        "max_position_embeddings": found.get("max_position_embeddings"),
    }


class ContextCache(KVCache):
    """The newest committed positions of one layer. `offset` counts the rows that are kept."""

    keys: Any
    values: Any
    offset: int

    def __init__(self, window: int, start: int) -> None:
        super().__init__()
        self.window = window  # rows that a draft sees
        self.start = start  # position of the first row

    @property
    def end(self) -> int:
        """The position after the newest row."""
        return int(self.start + self.offset)

    def cut(self, end: int) -> None:
        """Remove the rows from position `end` on."""
        self.trim(max(0, self.end - end))
        self.start = min(self.start, end)

    def drop_old(self) -> None:
        """Drop rows outside the window, many at a time."""
        if self.offset >= self.window + _SLACK:
            first = self.offset - self.window
            self.keys = self.keys[..., first : self.offset, :]
            self.values = self.values[..., first : self.offset, :]
            self.start, self.offset = self.start + first, self.window


class _Attention(nn.Module):
    def __init__(self, settings: BlockSettings, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = settings.heads, settings.kv_heads, settings.head_dim
        width, bias = settings.width, settings.bias
        self.q_proj = nn.Linear(width, heads * dim * (1 + settings.gated), bias=bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        if not settings.gemma:
            self.v_proj = nn.Linear(width, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, width, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps=settings.eps)
        self.k_norm = nn.RMSNorm(dim, eps=settings.eps)
        if settings.sink:
            self.attention_sink_bias = mx.zeros((heads,))
        self._heads, self._gated, self._eps = heads, settings.gated, settings.eps
        self._kv_shape = (1, -1, kv_heads, dim)
        self._scale = 1.0 if settings.gemma else dim**-0.5
        self._window, self._causal = settings.windows[layer], settings.causal[layer]

    def keys_values(self, x: mx.array, rope: Any, position: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values [1, heads, rows, dim] of rows that begin at `position`."""
        projected = self.k_proj(x).reshape(self._kv_shape).transpose(0, 2, 1, 3)
        keys = rope(self.k_norm(projected), offset=position)
        if "v_proj" in self:
            return keys, self.v_proj(x).reshape(self._kv_shape).transpose(0, 2, 1, 3)
        return keys, mx.fast.rms_norm(projected, None, self._eps)

    def __call__(self, x: mx.array, rope: Any, entry: ContextCache) -> mx.array:
        rows, position = x.shape[1], entry.end
        queries, gate = self.q_proj(x).reshape(1, rows, self._heads, -1), None
        if self._gated:
            queries, gate = mx.split(queries, 2, axis=-1)
        queries = rope(self.q_norm(queries).transpose(0, 2, 1, 3), offset=position)
        keys, values = entry.update_and_fetch(*self.keys_values(x, rope, position))
        entry.trim(rows)
        context = min(entry.offset, entry.window)
        output = mx.fast.scaled_dot_product_attention(
            queries,
            keys[..., entry.offset - context :, :],
            values[..., entry.offset - context :, :],
            scale=self._scale,
            mask=self._mask(context, rows),
            sinks=self.get("attention_sink_bias"),
        )
        output = output.transpose(0, 2, 1, 3).reshape(1, rows, -1)
        return self.o_proj(
            output if gate is None else output * mx.sigmoid(gate.reshape(1, rows, -1))
        )

    def _mask(self, context: int, rows: int) -> mx.array | None:
        """Return which keys each row of the block sees, [rows, context + rows]; None: all."""
        narrow = self._window is not None and context + rows > self._window
        if not narrow and not self._causal:
            return None
        query, key = context + mx.arange(rows)[:, None], mx.arange(context + rows)[None]
        seen = key <= query if self._causal else mx.ones((rows, context + rows), mx.bool_)
        return seen & ((key >= context) | (query - key < self._window)) if narrow else seen


class _Layer(nn.Module):
    def __init__(self, settings: BlockSettings, layer: int) -> None:
        super().__init__()
        width, eps = settings.width, settings.eps
        self.self_attn = _Attention(settings, layer)
        feed_forward = gemma3_text.MLP if settings.gemma else qwen3.MLP
        self.mlp = feed_forward(width, settings.intermediate)
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        if settings.gemma:
            self.pre_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
            self.post_feedforward_layernorm = nn.RMSNorm(width, eps=eps)
            self.layer_scalar = mx.ones((1,))

    def __call__(self, x: mx.array, rope: Any, entry: ContextCache) -> mx.array:
        inner = self.input_layernorm(x)
        if "layer_scalar" in self:
            x = x + self.post_attention_layernorm(self.self_attn(inner, rope, entry))
            inner = self.mlp(self.pre_feedforward_layernorm(x))
            return (x + self.post_feedforward_layernorm(inner)) * self.layer_scalar
        if "attention_conv" in self:
            inner, kernel = self.attention_conv.before(inner)
            x = x + self.attention_conv.after(self.self_attn(inner, rope, entry), kernel)
            inner, kernel = self.mlp_conv.before(self.post_attention_layernorm(x))
            return x + self.mlp_conv.after(self.mlp(inner), kernel)
        x = x + self.self_attn(inner, rope, entry)
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockConvolution(nn.Module):
    """Causal convolutions over the rows of a block, before and after a sublayer.

    A kernel is a learned base for each channel plus a dynamic part for each group of channels,
    projected from the sublayer's input.
    """

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = mx.zeros((2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        self._group = group

    def before(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Return the convolved input [1, rows, width], and the dynamic kernel for `after`."""
        _, taps, width = self.base_kernel.shape
        shape = (*x.shape[:-1], 2, taps, width // self._group)
        dynamic = self.kernel_projection(x).reshape(shape)
        return self._convolve(x, dynamic[..., 0, :, :], self.base_kernel[0]), dynamic[..., 1, :, :]

    def after(self, x: mx.array, dynamic: mx.array) -> mx.array:
        """Return the convolved output of the sublayer."""
        return self._convolve(x, dynamic, self.base_kernel[1])

    def _convolve(self, x: mx.array, dynamic: mx.array, base: mx.array) -> mx.array:
        rows = x.shape[1]
        kernel = mx.repeat(dynamic, self._group, axis=-1) + base.astype(x.dtype)
        padded = mx.pad(x, ((0, 0), (len(base) - 1, 0), (0, 0)))
        shifted = [padded[:, len(base) - 1 - tap :][:, :rows] for tap in range(len(base))]
        return sum(
            (kernel[..., tap, :] * values for tap, values in enumerate(shifted)), mx.zeros_like(x)
        )


class CandidateSelector(nn.Module):
    """Scores the best tokens of a row by the token before and the row's hidden state."""

    def __init__(self, vocabulary: int, width: int, rank: int, top: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        self._top = min(top, vocabulary)

    def __call__(self, logits: mx.array, hidden: mx.array, previous: mx.array) -> mx.array:
        """Return the scores of a row's candidates in logits [vocabulary], -inf elsewhere.

        logits: [vocabulary] of the row. hidden: [width]. previous: [1], the token before.
        """
        known = logits[: self.predecessor_codebook.weight.shape[0]]
        candidates = mx.argpartition(known, -self._top)[-self._top :]
        pair = self.predecessor_codebook(previous)[0] * self.hidden_projection(hidden[None])[0]
        scores = known[candidates] + self.successor_codebook(candidates) @ pair
        return spread(scores, candidates, logits.size)


class MarkovHead(nn.Module):
    """Biases the logits of a row by the token before it, through a matrix of low rank."""

    def __init__(self, tokens: int, drafted: int, width: int, rank: int, kind: str) -> None:
        """tokens: of the target. drafted: of the drafter's own head."""
        super().__init__()
        self.markov_w1 = nn.Embedding(tokens, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(width + 2 * rank, 3 * rank)
        elif kind != "vanilla":
            raise UnsupportedModel(
                f"expected a markov_head_type of vanilla, gated or rnn, found {kind!r:.40}; use "
                "another drafter"
            )

    def __call__(
        self, hidden: mx.array, previous: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the bias [1, drafted] of a row, and the state for the next row.

        hidden: [1, width] of the row. previous: [1], the token before. state: of the row before,
        None for the first; only the recurrent kind has one.
        """
        before = self.markov_w1(previous)
        if "gate_proj" in self:
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([hidden, before], -1)))
            return self.markov_w2(gate * before), None
        if "joint_proj" in self:
            state = mx.zeros_like(before) if state is None else state
            joint = self.joint_proj(mx.concatenate([state, before, hidden], -1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            state = gate * state + (1 - gate) * mx.tanh(candidate)
            return self.markov_w2(mx.tanh(output)), state
        return self.markov_w2(before), None


class BlockDrafter(StateDrafter):
    """A drafter of kind "dflash", "dflash2" or "dspark"."""

    is_parallel = takes_scaled_embeddings = True

    def __init__(self, config: DrafterConfig, weights: dict[str, mx.array]) -> None:
        """weights: their names decide which embedding and heads it has itself.

        Removes d2t, and adds one to norms that are stored minus one.
        """
        super().__init__()
        settings = BlockSettings(config)
        found, path = config.settings, config.path / "config.json"
        if config.mask_token is None:
            raise UnsupportedModel(f"{path} has no mask_token_id; use another drafter")
        parts = {name.partition(".")[0] for name in weights}
        width, drafted = settings.width, config.draft_vocabulary
        self.fc = nn.Linear(len(config.taps) * config.target_width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=settings.eps)
        self.layers = [_Layer(settings, layer) for layer in range(config.layers)]
        self.norm = nn.RMSNorm(width, eps=settings.eps)
        if "embed_tokens" in parts:
            self.embed_tokens = nn.Embedding(config.vocabulary, width)
        if "lm_head" in parts:
            self.lm_head = nn.Linear(width, drafted, bias=False)
        if config.kind == "dflash2":
            kernel = count(path, found, "conv_kernel_size")
            group = count(path, found, "conv_group_size")
            rank, top = (count(path, found, f"selector_{name}") for name in ("rank", "top_k"))
            for layer in self.layers:
                layer.attention_conv = BlockConvolution(width, kernel, group)
                layer.mlp_conv = BlockConvolution(width, kernel, group)
            self.candidate_selector = CandidateSelector(config.vocabulary, width, rank, top)
        rank = count(path, found, "markov_rank", 256) if "markov_head" in parts else 0
        if rank:
            kind = str(found.get("markov_head_type", "vanilla"))
            self.markov_head = MarkovHead(config.vocabulary, drafted, width, rank, kind)
        self.confidence_takes_token = bool(rank and found.get("confidence_head_with_markov", True))
        if "confidence_head" in parts:
            self.confidence_head = nn.Module()
            features = width + rank * self.confidence_takes_token
            self.confidence_head.proj = nn.Linear(features, 1)
        for name in weights if settings.offset_norms else ():
            if name.endswith("norm.weight"):
                weights[name] = weights[name] + 1.0
        self._rope = initialize_rope(**settings.rope)
        self._settings, self._config = settings, config
        self._embedding_scale = float(found.get("input_embedding_scale", 1.0))
        if settings.gemma and "embed_tokens" in parts:
            self._embedding_scale *= width**0.5
        self._output_scale = float(found.get("output_multiplier", 1.0))
        self._softcap = float(found.get("final_logit_softcapping") or 0.0)
        self.kind, self.taps = config.kind, config.taps
        self.longest = config.block - (not config.anchor_predicts)
        self._ids = draft_tokens(config, weights)

    def make_cache(self, window: int = CONTEXT, position: int = 0) -> list[ContextCache]:
        """Return an empty cache.

        window: committed positions that a draft sees at most; fewer if it was trained with fewer.
        position: of the first row that `extend` will append.
        """
        trained = [limit or window + 1 for limit in self._settings.windows]
        return [ContextCache(min(window, limit - 1), position) for limit in trained]

    def states(self, hidden: mx.array) -> mx.array:
        return self.hidden_norm(self.fc(hidden.astype(self.norm.weight.dtype)))

    def extend(
        self, states: mx.array, embeddings: mx.array | None, cache: list[ContextCache]
    ) -> None:
        """Append committed positions to `cache`. The embeddings of tokens are not used."""
        for layer, entry in zip(self.layers, cache, strict=True):
            if (skipped := states.shape[1] - entry.window) > 0:
                entry.start, entry.offset = entry.end + skipped, 0
            rows = states[:, -entry.window :]
            entry.update_and_fetch(*layer.self_attn.keys_values(rows, self._rope, entry.end))
            entry.drop_old()

    def start(self, target: TargetEnds, anchor: int, cache: list[ContextCache]) -> BlockDraft:
        """Begin a draft after `anchor`, the newest token. `cache` lacks it and stays unchanged."""
        config = self._config
        first = 0 if config.anchor_predicts else 1
        tokens = mx.array([[anchor] + [config.mask_token] * (config.block - 1)])
        x = self.embed(tokens, target).astype(self.norm.weight.dtype) * self._embedding_scale
        for layer, entry in zip(self.layers, cache, strict=True):
            x = layer(x, self._rope, entry)
        return BlockDraft(self, self.norm(x[:, first:])[0], target)

    def raw_logits(self, hidden: mx.array, target: TargetEnds) -> mx.array:
        """Return the logits [1, rows, drafter's tokens] of hidden states [1, rows, width]."""
        logits = super().raw_logits(hidden, target) * self._output_scale
        return mx.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    def spread(self, logits: mx.array) -> mx.array:
        """Return logits [drafter's tokens] as logits [target's tokens], -inf where it has none."""
        return spread(logits, self._ids, self._config.vocabulary)


class BlockDraft:
    """A draft from the hidden states of a block's rows. Its logits are computed when needed."""

    def __init__(self, drafter: BlockDrafter, hidden: mx.array, target: TargetEnds) -> None:
        self._drafter, self._hidden, self._target = drafter, hidden, target
        self._logits: dict[int, mx.array] = {}  # of `_TILE` rows each, by their number
        self._states: dict[int, mx.array | None] = {}  # of a recurrent head, before each depth

    def logits(self, depth: int, previous: int | mx.array) -> mx.array:
        """Return the logits [1, vocabulary] of draft token `depth`.

        Only recurrent Markov heads need the depths in order.
        """
        drafter, tile = self._drafter, depth // _TILE
        if tile not in self._logits:
            hidden = self._hidden[None, tile * _TILE : (tile + 1) * _TILE]
            self._logits[tile] = drafter.raw_logits(hidden, self._target)[0]
        row, before = self._logits[tile][depth % _TILE], mx.array(previous).reshape(1)
        if "candidate_selector" in drafter:
            return drafter.candidate_selector(row, self._hidden[depth], before)[None]
        if "markov_head" in drafter:
            hidden = self._hidden[depth : depth + 1]
            state = self._states.get(depth)
            bias, self._states[depth + 1] = drafter.markov_head(hidden, before, state)
            row = row + bias[0]
        return drafter.spread(row)[None]

    def confidence(self, depth: int, previous: int | mx.array) -> float | None:
        """Return the chance that the token at `depth` is accepted, None without such a head."""
        drafter = self._drafter
        if "confidence_head" not in drafter:
            return None
        features = self._hidden[depth : depth + 1]
        if drafter.confidence_takes_token:
            before = drafter.markov_head.markov_w1(mx.array(previous).reshape(1))
            features = mx.concatenate([features, before], -1)
        return float(mx.sigmoid(drafter.confidence_head.proj(features).astype(mx.float32)).item())
