"""Weights and inputs of tiny drafters, drawn with NumPy so that other programs draw the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shapes = dict[str, tuple[int, ...]]

LENGTHS = (9, 4)  # tokens of the prompt, and of each draft
ACCEPTED = (2, 0, 4, 1, 3)  # draft tokens that each pass accepts


def draw_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Array]:
    """Return weights of a checkpoint in published names: matrices around 0, gains around 1."""
    draw = np.random.default_rng(seed)
    weights = {}
    for name in sorted(shapes):
        gain = 1.0 if "norm" in name and len(shapes[name]) == 1 else 0.0
        weights[name] = draw.normal(gain, 0.3, shapes[name]).astype(np.float32)
    return weights


def draw_states(seed: int, rows: int, width: int) -> Array:
    """Return hidden states [1, rows, width] of a target."""
    return np.random.default_rng(seed).normal(size=(1, rows, width)).astype(np.float32)


def draw_tokens(seed: int, count: int, vocabulary: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, vocabulary, count)]


def draw_offsets(seed: int, count: int, vocabulary: int) -> Array:
    """Return d2t [count]: the target's id of each draft token, minus the draft token."""
    chosen = np.random.default_rng(seed).choice(vocabulary, count, replace=False)
    return np.sort(chosen).astype(np.int64) - np.arange(count)


