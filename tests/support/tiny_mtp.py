"""Tiny checkpoints of random weights with MTP heads, in the names and shapes that are published,
and what such a head computes, in plain numpy."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map

from akunu_py.models.gguf.file import GgufFile
from akunu_py.models.gguf.tokenizer import plan_tokenizer
from tests.support.tiny_gguf import TOKENIZER, vocabulary

Array = npt.NDArray[np.float64]
Weights = dict[str, mx.array]

WIDTH, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, WINDOW = 64, 4, 2, 16, 32, 4, 5
VOCABULARY = len(vocabulary())
_NOPE, _ROPE, _VALUE, _RANK = 8, 8, 8, 32
_COMMON: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": HEAD,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "rope_scaling": None, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2, "moe_intermediate_size": INNER, "norm_topk_prob": True,
}  # fmt: skip
_ROUTED: dict[str, Any] = {
    **_EXPERTS, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}  # fmt: skip
_MIXED: dict[str, Any] = {
    **_EXPERTS, "num_experts": EXPERTS, "shared_expert_intermediate_size": INNER,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_QWEN3_5 = {**_COMMON, **_DELTA, "mtp_num_hidden_layers": 1, "rope_parameters": {
    "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_COMMON, **_DELTA, **_MIXED},
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": {**_QWEN3_5, **_MIXED}},
    "glm4_moe": {**_COMMON, **_ROUTED, "use_qk_norm": True, "attention_bias": True,
                 "partial_rotary_factor": 0.5},
    # mlx-lm knows the head by the number of layers that DeepSeek-V3 has.
    "deepseek_v3": {**_COMMON, **_ROUTED, "num_hidden_layers": 61, "first_k_dense_replace": 61,
                    "num_key_value_heads": HEADS, "kv_lora_rank": _RANK,
                    "q_lora_rank": _RANK, "qk_rope_head_dim": _ROPE, "qk_nope_head_dim": _NOPE,
                    "v_head_dim": _VALUE, "moe_layer_freq": 1},
    "mimo": {**_COMMON, "num_nextn_predict_layers": 1},
    "mimo_v2_flash": {
        **_COMMON, **_ROUTED, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW, "layernorm_epsilon": 1e-5, "swa_rope_theta": 500.0,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV_HEADS, "v_head_dim": 24,
        "swa_head_dim": HEAD, "swa_v_head_dim": 24, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
_NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
# Where a head's weights are: what its names begin with, what its layer's do behind that; the norm
# of the embedding, of the hidden state, the projection, and the norm at the end.
_PLACES: dict[str, tuple[str, str, tuple[str, str, str, str]]] = {
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "glm4_moe": ("model.layers.2.", "", _NEXTN),
    "deepseek_v3": ("model.layers.61.", "", _NEXTN),
    "mimo": ("model.mtp_layers.0.", "",
             ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "mimo_v2_flash": ("model.mtp.layers.0.", "",
                      ("enorm", "hnorm", "eh_proj", "final_layernorm")),
}  # fmt: skip


def is_qwen(family: str) -> bool:
    return family.startswith("qwen")


def text_config(family: str) -> dict[str, Any]:
    config = CONFIGS[family]
    return dict(config.get("text_config", config))


def write_checkpoint(directory: Path, family: str, *, head: bool = True, seed: int = 0) -> Weights:
    """Writes a model as it is published into `directory`. Returns the weights of its head."""
    mx.random.seed(seed)
    trunk = _trunk(family)
    found = head_weights(family, seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family] | {"model_type": family}))
    weights = trunk | found if head else trunk
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    return found


def perfect_weights(directory: Path, family: str) -> Weights:
    """Writes a model into `directory` whose layers add nothing, so that it looks at the last token
    only, with a head that does the same. Returns the head's weights."""
    head = write_checkpoint(directory, family)
    file = str(directory / "model.safetensors")
    weights = dict(mx.load(file))
    home, _, (embedding, _, project, final) = _PLACES[family]
    for name, value in weights.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            weights[name] = mx.zeros_like(value)
    both = [mx.eye(WIDTH), mx.zeros((WIDTH, WIDTH))]
    order = both[::-1] if family == "mimo" else both
    weights[f"{home}{project}.weight"] = mx.concatenate(order, axis=1)
    gain = mx.zeros(WIDTH) if is_qwen(family) else mx.ones(WIDTH)
    norm = (
        "model.language_model.norm.weight"
        if "text_config" in CONFIGS[family]
        else "model.norm.weight"
    )
    weights[f"{home}{embedding}.weight"] = gain
    weights[f"{home}{final}.weight"] = weights[norm]
    mx.save_safetensors(file, weights, metadata={"format": "pt"})
    return {name: weights[name] for name in head}


