"""Logprobs are those of the model at every place, however its tokens were drafted."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import LogprobSampler
from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
from tests.support.tiny_fim import load_tiny


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(Path(tmp_path_factory.mktemp("tiny")), ["<|end|>"])


@pytest.mark.long
@settings(max_examples=12)
@given(
    st.text("ab ", min_size=1, max_size=20),
    st.sampled_from(["auto", "fixed", "off"]),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 5),
)
def test_they_are_the_models(
    engine: Engine, text: str, draft: DraftMode, temperature: float, count: int
) -> None:
    prompt = engine.tokens.encode(text * 3)
    asked = SamplingOptions(
        temperature=temperature, seed=1, logprobs=count, logit_bias=((70, 2.0),), top_k=9
    )
    options = GenerateOptions(max_tokens=20, draft=draft, sampling=asked)
    generation = Session(engine).generate(prompt, options)
    generation.answer()
    logits = engine.model(mx.array([prompt + generation.tokens]))[0].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert len(generation.logprobs) == len(generation.tokens)
    for number, (token, found) in enumerate(
        zip(generation.tokens, generation.logprobs, strict=True)
    ):
        row = expected[len(prompt) - 1 + number]
        assert found.logprob == pytest.approx(float(row[token].item()), abs=1e-3)
        best = sorted(row.tolist(), reverse=True)[:count]
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-3)
    whole = "".join(found.text for found in generation.logprobs)
    if "\ufffd" not in whole:  # parts of characters
        assert whole == generation.text


def test_they_do_not_wait_for_the_pass_under_way(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any operation on an array would be launched behind the pass that runs by then."""
    asked = SamplingOptions(logprobs=3)
    sampler = LogprobSampler(asked, engine.tokens.tokenizer)
    logits = mx.random.normal((3, engine.tokens.vocabulary))
    tokens = sampler.sample(logits, mx.array([65, 66, 67]), 10).tolist()

    def launched(*_: object) -> None:
        raise AssertionError("an operation was launched")

    with monkeypatch.context() as patch:
        for name in ("__getitem__", "item", "astype", "__neg__", "__float__"):
            patch.setattr(mx.array, name, launched)
        found = sampler.pop_logprobs(10, tokens, 65)
    assert [len(each.top) for each in found] == [3, 3, 3]
    assert all(each.logprob == each.top[0][1] for each in found)
