"""Checkpoints and side requests: how many tokens of the next prompt are cached.

tests/decoding/test_identity.py covers the turns of conversations for all families.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding import kv_cache
from akunu_py.decoding import target as target_module
from akunu_py.decoding.generate import prefill as prefill_module
from akunu_py.decoding.prompt_cache import history
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from tests.support.families import build
from tests.support.targets import Counting, answer, fresh, read, some

FIRST = 150  # tokens of the first prompt: several windows


def read_by(target: Target, prompt: list[int], truth: list[int]) -> int:
    """Checks the answer to `prompt`, returns how many of its tokens were not reused."""
    target.model.rows = 0
    cached = target.reuse_prefix(prompt).cached
    assert target.tokens + target.pending == prompt
    assert answer(target, prompt, truth) == truth
    rows: int = target.model.rows
    assert rows >= len(prompt) - cached
    return len(prompt) - cached


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_next"])
@pytest.mark.parametrize("tokens", [0, 5])
def test_a_side_request_leaves_what_the_next_turn_needs(name: str, tokens: int) -> None:
    """tokens: of its answer, before it is cancelled."""
    target = Target(Counting(build(name)))
    prompt = some(FIRST, 1)
    turn = [*prompt, *fresh(name, prompt)]
    read_by(target, prompt, turn[FIRST:])
    length = len(target.tokens)
    side = [*turn, *some(20, 7)]
    target.reuse_prefix(side, stable=len(turn))
    if tokens:
        assert answer(target, side, fresh(name, side)[:tokens])
    target.keep(len(turn))
    assert len(target.tokens) == (len(turn) if tokens else length)
    following = [*turn, *some(30, 2)]
    assert read_by(target, following, fresh(name, following)) == (
        len(following) - (len(turn) if tokens else length)
    )


@pytest.mark.parametrize("name", ["llama", "llama-sliding", "qwen3_next"])
def test_a_template_that_drops_the_thinking_costs_only_the_last_turn(name: str) -> None:
    """`ask` is what the template adds for an answer, and puts otherwise in the next turn."""
    target, submit = Target(Counting(build(name))), some(5, 9)
    known = some(400, 1)
    for turn in range(3):
        prompt = [*known, *submit]
        truth = fresh(name, prompt)
        read = read_by(target, prompt, truth)
        assert read <= (405 if turn == 0 else 65 + target_module._TEMPLATE_TAIL)
        known = [*prompt[:-3], *truth[10:], *some(40, turn)]  # `ask` was 2 of 5 tokens shared


@pytest.mark.long
def test_checkpoints_are_few_and_lie_where_they_save_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_module, "CHECKPOINT_EVERY", 100)
    target = Target(build("qwen3_next"))
    target.reuse_prefix(some(2000, 1))
    read(target, prefill_module.ChunkSizes(largest=50))
    places = [each.length for each in target.history.checkpoints]
    assert len(places) == history.MAX_CHECKPOINTS
    assert places[-1] == 2000 - target.prompt_tail
    gaps = [after - before for before, after in zip([0, *places], places, strict=False)]
    assert max(gaps) <= 800
    # Back to the nearest of them, whatever was asked for.
    assert target.reuse_prefix([*some(2000, 1)[: places[2] + 5], 7, 7]).cached == places[2]
    assert [each.length for each in target.history.checkpoints] == places[:3]


def test_checkpoints_take_no_more_than_their_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CHECKPOINT_BYTES", 1)
    target = Target(build("mamba2"))
    target.reuse_prefix(some(100, 1))
    read(target)
    target.reuse_prefix([*target.tokens, *some(50, 2)])
    read(target)
    assert len(target.history.checkpoints) == 1
    assert target.history.checkpoints[0].nbytes > 0


def test_a_cache_that_can_be_trimmed_or_is_unknown_has_no_checkpoints() -> None:
    target = Target(build("llama"))
    target.reuse_prefix(some(100, 1))
    read(target)
    target.history.checkpoint()
    assert target.history.checkpoints == []
    assert target.prompt_tail == 1

    class Other:
        """A cache of which nothing is known."""

    assert not kv_cache.needs_checkpoints([Other()])


@given(st.lists(st.integers(0, 1), max_size=600), st.lists(st.integers(0, 1), max_size=600))
def test_common_prefix(left: list[int], right: list[int]) -> None:
    for pair in ((left, right), (left + right, left), (left, left)):
        length = common_prefix(*pair)
        assert pair[0][:length] == pair[1][:length]
        assert length == min(map(len, pair)) or pair[0][length] != pair[1][length]