def layer_shapes(config: Mapping[str, Any], prefix: str, inputs: int) -> Shapes:
    """Return the shapes of a decoder layer whose attention takes `inputs` values."""
    width, inner, size = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    attention = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    shapes: Shapes = {
        f"{prefix}self_attn.{name}.weight": (count * size, inputs)
        for name, count in attention.items()
    }
    if config.get("attention_bias"):
        shapes |= {f"{prefix}self_attn.{n}.bias": (c * size,) for n, c in attention.items()}
        shapes[f"{prefix}self_attn.o_proj.bias"] = (width,)
    if config["model_type"] == "qwen3":
        shapes |= {f"{prefix}self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
    shapes[f"{prefix}self_attn.o_proj.weight"] = (width, heads * size)
    for name in ("gate_proj", "up_proj"):
        shapes[f"{prefix}mlp.{name}.weight"] = (inner, width)
    shapes[f"{prefix}mlp.down_proj.weight"] = (width, inner)
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (width,)
    return shapes


def eagle3_checkpoint(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Return an EAGLE-3 or P-EAGLE checkpoint as "speculators" publishes it.

    config: config.json. The embedding is part of it, and d2t with a smaller vocabulary.
    """
    layer = config["transformer_layer_config"]
    width, vocabulary = layer["hidden_size"], layer["vocab_size"]
    target, drafted = config.get("target_hidden_size") or width, config["draft_vocab_size"]
    taps = len(config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    shapes: Shapes = {
        "embed_tokens.weight": (vocabulary, width), "fc.weight": (width, taps * target),
        "layers.0.hidden_norm.weight": (width,), "lm_head.weight": (drafted, width),
        "norm.weight": (width,),
    }  # fmt: skip
    for number in range(layer["num_hidden_layers"]):
        shapes |= layer_shapes(layer, f"layers.{number}.", width * (1 if number else 2))
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * target,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (target,) for number in range(taps)}
    if config["speculators_model_type"] == "peagle":
        shapes["mask_hidden"] = (1, 1, taps * target)
    weights = draw_weights(shapes, seed)
    if drafted != vocabulary:
        weights["d2t"] = draw_offsets(seed, drafted, vocabulary)
    return weights


def eagle3_config(seed: int, **changes: Any) -> dict[str, Any]:
    """Return config.json of a drafter whose shapes follow from `seed`.

    changes: of the top level, or of the layer for names that its configuration has.
    """
    draw = np.random.default_rng(seed)
    size, kv_heads = int(draw.choice([8, 16])), int(draw.choice([1, 2]))
    heads, vocabulary = kv_heads * int(draw.choice([1, 2, 3])), int(draw.integers(60, 120))
    layer: dict[str, Any] = {
        "model_type": "llama", "hidden_size": int(draw.choice([24, 48])), "head_dim": size,
        "intermediate_size": int(draw.integers(20, 60)), "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5, "rope_theta": float(draw.choice([1e4, 5e5])),
        "max_position_embeddings": 512, "attention_bias": False, "rope_scaling": None,
        "layer_types": None, "sliding_window": None,
    }  # fmt: skip
    config: dict[str, Any] = {
        "speculators_model_type": "eagle3", "transformer_layer_config": layer,
        "draft_vocab_size": int(draw.integers(20, 50)), "norm_before_residual": bool(seed % 2),
        "target_hidden_size": layer["hidden_size"],
    }  # fmt: skip
    for name, value in changes.items():
        (layer if name in layer else config)[name] = value
    return config


# Options of the cases: the seed chooses the shapes.
EAGLE3_OPTIONS: Sequence[dict[str, Any]] = (
    {},
    {"target_hidden_size": 20, "norm_before_fc": True},
    {"num_hidden_layers": 2, "attention_bias": True},
    {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]},
)
# Of those that "speculators" computes, for every prefix of known tokens.
FORCED_OPTIONS: Sequence[dict[str, Any]] = (
    {"model_type": "qwen3", "norm_output": True, "fc_norm": True},
    {"layer_types": ["sliding_attention"], "sliding_window": 4},
    {"num_hidden_layers": 2, "norm_output": True},
    {"speculators_model_type": "peagle", "mask_token_id": 3, "norm_before_fc": True},
)


def mtp_config(seed: int, *, experts: int = 0) -> dict[str, Any]:
    """Return config.json of a repository of a Qwen3.5 head, as mlx-vlm writes it."""
    draw = np.random.default_rng(seed)
    kv_heads, rope = int(draw.choice([1, 2])), int(draw.choice([4, 8]))
    text: dict[str, Any] = {
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "hidden_size": int(draw.choice([32, 64])), "num_hidden_layers": 2, "head_dim": 16,
        "intermediate_size": 40, "num_attention_heads": 2 * kv_heads, "attention_bias": False,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-5, "vocab_size": 90,
        "max_position_embeddings": 512, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2, "mtp_num_hidden_layers": 1, "tie_word_embeddings": False,
        "rope_parameters": {
            "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": rope / 16,
            "mrope_section": [rope // 2, 0, 0],
        },
    }  # fmt: skip
    if experts:
        text |= {
            "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return {"model_type": "qwen3_5_mtp", "block_size": 3, "text_config": text}


def mtp_checkpoint(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Return the weights of such a head, and the target's embedding and lm_head."""
    text = config["text_config"]
    width, vocabulary = text["hidden_size"], text["vocab_size"]
    shapes = layer_shapes(text | {"model_type": "qwen3"}, "layers.0.", width)
    heads = text["num_attention_heads"] * text["head_dim"]
    shapes["layers.0.self_attn.q_proj.weight"] = (2 * heads, width)  # half of it is a gate
    if experts := text.get("num_experts"):
        inner, shared = text["moe_intermediate_size"], text["shared_expert_intermediate_size"]
        shapes = {name: shape for name, shape in shapes.items() if ".mlp." not in name}
        mlp = "layers.0.mlp."
        shapes[f"{mlp}gate.weight"] = (experts, width)
        shapes[f"{mlp}shared_expert_gate.weight"] = (1, width)
        for name, ends in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
            for home, size in (("switch_mlp", inner), ("shared_expert", shared)):
                shape = (size, width)[:: -1 if ends else 1]
                several = (experts, *shape) if home == "switch_mlp" else shape
                shapes[f"{mlp}{home}.{name}.weight"] = several
    shapes |= {
        f"{name}.weight": (width,)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    shapes |= {"fc.weight": (width, 2 * width), "embed_tokens.weight": (vocabulary, width)}
    return draw_weights(shapes | {"lm_head.weight": (vocabulary, width)}, seed)


WINDOW = 6  # of an assistant's sliding layers
ATTENDED = (3, 6, 7, 20)  # positions of the target; each draft follows token number `length`


def assistant_config(seed: int, *, clusters: bool = False) -> dict[str, Any]:
    """Return config.json of a Gemma 4 assistant whose shapes follow from `seed`."""
    draw = np.random.default_rng(seed)
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    rope = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25}
    text: dict[str, Any] = {
        "model_type": "gemma4_text", "hidden_size": int(draw.choice([16, 24])),
        "intermediate_size": int(draw.integers(20, 40)), "num_hidden_layers": len(kinds),
        "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 1,
        "num_global_key_value_heads": 1, "head_dim": 8, "global_head_dim": 16, "vocab_size": 96,
        "rms_norm_eps": 1e-6, "sliding_window": WINDOW, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "use_double_wide_mlp": False, "enable_moe_block": False,
        "num_kv_shared_layers": len(kinds), "attention_k_eq_v": False,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    }  # fmt: skip
    return {
        "model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": int(draw.choice([32, 40])), "text_config": text, "block_size": 4,
        "use_ordered_embeddings": clusters, "num_centroids": 12, "centroid_intermediate_top_k": 3,
        "tie_word_embeddings": True,
    }  # fmt: skip


TARGET_TYPES = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


def assistant_target(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a target; its last two layers share the keys and values of others."""
    text = config["text_config"] | {
        "layer_types": TARGET_TYPES, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "hidden_size": config["backbone_hidden_size"],
    }  # fmt: skip
    return {"model_type": "gemma4", "text_config": text}


def assistant_checkpoint(config: Mapping[str, Any], seed: int) -> dict[str, Array]:
    """Return the weights of an assistant, and the target's embedding as `target.weight`."""
    text, target = config["text_config"], config["backbone_hidden_size"]
    width, inner, vocabulary = (text[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: Shapes = {
        "model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,),
        "pre_projection.weight": (width, 2 * target), "post_projection.weight": (target, width),
        "target.weight": (vocabulary, target),
    }  # fmt: skip
    for number, kind in enumerate(text["layer_types"]):
        home, size = f"model.layers.{number}.", text["head_dim"]
        size = text["global_head_dim"] if kind == "full_attention" else size
        shapes |= {
            f"{home}self_attn.q_proj.weight": (text["num_attention_heads"] * size, width),
            f"{home}self_attn.o_proj.weight": (width, text["num_attention_heads"] * size),
            f"{home}self_attn.q_norm.weight": (size,), f"{home}layer_scalar": (1,),
            f"{home}mlp.gate_proj.weight": (inner, width),
            f"{home}mlp.up_proj.weight": (inner, width),
            f"{home}mlp.down_proj.weight": (width, inner),
        }  # fmt: skip
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{home}{name}_layernorm.weight"] = (width,)
    clusters = config["use_ordered_embeddings"]
    if clusters:
        shapes["masked_embedding.centroids.weight"] = (config["num_centroids"], width)
    weights = draw_weights(shapes, seed)
    if clusters:
        order = np.random.default_rng(seed).permutation(vocabulary)
        weights["masked_embedding.token_ordering"] = order.astype(np.int64)
    return weights


def assistant_attended(config: Mapping[str, Any], seed: int, length: int) -> dict[str, Any]:
    """Return the target's keys and values [1, heads, length, size], by type of layer."""
    text = config["text_config"]
    draw = np.random.default_rng(seed)
    sizes = {"sliding_attention": text["head_dim"], "full_attention": text["global_head_dim"]}
    heads = (text["num_key_value_heads"], text["num_global_key_value_heads"])
    return {
        kind: tuple(draw.normal(size=(1, count, length, size)).astype(np.float32) for _ in range(2))
        for (kind, size), count in zip(sizes.items(), heads, strict=True)
    }
