"""Reading GGUF files and converting them without loss."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import load_model

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models import gguf_import
from akunu_py.models.gguf import read_gguf
from akunu_py.models.gguf_import import import_gguf
from akunu_py.models.safetensors import read_header
from tests.tiny_gguf import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    Array,
    Tiny,
    random_tensors,
    reference_logits,
    write_tiny,
)

KINDS = ["F32", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


def convert(folder: Path, tiny: Tiny) -> tuple[Path, Path]:
    source = write_tiny(folder / "tiny.gguf", tiny)
    target = folder / "model"
    target.mkdir()
    import_gguf(source, target)
    return source, target


def load_arrays(path: Path) -> dict[str, mx.array]:
    arrays: Any = mx.load(str(path))
    assert isinstance(arrays, dict)
    return arrays


def numpy_weight(weights: dict[str, mx.array], module: str) -> Array:
    """A module's weight in float32, dequantised where it is quantised."""
    weight = weights[f"{module}.weight"]
    if f"{module}.scales" in weights:
        scales, biases = weights[f"{module}.scales"], weights[f"{module}.biases"]
        bits = weight.shape[-1] * 32 // (scales.shape[-1] * 32)
        weight = mx.dequantize(
            weight, scales.astype(mx.float32), biases.astype(mx.float32), group_size=32, bits=bits
        )
    return np.array(weight.astype(mx.float32))


def load_float32(folder: Path) -> Any:
    """The model as mlx-lm loads it, dequantised to float32 with float32 scales."""
    model, _ = load_model(folder)

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


