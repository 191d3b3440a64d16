"""Converts a llama-family GGUF file into a folder that mlx-lm loads.

Owns the meaning of the metadata and of the tensor names: config.json, model.safetensors and,
through `gguf_tokenizer`, the tokenizer. The conversion is lossless: quantised weights keep their
bits, and float32 norms become float16 only where every value survives it (so that activations stay
in half precision). Refuses, before anything is written, any other architecture and any tensor or
setting that we would have to ignore (UnsupportedModel), and files that contradict themselves
(DamagedModel).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models import gguf_weights as weights
from akunu_py.models.gguf import GgufFile, Tensor, read_gguf
from akunu_py.models.gguf_tokenizer import TokenizerPlan, plan_tokenizer
from akunu_py.models.safetensors import Entry, write_safetensors

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import found out. `parameters` counts weights, `context_length` tokens."""

    context_length: int
    parameters: int
    quantisation: str


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """Everything checked and ready to be written."""

    file: GgufFile
    config: dict[str, Any]
    entries: list[Entry]
    tokenizer: TokenizerPlan
    facts: Imported

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def import_gguf(
    source: Path, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> Imported:
    """Converts the GGUF file `source` into the existing, empty `folder`.

    progress: hears the bytes written and their total.
    Raises UnsupportedModel or DamagedModel before anything is written; OSError passes through.
    """
    plan = plan_import(source)
    total = plan.nbytes
    write_safetensors(
        folder / "model.safetensors", plan.entries, lambda done: progress(done, total)
    )
    plan.tokenizer.write(folder)
    (folder / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", "utf-8")
    return plan.facts


def plan_import(source: Path) -> ImportPlan:
    """Reads and checks everything but the weights' values."""
    file = read_gguf(source)
    settings = _Settings(file)
    architecture = settings.text("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(
            f"{source.name} has the architecture {architecture[:40]!r}; akunu imports 'llama'"
        )
    tokenizer = plan_tokenizer(file)
    config = _llama_config(settings, tokenizer)
    names = _check_tensors(file, config)
    types = Counter(tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1)
    quantised = {
        names[tensor.name]: weights.BITS[tensor.type.name]
        for tensor in file.tensors.values()
        if tensor.type.name in weights.BITS
    }
    if quantised:
        config["quantization"] = _quantisation(quantised)
    half = any(type_ != "F32" for type_ in types)
    entries = [
        entry
        for tensor in file.tensors.values()
        for entry in _entries(file, tensor, names[tensor.name], config, half)
    ]
    parameters = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    described = ", ".join(f"{name} x {count}" for name, count in types.most_common())
    facts = Imported(config["max_position_embeddings"], parameters, described)
    return ImportPlan(file, config, entries, tokenizer, facts)


class _Settings:
    """Typed access to metadata, with errors that name the key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def text(self, key: str) -> str:
        value = self.file.metadata.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 to 2**31 - 1."""
        value = self.file.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise self._wrong(key, "a positive number", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.file.metadata.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise self._wrong(key, "a positive real number", value)
        # GGUF keeps float32: the shortest decimal that means the same one is what was meant.
        return float(str(np.float32(value)))

    def _wrong(self, key: str, expected: str, found: object) -> DamagedModel:
        shown = "nothing" if found is None else repr(found)[:60]
        return DamagedModel(
            f"{self.file.path.name}: expected {expected} for {key}, found {shown}; "
            "fetch the file again"
        )


def _llama_config(settings: _Settings, tokenizer: TokenizerPlan) -> dict[str, Any]:
    """mlx-lm's `llama` arguments, after a check that nothing in the metadata goes unheeded."""
    name, metadata = settings.file.path.name, settings.file.metadata
    hidden = settings.count("llama.embedding_length")
    heads = settings.count("llama.attention.head_count")
    head_dim = settings.count("llama.attention.key_length", hidden // heads or 1)
    refused = {
        "llama.expert_count": 0,
        "llama.attention.value_length": head_dim,
        "llama.rope.dimension_count": head_dim,
        "llama.rope.scaling.type": "none",
        "llama.rope.scale_linear": 1.0,
        "llama.attention.sliding_window": 0,
        "llama.attention.scale": 1 / math.sqrt(head_dim),
        "llama.logit_scale": 1.0,
        "llama.embedding_scale": 1.0,
        "llama.residual_scale": 1.0,
        "tokenizer.ggml.add_eos_token": False,
    }
    for key, expected in refused.items():
        if (found := metadata.get(key, expected)) != expected:
            raise UnsupportedModel(
                f"{name} sets {key} to {found!r:.60}; akunu imports llama models with {expected!r}"
            )
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": settings.count("llama.feed_forward_length"),
        "num_hidden_layers": settings.count("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": settings.count("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": settings.real("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": settings.real("llama.rope.freq_base", 10000.0),
        "rope_traditional": False,
        "max_position_embeddings": settings.count("llama.context_length"),
        "vocab_size": tokenizer.size,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in settings.file.tensors,
    }
    return config | tokenizer.config_ids()


def _check_tensors(file: GgufFile, config: dict[str, Any]) -> dict[str, str]:
    """Holds the tensors against the settings; gives each one's module in mlx-lm's model."""
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "token_embd": (config["vocab_size"], hidden),
        "output_norm": (hidden,),
        "output": (config["vocab_size"], hidden),
    }
    for short, module in _TOP_NAMES.items():
        if short != "output" or not config["tie_word_embeddings"]:
            expected[f"{short}.weight"] = (module, shapes[short])
    # More layers than tensors are a damaged number; do not spell out a billion names first.
    for layer in range(min(config["num_hidden_layers"], len(file.tensors))):
        for short, module in _LAYER_NAMES.items():
            full = f"model.layers.{layer}.{module}"
            expected[f"blk.{layer}.{short}.weight"] = (full, shapes[short])
    if missing := [name for name in expected if name not in file.tensors]:
        raise DamagedModel(
            f"{file.path.name} is damaged: {len(missing)} tensors are missing, the first is "
            f"{missing[0]}; fetch the file again"
        )
    for name, tensor in file.tensors.items():
        if name not in expected:
            raise UnsupportedModel(
                f"{file.path.name} has a tensor {name[:80]!r} that akunu's import would ignore"
            )
        if tensor.shape != expected[name][1]:
            raise DamagedModel(
                f"{file.path.name}: expected the shape {list(expected[name][1])} for {name}, "
                f"found {list(tensor.shape)}; fetch the file again"
            )
    if config["head_dim"] % 2 or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise DamagedModel(f"{file.path.name}: impossible attention heads in the metadata")
    return {name: module for name, (module, _) in expected.items()}


def _quantisation(bits: dict[str, int]) -> dict[str, Any]:
    """mlx-lm's quantisation settings: the commonest width, and every module that differs."""
    common = Counter(bits.values()).most_common(1)[0][0]
    settings: dict[str, Any] = {
        "group_size": weights.GROUP_SIZE,
        "bits": common,
        "mode": "affine",
    }
    for module, width in bits.items():
        if width != common:
            settings[module] = {"group_size": weights.GROUP_SIZE, "bits": width}
    return settings


def _entries(
    file: GgufFile, tensor: Tensor, module: str, config: dict[str, Any], half: bool
) -> list[Entry]:
    """What a tensor becomes in model.safetensors. `half`: the model's matrices are not float32."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = heads.get(module.rsplit(".", 1)[-1])

    def ordered(read: Callable[[GgufFile, Tensor], weights.Array]) -> weights.Array:
        values = read(file, tensor)
        return weights.unpermute(values, config[field]) if field else values

    if tensor.type.name in weights.BITS:
        *rows, columns = tensor.shape
        words = columns * weights.BITS[tensor.type.name] // 32
        groups = (*rows, columns // weights.GROUP_SIZE)
        return [
            Entry(f"{module}.weight", "U32", (*rows, words), partial(ordered, weights.packed)),
            Entry(f"{module}.scales", "F16", groups, partial(ordered, weights.scales)),
            Entry(f"{module}.biases", "F16", groups, partial(ordered, weights.biases)),
        ]
    dtype = tensor.type.name
    if half and len(tensor.shape) == 1 and weights.fits_half(weights.plain(file, tensor)):
        dtype = "F16"
    return [Entry(f"{module}.weight", dtype, tensor.shape, partial(ordered, weights.plain))]
