"""A smaller model that drafts: the answer stays the target's, its own cache is rolled back with the
target's whatever its kind, and models of other tokens are refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding import decode
from akunu_py.decoding.draft_model import DraftModel, difference
from akunu_py.decoding.model_network import ModelNetwork
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.target import Target
from akunu_py.models.fit import Activations, Growth, Needs
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import SamplingOptions
from tests.support.families import build
from tests.support.family_answers import greedy, prompt_of
from tests.support.family_table import FAMILIES
from tests.support.targets import read
from tests.support.tiny import VOCABULARY

pytestmark = pytest.mark.usefixtures("uncompiled")

COUNT = 40
_QUICK = ("llama-sliding", "qwen3_next", "jamba")  # trimmed, cut, restored; the others are slow
FREE = {1: 1.0, 33: 1.01}  # a curve with which everything pays
NEEDS = Needs(1, Growth(1), Activations(1, 1, 1, 1), 4096)


class Spoiled(ModelNetwork):
    """One of whose guesses so many are replaced by wrong ones, which it goes on from."""

    def __init__(self, model: Any, target: Target, share_wrong: float) -> None:
        made = DraftModel("draft", Path(), model, {}, VOCABULARY, NEEDS, 1e-6)
        super().__init__(made, target)
        self.share_wrong = share_wrong
        self.random = random.Random(1)
        self.guesses: list[tuple[list[int], int]] = []  # (what it knew, its own guess)

    def guess(self) -> tuple[int, float]:
        known = list(self._known)
        token, sure = super().guess()
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
    prompt, target = prompt_of(name, False), Target(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    network = Spoiled(draft, target, wrong)
    drafter = AutoDrafter(CostCurve(FREE), networks=[network], ngrams=ngrams)
    drafter.extend(prompt)
    pieces = list(decode.decode(target, drafter, count, ()))
    tokens = [token for piece in pieces for token in piece.tokens]
    return tokens, network, [piece.accepted for piece in pieces]


def plain(name: str, sampling: SamplingOptions) -> list[int]:
    prompt, target = prompt_of(name, False), Target(build(name))
    target.sampler = Sampler(sampling)
    target.reuse_prefix(prompt)
    read(target)
    pieces = decode.decode(target, NoDrafter(), COUNT, ())
    return [token for piece in pieces for token in piece.tokens]


def right(prompt: Sequence[int], truth: Sequence[int], network: Spoiled) -> list[bool]:
    """Of each guess that was made behind the truth, whether it is the truth."""
    whole = [*prompt, *truth]
    return [
        token == whole[len(known)]
        for known, token in network.guesses
        if len(known) < len(whole) and known == whole[: len(known)]
    ]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name not in _QUICK else ()) for name in FAMILIES],
)
def test_its_cache_goes_back_with_the_targets(name: str) -> None:
    """The target drafts for itself, and every third guess is spoiled: behind each of them it says
    what it would have said without."""
    truth = greedy(name, False)[:COUNT]
    tokens, network, _ = answer(name, build(name), SamplingOptions(), wrong=0.3)
    assert tokens == truth
    found = right(prompt_of(name, False), truth, network)
    assert len(found) > COUNT // 2
    assert sum(found) >= len(found) - 1  # a near-tie may fall otherwise


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_whatever_it_says_the_answer_is_the_targets(name: str, temperature: float) -> None:
    """Another model, which is nearly always wrong, and the target itself, which never is, because
    it draws from the same noise."""
    sampling = SamplingOptions(temperature=temperature, top_p=0.9, repetition_penalty=1.1, seed=5)
    truth = plain(name, sampling)
    foreign, network, _ = answer(name, build("qwen3"), sampling, 0.0, ngrams=temperature > 0)
    assert foreign == truth
    assert network.guesses
    tokens, network, accepted = answer(name, build(name), sampling, 0.0)
    assert tokens == truth
    assert len(accepted) < COUNT / 3
    found = right(prompt_of(name, False), truth, network)
    assert sum(found) >= len(found) - 1


def test_a_perfect_one_gives_long_drafts() -> None:
    _, _, accepted = answer("llama", build("llama"), SamplingOptions(), 0.0, count=200)
    assert max(accepted) > 10


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
