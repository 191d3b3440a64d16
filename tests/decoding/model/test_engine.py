"""The real starter: its tokens equal those of mlx-lm, its text is what the tokens decode to."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.types import DraftMode, GenerateOptions, Message
from tests.support.jobs import chat_request
from tests.support.prompts import REWRITE, VARIED_PROMPTS
from tests.support.slow import slow

MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
# Code, and another script with repetition: 12 of its 24 tokens are accepted drafts.
CASES = [(11, 8, ("fixed",)), (18, 24, MODES)]


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
    "case", [*CASES, *slow(*((index, 128, MODES) for index in range(len(VARIED_PROMPTS))))]
)
def test_greedy_tokens_equal_mlx_lm(
    starter_engine: Engine,
    request: pytest.FixtureRequest,
    case: tuple[int, int, tuple[DraftMode, ...]],
) -> None:
    index, count, modes = case
    if modes == MODES:
        request.getfixturevalue("compiled")
    prompt = starter_engine.tokens.encode_chat([Message("user", VARIED_PROMPTS[index])])
    expected = mlx_lm_greedy(starter_engine, prompt, count)
    for mode in modes:
        options = GenerateOptions(max_tokens=count, draft=mode)
        answer = Session(starter_engine).generate(prompt, options).answer()
        assert list(answer.tokens) == expected, mode
        assert answer.stats.generated_tokens == len(expected)


def test_pieces_join_to_the_decoded_text_and_mark_accepted_drafts(starter_engine: Engine) -> None:
    prompt = starter_engine.tokens.encode_chat([Message("user", REWRITE)])
    request = Session(starter_engine).generate(prompt, GenerateOptions(max_tokens=60))
    pieces = list(request)
    tokenizer, stops = starter_engine.tokens.tokenizer, starter_engine.tokens.stop_tokens
    shown = [token for token in request.tokens if token not in stops]
    text = "".join(piece.text for piece in pieces)
    assert text == request.text == tokenizer.decode(shown)
    assert [token for piece in pieces for token in piece.piece.tokens] == request.tokens
    assert request.stats.accepted > 20
    for piece in pieces:
        assert all(0 <= start < end <= len(piece.text) for start, end in piece.drafted)
    # Every token of this text is whole characters, so each accepted one has a range of its own.
    assert sum(len(piece.drafted) for piece in pieces) == request.stats.accepted
    assert request.stats.target_passes < request.stats.generated_tokens - 1
    assert request.stats.tokens_per_pass > 2


def test_a_stop_token_ends_the_answer_and_is_not_shown(starter_engine: Engine) -> None:
    messages = [Message("user", "Answer with one word: yes or no?")]
    answer = chat_request(Session(starter_engine), messages, GenerateOptions()).answer()
    assert answer.finish_reason == "stop"
    assert answer.tokens[-1] in starter_engine.tokens.stop_tokens
    assert "<|im_end|>" not in answer.text
