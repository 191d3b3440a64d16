"""Tiny DFlash, DFlash2 and DSpark drafters, drawn with NumPy so that other programs draw the same.

A case is a config.json as published, with a seed for its weights, its target's embedding and
lm_head, and its target's hidden states.
"""

from typing import Any

import numpy as np

from tests.support.tiny_drafters import Array, Shapes, layer_shapes

Config = dict[str, Any]

TOKENS = 61
# Positions that become known before each draft. The first ones exceed every window.
ROWS = (37, 3, 2, 6, 40, 2)
_BACKBONE: Config = {
    "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "vocab_size": TOKENS,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
}  # fmt: skip
_SLIDING: Config = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 24,
}
_ALL_SLIDING: Config = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 20}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def dflash(nested: Config | None = None, **changes: Any) -> Config:
    """Return a config.json of z-lab's DFlash. nested: of its `dflash_config`."""
    return (
        _BACKBONE
        | {
            "architectures": ["DFlashDraftModel"],
            "num_target_layers": 12,
            "dflash_config": {"target_layer_ids": [1, 5, 9], "mask_token_id": 60, "block_size": 6}
            | (nested or {}),
        }
        | changes
    )


def dflash2(nested: Config | None = None, **changes: Any) -> Config:
    selector = {"conv_group_size": 8, "selector_rank": 12, "selector_top_k": 9}
    nested = selector | {"conv_kernel_size": 2} | (nested or {})
    return dflash(nested, architectures=["DFlash2DraftModel"], **changes)


