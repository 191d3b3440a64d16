"""A smaller model that drafts: the answer stays the target's, its own cache is rolled back with the
target's whatever its kind, and models of other tokens are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
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
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import Constraint, DraftMode, GenerateOptions, SamplingOptions
from tests.support.decoding import decode
from tests.support.engines import altered
from tests.support.families import build, families_of_each_kind
from tests.support.family_answers import greedy, prompt_of
from tests.support.mixture import Mixture
from tests.support.slow import cover
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


def answer(
    name: str,
    draft: Any,
    sampling: SamplingOptions,
    wrong: float,
    ngrams: bool = False,
    count: int = COUNT,
) -> tuple[list[int], Spoiled, list[int]]:
    """The tokens, the network, and how many were accepted in each pass."""
    prompt, target = prompt_of(name, False), Timeless(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    neural_drafter = Spoiled(draft, target, wrong)
    drafter = AutoDrafter(CostCurve(FREE), neural_drafters=[neural_drafter], ngrams=ngrams)
    drafter.extend(prompt)
    pieces = list(decode(target, drafter, count, ()))
    tokens = [token for piece in pieces for token in piece.tokens]
    return tokens, neural_drafter, [piece.accepted for piece in pieces]


def plain(name: str, sampling: SamplingOptions) -> list[int]:
    prompt, target = prompt_of(name, False), Target(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    pieces = decode(target, NoDrafter(), COUNT, ())
    return [token for piece in pieces for token in piece.tokens]


def right(prompt: Sequence[int], truth: Sequence[int], neural_drafter: Spoiled) -> list[bool]:
    """Of each guess that was made behind the truth, whether it is the truth."""
    whole = [*prompt, *truth]
    return [
        token == whole[len(known)]
        for known, token in neural_drafter.guesses
        if len(known) < len(whole) and known == whole[: len(known)]
    ]


@families_of_each_kind(quick=("llama-sliding", "qwen3_next", "jamba"))  # trimmed, cut, restored
def test_its_cache_goes_back_with_the_targets(name: str) -> None:
    """The target drafts for itself, and every third guess is spoiled: behind each of them it says
    what it would have said without."""
    truth = greedy(name, False)[:COUNT]
    tokens, neural_drafter, _ = answer(name, build(name), SamplingOptions(), wrong=0.3)
    assert tokens == truth
    found = right(prompt_of(name, False), truth, neural_drafter)
    assert len(found) > COUNT // 2
    assert sum(found) >= len(found) - 1  # a near-tie may fall otherwise


@pytest.mark.rotating
@pytest.mark.long
@pytest.mark.parametrize(("temperature", "name"), cover([0.0, 0.9], ["llama", "qwen3_next"]))
def test_whatever_it_says_the_answer_is_the_targets(name: str, temperature: float) -> None:
    """Another model, which is nearly always wrong, and the target itself, which never is, because
    it draws from the same noise."""
    sampling = SamplingOptions(temperature=temperature, top_p=0.9, repetition_penalty=1.1, seed=5)
    truth = plain(name, sampling)
    foreign, neural_drafter, _ = answer(name, build("qwen3"), sampling, 0.0, ngrams=temperature > 0)
    assert foreign == truth
    assert neural_drafter.guesses
    tokens, neural_drafter, accepted = answer(name, build(name), sampling, 0.0)
    assert tokens == truth
    assert len(accepted) < COUNT / 3
    found = right(prompt_of(name, False), truth, neural_drafter)
    assert sum(found) >= len(found) - 1


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@families_of_each_kind(quick=("llama-sliding", "qwen3_next", "jamba"))  # trimmed, cut, restored
def test_guesses_come_before_its_tokens_and_behind_them(name: str, temperature: float) -> None:
    """It reads what they bring, and both caches go back to wherever they were wrong."""
    sampling = SamplingOptions(temperature=temperature, seed=5)
    truth, prompt, ends = plain(name, sampling), prompt_of(name, False), set[int]()
    for seed in range(4):
        target = Timeless(build(name))
        neural_drafter = Spoiled(build(name), target, 0.3)
        drafter = Mixture(neural_drafter, [*prompt, *truth], VOCABULARY, seed)
        target.sampler = Sampler(sampling)
        target.reuse_prefix(prompt)
        read(target)
        drafter.extend(prompt)
        pieces = list(decode(target, drafter, COUNT, ()))
        assert [token for piece in pieces for token in piece.tokens] == truth
        found = right(prompt, truth, neural_drafter)
        assert sum(found) >= len(found) - 1 > 3
        ends |= drafter.ends()
    assert ends >= {1, 2, 3}


@pytest.mark.long
def test_a_perfect_one_gives_long_drafts() -> None:
    _, _, accepted = answer("llama", build("llama"), SamplingOptions(), 0.0, count=200)
    assert max(accepted) > 10


@pytest.mark.parametrize("name", ["llama-sliding", "qwen3_next"])  # without and with checkpoints
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_host_waits_once_for_each_drafted_token(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Target(build(name))
    target.sampler = Sampler(SamplingOptions(temperature=temperature, top_p=0.9, seed=1))
    drafter = ModelDrafter(DraftModel("draft", Path(), build(name), VOCABULARY, NEEDS, 1), target)
    drafter.start_draft(prompt_of(name, False))
    waits = []
    for owner, function in ((mx, "eval"), (mx.array, "item"), (mx.array, "tolist")):
        plain = getattr(owner, function)

        def counted(*args: Any, plain: Any = plain, name: str = function) -> Any:
            waits.append(name)
            return plain(*args)

        monkeypatch.setattr(owner, function, counted)
    for drafted in range(1, 4):
        token, chance = drafter.draft_token()
        assert type(token) is int
        assert 0 < chance <= 1
        assert len(waits) == drafted, waits


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


@pytest.mark.long
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_drafts_with_it(tmp_path: Path, temperature: float) -> None:
    """The target's copy drafts under another name, over turns."""
    target = write_model(tmp_path / "target", byte_level(["<|end|>"]), end="<|end|>")
    plain_engine = Engine.load(target)
    engine = Engine.load(target, draft_model=("copy", target))
    assert engine.draft_model is not None
    assert engine.draft_model.relative_cost == 1.0
    engine = replace(
        engine, draft_model=replace(engine.draft_model, relative_cost=1e-6)
    )  # worth a trial
    assert engine.plan.fit.needs == plain_engine.plan.fit.needs.with_draft(
        plain_engine.plan.fit.needs
    )
    assert engine.plan.fit.estimate.weights == 2 * plain_engine.plan.fit.estimate.weights
    sampling = SamplingOptions(temperature=temperature, seed=3)
    sessions = Session(plain_engine), Session(engine)
    text = "def first(items):\n    return items[0]\n"
    for turn in (text, text + "def last(items):\n", "something else"):
        options = GenerateOptions(30, draft="model", sampling=sampling)
        prompt = engine.tokens.encode(turn)
        plain = sessions[0].generate(prompt, replace(options, draft="off")).answer()
        assert sessions[1].generate(prompt, options).answer().tokens == plain.tokens


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
def test_it_draws_what_the_grammar_allows(copied: Engine) -> None:
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
def test_what_it_has_read_stays_for_the_next_request(copied: Engine) -> None:
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
