"""Networks that do not pay on a real model: the starter's copy in 2 bits, and its first layers. The
answers are its own, what they take is learned, and they are left alone."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.decoding.engine import Engine
from akunu_py.decoding.networks.exit import ExitNetwork
from akunu_py.decoding.networks.model import ModelNetwork
from akunu_py.decoding.session import Session
from akunu_py.types import Answer, DraftMode, GenerateOptions, Message, SamplingOptions

pytestmark = pytest.mark.slow

TOKENS = 40
PROMPTS = ("Why is the sky blue?", "Write a Python function that adds two numbers.")
SAMPLINGS = (SamplingOptions(), SamplingOptions(temperature=0.7, seed=7))


@pytest.fixture(scope="module")
def copied(starter_engine: Engine) -> Engine:
    small = Engine.load(starter_engine.path, name="2 bits")
    rounded = [  # kept in float32: MLX's kernels for 2 bits are slow on a processor
        (name, mx.dequantize(*mx.quantize(weight, 64, 2), 64, 2) if weight.ndim == 2 else weight)
        for name, weight in tree_flatten(small.model.parameters())
    ]
    small.model.load_weights(rounded)
    engine = starter_engine.drafted_by(small)
    assert engine.draft_model is not None
    return replace(engine, draft_model=replace(engine.draft_model, share=0.2))  # it is worth a try


@pytest.fixture(scope="module")
def truth(starter_engine: Engine) -> list[tuple[int, ...]]:
    plain = Session(starter_engine)
    return [
        answered(plain, prompt, GenerateOptions(TOKENS, "off", sampling=sampling)).tokens
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    ]


@pytest.mark.parametrize("mode", ["auto", "model", "exit"])
def test_what_does_not_pay_is_left_alone(
    mode: DraftMode, copied: Engine, truth: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    guesses = 0

    def counted(network: ModelNetwork | ExitNetwork) -> tuple[int, float]:
        nonlocal guesses
        guesses += 1
        return guess(network)  # type: ignore[arg-type]

    kind = ExitNetwork if mode == "exit" else ModelNetwork
    guess = kind.guess
    monkeypatch.setattr(kind, "guess", counted)
    session, made, passes, told = Session(copied), [], [], []
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
            options = GenerateOptions(TOKENS, mode, sampling=sampling)
            before = guesses
            found = answered(session, prompt, options)
            told.append(found.tokens)
            made.append(guesses - before)
            passes.append(found.stats.target_passes)
    assert told == truth
    (learned,) = session.drafting.networks.values()
    print(mode, "guesses", made, "passes", passes, "expected", learned.expected[:2])
    assert learned.timed
    assert learned.curve.measured(1)
    # In an answer or two, where a token of the first layers takes nine tenths of a step.
    assert sum(made[:2])
    assert sum(made[2:]) <= max(2, 0.02 * sum(passes[2:]))  # and that was it


def answered(session: Session, prompt: str, options: GenerateOptions) -> Answer:
    return session.chat([Message("user", prompt)], options).answer()
