"""Tiny checkpoints of random weights with MTP heads, in their published names and shapes.

A head consists of norms, a projection and a layer of mlx-lm's model of the family.
"""

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.base import create_causal_mask

from akunu_py.models.gguf.file import GgufFile
from akunu_py.models.gguf.tokenizer import plan_tokenizer
from akunu_py.models.mtp import HEAD_FILE
from tests.support.family_table import DELTA
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
_MIXED: dict[str, Any] = {
    **_EXPERTS, "num_experts": EXPERTS, "shared_expert_intermediate_size": INNER,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_QWEN3_5 = {**_COMMON, **DELTA, "mtp_num_hidden_layers": 1, "rope_parameters": {
    "type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
}}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_COMMON, **DELTA, **_MIXED},
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": {**_QWEN3_5, **_MIXED}},
    "glm4_moe": {**_COMMON, **_ROUTED, "use_qk_norm": True, "attention_bias": True,
                 "partial_rotary_factor": 0.5},
    # mlx-lm knows the head by the number of layers that DeepSeek-V3 has.
    "deepseek_v3": {**_COMMON, **_ROUTED, "num_hidden_layers": 61, "first_k_dense_replace": 60,
                    "num_key_value_heads": HEADS, "kv_lora_rank": _RANK,
                    "q_lora_rank": _RANK, "qk_rope_head_dim": _ROPE, "qk_nope_head_dim": _NOPE,
                    "v_head_dim": _VALUE, "moe_layer_freq": 1},
    "mimo": {**_COMMON, "num_nextn_predict_layers": 1},
    "mimo_v2_flash": {
        **_COMMON, **_ROUTED, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 0],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW, "layernorm_epsilon": 1e-5, "swa_rope_theta": 500.0,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV_HEADS, "v_head_dim": 24,
        "swa_head_dim": HEAD, "swa_v_head_dim": 24, "partial_rotary_factor": 0.5,
    },
    "step3p5": {
        **_COMMON, "num_attention_groups": KV_HEADS, "sliding_window": WINDOW,
        "layer_types": ["full_attention", *["sliding_attention"] * 3], "moe_layers_enum": "0",
        "rope_theta": [10000.0, *[500.0] * 3], "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0],
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1},
        "moe_num_experts": EXPERTS, "moe_top_k": 2, "moe_intermediate_size": INNER,
        "share_expert_dim": INNER, "swiglu_limits_shared": [0, 7.0, 7.0, 7.0],
        "num_nextn_predict_layers": 2,
    },
    "exaone_moe": {
        **_COMMON, **_EXPERTS, "num_experts": EXPERTS, "num_shared_experts": 1,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"],
        "is_moe_layer": [False, True],
    },
    "ernie4_5_moe": {
        **_COMMON, "use_bias": False, "moe_num_experts": EXPERTS, "moe_k": 2,
        "moe_intermediate_size": INNER, "moe_layer_start_index": 0, "moe_layer_end_index": 0,
        "moe_num_shared_experts": 1, "num_nextn_predict_layers": 1,
    },
    "nemotron_h": {
        **_COMMON, **_ROUTED, "hybrid_override_pattern": ["M", "*", "E"], "num_hidden_layers": 3,
        "mtp_hybrid_override_pattern": "*E", "layer_norm_epsilon": 1e-5, "use_bias": False,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_proj_bias": False, "ssm_state_size": 8,
        "conv_kernel": 4, "n_groups": 2, "mlp_bias": False, "use_conv_bias": True,
        "moe_shared_expert_intermediate_size": INNER, "moe_latent_size": INNER,
    },
}  # fmt: skip
_NEXTN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
_QWEN = ("mtp.", "layers.0.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"))
# Where a head's weights are: what its names begin with, what its layer's do behind that, {} for the
# number; the norm of the embedding, of the hidden state, the projection, and the norm at the end.
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
    "step3p5": ("model.layers.2.", "",
                ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")),
    "exaone_moe": _QWEN,
    "ernie4_5_moe": ("model.", "mtp_block.0.",  # and the target's norm
                     ("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0", "norm")),
    "nemotron_h": ("mtp.", "layers.{}.", ("layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj",
                                          "layers.1.final_layernorm")),
}  # fmt: skip
# The layers of a target that have the shapes of its head.
_LIKE_HEAD = {"deepseek_v3": (60,), "exaone_moe": (0,), "nemotron_h": (1, 2)}


_WINDOWED = ("mimo_v2_flash", "step3p5", "exaone_moe")


def is_qwen(family: str) -> bool:
    return family.startswith("qwen")


def has_offset_norms(family: str) -> bool:
    """Norms are published as gains minus one."""
    return is_qwen(family) or family == "step3p5"


