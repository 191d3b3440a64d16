"""Tokens of answers to text, with stop sequences and thinking, and answers that are continued."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.text.stream_decoder import Detokenizer
from akunu_py.decoding.text.thinking import unfinished_thinking
from akunu_py.types import DraftMode, GenerateOptions, Message, SamplingOptions
from tests.support.jobs import chat_request
from tests.support.tiny_fim import byte_level, write_model

LENGTH = 28  # tokens of a senseless answer that contains all stop sequences below
TEXTS = (
    "  leading spaces\n\n\ttabs\r\nand newlines  ",
    "日本語のテキスト、漢字とかな。한국어도.",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇳🇴 e\u0301 \u200f שלום",
)


def stream(engine: Engine, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(engine.tokens.tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_the_whole_in_whole_characters(
    starter_engine: Engine, text: str
) -> None:
    pieces = stream(starter_engine, starter_engine.tokens.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_many_tokens_comes_with_its_last_one(starter_engine: Engine) -> None:
    tokens = starter_engine.tokens.encode("🏳")
    assert len(tokens) > 1
    pieces = stream(starter_engine, tokens)
    assert pieces[: len(tokens)] == [""] * (len(tokens) - 1) + ["🏳"]
    assert "".join(stream(starter_engine, tokens[:-1])) == "\ufffd"


def test_random_tokens_lose_nothing(starter_engine: Engine) -> None:
    generator = random.Random(0)
    decode = starter_engine.tokens.tokenizer.decode
    for _ in range(50):
        tokens = [generator.randrange(17, 49152) for _ in range(30)]
        expected = decode(tokens, clean_up_tokenization_spaces=False)
        got = "".join(stream(starter_engine, tokens))
        # The number of U+FFFD for invalid UTF-8 depends on the grouping.
        assert got.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_the_end_of_the_prompt_is_context(starter_engine: Engine) -> None:
    *_, last = starter_engine.tokens.encode("The capital of France is")
    detokenizer = Detokenizer(starter_engine.tokens.tokenizer, last)
    answer = starter_engine.tokens.encode(" Paris")
    assert "".join(map(detokenizer.add, answer)) == " Paris"


# Answers that were stopped in their thinking or after it, and are continued.
TURNS = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
CHATML = ("<|im_end|>", "<think>", "<|im_start|>", "</think>")
HARMONY = (
    "<|return|>", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"
)  # fmt: skip
# The markers, the end of the template, and what the model writes before and after its thinking.
TEMPLATES = {
    "opened": (CHATML, "<|im_start|>assistant\n<think>{{ '\n' }}", "", "\n</think>\n\n"),
    "by itself": (CHATML, "<|im_start|>assistant{{ '\n' }}", "<think>\n", "\n</think>\n\n"),
    "channels": (
        HARMONY,
        "<|start|>assistant",
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "off": (CHATML, "<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}", None, ""),
}
MESSAGES = [Message("user", "What does <think> mean?")]
THOUGHT, ANSWER = "First this.\nThen that", "So it is"


@pytest.fixture(scope="module", params=list(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    markers, end, *_ = TEMPLATES[request.param]
    turns = TURNS if markers == CHATML else TURNS.replace("im_start", "start").replace("im_", "")
    directory = tmp_path_factory.mktemp("model") / "m"
    write_model(directory, byte_level(markers), end=markers[0])
    (directory / "chat_template.jinja").write_text(turns + end)
    return Engine.load(Path(directory), name=request.param)


def partial(thinking: str, content: str = "") -> list[Message]:
    return [*MESSAGES, Message("assistant", content, thinking=thinking)]


def test_the_prompt_of_a_partial_answer_ends_with_it(model: Engine) -> None:
    prompt, tokenizer = model.tokens.encode_chat(MESSAGES), model.tokens.tokenizer
    *_, before, between = TEMPLATES[model.name]
    for end in range(1, len(THOUGHT) + 1):
        expected = "" if before is None else before + THOUGHT[:end]
        tokens = model.tokens.encode_chat(partial(THOUGHT[:end]))
        assert tokens == prompt + model.tokens.encode_text(expected)
    thinking = "" if before is None else before + THOUGHT + between
    for end in range(1, len(ANSWER) + 1):
        tokens = model.tokens.encode_chat(partial(THOUGHT, ANSWER[:end]))
        assert tokens == prompt + model.tokens.encode_text(thinking + ANSWER[:end])
        assert unfinished_thinking(tokenizer, tokens) is None
    opened = model.name.startswith("opened")
    assert unfinished_thinking(tokenizer, prompt) == (0 if opened else None)


@pytest.mark.parametrize("model", ["off"], indirect=True)
@pytest.mark.parametrize("mode", ["off", "fixed", "auto"])
def test_a_stop_sequence_ends_the_answer_before_it(model: Engine, mode: DraftMode) -> None:
    letters = tuple((token, 1000.0) for token in model.tokens.encode_text("abc"))
    sampling = SamplingOptions(1.0, seed=3, logit_bias=letters)
    options = GenerateOptions(60, mode, sampling=sampling)
    whole = chat_request(Session(model), MESSAGES, options).answer().text
    stop = whole[20:26]
    request = chat_request(Session(model), MESSAGES, replace(options, stop=("never", stop)))
    pieces = list(request)
    assert request.text == "".join(piece.text for piece in pieces) == whole[: whole.index(stop)]
    assert request.finish_reason == "stop"
    assert whole.index(stop) < len(request.tokens) == request.stats.generated_tokens < 60
    for piece in pieces:
        assert all(0 <= start < end <= len(piece.text) for start, end in piece.drafted)


@pytest.mark.parametrize("model", [name for name in TEMPLATES if name != "off"], indirect=True)
def test_continued_thinking_equals_uninterrupted_thinking_and_its_budget(model: Engine) -> None:
    letters = tuple((token, 1000.0) for token in model.tokens.encode_text("abcdefgh"))
    sampling, budget = SamplingOptions(logit_bias=letters), len(THOUGHT) + 5
    options = GenerateOptions(45, "off", sampling=sampling, thinking_budget=budget)
    whole = chat_request(Session(model), partial(THOUGHT), options).answer()
    assert len(whole.thinking) == 5
    for end in range(1, len(whole.thinking)):
        left = replace(options, max_tokens=options.max_tokens - end)
        messages = partial(THOUGHT + whole.thinking[:end])
        rest = chat_request(Session(model), messages, left).answer()
        assert whole.thinking[:end] + rest.thinking == whole.thinking
        assert rest.text == whole.text
    newline = tuple(model.tokens.encode_text("\n"))
    options = GenerateOptions(3, "off", sampling=SamplingOptions(allowed_tokens=newline))
    assert chat_request(Session(model), partial(THOUGHT), options).answer().thinking == "\n\n\n"
