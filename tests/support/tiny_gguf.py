"""GGUF files, written with the gguf package, and tiny llamas with random weights."""

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
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": vocabulary(),
    "tokenizer.ggml.token_type": [_token_type(token) for token in vocabulary()],
    "tokenizer.ggml.merges": MERGES, "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0, "tokenizer.chat_template": TEMPLATE,
}  # fmt: skip


@dataclass
class Tiny:
    """What to write. Metadata of None is left out."""

    kind: str = "Q4_1"  # of matrices
    embedding: str = "Q8_0"
    exact_norms: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Array] = field(default_factory=dict)
    without: set[str] = field(default_factory=set)
    edit: Callable[[dict[str, Array]], None] = lambda tensors: None


def random_tensors(tiny: Tiny) -> dict[str, Array]:
    """Return the float32 tensors of a tiny llama by their names in GGUF."""
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
    """Write a tiny llama."""
    tiny = tiny or Tiny()
    metadata: dict[str, Any] = {
        "llama.block_count": LAYERS, "llama.context_length": CONTEXT,
        "llama.embedding_length": HIDDEN, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 10000.0, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    tensors = random_tensors(tiny) | tiny.extra
    kept = {name: values for name, values in tensors.items() if name not in tiny.without}
    kinds = {"token_embd.weight": tiny.embedding}
    return write_file(path, "llama", metadata | TOKENIZER | tiny.metadata, kept, tiny.kind, kinds)


def write_file(
    path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Array],
    kind: str = "F32", kinds: dict[str, str] | None = None, *, shard_tensors: int = 0,
) -> Path:  # fmt: skip
    """Write float32 matrices as `kind`, or as `kinds` says by name, and vectors as F32.

    shard_tensors: number of tensors in each part of a split file, 0 for one file. Returns the
    first part.
    """
    writer: Any = gguf.GGUFWriter(str(path), architecture, split_max_tensors=shard_tensors)
    adders = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
        str: writer.add_string, list: writer.add_array,
    }  # fmt: skip
    for key, value in metadata.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, values in tensors.items():
        if values.dtype != np.float32:
            writer.add_tensor(name, values)
            continue
        stored = "F32" if values.ndim == 1 else (kinds or {}).get(name, kind)
        type_ = gguf.GGMLQuantizationType[stored]
        writer.add_tensor(name, gguf.quantize(values, type_), raw_dtype=type_)
    finish(writer)
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def finish(writer: Any) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_float32(directory: Path) -> Any:
    """Load a model with mlx-lm, dequantized to float32 with float32 scales."""
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
