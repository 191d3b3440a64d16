"""The decode loop: where answers end, draft lengths, and what stays in the cache."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest

from akunu_py.decoding.target import Target
from akunu_py.ngram.auto import PROBE_LENGTH, AutoDrafter
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import Drafter, Piece
from tests.support.decoding import decode
from tests.support.slow import slow
from tests.support.targets import Counting, read
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


def assert_committed(target: Target, tokens: list[int]) -> None:
    """The cache holds what is committed to it, and at most the last token is missing."""
    assert target.tokens + target.pending == PROMPT + tokens
    assert len(target.pending) <= 1
    assert {entry.offset for entry in target.cache} == {len(target.tokens)}


@pytest.mark.parametrize("limit", [1, 2, 17])
@pytest.mark.parametrize("pipelines", PIPELINES)
def test_an_answer_has_exactly_the_maximum_of_tokens(limit: int, pipelines: bool | None) -> None:
    target, pieces = run(Adversary(PROMPT, truth(), 1, pipelines), limit)
    assert tokens_of(pieces) == truth()[:limit]
    assert_committed(target, truth()[:limit])


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("seed", range(3))
def test_a_stop_token_ends_the_answer_inside_a_draft(seed: int, pipelines: bool | None) -> None:
    stop = truth()[40 + seed]
    expected = truth()[: truth().index(stop) + 1]
    target, pieces = run(Adversary(PROMPT, truth(), seed, pipelines), stop={stop})
    assert tokens_of(pieces) == expected
    assert_committed(target, expected)


@pytest.mark.parametrize("pipelines", PIPELINES)
@pytest.mark.parametrize("drafts", [False, True])
def test_closing_between_steps_leaves_a_valid_cache(pipelines: bool | None, drafts: bool) -> None:
    drafter = Adversary(PROMPT, truth(), 3, pipelines) if drafts else NoDrafter()
    target, pieces = run(drafter, leave_after=9)
    assert_committed(target, tokens_of(pieces))
    # What comes next from this very cache is still the truth.
    known = PROMPT + tokens_of(pieces)
    assert target.reuse_prefix(known).cached == len(known) - 1
    rest = decode(target, NoDrafter(), 20, ())
    count = len(tokens_of(pieces))
    assert tokens_of(list(rest)) == truth()[count : count + 20]


def test_pipelined_plain_steps_take_one_pass_each() -> None:
    target = ready(Counting(model()), PROMPT)
    target.model.rows = 0
    pieces = list(decode(target, NoDrafter(), 50, ()))
    assert tokens_of(pieces) == truth()[:50]
    assert target.model.rows == 50


@pytest.mark.parametrize("length", [0, 7, 32, *slow(1, 2, 16, 31)])
def test_drafts_of_every_length_change_no_token(
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
    assert_committed(target, truth())
    assert all(piece.accepted < len(piece.tokens) for piece in pieces[:-1])
    drafted = [piece.accepted + len(piece.rejected) for piece in pieces]
    assert max(drafted) == (length or PROBE_LENGTH), "even where it never pays, it is probed"
