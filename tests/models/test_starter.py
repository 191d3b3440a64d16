"""The starter model in the store: files, weights and tokenizer equal llama.cpp's."""

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from tests.support.paths import GOLDEN
from tests.support.tiny_gguf import load_float32

TOKENS = GOLDEN / "smollm2_tokens.json"
GREEDY = GOLDEN / "smollm2_llama_cpp_greedy.json"
# llama.cpp rounds activations to 8 bits; below this margin its choice and ours may differ.
NEAR_TIE = 0.2


def test_the_files_have_the_recorded_hashes(starter: StoredModel) -> None:
    model_store.verify(starter)
    assert starter.context_length == 8192
    assert starter.license == "Apache-2.0"
    assert starter.quantization == "Q4_1 x 210, Q8_0 x 1"


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_greedy_answers_equal_llama_cpps_up_to_near_ties(starter: StoredModel, count: int) -> None:
    answers = json.loads(GREEDY.read_text("utf-8"))["answers"][:count]
    assert len(answers) == count
    model = load_float32(starter.path)
    compared = 0
    for answer in answers:
        ids, output = answer["ids"], answer["output"]
        # One pass over prompt and answer equals decoding while both agree.
        logits = model(mx.array([ids + output[:-1]]))[0, len(ids) - 1 :]
        ours = np.array(mx.argmax(logits, -1)).tolist()
        for token, expected, margin in zip(ours, output, answer["margins"], strict=True):
            if token != expected:
                assert margin < NEAR_TIE, answer["prompt"]
                break
            compared += 1
    assert compared > 25 * count


@pytest.fixture(scope="module")
def tokenizer(starter: StoredModel) -> Any:
    return load_tokenizer(starter.path)


def test_tokens_equal_llama_cpps_for_every_text(tokenizer: Any) -> None:
    cases = json.loads(TOKENS.read_text("utf-8"))["cases"]
    assert len(cases) >= 150
    wrong = [
        case["text"]
        for case in cases
        if tokenizer.encode(case["text"], add_special_tokens=False) != case["ids"]
    ]
    assert not wrong


def test_texts_survive_encoding_and_decoding(tokenizer: Any) -> None:
    for case in json.loads(TOKENS.read_text("utf-8"))["cases"]:
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
