"""A draft model: its cache is rolled back with the target's, and other vocabularies are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.drafting.neural import ModelDrafter
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.drafters import DraftModel, difference
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.target import Target
from akunu_py.errors import UsageError
from akunu_py.models.load.fit import Activations, CacheGrowth, MemoryNeeds
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import Constraint, DraftMode, GenerateOptions, SamplingOptions
from tests.support.decoding import decode
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.family_answers import prompt_of
from tests.support.identity import plain_tokens
from tests.support.targets import Counting, Timeless, read
from tests.support.tiny import VOCABULARY
from tests.support.tiny_fim import byte_level, sentence_piece, write_model

COUNT = 40
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
NEEDS = MemoryNeeds(1, CacheGrowth(1), Activations(1, 1, 1, 1), 4096)


class Spoiled(ModelDrafter):
    """One of whose guesses so many are replaced by wrong ones, which it goes on from."""

    def __init__(self, model: Any, target: Target, share_wrong: float) -> None:
        made = DraftModel("draft", Path(), model, VOCABULARY, NEEDS, 1e-6)
        super().__init__(made, target)
        self.share_wrong = share_wrong
        self.random = random.Random(1)
        self.guesses: list[tuple[list[int], int]] = []  # (what it knew, its own guess)

    def draft_token(self) -> tuple[int, float]:
        known = list(self._known)
        token, sure = super().draft_token()
        self.guesses.append((known, token))
        if self.random.random() < self.share_wrong:
            token = self._known[-1] = (token + 1) % VOCABULARY
        return token, sure

    def clock(self) -> float:
        return 0.0  # no time is measured, so its stated share of a step counts


def answer(name: str, sampling: SamplingOptions, wrong: float) -> tuple[list[int], Spoiled]:
    """Return the tokens and the draft model."""
    prompt, target = prompt_of(name), Timeless(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    model = Spoiled(build(name), target, wrong)
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[model], ngrams=False)
    drafter.extend(prompt)
    pieces = list(decode(target, drafter, COUNT, ()))
    return [token for piece in pieces for token in piece.tokens], model


def right(prompt: Sequence[int], truth: Sequence[int], neural_drafter: Spoiled) -> list[bool]:
    """Of each guess that was made behind the truth, whether it is the truth."""
    whole = [*prompt, *truth]
    return [
        token == whole[len(known)]
        for known, token in neural_drafter.guesses
        if len(known) < len(whole) and known == whole[: len(known)]
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@families_of_each_kind(quick=("llama-sliding", "qwen3_next"))
def test_its_cache_goes_back_with_the_targets(name: str, temperature: float) -> None:
    """The target drafts for itself, and every third token is replaced by a wrong one.

    After each rejection it drafts the same as a model that never saw the wrong tokens.
    """
    sampling, prompt = SamplingOptions(temperature=temperature, seed=5), prompt_of(name)
    truth = plain_tokens(build(name), prompt, COUNT, sampling)
    tokens, model = answer(name, sampling, 0.3)
    assert tokens == truth
    found = right(prompt, truth, model)
    assert sum(found) >= len(found) - 1 > 3  # a near-tie may fall otherwise


def test_vocabularies_are_compared() -> None:
    target = {f"t{token}": token for token in range(100)}
    assert not difference(target, dict(target))
    assert not difference(target, target | {"more": 100})
    assert not difference(target | {"more": 100}, target)
    swapped = target | {"t7": 8, "t8": 7}
    why = difference(target, swapped)
    assert "2 of them" in why
    assert "the first is 7: 't7' and 't8'" in why
    assert "knows 50 of its 100" in difference(target, dict(list(target.items())[:50]))


def test_memory_for_a_draft_model_is_planned(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", byte_level(["<|end|>"]), end="<|end|>")
    plain, engine = Engine.load(target), Engine.load(target, draft_model=("copy", target))
    assert engine.draft_model is not None
    assert engine.draft_model.relative_cost == 1.0
    assert engine.plan.fit.needs == plain.plan.fit.needs.with_draft(plain.plan.fit.needs)
    assert engine.plan.fit.estimate.weights == 2 * plain.plan.fit.estimate.weights


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Whose own copy always pays as its draft model."""
    monkeypatch.setattr(ModelDrafter, "clock", lambda neural_drafter: 0.0)
    monkeypatch.setattr(Target, "clock", staticmethod(Timeless.clock))
    target = write_model(tmp_path / "target", byte_level(["<|end|>"]), end="<|end|>")
    engine = Engine.load(target, draft_model=("copy", target))
    assert engine.draft_model is not None
    return replace(engine, draft_model=replace(engine.draft_model, relative_cost=1e-6))


@pytest.mark.long
def test_drafts_follow_the_grammar(copied: Engine) -> None:
    """As the target does, which would else have had other tokens nine times of ten."""
    for temperature in (0.0, 1.0):
        sampling = SamplingOptions(
            temperature=temperature, seed=2, constraint=Constraint("regex", "[a-e ]{40}")
        )
        options = GenerateOptions(40, draft="model", sampling=sampling)
        session, prompt = Session(copied), copied.tokens.encode("Say: ")
        plain = session.generate(prompt, replace(options, draft="off")).answer()
        drafted = Session(copied).generate(prompt, options).answer()
        assert drafted.tokens == plain.tokens
        assert drafted.stats.drafted > 10
        assert drafted.stats.acceptance_rate > 0.9


@pytest.mark.long
def test_its_prompt_cache_stays_for_the_next_request(copied: Engine) -> None:
    """Beside the target's history: another session that goes on with that reads what is new."""
    assert copied.draft_model is not None
    counting = Counting(copied.draft_model.model)
    small = replace(copied.draft_model, model=counting)
    engine = altered(copied, draft_model=small, prompt_cache_memory=1 << 30)
    first, prompt = Session(engine), engine.tokens.encode("once upon a time " * 20)
    options = GenerateOptions(20, draft="model")
    told = first.generate(prompt, options).answer().tokens
    assert counting.rows > len(prompt)
    (history,) = first.target.history.drafter_histories.values()
    assert first.target.history.nbytes > history.nbytes > 0
    second = Session(engine, sibling=first)
    first.release()
    counting.rows = 0
    more = [*prompt, *told, *engine.tokens.encode(" and then")]
    again = second.generate(more, options).answer()
    assert (
        again.tokens
        == Session(engine).generate(more, replace(options, draft="off")).answer().tokens
    )
    assert again.stats.drafted
    assert 0 < counting.rows < len(prompt) / 2
    assert second.target.history.shorten(1)
    assert not second.target.history.drafter_histories


def test_a_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", byte_level(["<|end|>"]), end="<|end|>")
    other = write_model(tmp_path / "other", sentence_piece(["<|end|>"]), end="<|end|>")
    with pytest.raises(UsageError, match=r"other cannot draft for target: their tokens differ, "):
        Engine.load(target, draft_model=("other", other))
    modes: tuple[DraftMode, ...] = ("model", "mtp")
    for mode in modes:
        with pytest.raises(UsageError, match=f"--draft {mode}: "):
            Session(Engine.load(target)).generate([1], GenerateOptions(draft=mode))
