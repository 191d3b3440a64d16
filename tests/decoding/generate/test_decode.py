"""The loop: whatever is drafted, the output is the target's own and the cache holds it."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest

from akunu_py.decoding.generate.decode import cut
from akunu_py.decoding.target import Target
from akunu_py.ngram.auto import PROBE_LENGTH, AutoDrafter
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.types import Drafter, Piece
from tests.support.decoding import decode
from tests.support.slow import every_other_slow
from tests.support.targets import read
from tests.support.tiny import VOCABULARY, Adversary, plain_greedy, tiny_llama

PROMPT = [(7 * index + 3) % VOCABULARY for index in range(20)]
COUNT = 200


@functools.cache
def model() -> Any:
    return tiny_llama()


@functools.cache
def truth() -> list[int]:
    return plain_greedy(model(), PROMPT, COUNT)


PIPELINES = [None, False, True]  # of plain steps: see `Adversary`


def ready(model: Any, prompt: list[int]) -> Target:
    target = Target(model)
    assert target.reuse_prefix(prompt).cached == 0
    read(target)
    return target


def run(
    drafter: Drafter,
    limit: int = COUNT,
    stop: Collection[int] = (),
    *,
    leave_after: int | None = None,
) -> tuple[Target, list[Piece]]:
    target = ready(model(), PROMPT)
    drafter.extend(PROMPT)
    pieces: list[Piece] = []
    passes = decode(target, drafter, limit, stop)
    for piece in passes:
        pieces.append(piece)
        if len(pieces) == leave_after:
            break
    passes.close()
    return target, pieces


def tokens_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def assert_in_step(target: Target, tokens: list[int]) -> None:
    """The cache holds what is committed to it, and at most the last token is missing."""
    assert target.tokens + target.pending == PROMPT + tokens
    assert len(target.pending) <= 1
    assert {entry.offset for entry in target.cache} == {len(target.tokens)}


@pytest.mark.long
def test_the_truth_varies() -> None:
    assert len(set(truth())) > 20


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("seed", range(5))
def test_an_adversarial_drafter_changes_nothing(seed: int, pipelines: bool | None) -> None:
    drafter = Adversary(PROMPT, truth(), seed, pipelines)
    target, pieces = run(drafter)
    assert tokens_of(pieces) == truth()
    assert drafter.history == PROMPT + truth()
    assert drafter.accepted == sum(piece.accepted for piece in pieces) > 0
    assert_in_step(target, truth())


@pytest.mark.parametrize("drafter", [NoDrafter(), FixedDrafter(4), FixedDrafter(16)])
def test_our_drafters_change_nothing(drafter: Drafter) -> None:
    target, pieces = run(drafter)
    assert tokens_of(pieces) == truth()
    assert_in_step(target, truth())


@pytest.mark.parametrize("limit", [1, 2, 3, 17])
@pytest.mark.parametrize("pipelines", PIPELINES)
def test_the_limit_is_kept_exactly(limit: int, pipelines: bool | None) -> None:
    target, pieces = run(Adversary(PROMPT, truth(), 1, pipelines), limit)
    assert tokens_of(pieces) == truth()[:limit]
    assert_in_step(target, truth()[:limit])


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("seed", range(8))
def test_a_stop_token_ends_it_wherever_it_falls(seed: int, pipelines: bool | None) -> None:
    stop = truth()[40 + seed]
    expected = truth()[: truth().index(stop) + 1]
    target, pieces = run(Adversary(PROMPT, truth(), seed, pipelines), stop={stop})
    assert tokens_of(pieces) == expected
    assert_in_step(target, expected)


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("drafts", [False, True])
def test_leaving_early_leaves_the_cache_right(pipelines: bool | None, drafts: bool) -> None:
    drafter = Adversary(PROMPT, truth(), 3, pipelines) if drafts else NoDrafter()
    target, pieces = run(drafter, leave_after=9)
    assert_in_step(target, tokens_of(pieces))
    # What comes next from this very cache is still the truth.
    known = PROMPT + tokens_of(pieces)
    assert target.reuse_prefix(known).cached == len(known) - 1
    rest = decode(target, NoDrafter(), 20, ())
    count = len(tokens_of(pieces))
    assert tokens_of(list(rest)) == truth()[count : count + 20]


def test_pieces_count_what_was_drafted() -> None:
    _, pieces = run(Adversary(PROMPT, truth(), 2))
    assert any(piece.accepted and piece.rejected for piece in pieces)
    assert all(piece.accepted < len(piece.tokens) for piece in pieces[:-1])


def test_pipelined_plain_steps_take_one_pass_each() -> None:
    calls = 0

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(model(), name)

        def __call__(self, *args: object, **options: object) -> object:
            nonlocal calls
            calls += 1
            return model()(*args, **options)

    target = ready(Counting(), PROMPT)
    calls = 0
    pieces = list(decode(target, NoDrafter(), 50, ()))
    assert tokens_of(pieces) == truth()[:50]
    assert calls == 50


def test_cut() -> None:
    assert cut([1, 2, 3], {2}) == [1, 2]
    assert cut([1, 2, 3], ()) == [1, 2, 3]


@pytest.mark.rotating
@pytest.mark.parametrize("length", every_other_slow(range(33)))
def test_every_length_of_the_planner_changes_nothing(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter has seen the answer, with every 23rd token changed: long drafts, some wrong."""

    def forced(
        chances: list[float], costs: object, rate: float, limit: int, **_: object
    ) -> tuple[int, list[float]]:
        return min(length, limit, len(chances)), []

    monkeypatch.setattr("akunu_py.ngram.auto.best_draft", forced)
    monkeypatch.setattr("akunu_py.ngram.cost.PROBE_INTERVAL", COUNT // 3)
    drafter = AutoDrafter()
    altered = [token if i % 23 else (token + 1) % VOCABULARY for i, token in enumerate(truth())]
    drafter.extend([*PROMPT, *altered])
    target, pieces = run(drafter)
    assert tokens_of(pieces) == truth()
    assert_in_step(target, truth())
    drafted = [piece.accepted + len(piece.rejected) for piece in pieces]
    assert max(drafted) == (length or PROBE_LENGTH), "even where it never pays, it is probed"