def write_checkpoint(directory: Path, family: str, *, head: bool = True) -> Weights:
    """Writes a model as it is published into `directory`. Returns the weights of its head."""
    trunk = _published(family, _model(family, 0))
    found = _head_weights(family, 0)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[family] | {"model_type": family}))
    weights = trunk | found if head else trunk
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    return found


def write_chain(directory: Path, family: str) -> None:
    """Write a model whose head is the first of three in a chain."""
    weights = write_checkpoint(directory, family)
    for number in (1, 2):
        before, after = ("layers.2.", f"layers.{2 + number}.")
        if family == "mimo_v2_flash":
            before, after = "layers.0.", f"layers.{number}."
        other = _head_weights(family, number + 7)
        weights |= {name.replace(before, after): value for name, value in other.items()}
    mx.save_safetensors(str(directory / HEAD_FILE), weights)


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


@cache
def _model(family: str, seed: int) -> Any:
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[family] | {"model_type": family}))
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * 0.3 + (w.ndim == 1),
                          model.parameters()))  # fmt: skip
    return model


_STEP_NAMES = {
    ".mlp.switch_mlp.": ".moe.", ".mlp.gate.gate.": ".moe.gate.", ".mlp.share_expert.":
    ".share_expert.", ".mlp.gate.router_bias": ".moe.router_bias",
}  # fmt: skip


def _published(family: str, model: Any) -> Weights:
    published: Weights = {}
    for name, value in dict(tree_flatten(model.parameters())).items():
        for own, theirs in _STEP_NAMES.items() if family == "step3p5" else ():
            name = name.replace(own, theirs)
        name = name.replace("language_model.model.", "model.language_model.")
        name = name.replace("language_model.lm_head", "lm_head")
        if ".switch_mlp." in name and family == "qwen3_5_moe":
            name = name.replace("switch_mlp", "experts").removesuffix(".weight")
        elif ".switch_mlp." in name:
            for index in range(EXPERTS):
                expert = name.replace("switch_mlp", f"experts.{index}")
                expert = expert.replace(".fc1.", ".up_proj.").replace(".fc2.", ".down_proj.")
                published[expert] = value[index]
            continue
        elif has_offset_norms(family):
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


def _head_weights(family: str, seed: int) -> Weights:
    """Return a head's weights; gains minus one lie around -0.4, as in published heads.

    So do the hidden norm's gains of other families: negative gains are no sign of an offset there.
    """
    home, layer, (embedding, hidden, project, final) = _PLACES[family]
    draw = np.random.default_rng(seed)
    made: Weights = {}

    def add(name: str, gain: float, scale: float, *shape: int) -> None:
        made[f"{home}{name}.weight"] = mx.array(draw.normal(gain, scale, shape).astype(np.float32))

    for name in (embedding, hidden, *([] if family == "ernie4_5_moe" else [final])):
        is_negative = has_offset_norms(family) or name == hidden
        add(name, -0.4 if is_negative else 1.0, 0.1, WIDTH)
    add(project, 0.0, 0.3, WIDTH, 2 * WIDTH)
    if family in ("glm4_moe", "deepseek_v3"):  # copies of the target's
        for name in ("embed_tokens", "shared_head.head"):
            add(name, 0.0, 0.3, VOCABULARY, WIDTH)
    if family == "step3p5":  # its own
        add("transformer.shared_head.output", 0.0, 0.3, VOCABULARY, WIDTH)
    for name, value in _published(family, _model(family, seed + 1)).items():
        for number, like in enumerate(_LIKE_HEAD.get(family, (1,))):
            _, found, rest = name.partition(f"layers.{like}.")
            if family == "mimo_v2_flash":
                rest = rest.replace("post_attention_layernorm", "pre_mlp_layernorm")
            if found:
                made[f"{home}{layer.format(number)}{rest}"] = value
    return made


def reference(family: str, published: Weights, embeddings: Array, hidden: Array) -> Array:
    """Return the hidden states of a head for all rows at once; all states are [rows, width]."""
    home, _, (embedding, before, project, final) = _PLACES[family]
    if family == "ernie4_5_moe":
        published = _published(family, _model(family, 0)) | published

    def norm(x: Array, name: str) -> Array:
        gain = np.array(published[f"{home}{name}.weight"], np.float64) + has_offset_norms(family)
        normed: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
        return normed

    both = [norm(embeddings, embedding), norm(hidden, before)]
    if family == "mimo":
        both.reverse()
    x = np.concatenate(both, -1) @ np.array(published[f"{home}{project}.weight"]).T
    model = _model(family, 1)
    mask = create_causal_mask(len(x), window_size=WINDOW if family in _WINDOWED else None)
    states = mx.array(x)[None]
    for like in _LIKE_HEAD.get(family, (1,)):
        states = model.layers[like](states, mask, None)
    state = np.array(states[0], np.float64)
    return state if family == "step3p5" else norm(state, final)
