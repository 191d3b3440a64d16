"""MLX checks no index: no token id that the weights lack may become one, wherever it comes from."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.completion.completer import Completer
from akunu_py.completion.request import CompleteOptions, CompletionRequest
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.token_ids import first_invalid, in_vocabulary
from akunu_py.errors import DamagedModel, UsageError
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.support.complete import complete
from tests.support.engines import altered
from tests.support.tiny_fim import byte_level, write_model

WEIGHTS = 258  # tokens that the weights have: the bytes and two markers
SURPLUS = [f"word{number}" for number in range(40)]  # what the tokenizer has besides
IDS = st.integers(-3, WEIGHTS + 60) | st.sampled_from([-(2**31), 2**31 - 1, 2**31, 2**40])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its tokenizer knows more tokens than its weights."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, byte_level(["<|end|>", "<|two|>"]), end="<|end|>")
    byte_level(["<|end|>", "<|two|>", *SURPLUS]).save(str(directory / "tokenizer.json"))
    engine = Engine.load(directory)
    assert engine.tokens.vocabulary == WEIGHTS < len(engine.tokens.tokenizer)
    return engine


@given(st.lists(IDS, max_size=8), st.integers(1, 300))
def test_what_is_outside_is_found(tokens: list[int], vocabulary: int) -> None:
    good = [0 <= token < vocabulary for token in tokens]
    assert first_invalid(tokens, vocabulary) == (good.index(False) if False in good else None)
    assert in_vocabulary(tokens, vocabulary) == [
        t for t, each in zip(tokens, good, strict=True) if each
    ]


@given(
    st.lists(st.tuples(IDS, st.floats(-9, 9)), max_size=6),
    st.lists(IDS, max_size=6).map(tuple),
    st.sampled_from([0.0, 0.8]),
)
def test_options_change_no_memory_but_the_logits(
    bias: list[tuple[int, float]], allowed: tuple[int, ...], temperature: float
) -> None:
    options = SamplingOptions(
        temperature=temperature, logit_bias=tuple(bias), allowed_tokens=allowed, seed=1
    )
    logits = mx.random.normal((3, WEIGHTS), key=mx.random.key(2))
    before = mx.array([1, 2, 3])
    sampled = Sampler(options).sample(logits, before, 5).tolist()
    valid = replace(
        options,
        logit_bias=tuple((token, by) for token, by in bias if 0 <= token < WEIGHTS),
        allowed_tokens=tuple(in_vocabulary(allowed, WEIGHTS)),
    )
    assert all(0 <= token < WEIGHTS for token in sampled)
    if valid.allowed_tokens or not allowed:
        assert sampled == Sampler(valid).sample(logits, before, 5).tolist()
    if valid.allowed_tokens:
        assert set(sampled) <= set(valid.allowed_tokens)


@given(IDS)
def test_prompts_and_biases_are_refused(engine: Engine, token: int) -> None:
    session = Session(engine)
    biased = GenerateOptions(max_tokens=1, sampling=SamplingOptions(logit_bias=((token, 1.0),)))
    if 0 <= token < WEIGHTS:
        session.generate([token], biased)
        return
    with pytest.raises(DamagedModel, match="its weights have only 258 tokens"):
        session.generate([5, token, 6], GenerateOptions())
    with pytest.raises(UsageError, match=f"has 258 tokens, no id {token}"):
        session.generate([5], biased)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("prefix", ["wor", "word1", "w", "x = wo"])
def test_completions_heal_with_tokens_that_the_weights_have(
    engine: Engine, prefix: str, temperature: float
) -> None:
    completer = Completer(engine, CompleteOptions(fim="none"))
    assert all(token < WEIGHTS for token in completer.code.compatible_tokens("wor"))
    assert len(completer.code.compatible_tokens("w")) > 0
    complete(completer, CompletionRequest(prefix, max_tokens=3, temperature=temperature))


def test_a_stop_token_that_the_weights_lack_is_never_drafted(engine: Engine) -> None:
    stops = frozenset({WEIGHTS + 20})
    session = Session(altered(engine, stop_tokens=stops))
    options = GenerateOptions(max_tokens=12, draft="fixed")
    plain = Session(engine).generate([5, 6, 7], replace(options, draft="off")).answer()
    context = [[5, 6, 7, plain.tokens[0]], [5, 6, 7, *plain.tokens[:2]]]
    assert session.generate([5, 6, 7], options, context).answer().tokens == plain.tokens
