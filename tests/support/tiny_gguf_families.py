"""Tiny random-weight models of each family that GGUF import knows, as safetensors and as GGUF.

The weights are those of mlx-lm's classes. They are converted to GGUF as by llama.cpp: names come
from the gguf package, and changes of values are repeated here. Nothing is shared with our import.
"""

import importlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from tests.support.tiny_gguf import TOKENIZER, Array, vocabulary, write_file

CONTEXT, LAYERS, HEADS, KV_HEADS, INNER = 512, 2, 4, 2, 96


@dataclass(frozen=True)
class FamilyCase:
    """A family's tiny model."""

    architecture: str
    config: dict[str, Any]  # mlx-lm's
    keys: dict[str, Any] = field(default_factory=dict)  # more GGUF metadata, below the architecture
    tables: dict[str, list[float]] = field(default_factory=dict)  # tensors of rotary factors


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    return {
        "model_type": model_type, "hidden_size": 64, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT, "vocab_size": len(vocabulary()),
        "tie_word_embeddings": False, "eos_token_id": 2,
    } | changes  # fmt: skip


def _llama3_divisors() -> list[float]:
    """Return Llama 3.2's scaling of 8 frequencies, by the formula of its release."""
    divisors = []
    for i in range(8):
        wavelength = 2 * np.pi * 500000.0 ** (i / 8)
        smooth = (8192 / wavelength - 1) / 3
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(32.0)
        else:
            divisors.append(float(1 / ((1 - smooth) / 32 + smooth)))
    return divisors


_WIDE_KEYS = {"attention.key_length": 32, "attention.value_length": 32}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
_FACTORS = [1.0, 1.1, 1.3, 1.7, 2.5, 4.0]
_OWN_TABLE = [1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0, 7.0]

_OWN_SCALING = {
    "rope_type": "longrope", "original_max_position_embeddings": CONTEXT,
    "short_factor": _OWN_TABLE, "long_factor": _OWN_TABLE,
}  # fmt: skip
_LONG = {"type": "longrope", "long_factor": _FACTORS, "short_factor": _FACTORS}
CASES = {
    "llama": FamilyCase("llama", _config("llama")),
    "llama tied": FamilyCase("llama", _config("llama", tie_word_embeddings=True)),
    "llama wide heads": FamilyCase("llama", _config("llama", head_dim=32), _WIDE_KEYS),
    "llama 3.2": FamilyCase(
        "llama", _config("llama", rope_theta=500000.0, rope_scaling=_LLAMA3),
        tables={"rope_freqs.weight": _llama3_divisors()},
    ),
    "llama own table": FamilyCase(
        "llama", _config("llama", rope_scaling=_OWN_SCALING),
        tables={"rope_freqs.weight": _OWN_TABLE},
    ),
    "llama linear": FamilyCase(
        "llama", _config("llama", rope_scaling={"type": "linear", "factor": 8.0}),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "qwen2": FamilyCase("qwen2", _config("qwen2", tie_word_embeddings=True)),
    "qwen2 yarn": FamilyCase(
        "qwen2", _config("qwen2", rope_scaling=_YARN),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 128},
    ),
    "qwen3": FamilyCase("qwen3", _config("qwen3", head_dim=32), _WIDE_KEYS),
    "qwen3moe": FamilyCase(
        "qwen3moe",
        _config("qwen3_moe", num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1,
                mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True),
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma3": FamilyCase(
        "gemma3",
        _config("gemma3_text", num_hidden_layers=7, rope_theta=1000000.0, sliding_window=32,
                rope_local_base_freq=10000.0, query_pre_attn_scalar=16, sliding_window_pattern=6,
                tie_word_embeddings=True),
        {"attention.key_length": 16, "attention.value_length": 16,
         "attention.sliding_window": 32, "rope.freq_base": 1000000.0},
    ),
    "phi3": FamilyCase("phi3", _config("phi3")),
    "phi3 long": FamilyCase(
        "phi3",
        _config("phi3", partial_rotary_factor=0.75, original_max_position_embeddings=128,
                rope_scaling=_LONG),
        {"rope.dimension_count": 12, "rope.scaling.original_context_length": 128,
         "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(128))),
         "attention.sliding_window": 256},
        tables={"rope_factors_long.weight": _FACTORS, "rope_factors_short.weight": _FACTORS},
    ),
}  # fmt: skip


def weights_of(case: FamilyCase) -> dict[str, Array]:
    """Return random float32 parameters by mlx-lm's names, the same ones every time."""
    module = importlib.import_module(f"mlx_lm.models.{case.config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(case.config))
    draw = np.random.RandomState(0)  # its stream never changes
    parameters: Any = tree_flatten(model.parameters())
    made: dict[str, Array] = {}
    for name, value in sorted(parameters):
        if name == "lm_head.weight" and case.config["tie_word_embeddings"]:
            continue
        values = draw.standard_normal(value.shape)
        if name.endswith("norm.weight"):
            values = 0.2 * values + (0 if case.architecture == "gemma3" else 1)
        elif "embed_tokens" not in name:
            values *= 1.5 / np.sqrt(value.shape[-1])
        elif case.config["tie_word_embeddings"]:
            # Otherwise it would find the token that it has just read the likeliest.
            values *= 0.03 if case.architecture == "gemma3" else 0.2
        made[name] = values.astype(np.float32)
    return made


def write_directory(directory: Path, case: FamilyCase, weights: dict[str, Array]) -> Path:
    """Write config.json and model.safetensors as mlx-lm loads them, without a tokenizer."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(case.config))
    arrays = {name: mx.array(values) for name, values in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), arrays)
    return directory


def write_gguf(
    path: Path, case: FamilyCase, weights: dict[str, Array], kind: str = "F32",
    shard_tensors: int = 0,
) -> Path:  # fmt: skip
    """Write the GGUF file that llama.cpp's conversion would make of `weights`."""
    config, architecture = case.config, case.architecture
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    } | case.keys
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()} | TOKENIZER
    tensors = {table: np.array(values, np.float32) for table, values in case.tables.items()}
    arch = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for parameter, values in weights.items():
        known = parameter.replace("switch_mlp", "experts")
        target = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert target, parameter
        tensors[target] = as_llama_cpp(case, parameter, values)
    kinds = {name: "F32" for name in tensors if "ffn_gate_inp" in name}
    return write_file(
        path, architecture, metadata, tensors, kind, kinds, shard_tensors=shard_tensors
    )


def as_llama_cpp(case: FamilyCase, parameter: str, values: Array) -> Array:
    """Return a parameter's values after llama.cpp's conversion."""
    if case.architecture == "llama" and (found := re.search(r"\.([qk])_proj\.weight", parameter)):
        heads = HEADS if found[1] == "q" else KV_HEADS
        halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
    if case.architecture == "gemma3" and parameter.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def prompt() -> list[int]:
    """Return 80 tokens of text: longer than the tiny window of gemma3."""
    ids: list[int] = np.random.RandomState(1).randint(3, 260, 80).tolist()
    return ids