def write_tokenizer(directory: Path) -> None:
    """One of `VOCABULARY` tokens."""
    metadata = TOKENIZER | {"general.architecture": "llama"}
    metadata.pop("tokenizer.ggml.token_type")
    plan_tokenizer(GgufFile(Path("x.gguf"), metadata, {})).write(directory)


def _trunk(family: str) -> Weights:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[family] | {"model_type": family}))
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3 + (w.ndim == 1),
                          model.parameters()))  # fmt: skip
    published: Weights = {}
    for name, value in dict(tree_flatten(model.parameters())).items():
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head", "lm_head")
        if ".switch_mlp." in name and family == "qwen3_5_moe":
            name = name.replace("switch_mlp", "experts").removesuffix(".weight")
        elif ".switch_mlp." in name:
            for index in range(EXPERTS):
                published[name.replace("switch_mlp", f"experts.{index}")] = value[index]
            continue
        elif is_qwen(family):
            value = value.moveaxis(2, 1) if "conv1d" in name else value
            value = value - (name.endswith("norm.weight") and "linear_attn" not in name)
        published[name] = value
    for name in [name for name in published if name.endswith(".experts.gate_proj")]:
        stem = name.removesuffix("gate_proj")
        both = [published.pop(name), published.pop(f"{stem}up_proj")]
        published[f"{stem}gate_up_proj"] = mx.concatenate(both, axis=1)
    for name in [name for name in published if name.endswith(".embed_q.weight")]:
        stem = name.removesuffix("embed_q.weight")
        keys, values = published.pop(name), published.pop(f"{stem}unembed_out.weight")
        whole = mx.concatenate([keys.swapaxes(-1, -2), values], axis=1)
        published[f"{stem}kv_b_proj.weight"] = whole.reshape(-1, _RANK)
    return published


def head_weights(family: str, seed: int = 0) -> Weights:
    """The weights of a head, by published names; gains minus one lie around -0.4, as real ones."""
    home, layer, (embedding, hidden, project, final) = _PLACES[family]
    draw = np.random.default_rng(seed)
    gain = -0.4 if is_qwen(family) else 1.0
    made: Weights = {}

    def add(name: str, *shape: int) -> None:
        offset = gain if len(shape) == 1 and name.endswith("norm.weight") else 0.0
        made[home + name] = mx.array(draw.normal(offset, 0.3, shape).astype(np.float32))

    for name in (embedding, hidden, final):
        made[f"{home}{name}.weight"] = mx.array(draw.normal(gain, 0.1, WIDTH).astype(np.float32))
    add(f"{project}.weight", WIDTH, 2 * WIDTH)
    for name, shape in _layer_shapes(family).items():
        add(layer + name, *shape)
    if family in ("glm4_moe", "deepseek_v3"):  # copies of the target's
        add("embed_tokens.weight", VOCABULARY, WIDTH)
        add("shared_head.head.weight", VOCABULARY, WIDTH)
    return made


def _layer_shapes(family: str) -> dict[str, tuple[int, ...]]:
    queries, values = HEADS * HEAD, KV_HEADS * (24 if family == "mimo_v2_flash" else HEAD)
    after = "pre_mlp_layernorm" if family == "mimo_v2_flash" else "post_attention_layernorm"
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (WIDTH,),
        f"{after}.weight": (WIDTH,),
        "self_attn.q_proj.weight": (queries * (2 if is_qwen(family) else 1), WIDTH),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj.weight": (values, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, values * HEADS // KV_HEADS),
    }
    if family == "deepseek_v3":
        for name in "qkv":
            del shapes[f"self_attn.{name}_proj.weight"]
        shapes |= {
            "self_attn.q_a_proj.weight": (_RANK, WIDTH),
            "self_attn.q_a_layernorm.weight": (_RANK,),
            "self_attn.q_b_proj.weight": (HEADS * (_NOPE + _ROPE), _RANK),
            "self_attn.kv_a_proj_with_mqa.weight": (_RANK + _ROPE, WIDTH),
            "self_attn.kv_a_layernorm.weight": (_RANK,),
            "self_attn.kv_b_proj.weight": (HEADS * (_NOPE + _VALUE), _RANK),
            "self_attn.o_proj.weight": (WIDTH, HEADS * _VALUE),
        }
    if is_qwen(family) or family == "glm4_moe":
        shapes |= {f"self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
    if family in ("mimo", "glm4_moe"):
        shapes |= {f"self_attn.{n}_proj.bias": (size * HEAD,)
                   for n, size in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))}  # fmt: skip
    if family == "mimo_v2_flash":
        shapes["self_attn.attention_sink_bias"] = (HEADS,)
    return shapes | _mlp_shapes(family)


