"""Sessions on the real starter: fidelity, prefix reuse, ends, cancellation, refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import EmptyPrompt, PromptTooLong, UnknownModel, UsageError
from akunu_py.types import DraftMode, GenerateOptions, Message
from tests.support.engines import altered
from tests.support.jobs import chat_request
from tests.support.prompts import REWRITE, VARIED_PROMPTS

MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
# Code, and another script with repetition: 12 of its 24 tokens are accepted drafts. The slow tests
# take all prompts in all modes.
_QUICK: list[tuple[int, int, tuple[DraftMode, ...]]] = [(11, 8, ("fixed",)), (18, 24, MODES)]


def mlx_lm_greedy(engine: Engine, prompt: list[int], count: int) -> list[int]:
    steps = generate_step(mx.array(prompt), engine.model, max_tokens=count)
    tokens: list[int] = []
    for token, _ in steps:
        tokens.append(int(token))
        if token in engine.tokens.stop_tokens:
            break
    steps.close()
    return tokens


@pytest.mark.parametrize(
    ("index", "count", "modes"),
    [
        *_QUICK,
        *(
            pytest.param(index, 128, MODES, marks=pytest.mark.slow)
            for index in range(len(VARIED_PROMPTS))
        ),
    ],
)
def test_greedy_tokens_equal_mlx_lm(
    starter_engine: Engine,
    request: pytest.FixtureRequest,
    index: int,
    count: int,
    modes: tuple[DraftMode, ...],
) -> None:
    if modes == MODES:
        request.getfixturevalue("compiled")
    prompt = starter_engine.tokens.encode_chat([Message("user", VARIED_PROMPTS[index])])
    expected = mlx_lm_greedy(starter_engine, prompt, count)
    for mode in modes:
        options = GenerateOptions(max_tokens=count, draft=mode)
        answer = Session(starter_engine).generate(prompt, options).answer()
        assert list(answer.tokens) == expected, mode
        assert answer.stats.generated_tokens == len(expected)


def test_the_text_is_what_the_tokens_decode_to(starter_engine: Engine) -> None:
    prompt = starter_engine.tokens.encode_chat(
        [Message("user", "Write a line with emoji and Chinese.")]
    )
    generation = Session(starter_engine).generate(prompt, GenerateOptions(max_tokens=40))
    pieces = list(generation)
    text = "".join(piece.text for piece in pieces)
    shown = [token for token in generation.tokens if token not in starter_engine.tokens.stop_tokens]
    assert text == generation.text == starter_engine.tokens.tokenizer.decode(shown)
    assert [token for piece in pieces for token in piece.piece.tokens] == generation.tokens


def test_drafted_ranges_cover_what_was_accepted(starter_engine: Engine) -> None:
    prompt = starter_engine.tokens.encode_chat([Message("user", REWRITE)])
    generation = Session(starter_engine).generate(prompt, GenerateOptions(max_tokens=60))
    pieces = list(generation)
    assert generation.stats.accepted > 20
    for piece in pieces:
        assert all(0 <= start < end <= len(piece.text) for start, end in piece.drafted)
    # Every token of this text is whole characters, so each accepted one has a range of its own.
    assert sum(len(piece.drafted) for piece in pieces) == generation.stats.accepted
    assert generation.stats.target_passes < generation.stats.generated_tokens - 1
    assert generation.stats.tokens_per_pass > 2


def test_a_stop_token_ends_the_answer(starter_engine: Engine) -> None:
    session = Session(starter_engine)
    asked = [Message("user", "Answer with one word: yes or no?")]
    answer = chat_request(session, asked, GenerateOptions()).answer()
    assert answer.finish_reason == "stop"
    assert answer.tokens[-1] in starter_engine.tokens.stop_tokens
    assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_is_kept(shallow_starter: Engine, mode: DraftMode, count: int) -> None:
    options = GenerateOptions(max_tokens=count, draft=mode)
    answer = chat_request(
        Session(shallow_starter), [Message("user", "Tell me a story.")], options
    ).answer()
    assert len(answer.tokens) == count
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
def test_a_full_context_ends_the_answer(shallow_starter: Engine, mode: DraftMode) -> None:
    engine = altered(shallow_starter, context_length=48)
    session = Session(engine)
    generation = chat_request(
        session, [Message("user", "Tell me a story.")], GenerateOptions(draft=mode)
    )
    answer = generation.answer()
    assert answer.finish_reason == "context"
    assert answer.stats.prompt_tokens + len(answer.tokens) == 48


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_the_next_turn_reads_only_what_is_new(shallow_starter: Engine, mode: DraftMode) -> None:
    options = GenerateOptions(max_tokens=10, draft=mode)
    session = Session(shallow_starter)
    messages = [Message("user", "Name three rivers.")]
    first = chat_request(session, messages, options).answer()
    messages += [Message("assistant", first.text), Message("user", "And three mountains?")]
    second = chat_request(session, messages, options).answer()
    assert second.stats.cached_tokens >= first.stats.prompt_tokens
    fresh = chat_request(Session(shallow_starter), messages, options).answer()
    assert fresh.stats.cached_tokens == 0
    assert second.tokens == fresh.tokens
    # Going back to an earlier turn works too.
    again = chat_request(session, messages[:1], options).answer()
    assert again.tokens == first.tokens
    assert again.stats.cached_tokens == first.stats.prompt_tokens - 1


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_answer_keeps_its_tokens(shallow_starter: Engine, mode: DraftMode) -> None:
    options = GenerateOptions(max_tokens=24, draft=mode)
    session = Session(shallow_starter)
    messages = [Message("user", "Tell me a long story about a dragon.")]
    whole = chat_request(Session(shallow_starter), messages, options).answer()
    generation = chat_request(session, messages, options)
    for _ in itertools.islice(generation, 5):
        generation.cancel()
    assert generation.finish_reason == "cancelled"
    assert 1 <= len(generation.tokens) < 16
    assert whole.text.startswith(generation.text)
    assert chat_request(session, messages, options).answer().tokens == whole.tokens


@pytest.mark.long
def test_an_answer_that_is_left_does_not_spoil_the_next(shallow_starter: Engine) -> None:
    options = GenerateOptions(max_tokens=16)
    session = Session(shallow_starter)
    messages = [Message("user", "Tell me about the sea.")]
    pieces = iter(chat_request(session, messages, options))
    next(pieces)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    fresh = chat_request(Session(shallow_starter), messages, options).answer()
    assert chat_request(session, messages, options).answer().tokens == fresh.tokens


def test_reading_a_prompt_reports_and_can_be_cancelled(shallow_starter: Engine) -> None:
    prompt = shallow_starter.tokens.encode("word " * 600)
    generation = Session(shallow_starter).generate(prompt, GenerateOptions(max_tokens=4))
    seen = []
    for step in generation.steps():
        seen.append(step)
        if step == PrefillProgress(512, len(prompt) - 1):
            generation.cancel()
    assert generation.finish_reason == "cancelled"
    assert generation.tokens == []
    assert seen == [PrefillProgress(0, len(prompt) - 1), PrefillProgress(512, len(prompt) - 1)]


def test_refusals(shallow_starter: Engine, tmp_path: Path) -> None:
    session = Session(shallow_starter)
    with pytest.raises(EmptyPrompt):
        session.generate([], GenerateOptions())
    with pytest.raises(PromptTooLong, match="8192"):
        session.generate([5] * 8192, GenerateOptions())
    with pytest.raises(UsageError, match="max_tokens"):
        session.generate([5], GenerateOptions(max_tokens=0))
    with pytest.raises(UsageError, match="draft_tokens"):
        session.generate([5], GenerateOptions(draft_tokens=0))
    with pytest.raises(UnknownModel, match="no config"):
        Engine.load(tmp_path)
