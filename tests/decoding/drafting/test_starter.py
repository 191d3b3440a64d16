"""Networks that do not pay on a real model: the starter's copy in 2 bits, and its first layers. The
answers are its own, what they take is learned, and they are left alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.bench.curve import parse_curve
from akunu_py.decoding.drafting.early_exit import ExitDrafter
from akunu_py.decoding.drafting.neural import ModelDrafter
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.types import Answer, DraftMode, GenerateOptions, Message, SamplingOptions
from tests.support.jobs import chat_request

pytestmark = pytest.mark.slow

TOKENS = 100
PROMPTS = ("Why is the sky blue?", "Write a Python function that adds two numbers.")
SAMPLINGS = (SamplingOptions(), SamplingOptions(temperature=0.7, seed=7))
COPY, LAYERS = 0.2, 0.97  # of a plain step, for a token
LOST = 0.02  # of the time at most, by networks that do not pay


class Clock:
    """Passes and guesses take what they are said to take, however busy the machine is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.guesses = 0
        self._rows = deque[int]()
        cost, launch, read = parse_curve("cpu"), Target.launch, Target.read

        def launched(target: Target, rows: Sequence[int], *args: Any, **options: Any) -> mx.array:
            self._rows.append(max(1, len(rows)))
            return launch(target, rows, *args, **options)

        def collected(target: Target, sampled: mx.array) -> list[int]:
            self.now += cost(self._rows.popleft())
            return read(target, sampled)

        monkeypatch.setattr(Target, "launch", launched)
        monkeypatch.setattr(Target, "read", collected)
        monkeypatch.setattr(Target, "clock", lambda target: self.now)
        for kind, takes in ((ModelDrafter, COPY), (ExitDrafter, LAYERS)):
            monkeypatch.setattr(kind, "draft_token", self._taking(takes, kind.draft_token))
            monkeypatch.setattr(kind, "clock", lambda neural_drafter: self.now)

    def _taking(self, takes: float, guess: Any) -> Any:
        def guessed(neural_drafter: Any) -> tuple[int, float]:
            self.now += takes
            self.guesses += 1
            found: tuple[int, float] = guess(neural_drafter)
            return found

        return guessed


@pytest.fixture(scope="module")
def copied(starter_engine: Engine) -> Engine:
    small = Engine.load(starter_engine.path, name="2 bits")
    rounded = [  # kept in float32: MLX's kernels for 2 bits are slow on a processor
        (name, mx.dequantize(*mx.quantize(weight, 64, 2), 64, 2) if weight.ndim == 2 else weight)
        for name, weight in tree_flatten(small.model.parameters())
    ]
    small.model.load_weights(rounded)
    engine = starter_engine.with_draft_model(small)
    assert engine.draft_model is not None
    return replace(
        engine, draft_model=replace(engine.draft_model, relative_cost=0.2)
    )  # it is worth a try


@pytest.mark.parametrize("mode", ["auto", "model", "exit"])
def test_unprofitable_drafters_are_rarely_used(
    mode: DraftMode, copied: Engine, starter_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers, and they take no longer, but for what it takes to find that out: with
    `auto` in each of them, alone in all."""
    clock = Clock(monkeypatch)
    alone: DraftMode = "ngram" if mode == "auto" else "off"
    truth, plain, _ = answers(starter_engine, alone, clock)
    told, times, session = answers(copied, mode, clock)
    (learned,) = session.learned.neural_drafters.values()
    print(mode, "guesses", clock.guesses, times, plain, "expected", learned.expected[:2])
    assert told == truth
    assert clock.guesses
    assert learned.timed
    assert learned.curve.table(0)[0] == pytest.approx(LAYERS if mode == "exit" else COPY)
    assert sum(times) <= (1 + LOST) * sum(plain)
    some = times if mode == "auto" else times[-1:]
    assert all(
        now <= (1 + LOST) * before for now, before in zip(some, plain[-len(some) :], strict=True)
    )


def answers(
    engine: Engine, mode: DraftMode, clock: Clock
) -> tuple[list[tuple[int, ...]], list[float], Session]:
    """The answers of one session, and how long each took."""
    session, found, times = Session(engine), [], []
    for prompt in PROMPTS:
        for sampling in SAMPLINGS:
            before = clock.now
            options = GenerateOptions(TOKENS, mode, sampling=sampling)
            found.append(answered(session, prompt, options).tokens)
            times.append(clock.now - before)
    return found, times, session


def answered(session: Session, prompt: str, options: GenerateOptions) -> Answer:
    return chat_request(session, [Message("user", prompt)], options).answer()