def _mlp_shapes(family: str) -> dict[str, tuple[int, ...]]:
    def mlp(home: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {
            f"{home}.gate_proj.weight": (inner, WIDTH),
            f"{home}.up_proj.weight": (inner, WIDTH),
            f"{home}.down_proj.weight": (WIDTH, inner),
        }

    if family in ("qwen3_5", "mimo", "mimo_v2_flash"):
        return mlp("mlp", 64)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (EXPERTS, WIDTH)}
    if family == "qwen3_5_moe":  # as Qwen3.6 has it
        shapes |= {
            "mlp.experts.gate_up_proj": (EXPERTS, 2 * INNER, WIDTH),
            "mlp.experts.down_proj": (EXPERTS, WIDTH, INNER),
        }
    else:
        for index in range(EXPERTS):
            shapes |= mlp(f"mlp.experts.{index}", INNER)
    if is_qwen(family):
        return shapes | mlp("mlp.shared_expert", INNER) | {
            "mlp.shared_expert_gate.weight": (1, WIDTH)
        }  # fmt: skip
    shapes["mlp.gate.e_score_correction_bias"] = (EXPERTS,)
    return shapes | mlp("mlp.shared_experts", INNER)


def reference(family: str, published: Weights, embeddings: Array, hidden: Array) -> Array:
    """The hidden states [rows, width] of a head, all rows at once. embeddings, hidden: [rows,
    width]."""
    home, layer, (embedding, before, project, final) = _PLACES[family]
    weights = {
        name.removeprefix(home): np.array(value.astype(mx.float32), np.float64)
        for name, value in published.items()
    }
    if is_qwen(family):
        weights = {k: v + 1 if k.endswith("norm.weight") or k.startswith("pre_fc") else v
                   for k, v in weights.items()}  # fmt: skip
    inner = {k.removeprefix(layer): v for k, v in weights.items() if k.startswith(layer)}
    both = [_rms(embeddings, weights[f"{embedding}.weight"]),
            _rms(hidden, weights[f"{before}.weight"])]  # fmt: skip
    if family == "mimo":
        both.reverse()
    x = np.concatenate(both, -1) @ weights[f"{project}.weight"].T
    attend = _latent_attention if family == "deepseek_v3" else _attention
    x = x + attend(family, inner, _rms(x, inner["input_layernorm.weight"]))
    after = "pre_mlp_layernorm" if family == "mimo_v2_flash" else "post_attention_layernorm"
    x = x + _feed_forward(family, inner, _rms(x, inner[f"{after}.weight"]))
    return _rms(x, weights[f"{final}.weight"])


def _rms(x: Array, gain: Array, eps: float = 1e-5) -> Array:
    normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain
    return normed


