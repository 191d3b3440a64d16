"""Tokens to text: whole characters only, stop sequences and thinking, with and without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from akunu_py.decoding.generate.session import Request, Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.text.stream_decoder import Detokenizer
from akunu_py.errors import UsageError
from akunu_py.types import DraftMode, GenerateOptions, Message
from tests.support.command import assert_one_line_error, run_here
from tests.support.engines import altered
from tests.support.jobs import chat_request
from tests.support.prompts import REWRITE
from tests.support.slow import cover

MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
LENGTH = 28  # tokens of a senseless answer in which all stop sequences below come
TEXTS = (
    "Plain words, and numbers 1234567890.",
    "  leading spaces\n\n\ttabs\r\nand newlines  ",
    "émigré naïve Ærøskøbing",
    "日本語のテキスト、漢字とかな。한국어도.",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇳🇴 e\u0301 \u200f שלום",
    "def f(x):\n    return {'a': [x**2 for _ in range(3)]}\n",
)


def stream(engine: Engine, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(engine.tokens.tokenizer)
    return [*(detokenizer.add(token) for token in tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_streaming_equals_decoding_at_once(starter_engine: Engine, text: str) -> None:
    tokens = starter_engine.tokens.encode(text)
    pieces = stream(starter_engine, tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_many_tokens_is_held_until_it_is_whole(starter_engine: Engine) -> None:
    tokens = starter_engine.tokens.encode("🏳")
    assert len(tokens) > 1
    pieces = stream(starter_engine, tokens)
    assert pieces[: len(tokens)] == [""] * (len(tokens) - 1) + ["🏳"]


def test_random_tokens_lose_nothing(starter_engine: Engine) -> None:
    generator = random.Random(0)
    for _ in range(50):
        tokens = [generator.randrange(17, 49152) for _ in range(30)]
        expected = starter_engine.tokens.tokenizer.decode(
            tokens, clean_up_tokenization_spaces=False
        )
        got = "".join(stream(starter_engine, tokens))
        # Where bytes are no UTF-8, how many U+FFFD stand for them is a matter of grouping.
        assert got.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_an_incomplete_end_is_given_out_at_the_end(starter_engine: Engine) -> None:
    tokens = starter_engine.tokens.encode("ok 🏳")[:-1]
    pieces = stream(starter_engine, tokens)
    assert "".join(pieces).startswith("ok ")
    assert pieces[-1].endswith("\ufffd")


def test_the_prompts_end_is_context(starter_engine: Engine) -> None:
    prompt, answer = (
        starter_engine.tokens.encode("The capital of France is"),
        starter_engine.tokens.encode(" Paris"),
    )
    detokenizer = Detokenizer(starter_engine.tokens.tokenizer, prompt[-1])
    assert "".join(detokenizer.add(token) for token in answer) == " Paris"


Answering = Callable[..., Request]


@pytest.fixture(scope="module")
def generation(shallow_starter: Engine, tmp_path_factory: pytest.TempPathFactory) -> Answering:
    """Answers the same prompt in a new session each, which is given the prompt as read already."""
    messages = [Message("user", REWRITE)]
    session, prompt_read = (
        Session(shallow_starter),
        tmp_path_factory.mktemp("read") / "x.safetensors",
    )
    chat_request(session, messages, GenerateOptions(max_tokens=1)).answer()
    session.save_prompt_cache(prompt_read)

    def generation(options: GenerateOptions, engine: Engine = shallow_starter) -> Request:
        session = Session(engine)
        session.load_prompt_cache(prompt_read)
        return chat_request(session, messages, options)

    return generation


@pytest.fixture(scope="module")
def whole(generation: Answering) -> str:
    return generation(GenerateOptions(max_tokens=LENGTH)).answer().text


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "stop"), cover(MODES, ["ChannelTypeMeta", "nfoIntfCh", "fireh", "rom"])
)
def test_a_stop_sequence_ends_the_answer_before_it(
    shallow_starter: Engine, generation: Answering, whole: str, mode: DraftMode, stop: str
) -> None:
    assert stop in whole
    made = generation(GenerateOptions(max_tokens=LENGTH, draft=mode, stop=("never said", stop)))
    pieces = list(made)
    assert made.text == whole[: whole.index(stop)]
    assert "".join(piece.text for piece in pieces) == made.text
    assert made.finish_reason == "stop"
    assert stop in shallow_starter.tokens.tokenizer.decode(made.tokens)
    assert len(made.tokens) == made.stats.generated_tokens < LENGTH
    for piece in pieces:
        assert all(0 <= start < end <= len(piece.text) for start, end in piece.drafted)


@pytest.mark.long
def test_what_looked_like_a_stop_sequence_is_given_out(generation: Answering, whole: str) -> None:
    almost = whole[-20:] + "¶"
    made = generation(GenerateOptions(max_tokens=LENGTH, stop=(almost,)))
    assert made.answer().text == whole
    assert made.finish_reason == "length"


@pytest.mark.long
def test_the_next_turn_after_a_stop_is_right(shallow_starter: Engine) -> None:
    session, messages = Session(shallow_starter), [Message("user", REWRITE)]
    whole = chat_request(session, messages, GenerateOptions(max_tokens=16)).answer().text
    options = GenerateOptions(max_tokens=40, stop=(whole[-6:],))
    first = chat_request(session, messages, options).answer()
    assert first.finish_reason == "stop"
    messages += [Message("assistant", first.text), Message("user", "Say it again.")]
    plain = GenerateOptions(max_tokens=8)
    assert (
        chat_request(session, messages, plain).answer().tokens
        == chat_request(Session(shallow_starter), messages, plain).answer().tokens
    )


class Reasoner:
    """The starter's tokenizer with two texts of its answer as the markers of a thinking block."""

    def __init__(self, tokenizer: Any, start: str, end: str) -> None:
        self._tokenizer = tokenizer
        self.has_thinking, self.think_start, self.think_end = True, start, end
        self.think_start_tokens = self.think_end_tokens = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_thinking_is_separated(
    shallow_starter: Engine, generation: Answering, whole: str, mode: DraftMode
) -> None:
    start, end, stop = whole[:9], "MetaInfo", "peIntfCh"
    thought = whole[len(start) : whole.index(end)].lstrip("\r\n")
    answer = whole[whole.index(end) + len(end) :].lstrip("\r\n")
    tokenizer = Reasoner(shallow_starter.tokens.tokenizer, start, end)
    engine = altered(shallow_starter, tokenizer=tokenizer)
    # A stop sequence that comes in the thinking does not end it.
    options = GenerateOptions(max_tokens=LENGTH, draft=mode, stop=(stop,))
    made = generation(options, engine)
    pieces = list(made)
    assert made.thinking == "".join(piece.thinking for piece in pieces) == thought
    assert made.text == "".join(piece.text for piece in pieces) == answer
    assert stop in thought
    assert stop not in answer


@pytest.mark.usefixtures("loaded_shallow_starter")
def test_an_empty_stop_is_refused(generation: Answering) -> None:
    with pytest.raises(UsageError, match="stop"):
        generation(GenerateOptions(stop=("",)))
    assert_one_line_error(run_here("run", "hi", "--stop", ""), 2, "stop")
