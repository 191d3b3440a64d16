"""Hostile files of models: refused before they take memory or time, or import modules."""

import importlib
import json
import os
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx_lm.utils
import pytest

from akunu_py.engine.engine import Engine
from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.load.safetensors import read_header
from akunu_py.models.store.mlx_directory import plan_directory
from tests.reliability.fuzz import MEGABYTE, memory_below
from tests.support.tiny_fim import byte_level, write_model

pytestmark = pytest.mark.usefixtures("own_directories")

END = "<|end|>"


@pytest.fixture
def altered(tmp_path: Path) -> Path:
    """A tiny model to alter."""
    return write_model(tmp_path / "altered", byte_level([END]), end=END)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("key", ["chat_template_type", "tool_parser_type", "tokenizer_class"])
@pytest.mark.parametrize("name", ["../x", "os", "", 5, ["a"], "pipeline"])
def test_no_module_is_imported_by_a_name_in_a_file(
    key: str, name: Any, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = Mock(side_effect=importlib.import_module)
    monkeypatch.setattr(importlib, "import_module", imported)
    edit(altered / "tokenizer_config.json", **{key: name})
    with pytest.raises(UnsupportedModel, match=key):
        Engine.load(altered)
    requested = [call.args[0] for call in imported.call_args_list]
    assert not [module for module in requested if not module.startswith("mlx_lm.models.")]


@pytest.mark.parametrize("count", [1000, 10**12])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_layers", "n_layer", "layer_types"])
def test_layers_are_counted_before_they_are_built(
    key: str, count: int, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("it was handed to mlx-lm")

    monkeypatch.setattr(mlx_lm.utils, "load_model", build)
    value = ["full_attention"] * min(count, 10**5) if key == "layer_types" else count
    edit(altered / "config.json", text_config={key: value})
    with pytest.raises(DamagedModel, match=rf"config\.json sets {key} to \d+ layers"):
        Engine.load(altered)


def test_a_tokenizer_of_more_tokens_than_the_weights(altered: Path) -> None:
    path = altered / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"zebra": 4000}
    path.write_text(json.dumps(content))
    for load in (plan_directory, Engine.load):
        with pytest.raises(DamagedModel, match="has token 4000, but the weights only 257"):
            load(altered)


@pytest.mark.long
def test_an_expression_that_panics(altered: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    edit(altered / "tokenizer.json", pre_tokenizer=split | {"invert": False})
    engine = Engine.load(altered)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json cannot encode this text"):
        engine.tokens.encode("a" * 40 + "b")


def test_long_header_is_refused_without_allocating(tmp_path: Path) -> None:
    """`test_fuzz_files.py` has other headers."""
    path = tmp_path / "large"
    path.write_bytes(struct.pack("<Q", 1 << 32))
    os.truncate(path, 1 << 33)
    with memory_below(MEGABYTE), pytest.raises(DamagedModel):
        read_header(path)
