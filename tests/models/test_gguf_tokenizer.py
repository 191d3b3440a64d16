"""GGUF tokenizers equal llama.cpp's pre-tokenizers and the SentencePiece library."""

import io
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer

from akunu_py.errors import DamagedModel, UnsupportedModel
from akunu_py.models.gguf.file import GgufFile
from akunu_py.models.gguf.tokenizer import (
    PRE_TOKENIZERS,
    build_byte_pairs,
    plan_tokenizer,
    sentence_piece_merges,
)
from akunu_py.models.store.model_store import StoredModel
from tests.golden.texts import CODE, DIGITS, PROSE, SPACES, UNICODE, random_texts
from tests.support.paths import GOLDEN
from tests.support.starter_vocabulary import starter_vocabulary
from tests.support.tiny_gguf import Tiny, vocabulary
from tests.support.tiny_model import tiny_directory

EXPECTED = json.loads((GOLDEN / "pre_tokenizers.json").read_text("utf-8"))
TEXTS = [*PROSE, *DIGITS, *SPACES, *UNICODE, *CODE, *random_texts(150)]
RUNS = ["▁" * length for length in range(2, 17)] + ["\n" * length for length in range(1, 8)]
# Gemma's way (runs of spaces and lines as tokens, no space in front), and Llama's and Phi's.
KINDS: dict[str, dict[str, Any]] = {
    "gemma": {"add_dummy_prefix": False, "user_defined_symbols": ["<start_of_turn>", *RUNS]},
    "llama": {"add_dummy_prefix": True, "user_defined_symbols": ["<|user|>", "<|end|>"]},
}


@pytest.mark.parametrize("pre", EXPECTED["ids"])
def test_words_are_split_as_by_llama_cpp(starter: StoredModel, pre: str) -> None:
    tokenizer = build_byte_pairs(*starter_vocabulary(), PRE_TOKENIZERS[pre])
    wrong = [
        text
        for text, ids in zip(EXPECTED["texts"], EXPECTED["ids"][pre], strict=True)
        if tokenizer.encode(text).ids != ids
    ]
    assert not wrong


@pytest.fixture(scope="module")
def processors() -> dict[str, Any]:
    """SentencePiece models trained on the texts of the tests."""
    made = {}
    for name, options in KINDS.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*PROSE, *DIGITS, *UNICODE, *CODE] * 3), model_writer=model,
            model_type="bpe", vocab_size=1500, character_coverage=0.98, byte_fallback=True,
            split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True, minloglevel=2, **options,
        )  # fmt: skip
        made[name] = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return made


def metadata_of(name: str, processor: Any, **changes: Any) -> GgufFile:
    """Return the metadata that llama.cpp writes for a SentencePiece model."""
    ids = range(processor.vocab_size())
    user_defined = set(KINDS[name]["user_defined_symbols"])

    def kind(i: int) -> Any:
        kinds = {
            gguf.TokenType.UNKNOWN: processor.is_unknown(i),
            gguf.TokenType.CONTROL: processor.is_control(i),
            gguf.TokenType.BYTE: processor.is_byte(i),
            gguf.TokenType.USER_DEFINED: processor.id_to_piece(i) in user_defined,
        }
        return next((kind for kind, is_this in kinds.items() if is_this), gguf.TokenType.NORMAL)

    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 100,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([processor.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in ids], np.int32),
        "tokenizer.ggml.add_space_prefix": KINDS[name]["add_dummy_prefix"],
    } | changes
    return GgufFile(Path("x.gguf"), metadata, {})


@pytest.mark.parametrize("name", KINDS)
def test_tokens_equal_those_of_the_sentencepiece_library(
    processors: dict[str, Any], name: str
) -> None:
    processor = processors[name]
    tokenizer = plan_tokenizer(metadata_of(name, processor)).tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(text), text
        if "▁" not in text:
            assert tokenizer.decode(ids) == text


def test_texts_begin_with_the_bos_token(processors: dict[str, Any], tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    file = metadata_of("gemma", processors["gemma"], **{"tokenizer.chat_template": template})
    plan_tokenizer(file).write(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert chat == tokenizer.encode("Hi")
    assert tokenizer.eos_token_ids == {2}


def test_phi_3_special_tokens_drop_the_space_after_them(processors: dict[str, Any]) -> None:
    processor = processors["llama"]
    named = metadata_of("llama", processor, **{"general.name": "Phi-3 mini"})
    plain = metadata_of("llama", processor)
    text, bare = "<|user|>\n Hi<|end|>\n", "<|user|>Hi<|end|>"
    swallows, keeps = (plan_tokenizer(file).tokenizer for file in (named, plain))
    assert swallows.encode(text).ids == swallows.encode(bare).ids == keeps.encode(bare).ids
    assert len(keeps.encode(text).ids) > len(keeps.encode(bare).ids)


def test_end_of_turn_token_is_found_by_name(processors: dict[str, Any]) -> None:
    file = metadata_of("llama", processors["llama"])
    end = file.metadata["tokenizer.ggml.tokens"].index("<|end|>")
    file.metadata["tokenizer.ggml.token_type"][end] = gguf.TokenType.CONTROL
    assert plan_tokenizer(file).config_ids()["eos_token_id"] == sorted({2, end})


def test_pieces_of_equal_score_merge_from_the_left() -> None:
    merges = sentence_piece_merges({"a": 0.0, "aa": 0.0, "aaa": 0.0, "b": -1.0})
    assert merges == [("aa", "a"), ("a", "aa"), ("a", "a")]


def test_sentencepiece_without_byte_tokens_is_refused(processors: dict[str, Any]) -> None:
    file = metadata_of("llama", processors["llama"])
    file.metadata["tokenizer.ggml.token_type"][5] = gguf.TokenType.NORMAL
    with pytest.raises(UnsupportedModel, match="every byte"):
        plan_tokenizer(file)


@pytest.mark.parametrize("change", [
    {"tokenizer.ggml.scores": None}, {"tokenizer.ggml.unknown_token_id": 100_000},
    {"tokenizer.ggml.add_space_prefix": 1}, {"tokenizer.chat_template": 7},
])  # fmt: skip
def test_contradictions_are_damage(processors: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(DamagedModel):
        plan_tokenizer(metadata_of("llama", processors["llama"], **change))


def test_user_defined_tokens_stay_whole_but_are_not_special(tmp_path: Path) -> None:
    directory = tiny_directory(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("a<tool>b<|im_end|>").ids
    tokens = vocabulary()
    assert [tokens[i] for i in ids] == ["a", "<tool>", "b", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a<tool>b"


def test_an_end_of_turn_token_ends_answers_too(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    directory = tiny_directory(tmp_path, Tiny(metadata=ends))
    config = json.loads((directory / "config.json").read_text())
    assert config["eos_token_id"] == [0, 2]
    loaded = load_tokenizer(directory, eos_token_ids=config["eos_token_id"])
    assert loaded.eos_token_ids == {0, 2}
