"""Tiny llama GGUF files with random weights, and a forward pass of our own to hold imports against.

The forward pass is numpy in float32, in the GGUF's own layout (rotary pairs side by side, as
llama.cpp computes them), so it shares nothing with the conversion that it checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model
from tokenizers.pre_tokenizers import ByteLevel

Array = npt.NDArray[Any]
HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, CONTEXT = 64, 4, 2, 96, 2, 128
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<tool>"
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "in g", "Ġ a"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> list[str]:
    letters = sorted(ByteLevel.alphabet())
    tokens = [*CONTROL, *letters, *(merge.replace(" ", "") for merge in MERGES), USER_DEFINED]
    return tokens + [f"[unused{i}]" for i in range(-len(tokens) % 32)]


def _token_type(token: str) -> int:
    if token in CONTROL:
        return 3
    return 4 if token == USER_DEFINED else 5 if token.startswith("[unused") else 1


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": vocabulary(),
    "tokenizer.ggml.token_type": [_token_type(token) for token in vocabulary()],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.chat_template": TEMPLATE,
}


@dataclass
class Tiny:
    """What to write. `types` names how each tensor is stored, by its name's last part but one."""

    kind: str = "Q4_1"
    embedding: str = "Q8_0"
    exact_norms: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Array] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    edit: Callable[[dict[str, Array]], None] = lambda tensors: None


def random_tensors(tiny: Tiny) -> dict[str, Array]:
    """The float32 tensors of a tiny llama under their names in GGUF."""
    draw = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        values: Array = draw.standard_normal((rows, columns)) / np.sqrt(columns)
        return values.astype(np.float32)

    def norm() -> Array:
        values = draw.uniform(0.5, 1.5, HIDDEN)
        return values.astype(np.float16 if tiny.exact_norms else np.float32).astype(np.float32)

    size, keys = len(vocabulary()), KV_HEADS * HIDDEN // HEADS
    tensors = {"token_embd.weight": matrix(size, HIDDEN) * 4, "output_norm.weight": norm()}
    for layer in range(LAYERS):
        for name, values in {
            "attn_norm": norm(),
            "attn_q": matrix(HIDDEN, HIDDEN),
            "attn_k": matrix(keys, HIDDEN),
            "attn_v": matrix(keys, HIDDEN),
            "attn_output": matrix(HIDDEN, HIDDEN),
            "ffn_norm": norm(),
            "ffn_gate": matrix(INNER, HIDDEN),
            "ffn_up": matrix(INNER, HIDDEN),
            "ffn_down": matrix(HIDDEN, INNER),
        }.items():
            tensors[f"blk.{layer}.{name}.weight"] = values
    tiny.edit(tensors)
    return tensors


def write_tiny(path: Path, tiny: Tiny | None = None) -> Path:
    """Writes a tiny llama with the gguf package's own writer."""
    tiny = tiny or Tiny()
    writer = gguf.GGUFWriter(str(path), "llama")
    values: dict[str, Any] = (
        {
            "llama.block_count": LAYERS,
            "llama.context_length": CONTEXT,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": INNER,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.rope.freq_base": 10000.0,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
        }
        | TOKENIZER
        | tiny.metadata
    )
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in (random_tensors(tiny) | tiny.extra).items():
        if name in tiny.without:
            continue
        wanted = tiny.embedding if name in ("token_embd.weight", "output.weight") else tiny.kind
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else wanted]
        if tensor.dtype != np.float32:
            writer.add_tensor(name, tensor)
            continue
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    finish(writer)
    return path


def write_mamba(path: Path) -> Path:
    """Writes a file of an architecture that is not imported, with nothing in it."""
    finish(gguf.GGUFWriter(str(path), "mamba"))
    return path


def finish(writer: Any) -> None:
    """Writes all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any) -> None:
    """Gives a file the tiny tokenizer."""
    for key, value in TOKENIZER.items():
        _add(writer, key, value)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def load_float32(directory: Path) -> Any:
    """The model as mlx-lm loads it, dequantized to float32 with float32 scales."""
    model, _ = load_model(directory)

    def plain(module: Any) -> Any:
        if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return module
        linear = isinstance(module, nn.QuantizedLinear)
        new = nn.Linear(1, 1, bias=False) if linear else nn.Embedding(1, 1)
        new.weight = mx.dequantize(
            module.weight,
            module.scales.astype(mx.float32),
            module.biases.astype(mx.float32),
            group_size=module.group_size,
            bits=module.bits,
        )
        if "bias" in module:
            new.bias = module.bias
        return new

    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    model.update_modules(tree_unflatten([(name, plain(module)) for name, module in leaves]))
    model.set_dtype(mx.float32)
    return model
