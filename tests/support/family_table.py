"""What mlx-lm's model families are built with, tiny: at least one for every mixture of cache kinds.

tests/engine/test_families.py checks that against mlx-lm's sources; tests/support/families.py
builds them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.models.cache import ConcatenateKVCache, QuantizedKVCache

from tests.support.tiny import VOCABULARY

WINDOW = 48  # positions of a sliding window or an attention chunk: far smaller than a run

# What most families call the same. A module takes the names it knows.
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "attention_bias": False,
    "sliding_window": WINDOW,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "num_shared_experts": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "use_bias": False, "use_conv_bias": True, "conv_kernel": 4, "n_groups": 2, "state_size": 8,
    "ssm_state_size": 8, "time_step_limit": (0.001, 100.0),
}  # fmt: skip
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """How to build one: the module of mlx-lm and what it needs beyond `COMMON`.

    inner: the name that the text model's arguments go under, where the module nests them.
    scale, embedding, seed: the random weights, chosen such that the output does not soon repeat
    itself. caches: another cache than the model's own.
    """

    module: str
    args: dict[str, Any] = field(default_factory=dict)
    inner: str | None = None
    scale: float = 0.3
    embedding: float = 0.3
    seed: int = 0
    caches: Callable[[], Any] | None = None


def _quantized(bits: int) -> Callable[[], Any]:
    return lambda: QuantizedKVCache(group_size=32, bits=bits)


FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "llama-sliding": Family("llama", {"layer_types": _SLIDING_AND_FULL}),
    "llama-kv8": Family("llama", {"head_dim": 32}, caches=_quantized(8)),
    "llama-kv4": Family("llama", {"head_dim": 32}, caches=_quantized(4)),
    "llama-concatenate": Family("llama", caches=ConcatenateKVCache),
    "qwen3": Family("qwen3", scale=1.2, seed=4),
    "gemma3_text": Family("gemma3_text", {"sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
    "gemma3n": Family(
        "gemma3n",
        {
            "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _SLIDING_AND_FULL * 2,
            "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8,
            "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "altup_num_inputs": 2,
            "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
            "laurel_rank": 8,
        },
        inner="text_config", scale=0.8, embedding=0.01, seed=2,
    ),
    "gpt_oss": Family("gpt_oss", {**_EXPERTS, "layer_types": _SLIDING_AND_FULL[::-1]}, scale=0.8),
    "llama4": Family(
        "llama4",
        {
            **_EXPERTS, "num_experts_per_tok": 1, "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW, "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64, "rope_scaling": None, "use_qk_norm": True,
            "floor_scale": 32,
        },
        inner="text_config",
    ),
    "deepseek_v3": Family("deepseek_v3", {**_EXPERTS, **_LATENT}),
    "deepseek_v32": Family(
        "deepseek_v32",
        {**_EXPERTS, **_LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": WINDOW},
    ),
    "minimax_m3_vl": Family(
        "minimax_m3_vl",
        {
            **_EXPERTS, "dense_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 8,
            "index_block_size": 16, "index_topk_blocks": 3,
            "layer_types": ["full_attention", "sparse"],
        },
        inner="text_config", scale=0.5, seed=1,
    ),
    "longcat_flash_ngram": Family(
        "longcat_flash_ngram",
        {
            **_EXPERTS, **_LATENT, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 32,
            "moe_topk": 2, "zero_expert_num": 1, "num_layers": 2, "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 2,
        },
    ),
    "deepseek_v41": Family(
        "deepseek_v41",
        {
            **_EXPERTS, **_LATENT, "num_hidden_layers": 3, "head_dim": 32, "o_groups": 2,
            "o_lora_rank": 16,
            "compress_ratios": (0, 4, 4),  # a window only, one that compresses, one that shares
            "kv_source_layer_ids": (1,), "index_source_layer_ids": (1,), "hc_mult": 2,
            "hc_sinkhorn_iters": 2, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 16,
        },
        scale=0.8,
    ),
    "iquestloopcoder": Family("iquestloopcoder", {"loop_window_size": WINDOW}),
    "mamba2": Family("mamba2", {**_MAMBA, "num_heads": 8, "time_step_rank": 4}),
    "rwkv7": Family(
        "rwkv7",
        {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
        seed=1,
    ),
    "qwen3_next": Family("qwen3_next", {**_EXPERTS, **DELTA}),
    "qwen3_5": Family("qwen3_5", {**DELTA}, inner="text_config"),
    "lfm2": Family(
        "lfm2",
        {
            "conv_bias": False, "conv_L_cache": 3, "block_dim": 32, "block_ff_dim": 64,
            "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1],
        },
        scale=0.5,
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_heads": 4, "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "jamba": Family(
        "jamba",
        {
            **_EXPERTS, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
            "expert_layer_period": 2, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2,
        },
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            **_EXPERTS, **_MAMBA, "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
            "mamba_proj_bias": False, "mlp_bias": False,
            "hybrid_override_pattern": ["M", "*", "-", "M"],
        },
    ),
    "gear": Family(
        "gear",
        {
            "num_hidden_layers": 3, "layer_types": ["conv_mixer", *_SLIDING_AND_FULL],
            "query_pre_attn_scalar": 8,
        },
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        {
            "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": WINDOW,
            "block_types": ["recurrent", "attention"], "num_key_value_heads": 1,
        },
    ),
    "baichuan_m1": Family("baichuan_m1", {"sliding_window_layers": [0], "conv_window": 2}, seed=1),
    "bailing_hybrid": Family(
        "bailing_hybrid",
        {**_EXPERTS, **_LATENT, "layer_group_size": 2, "group_norm_size": 2},
    ),
    "kimi_k3": Family(
        "kimi_k3",
        {
            **_EXPERTS, **_LATENT, "attn_res_block_size": 2, "activation_situ_beta": 1.0,
            "activation_situ_linear_beta": 1.0, "mla_use_output_gate": True,
            "routed_expert_hidden_size": 16, "num_hidden_layers": 4,
            "linear_attn_config": {
                "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
        },
        inner="text_config",
    ),
}  # fmt: skip

# One family for each mixture of cache kinds. What takes long is tested with these, and with all
# others in `make test-slow`.
ONE_OF_EACH_KIND = (
    "llama", "llama-sliding", "llama-kv8", "llama-concatenate", "llama4", "deepseek_v32",
    "falcon_h1", "deepseek_v41", "mamba2", "qwen3_next", "gear", "recurrent_gemma", "baichuan_m1",
)  # fmt: skip