def dspark(**changes: Any) -> Config:
    """Return a flat config.json of DeepSpec's DSpark."""
    return (
        _BACKBONE
        | {
            "architectures": ["Qwen3DSparkModel"], "block_size": 5, "mask_token_id": 60,
            "target_layer_ids": [-1, 5, 9], "num_target_layers": 12, "markov_rank": 12,
            "markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        | changes
    )  # fmt: skip


def gemma4_dspark() -> Config:
    rope = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    return dspark(
        architectures=["Gemma4DSparkModel"],
        model_type="gemma4_text",
        attention_k_eq_v=True,
        global_head_dim=32,
        num_global_key_value_heads=1,
        rope_parameters={"full_attention": rope, "sliding_attention": {"rope_theta": 1e4}},
        layer_types=["sliding_attention"] * 3,  # copied from the target, unused
        sliding_window=4,
        final_logit_softcapping=30.0,
    )


def speculators(config: Config, kind: str, **changes: Any) -> Config:
    """Return the config.json of the same drafter in vLLM's "speculators" container."""
    nested = config.get("dflash_config", {})
    flat = config | nested
    backbone = {key: config[key] for key in _BACKBONE}
    backbone |= {k: config[k] for k in ("layer_types", "sliding_window") if k in config}
    if "sliding_window" in config:
        backbone["use_sliding_window"] = True
    ours = {"block_size", "mask_token_id", "sliding_window_non_causal", *_HEADS}
    tokens = flat["block_size"] - (kind != "dspark")
    return (
        {
            "speculators_model_type": kind,
            "transformer_layer_config": backbone,
            "aux_hidden_state_layer_ids": [tap + 1 for tap in flat["target_layer_ids"]],
            "draft_vocab_size": TOKENS,
            "speculators_config": {
                "algorithm": kind,
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
                "verifier": {"name_or_path": "owner/model"},
            },
        }
        | {key: flat[key] for key in ours if key in flat}
        | changes
    )


_HEADS = (
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "markov_rank",
    "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip


def specforge(config: Config) -> Config:
    """Return the config.json of a DSpark drafter as SpecForge writes it."""
    moved = ("target_layer_ids", "mask_token_id")
    rest = {key: value for key, value in config.items() if key not in moved}
    nested = {key: config[key] for key in moved} | {"projector_type": "dspark"}
    return rest | {"architectures": ["DSparkDraftModel"], "dflash_config": nested}


def lfm2(config: Config) -> Config:
    """Return the config.json of a DSpark drafter as Liquid AI writes it."""
    moved = ("target_layer_ids", "mask_token_id", "num_target_layers")
    rest = {key: value for key, value in config.items() if key not in moved}
    return rest | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "dflash_config": {key: config[key] for key in moved},
        "layer_types": ["full_attention"] * config["num_hidden_layers"],
    }


_SCALES: Config = {
    "input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0,
    "block_size": 4,
}  # fmt: skip
_SINKS: Config = {
    "attention_sink_bias": True, "dflash_query_causal": True, "sliding_window": 16,
    "has_lm_head": False, "sample_from_anchor": False,
}  # fmt: skip
_GATED: Config = {
    "model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True,
    "rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.25},
}  # fmt: skip
_SLOWER_YARN = dspark(rope_parameters=_YARN | {"rope_theta": 5e3}, enable_confidence_head=False)
# Names of cases, the program that drafts, and config.json. The index is the seed.
CASES: list[tuple[str, str, Config]] = [
    ("dflash", "dflash", dflash()),
    ("dflash, sliding", "dflash", dflash(**_SLIDING)),
    ("dflash, all sliding", "dflash", dflash(**_ALL_SLIDING, num_key_value_heads=1)),
    ("dflash, bidirectional", "dflash", dflash(**_SLIDING, is_causal=False)),
    ("dflash, causal", "dflash", dflash(is_causal=True, num_attention_heads=6)),
    ("dflash, scaled", "dflash", dflash(_SCALES, rope_parameters=_YARN, num_hidden_layers=1)),
    ("dflash2", "dflash", dflash2()),
    ("dflash2, sliding", "dflash", dflash2({"conv_kernel_size": 3}, **_SLIDING)),
    ("dspark", "mlx-dspark", dspark()),
    ("dspark, attention bias", "mlx-dspark", dspark(attention_bias=True, markov_rank=8)),
    ("dspark, few tokens", "mlx-dspark",
     dspark(draft_vocab_size=23, confidence_head_with_markov=False)),
    ("dspark, anchor apart", "mlx-dspark", dspark(sample_from_anchor=False)),
    ("dspark, yarn", "mlx-dspark", specforge(_SLOWER_YARN)),
    ("dspark, interleaved rope", "mlx-dspark", lfm2(dspark()) | {"rope_is_neox_style": False}),
    ("dspark, sinks", "mlx-dspark", dspark(**_SINKS)),
    ("dspark, gated", "mlx-dspark", dspark(**_GATED)),
    ("dspark, gemma 4", "mlx-dspark", gemma4_dspark()),
]  # fmt: skip


def flat_settings(config: Config) -> Config:
    """Return the settings of all levels in one."""
    inner: Config = config.get("transformer_layer_config", {}) | config.get("dflash_config", {})
    return config | inner


def checkpoint(config: Config, seed: int) -> dict[str, Array]:
    """Return the weights in published names: matrices around 0, gains around 1."""
    draw = np.random.default_rng(seed)
    weights: dict[str, Array] = {}
    for name, shape in sorted(_shapes(config).items()):
        gain = 1.0 if name.endswith("norm.weight") and config.get("model_type") != "qwen3_5" else 0
        gain = 1.0 if name.endswith("layer_scalar") else gain
        weights[name] = draw.normal(gain, 0.3, shape).astype(np.float32)
    drafted = flat_settings(config).get("draft_vocab_size", TOKENS)
    if drafted != TOKENS:
        chosen = np.sort(draw.choice(TOKENS, drafted, replace=False))
        weights["d2t"] = chosen.astype(np.int64) - np.arange(drafted)
    return weights


def target(config: Config, seed: int) -> tuple[Array, Array]:
    """Return the embedding and the lm_head of the target, both [tokens, width]."""
    draw = np.random.default_rng(1000 + seed)
    shape = (2, TOKENS, flat_settings(config)["hidden_size"])
    embedding, head = draw.normal(0, 0.5, shape).astype(np.float32)
    return embedding, head


def rounds(config: Config, seed: int) -> list[tuple[Array, int]]:
    """Return the hidden states [1, rows, taps * width] that become known, and each anchor."""
    draw = np.random.default_rng(2000 + seed)
    flat = flat_settings(config)
    taps = flat.get("target_layer_ids") or flat["aux_hidden_state_layer_ids"]
    width = len(taps) * flat["hidden_size"]
    return [
        (draw.normal(size=(1, rows, width)).astype(np.float32), int(draw.integers(TOKENS)))
        for rows in ROWS
    ]


def _shapes(config: Config) -> Shapes:
    flat = flat_settings(config)
    width, gemma = flat["hidden_size"], "gemma" in flat["model_type"]
    layer = flat | {"model_type": "qwen3"}
    if gemma:
        layer["num_key_value_heads"] = flat["num_global_key_value_heads"]
        layer["head_dim"] = flat["global_head_dim"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    taps = flat.get("target_layer_ids") or flat["aux_hidden_state_layer_ids"]
    shapes: Shapes = {"fc.weight": (width, len(taps) * width)}
    shapes |= {f"{name}.weight": (width,) for name in ("hidden_norm", "norm")}
    for number in range(flat["num_hidden_layers"]):
        home = f"layers.{number}."
        shapes |= layer_shapes(layer, home, width)
        if flat.get("enable_qwen35_gated_q_proj"):
            shapes[f"{home}self_attn.q_proj.weight"] = (2 * queries, width)
        if flat.get("attention_sink_bias"):
            shapes[f"{home}self_attn.attention_sink_bias"] = (layer["num_attention_heads"],)
        if gemma:
            del shapes[f"{home}self_attn.v_proj.weight"]
            shapes[f"{home}layer_scalar"] = (1,)
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"{home}{name}.weight"] = (width,)
        if kernel := flat.get("conv_kernel_size"):
            for name in ("attention_conv", "mlp_conv"):
                groups = width // flat["conv_group_size"]
                shapes[f"{home}{name}.base_kernel"] = (2, kernel, width)
                shapes[f"{home}{name}.kernel_projection.weight"] = (2 * kernel * groups, width)
    return shapes | _head_shapes(flat, width)


def _head_shapes(flat: Config, width: int) -> Shapes:
    shapes: Shapes = {}
    drafted = flat.get("draft_vocab_size", TOKENS)
    if rank := flat.get("selector_rank"):
        shapes["candidate_selector.predecessor_codebook"] = (TOKENS, rank)
        shapes["candidate_selector.successor_codebook"] = (TOKENS, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, width)
    if rank := flat.get("markov_rank"):
        shapes["markov_head.markov_w1.weight"] = (TOKENS, rank)
        shapes["markov_head.markov_w2.weight"] = (drafted, rank)
        for kind, name, outputs in (("gated", "gate_proj", 1), ("rnn", "joint_proj", 3)):
            if flat.get("markov_head_type") == kind:
                inputs = width + rank * (1 if kind == "gated" else 2)
                shapes[f"markov_head.{name}.weight"] = (outputs * rank, inputs)
                shapes[f"markov_head.{name}.bias"] = (outputs * rank,)
        shapes["embed_tokens.weight"] = (TOKENS, width)
        if flat.get("has_lm_head", True):
            shapes["lm_head.weight"] = (drafted, width)
        if flat.get("enable_confidence_head"):
            inputs = width + (rank if flat.get("confidence_head_with_markov") else 0)
            shapes["confidence_head.proj.weight"] = (1, inputs)
            shapes["confidence_head.proj.bias"] = (1,)
    return shapes
