"""Thinking budgets and minimum lengths, exact with drafts, seeds and in shared passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.decoding.constraint import answer_limits
from akunu_py.decoding.constraint.answer_limits import ThinkingBudget, can_limit_thinking
from akunu_py.decoding.generate.session import Session, Status
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.types import Constraint, Drafter, DraftMode, GenerateOptions, SamplingOptions
from tests.support.tiny import Adversary
from tests.support.tiny_fim import byte_level, load_tiny, write_model

END, START, STOP = "<|end|>", "<think>", "</think>"
HARMONY = (
    "<|return|>", "<|channel|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"
)  # fmt: skip
TOKENS = 24
MODES: tuple[DraftMode, ...] = ("off", "fixed", "auto")
YES = Constraint("choice", choices=("yes", "no"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), [END, START, STOP])


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = write_model(tmp_path_factory.mktemp("m") / "m", byte_level(HARMONY), end=HARMONY[0])
    return Engine.load(Path(directory), name="harmony")


def prompt_of(engine: Engine, *, opened: bool = True) -> list[int]:
    return engine.tokens.encode_text(f"What is it? {START if opened else ''}")


def options(
    budget: int, seed: int | None = None, constraint: Constraint | None = None
) -> GenerateOptions:
    sampling = SamplingOptions(0.0 if seed is None else 0.9, seed=seed, constraint=constraint)
    return GenerateOptions(TOKENS, "off", sampling=sampling, thinking_budget=budget)


def naive(engine: Engine, prompt: list[int], requested: GenerateOptions) -> list[int]:
    """Decode without a cache; the end of thinking replaces the token at the budget."""
    sampler = Sampler(requested.sampling)
    (start,), (end,) = (engine.tokens.encode_text(text) for text in (START, STOP))
    tokens: list[int] = []
    thinking, used = prompt[-1] == start, 0
    while len(tokens) < requested.max_tokens:
        history = mx.array([*prompt, *tokens])
        logits = engine.model(history[None])[0, -1:]
        token = int(sampler.sample(logits, history, history.shape[0]).item())
        if thinking and used == requested.thinking_budget:
            token = end
        tokens.append(token)
        used += thinking
        thinking = thinking and token != end
        if token in engine.tokens.stop_tokens:
            break
    return tokens


@pytest.mark.parametrize(("budget", "seed"), [(0, None), (1, 4), (7, None), (7, 4)])
def test_the_end_of_thinking_is_forced_exactly(
    engine: Engine, budget: int, seed: int | None
) -> None:
    prompt, requested = prompt_of(engine), options(budget, seed)
    truth = naive(engine, prompt, requested)
    (end,) = engine.tokens.encode_text(STOP)
    assert truth.index(end) == budget
    rejected = 0
    for mode in MODES:
        answer = Session(engine).generate(prompt, replace(requested, draft=mode)).answer()
        assert list(answer.tokens) == truth
    for adversary_seed in range(3):
        session = Session(engine)

        def adversary(_: Drafter, number: int = adversary_seed) -> Drafter:
            return Adversary(prompt, truth, number)

        session.drafting.wrap = adversary
        answer = session.generate(prompt, replace(requested, draft="auto")).answer()
        assert list(answer.tokens) == truth
        rejected += answer.stats.drafted - answer.stats.accepted
    assert rejected
    assert answer.thinking == engine.tokens.tokenizer.decode(truth[:budget])


def test_a_distant_budget_changes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are launched ahead until the budget is near."""
    prompt = prompt_of(engine)
    monkeypatch.setattr(answer_limits, "_FAR", 10)
    for mode in MODES:
        session = Session(engine)
        request = session.generate(prompt, replace(options(15, 3), draft=mode))
        ahead = [
            session.target.runs_ahead for _ in request.steps() if request.status is Status.DECODING
        ]
        assert request.tokens == naive(engine, prompt, options(15, 3))
        assert (True in ahead, False in ahead) == (True, True)
        assert ahead[-1]  # the answer has no mask


def test_a_grammar_follows_the_thinking(engine: Engine) -> None:
    prompt = prompt_of(engine)
    answers = [
        Session(engine).generate(prompt, replace(options(5, 1, YES), draft=mode)).answer()
        for mode in MODES
    ]
    assert len({each.tokens for each in answers}) == 1
    assert answers[0].text in YES.choices
    assert answers[0].thinking


def walk(budget: ThinkingBudget, tokens: Sequence[int]) -> list[int]:
    """Return the tokens that are sampled, if the model would sample `tokens`."""
    walked = []
    for token in tokens:
        sampled = (budget.forced() or (token,))[0]
        budget.step(sampled)
        walked.append(sampled)
    return walked


def test_only_thinking_before_the_answer_counts(engine: Engine) -> None:
    encode = engine.tokens.encode_text
    budget = ThinkingBudget(engine.tokens, 2, prompt_of(engine, opened=False))
    generated = encode(f"\n{START}abcde")
    assert walk(budget, generated) == encode(f"\n{START}ab{STOP}de")
    budget = ThinkingBudget(engine.tokens, 2, prompt_of(engine, opened=False))
    generated = encode(f"The marker is {START} and {STOP}")
    assert walk(budget, generated) == generated
    assert budget.free


def test_channels(harmony: Engine) -> None:
    """gpt-oss thinks in messages, before the answer and between calls."""
    assert can_limit_thinking(harmony.tokens.tokenizer)
    encode = harmony.tokens.encode_text
    think, answer = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    budget = ThinkingBudget(harmony.tokens, 5, encode("Hi<|start|>assistant"))
    generated = f"{think}abc<|end|><|start|>assistant<|channel|>commentary<|message|>x<|end|>"
    assert walk(budget, encode(generated)) == encode(generated)  # 4 tokens, the end is one
    forced = f"<|end|><|start|>assistant{answer}"
    again = encode(f"<|start|>assistant{think}y" + "z" * len(encode(forced)) + "!")
    end = encode(f"<|start|>assistant{think}y{forced}!")
    assert walk(budget, again) == end


def test_models_without_thinking_ignore_a_budget(tmp_path: Path) -> None:
    plain = load_tiny(tmp_path, [END])
    assert not can_limit_thinking(plain.tokens.tokenizer)
    session = Session(plain)
    request = session.generate([5, 6], options(0))
    request.answer()
    assert session.target.constraint is None


@pytest.mark.parametrize("mode", MODES)
def test_minimum_length(engine: Engine, mode: DraftMode) -> None:
    bias = tuple((token, 100.0) for token in engine.tokens.stop_tokens)
    requested = GenerateOptions(
        TOKENS, mode, sampling=SamplingOptions(logit_bias=bias), min_tokens=6
    )
    answer = Session(engine).generate(prompt_of(engine, opened=False), requested).answer()
    assert len(answer.tokens) == 7
    assert answer.finish_reason == "stop"