@pytest.mark.parametrize("kind", [*KINDS, "BF16"])
def test_dequantised_weights_equal_the_gguf_packages(tmp_path: Path, kind: str) -> None:
    norms_too = kind != "BF16"  # there they are rounded to it
    source, folder = convert(tmp_path, Tiny(kind=kind, embedding=kind, tied=False))
    weights = load_arrays(folder / "model.safetensors")
    expected = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(source).tensors
    }
    modules = {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "output_norm": "model.norm",
        "blk.1.attn_v": "model.layers.1.self_attn.v_proj",
        "blk.1.attn_output": "model.layers.1.self_attn.o_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
        "blk.0.attn_norm": "model.layers.0.input_layernorm",
        "blk.1.ffn_norm": "model.layers.1.post_attention_layernorm",
    }
    for name, module in modules.items():
        if norms_too or "norm" not in name:
            actual = numpy_weight(weights, module)
            np.testing.assert_allclose(actual, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_bits_equal_those_of_mlxs_own_reader(tmp_path: Path, kind: str) -> None:
    source, folder = convert(tmp_path, Tiny(kind=kind, embedding=kind))
    ours, theirs = load_arrays(folder / "model.safetensors"), load_arrays(source)
    for name, module in {
        "token_embd": "model.embed_tokens",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.1.ffn_down": "model.layers.1.mlp.down_proj",
    }.items():
        for part in ("weight", "scales", "biases"):
            left, right = ours[f"{module}.{part}"], theirs[f"{name}.{part}"]
            assert left.dtype == right.dtype
            assert mx.array_equal(left, right).item()


@pytest.mark.parametrize("kind", KINDS)
def test_q_and_k_rows_are_put_back(tmp_path: Path, kind: str) -> None:
    original: dict[str, Array] = {}

    def permute(tensors: dict[str, Array]) -> None:
        """What llama.cpp's conversion from transformers does to Q and K."""
        for name, heads in {"attn_q": HEADS, "attn_k": KV_HEADS}.items():
            values = tensors[f"blk.0.{name}.weight"]
            original[name] = values
            pairs = values.reshape(heads, 2, HIDDEN // HEADS // 2, HIDDEN).swapaxes(1, 2)
            tensors[f"blk.0.{name}.weight"] = np.ascontiguousarray(pairs.reshape(values.shape))

    _, folder = convert(tmp_path, Tiny(kind=kind, embedding=kind, edit=permute))
    weights = load_arrays(folder / "model.safetensors")
    for name, values in original.items():
        module = f"model.layers.0.self_attn.{name[-1]}_proj"
        type_ = gguf.GGMLQuantizationType[kind]
        rounded = gguf.dequantize(gguf.quantize(values, type_), type_)
        np.testing.assert_allclose(numpy_weight(weights, module), rounded, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_a_forward_pass_on_the_gguf(tmp_path: Path, kind: str, tied: bool) -> None:
    source, folder = convert(tmp_path, Tiny(kind=kind, embedding=kind, tied=tied))
    ids = np.random.default_rng(1).integers(0, 250, 24).tolist()
    logits = np.array(load_float32(folder)(mx.array([ids]))[0])
    np.testing.assert_allclose(logits, reference_logits(source, ids), rtol=0, atol=2e-4)


def test_the_config_names_every_width(tmp_path: Path) -> None:
    _, folder = convert(tmp_path, Tiny(kind="Q4_0", embedding="Q8_0"))
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 128
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2


def test_plain_weights_get_no_quantisation_settings(tmp_path: Path) -> None:
    _, folder = convert(tmp_path, Tiny(kind="F16", embedding="F16"))
    assert "quantization" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize(
    ("kind", "embedding", "expected"),
    [
        ("Q4_1", "Q8_0", "F16"),
        ("F16", "F16", "F16"),
        ("Q5_0", "F32", "F16"),
        ("F32", "F32", "F32"),
        ("BF16", "BF16", "BF16"),
        ("Q4_0", "BF16", "BF16"),
    ],
)
def test_all_floats_have_one_type(tmp_path: Path, kind: str, embedding: str, expected: str) -> None:
    """A single float32 norm would make MLX compute everything in float32."""
    _, folder = convert(tmp_path, Tiny(kind=kind, embedding=embedding, exact_norms=False))
    header = read_header(folder / "model.safetensors")
    header.pop("__metadata__")
    assert {entry["dtype"] for entry in header.values()} - {"U32"} == {expected}


def test_norms_beyond_half_precision_choose_bfloat(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Array]) -> None:
        tensors["output_norm.weight"] *= np.float32(100_000)

    _, folder = convert(tmp_path, Tiny(edit=enlarge))
    assert read_header(folder / "model.safetensors")["model.norm.weight"]["dtype"] == "BF16"
    largest = float(mx.max(load_arrays(folder / "model.safetensors")["model.norm.weight"]).item())
    assert 65504 < largest < 200_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"llama.expert_count": 8}}, "expert_count"),
        ({"metadata": {"llama.rope.scaling.type": "spiral"}}, "scaling"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "dimension_count"),
        ({"metadata": {"llama.attention.sliding_window": 64}}, "sliding_window"),
        ({"metadata": {"llama.attention.scale": 0.5}}, "attention.scale"),
        ({"metadata": {"llama.final_logit_softcapping": 30.0}}, "softcapping"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "tokenizer"),
        ({"metadata": {"tokenizer.ggml.pre": "default"}}, "pre-tokenizer"),
        ({"metadata": {"tokenizer.ggml.pre": None}}, "pre-tokenizer"),
        ({"metadata": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, "attn_q.bias"),
    ],
)
def test_what_we_cannot_import_is_refused_before_writing(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", Tiny(**change))
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(UnsupportedModel, match=message) as caught:
        import_gguf(source, folder)
    assert "\n" not in str(caught.value)
    assert not list(folder.iterdir())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        gguf_import.plan_import(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "change",
    [
        {"without": {"blk.1.ffn_up.weight"}},
        {"without": {"token_embd.weight"}},
        {"metadata": {"llama.block_count": 2_000_000_000}},
        {"metadata": {"llama.block_count": 0}},
        {"metadata": {"llama.embedding_length": "many"}},
        {"metadata": {"llama.attention.head_count": 1_000}},
        {"metadata": {"llama.context_length": None}},
        {"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}},
        {"metadata": {"tokenizer.ggml.eos_token_id": 100_000}},
        {"metadata": {"tokenizer.ggml.eos_token_id": None}},
        {"metadata": {"tokenizer.ggml.merges": ["no such", "h e"]}},
        {"metadata": {"tokenizer.ggml.tokens": ["a", "a"]}},
        {"metadata": {"tokenizer.ggml.token_type": [1, 1]}},
        {"metadata": {"general.alignment": 48}},
        {"metadata": {"llama.rope.scaling.type": "linear"}},
        {"metadata": {"tokenizer.ggml.model": "llama"}},
        {"metadata": {"tokenizer.ggml.add_bos_token": "yes"}},
        {"metadata": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}},
        {"extra": {"rope_freqs.weight": np.ones(3, np.float32)}},
        {"extra": {"rope_freqs.weight": np.zeros(8, np.float32)}},
    ],
)
def test_contradictions_are_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", Tiny(**change))
    with pytest.raises(DamagedModel) as caught:
        gguf_import.plan_import(source)
    assert "\n" not in str(caught.value)


def test_a_file_cut_off_anywhere_is_damaged(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "tiny.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(whole), 997), len(whole) - 33]:
        cut.write_bytes(whole[:length])
        with pytest.raises(DamagedModel):
            gguf_import.plan_import(cut)


def test_absurd_counts_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    huge = 2**63
    key = struct.pack("<Q", 1) + b"k"
    for body in (
        struct.pack("<IQQ", 3, huge, 0),
        struct.pack("<IQQ", 3, 0, huge),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", huge),
        struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 8, huge),
        struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 4, huge),
        struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 8, huge),
        struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IIQ", 9, 9, 1),
        struct.pack("<IQQ", 3, 1, 0) + key + struct.pack("<I", 2**31),
        struct.pack("<IQQ", 3, 1, 0) + key + struct.pack("<IQIQ", 1, huge, 0, 0),
        struct.pack("<IQQ", 3, 1, 0) + key + struct.pack("<IQIQ", 1, 32, 0, huge),
    ):
        path.write_bytes(b"GGUF" + body + b"\0" * 64)
        with pytest.raises(DamagedModel):
            read_gguf(path)


def test_other_versions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "old.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(UnsupportedModel, match="v1"):
        read_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(UnsupportedModel, match="big-endian"):
        read_gguf(path)


def test_a_type_that_mlx_has_nothing_for_is_named(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf", Tiny(extra={"x": np.ones(32, np.int32)}))
    with pytest.raises(UnsupportedModel, match="I32"):
        read_gguf(source)


def test_random_tensors_are_repeatable() -> None:
    first, second = random_tensors(Tiny(seed=3)), random_tensors(Tiny(seed=3))
    assert all(np.array_equal(first[name], second[name]) for name in first)
