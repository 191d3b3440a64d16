"""Each family has equal output from GGUF and safetensors, and equals llama.cpp."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf.convert import FAMILIES, plan_import
from akunu_py.models.gguf.file import read_gguf
from tests.support.paths import GOLDEN
from tests.support.slow import cover
from tests.support.tiny_gguf import Array, load_float32, write_file
from tests.support.tiny_gguf_families import (
    CASES,
    FamilyCase,
    prompt,
    weights_of,
    write_directory,
    write_gguf,
)

EXPECTED = GOLDEN / "family_tokens.json"
NEAR_TIE = 0.02  # logits; between two summation orders of float32
LLAMA_CPP_LOGITS = 0.02  # its gelu is a table in half precision


def imported(directory: Path, source: Path) -> Path:
    target = directory / "imported"
    target.mkdir()
    plan_import(source).write(target)
    return target


def float32_logits(directory: Path) -> Array:
    return np.array(load_float32(directory)(mx.array([prompt()]))[0])


def test_all_families_are_covered() -> None:
    assert {case.architecture for case in CASES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logits_are_llama_cpps(tmp_path: Path, name: str) -> None:
    case, golden = CASES[name], json.loads(EXPECTED.read_text("utf-8"))["cases"][name]
    source = write_gguf(tmp_path / "x.gguf", case, weights_of(case))
    target = imported(tmp_path, source)
    config = json.loads((target / "config.json").read_text())
    assert config["model_type"] == case.config["model_type"]
    logits = float32_logits(target)
    margins = np.array(golden["margins"])
    same = logits.argmax(-1) == np.array(golden["tokens"])
    assert (same | (margins < NEAR_TIE)).all()
    np.testing.assert_allclose(logits[-1, :16], golden["logits"], atol=LLAMA_CPP_LOGITS)


@pytest.mark.parametrize(
    ("kind", "name"),
    cover(
        ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"],
        ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "phi3"],
    ),
)
def test_quantized_files_give_the_tokens_of_their_rounded_weights(
    tmp_path: Path, name: str, kind: str
) -> None:
    case = CASES[name]
    weights = weights_of(case)
    target = imported(tmp_path, write_gguf(tmp_path / "x.gguf", case, weights, kind))
    directory = write_directory(tmp_path / "directory", case, rounded(case, weights, kind))
    expected, actual = float32_logits(directory), float32_logits(target)
    ranked = np.sort(expected, -1)
    # Floats of bfloat16 (all of Gemma, BF16 norms of the others) round by 2**-9, half by 2**-12.
    coarse = kind == "BF16" or name == "gemma3"
    near = ranked[:, -1] - ranked[:, -2] < (0.1 if coarse else 0.01) * expected.std()
    assert ((actual.argmax(-1) == expected.argmax(-1)) | near).all()
    assert np.abs(actual - expected).mean() < (0.05 if coarse else 0.005) * expected.std()


def rounded(case: FamilyCase, weights: dict[str, Array], kind: str) -> dict[str, Array]:
    """Return the weights after a round trip through `kind` with the gguf package."""
    type_ = gguf.GGMLQuantizationType[kind]
    made = {}
    for name, values in weights.items():
        plain = values.ndim == 1 or name.endswith("mlp.gate.weight")
        made[name] = values if plain else gguf.dequantize(gguf.quantize(values, type_), type_)
    return made


def plan_with(
    directory: Path, name: str, keys: dict[str, Any], tables: dict[str, list[float]] | None = None
) -> None:
    case = CASES[name]
    changed = dataclasses.replace(case, keys=case.keys | keys, tables=tables or case.tables)
    plan_import(write_gguf(directory / "x.gguf", changed, weights_of(case)))


@pytest.mark.parametrize(("name", "keys", "message"), [
    ("gemma3", {"final_logit_softcapping": 30.0}, "softcapping"),
    ("qwen2", {"attention.key_length": 8}, "key_length|shape"),
    ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale"),
    ("qwen3moe", {"expert_shared_count": 1}, "expert_shared_count"),
    ("phi3", {"rope.scaling.type": "yarn"}, "scaling"),
    ("llama", {"rope.scaling.type": "longrope"}, "scaling"),
    ("qwen3", {"rope.dimension_count": 8}, "dimension_count"),
])  # fmt: skip
def test_settings_that_mlx_lm_ignores_are_rejected(
    tmp_path: Path, name: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises((UnsupportedModel, DamagedModel), match=message):
        plan_with(tmp_path, name, keys)


def test_frequency_tables_of_other_families_are_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="rope_factors_long"):
        plan_with(tmp_path, "qwen3", {}, {"rope_factors_long.weight": [2.0] * 16})


def test_an_unknown_architecture_names_those_known(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"'mamba'.*llama, qwen2, qwen3.*gemma3, phi3"):
        plan_import(write_file(tmp_path / "x.gguf", "mamba", {}, {}))


def test_split_files_are_read_as_one(tmp_path: Path) -> None:
    case = CASES["llama"]
    weights = weights_of(case)
    whole = read_gguf(write_gguf(tmp_path / "whole.gguf", case, weights))
    first = write_gguf(tmp_path / "m.gguf", case, weights, shard_tensors=6)
    assert first.name == "m-00001-of-00004.gguf"
    assert read_gguf(first).tensors.keys() == whole.tensors.keys()
    target = imported(tmp_path, first)
    directory = write_directory(tmp_path / "directory", case, weights)
    assert np.array_equal(float32_logits(target), float32_logits(directory))
    with pytest.raises(DamagedModel, match="m-00001-of-00004"):
        read_gguf(tmp_path / "m-00002-of-00004.gguf")
    (tmp_path / "m-00003-of-00004.gguf").unlink()
    with pytest.raises(DamagedModel, match=r"m-00003-of-00004.*fetch that part"):
        read_gguf(first)
    with pytest.raises(DamagedModel, match="00001-of-00004"):
        read_gguf(first.rename(tmp_path / "renamed.gguf"))
