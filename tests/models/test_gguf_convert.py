"""Reading GGUF files and converting them without loss."""

import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from akunu_py.models.gguf.file import read_gguf
from akunu_py.models.load.safetensors import read_header
from tests.support.tiny_gguf import Array, Tiny, finish
from tests.support.tiny_model import tiny_directory


def test_the_config_names_every_width(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path, Tiny(kind="Q4_0", embedding="Q8_0"))
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32, "bits": 4, "mode": "affine",
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }  # fmt: skip
    assert config["rms_norm_eps"] == 1e-5
    assert config["max_position_embeddings"] == 128
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2
    (tmp_path / "plain").mkdir()
    directory = tiny_directory(tmp_path / "plain", Tiny(kind="F16", embedding="F16"))
    assert "quantization" not in json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize(("kind", "embedding", "expected"), [
    ("Q4_1", "Q8_0", "F16"), ("Q5_0", "F32", "F16"), ("F32", "F32", "F32"),
    ("BF16", "BF16", "BF16"), ("Q4_0", "BF16", "BF16"),
])  # fmt: skip
def test_all_floats_have_one_type(tmp_path: Path, kind: str, embedding: str, expected: str) -> None:
    """A single float32 norm would make MLX compute everything in float32."""
    tiny = Tiny(kind=kind, embedding=embedding, exact_norms=False)
    tensors, _ = read_header(tiny_directory(tmp_path, tiny) / "model.safetensors")
    assert {entry["dtype"] for entry in tensors.values()} - {"U32"} == {expected}


def test_norms_beyond_half_precision_choose_bfloat(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, Array]) -> None:
        tensors["output_norm.weight"] *= np.float32(100_000)

    weights: Any = mx.load(str(tiny_directory(tmp_path, Tiny(edit=enlarge)) / "model.safetensors"))
    norm = weights["model.norm.weight"]
    assert norm.dtype == mx.bfloat16
    assert 65504 < mx.max(norm).item() < 200_000


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 1 << 31,
        "int32": -(1 << 30), "float32": 0.5, "bool": True, "string": "text", "uint64": 1 << 63,
        "int64": -(1 << 62), "float64": 0.1, "array": [1, 2, 3],
    }  # fmt: skip
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"my.{kind}", value)
    finish(writer)
    metadata = read_gguf(tmp_path / "x.gguf").metadata
    for kind, value in values.items():
        found = metadata[f"my.{kind}"]
        assert (list(found) if kind == "array" else found) == value, kind