def _rotate(x: Array, dims: int, base: float, *, pairs: bool = False) -> Array:
    """x: [rows, heads, size]. pairs: whether neighbours are rotated, or one half by the other."""
    angles = np.arange(len(x))[:, None] * base ** (-np.arange(0, dims, 2) / dims)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out = x.copy()
    first, second = (
        (slice(0, dims, 2), slice(1, dims, 2))
        if pairs
        else (slice(dims // 2), slice(dims // 2, dims))
    )
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    probabilities: Array = e / e.sum(-1, keepdims=True)
    return probabilities


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _attend(q: Array, k: Array, v: Array, window: int, sinks: Array | None) -> Array:
    """q: [rows, heads, size]; k, v with as many heads. Returns [rows, heads * size of v]."""
    rows = np.arange(len(q))
    seen = (rows[:, None] >= rows) & (rows[:, None] < rows + window)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(seen, scores, -1e30)
    if sinks is not None:
        extra = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
        scores = np.concatenate([scores, extra], -1)
    weights = _softmax(scores)[..., : len(q)]
    return np.asarray(np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1))


def _attention(family: str, w: dict[str, Array], x: Array) -> Array:
    rows = len(x)

    def project(name: str) -> Array:
        bias = w.get(f"self_attn.{name}_proj.bias", 0.0)
        return np.asarray(x @ w[f"self_attn.{name}_proj.weight"].T + bias)

    q, gate = project("q").reshape(rows, HEADS, -1), np.zeros((rows, 1))
    if is_qwen(family):
        q, gate = q[..., :HEAD], q[..., HEAD:].reshape(rows, -1)
    k, v = project("k").reshape(rows, KV_HEADS, -1), project("v").reshape(rows, KV_HEADS, -1)
    if "self_attn.q_norm.weight" in w:
        q, k = _rms(q, w["self_attn.q_norm.weight"]), _rms(k, w["self_attn.k_norm.weight"])
    base = 500.0 if family == "mimo_v2_flash" else 10000.0
    dims = HEAD if family == "mimo" else HEAD // 2
    q, k = _rotate(q, dims, base), _rotate(k, dims, base)
    k, v = (np.repeat(part, HEADS // KV_HEADS, 1) for part in (k, v))
    window = WINDOW if family == "mimo_v2_flash" else rows
    out = _attend(q, k, v, window, w.get("self_attn.attention_sink_bias"))
    out = out * _sigmoid(gate) if is_qwen(family) else out
    return np.asarray(out @ w["self_attn.o_proj.weight"].T)


def _latent_attention(family: str, w: dict[str, Array], x: Array) -> Array:
    rows = len(x)
    q = _rms(x @ w["self_attn.q_a_proj.weight"].T, w["self_attn.q_a_layernorm.weight"], 1e-6)
    q = (q @ w["self_attn.q_b_proj.weight"].T).reshape(rows, HEADS, -1)
    down = x @ w["self_attn.kv_a_proj_with_mqa.weight"].T
    latent = _rms(down[:, :_RANK], w["self_attn.kv_a_layernorm.weight"], 1e-6)
    up = (latent @ w["self_attn.kv_b_proj.weight"].T).reshape(rows, HEADS, -1)
    turned = _rotate(down[:, None, _RANK:], _ROPE, 10000.0, pairs=True)
    k = np.concatenate([up[..., :_NOPE], np.repeat(turned, HEADS, 1)], -1)
    q = np.concatenate([q[..., :_NOPE], _rotate(q[..., _NOPE:], _ROPE, 10000.0, pairs=True)], -1)
    out = _attend(q, k, up[..., _NOPE:], rows, None)
    return np.asarray(out @ w["self_attn.o_proj.weight"].T)


def _feed_forward(family: str, w: dict[str, Array], x: Array) -> Array:
    def mlp(home: str, x: Array) -> Array:
        gate, up = (x @ w[f"{home}.{name}_proj.weight"].T for name in ("gate", "up"))
        return np.asarray((gate * _sigmoid(gate) * up) @ w[f"{home}.down_proj.weight"].T)

    if "mlp.gate.weight" not in w:
        return mlp("mlp", x)
    if "mlp.experts.gate_up_proj" in w:
        for index in range(EXPERTS):
            gate, up = np.split(w["mlp.experts.gate_up_proj"][index], 2)
            parts = {"gate": gate, "up": up, "down": w["mlp.experts.down_proj"][index]}
            w |= {f"mlp.experts.{index}.{k}_proj.weight": v for k, v in parts.items()}
    logits = x @ w["mlp.gate.weight"].T
    scores = _softmax(logits) if is_qwen(family) else _sigmoid(logits)
    best = np.argsort(-scores - w.get("mlp.gate.e_score_correction_bias", 0.0), -1)[:, :2]
    out = np.zeros_like(x)
    for row, chosen in enumerate(best):
        shares = scores[row, chosen] / scores[row, chosen].sum()
        for index, share in zip(chosen, shares, strict=True):
            out[row] += share * mlp(f"mlp.experts.{index}", x[row])
    if is_qwen(family):
        return out + _sigmoid(x @ w["mlp.shared_expert_gate.weight"].T) * mlp(
            "mlp.shared_expert", x
        )
    return out * 1.5 + mlp("mlp.shared_experts", x)
