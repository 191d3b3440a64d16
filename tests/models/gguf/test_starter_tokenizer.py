"""A tokenizer built from GGUF metadata equals the original."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from akunu_py.models.gguf.convert import plan_import
from akunu_py.models.store.model_store import StoredModel
from tests.support.paths import GOLDEN
from tests.support.tiny_gguf import Tiny, vocabulary, write_tiny

EXPECTED = GOLDEN / "smollm2_tokens.json"


@pytest.fixture(scope="module")
def tokenizer(starter: StoredModel) -> Any:
    return load_tokenizer(starter.path)


def test_tokens_equal_llama_cpps_for_every_text(tokenizer: Any) -> None:
    cases = json.loads(EXPECTED.read_text("utf-8"))["cases"]
    assert len(cases) >= 150
    wrong = [
        case["text"]
        for case in cases
        if tokenizer.encode(case["text"], add_special_tokens=False) != case["ids"]
    ]
    assert not wrong


def test_nothing_is_added_by_default(tokenizer: Any) -> None:
    assert tokenizer.encode("Hello") == tokenizer.encode("Hello", add_special_tokens=False)


def test_texts_survive_encoding_and_decoding(tokenizer: Any) -> None:
    for case in json.loads(EXPECTED.read_text("utf-8"))["cases"]:
        # The vocabulary has no token for some control bytes; llama.cpp drops them as well.
        if all(ord(c) >= 32 or c in "\t\n\r" for c in case["text"]):
            assert tokenizer.decode(case["ids"]) == case["text"]


def test_special_tokens_and_the_template(tokenizer: Any) -> None:
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.has_chat_template
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_loading_needs_no_torch(tokenizer: Any) -> None:
    assert "torch" not in sys.modules


def test_user_defined_tokens_stay_whole_but_are_not_special(tmp_path: Path) -> None:
    plan_import(write_tiny(tmp_path / "tiny.gguf")).write(directory := _directory(tmp_path))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("a<tool>b<|im_end|>").ids
    tokens = vocabulary()
    assert [tokens[i] for i in ids] == ["a", "<tool>", "b", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a<tool>b"


def test_an_end_of_turn_token_ends_answers_too(tmp_path: Path) -> None:
    tiny = Tiny(
        metadata={"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2},
    )
    plan_import(write_tiny(tmp_path / "tiny.gguf", tiny)).write(directory := _directory(tmp_path))
    config = json.loads((directory / "config.json").read_text())
    assert config["eos_token_id"] == [0, 2]
    loaded = load_tokenizer(directory, eos_token_ids=config["eos_token_id"])
    assert loaded.eos_token_ids == {0, 2}


def test_digits_are_split_one_by_one_and_merges_are_ranked(tmp_path: Path) -> None:
    plan_import(write_tiny(tmp_path / "tiny.gguf")).write(directory := _directory(tmp_path))
    encoded = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("a the 123 ing")
    assert encoded.tokens == ["a", "Ġthe", "Ġ", "1", "2", "3", "Ġ", "ing"]


def _directory(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    return directory
