"""Text comes out whole: never half a character, and in sum what decoding at once gives."""

from __future__ import annotations

import random

import pytest

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.stream_decoder import Detokenizer

TEXTS = (
    "Plain words, and numbers 1234567890.",
    "  leading spaces\n\n\ttabs\r\nand line ends  ",
    "émigré naïve Ærøskøbing",
    "日本語のテキスト、漢字とかな。한국어도.",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇳🇴 e\u0301 \u200f שלום",
    "def f(x):\n    return {'a': [x**2 for _ in range(3)]}\n",
)


def stream(engine: Engine, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(engine.tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_equals_decoding_at_once(starter_engine: Engine, text: str) -> None:
    tokens = starter_engine.encode(text)
    pieces = stream(starter_engine, tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_many_tokens_is_held_until_it_is_whole(starter_engine: Engine) -> None:
    tokens = starter_engine.encode("🏳")
    assert len(tokens) > 1
    pieces = stream(starter_engine, tokens)
    assert pieces[: len(tokens)] == [""] * (len(tokens) - 1) + ["🏳"]


def test_random_tokens_lose_nothing(starter_engine: Engine) -> None:
    generator = random.Random(0)
    for _ in range(50):
        tokens = [generator.randrange(17, 49152) for _ in range(30)]
        expected = starter_engine.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        got = "".join(stream(starter_engine, tokens))
        # Where bytes are no UTF-8, how many U+FFFD stand for them is a matter of grouping.
        assert got.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_an_incomplete_end_is_given_out_at_the_end(starter_engine: Engine) -> None:
    tokens = starter_engine.encode("ok 🏳")[:-1]
    pieces = stream(starter_engine, tokens)
    assert "".join(pieces).startswith("ok ")
    assert pieces[-1].endswith("\ufffd")


def test_the_prompts_end_is_context(starter_engine: Engine) -> None:
    prompt, answer = (
        starter_engine.encode("The capital of France is"),
        starter_engine.encode(" Paris"),
    )
    detokenizer = Detokenizer(starter_engine.tokenizer, prompt[-1])
    assert "".join(detokenizer.add(token) for token in answer) == " Paris"
