"""Directories of models altered in every field: each is loaded and runs, or refused in one line.

No altered file may take memory or time before it is checked, nor have a module imported that it
names; whatever is raised beside our own errors fails the test.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_lm.utils
import pytest
from hypothesis import strategies as st

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, DamagedModel, UnsupportedModel
from akunu_py.models.load.mlx_directory import plan_directory
from akunu_py.types import GenerateOptions, Message, SamplingOptions
from tests.reliability.fuzz import changed, clear, damaged, explore, json_like, lengths
from tests.support.tiny_fim import byte_level, write_model

pytestmark = [pytest.mark.rotating, pytest.mark.usefixtures("own_directories")]

FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
)
END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with all the files that a directory may have."""
    directory = write_model(tmp_path_factory.mktemp("whole"), byte_level([END]), end=END)
    config = json.loads((directory / "config.json").read_text())
    more: dict[str, Any] = {
        "rope_theta": 1e4,
        "head_dim": 8,
        "rope_scaling": None,
        "attention_bias": False,
    }
    (directory / "config.json").write_text(json.dumps(config | more))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "chat_template_type": None, "tool_parser_type": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256]}))
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    return directory


@pytest.fixture
def altered(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "altered"))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def try_all(directory: Path) -> bool:
    """Whether the model can be imported and answers; our own errors are what else may come."""
    answered = [False]
    with clear():
        plan_directory(directory)
    with clear():
        engine = Engine.load(directory)
        engine.tokens.encode_chat([Message("user", "Hello")])
        options = GenerateOptions(max_tokens=2, sampling=SamplingOptions(temperature=0))
        answered += [True for _ in Session(engine).generate(engine.tokens.encode("Hello"), options)]
    return answered[-1]


def test_the_whole_one_runs(whole: Path) -> None:
    assert try_all(whole)


@lengths(12)
@pytest.mark.parametrize("name", FILES)
def test_settings_altered_in_any_field(name: str, examples: int, altered: Path) -> None:
    path = altered / name
    good = json.loads(path.read_text())

    def check(value: Any) -> None:
        path.write_text(json.dumps(value))
        try_all(altered)

    explore(check, examples, changed(good) | json_like(st.sampled_from(sorted(good))))


@pytest.mark.parametrize("name", FILES)
def test_settings_with_bytes_turned_over(name: str, altered: Path) -> None:
    path = altered / name
    good = path.read_bytes()

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try_all(altered)

    explore(check, 12, damaged(good))


@pytest.mark.parametrize("key", ["chat_template_type", "tool_parser_type", "tokenizer_class"])
@pytest.mark.parametrize("name", ["x", "../x", "os", "deepseek_v32.json", "", 5, ["a"], "pipeline"])
def test_no_module_is_imported_by_a_name_in_a_file(
    key: str, name: Any, altered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = importlib.import_module

    def note(module: str, package: str | None = None) -> Any:
        asked.append(module)
        return real(module, package)

    monkeypatch.setattr(importlib, "import_module", note)
    edit(altered / "tokenizer_config.json", **{key: name})
    with pytest.raises(UnsupportedModel, match=key):
        Engine.load(altered)
    assert not [module for module in asked if not module.startswith("mlx_lm.models.")]


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_unknown_fields_of_tokens_write_nothing(
    file: str, altered: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tokenizers library writes the names of those that it ignores to stdout, raw."""
    token = {"content": "<x>", "id": 257, "special": True, "\x1b[2J": 1}
    more = {"added_tokens": [token], "x_token": token, "added_tokens_decoder": {"257": token}}
    edit(altered / file, **more)
    with pytest.raises(DamagedModel, match="unknown field"):
        Engine.load(altered)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("count", [1000, 10**6, 10**12])
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


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 * 10**9)


@pytest.mark.parametrize("make", [_fifo, _zeros, _sparse])
@pytest.mark.parametrize("name", [*FILES, "chat_template.jinja", "model-2.safetensors"])
def test_what_is_no_file_of_its_kind(
    name: str, make: Callable[[Path], None], altered: Path
) -> None:
    (altered / name).unlink(missing_ok=True)
    make(altered / name)
    for load in (plan_directory, Engine.load):
        with pytest.raises(AkunuError):
            load(altered)


def test_an_endless_model_card(altered: Path) -> None:
    for make in (_fifo, _zeros, _sparse):
        make(altered / "README.md")
        assert plan_directory(altered).facts.license == ""
        (altered / "README.md").unlink()


def test_a_tokenizer_of_more_tokens_than_the_weights(altered: Path) -> None:
    path = altered / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {"zebra": 4000}
    path.write_text(json.dumps(content))
    for load in (plan_directory, Engine.load):
        with pytest.raises(DamagedModel, match="has token 4000, but the weights only 257"):
            load(altered)


def test_an_expression_that_panics(altered: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    edit(altered / "tokenizer.json", pre_tokenizer=split | {"invert": False})
    engine = Engine.load(altered)
    with pytest.raises(DamagedModel, match=r"tokenizer\.json cannot encode this text"):
        engine.tokens.encode("a" * 40 + "b")


def test_a_sentencepiece_model_with_a_long_piece(altered: Path) -> None:
    """transformers would take a piece of a million characters apart for hours."""
    from transformers.utils import sentencepiece_model_pb2_new as protobuf

    model = protobuf.ModelProto()
    for piece in ("<unk>", "a", "b" * 10**6):
        model.pieces.add(piece=piece, score=0.0)
    (altered / "tokenizer.model").write_bytes(model.SerializeToString())
    (altered / "tokenizer.json").unlink()
    for load in (plan_directory, Engine.load):
        with pytest.raises(DamagedModel, match=r"tokenizer\.model has a piece of 1000"):
            load(altered)
