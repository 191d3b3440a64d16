"""The answer cache: lookup, overwriting, and its form as bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.answer_cache import LONGEST_MATCH, MAX_CHAIN, AnswerCache


def test_finds_what_followed_the_longest_context() -> None:
    memory = AnswerCache(8)
    memory.learn([1, 2, 3, 4, 5])
    memory.learn([9, 2, 3, 6])
    memory.learn([8, 2, 3, 6])
    found = memory.lookup([1, 2, 3])
    assert found is not None
    assert (found.token, found.length) == (4, 3)
    found = memory.lookup([7, 2, 3])
    assert found is not None
    assert (found.token, found.length, found.agreeing, found.opposing) == (6, 2, 2, 1)
    found = memory.lookup([7, 7, 4])
    assert found is not None
    assert (found.token, found.length) == (5, 1)


def test_knows_nothing_across_items_or_of_new_contexts() -> None:
    memory = AnswerCache(8)
    assert memory.lookup([1, 2]) is None
    memory.learn([1, 2])
    memory.learn([3, 4])
    assert memory.lookup([1, 2]) is None
    assert memory.lookup([5]) is None
    assert memory.lookup([]) is None
    found = memory.lookup([0, 3])
    assert found is not None
    assert found.token == 4


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=20), st.integers(4, 6))
def test_lookups_match_the_stored_tokens(items: list[list[int]], bits: int) -> None:
    memory = AnswerCache(bits)
    log: list[int] = []
    for item in items:
        memory.learn(item)
        log += [*item, -1]
    assert memory.total == len(log)
    assert len(memory) == min(len(log), 2**bits)
    kept = log[-(2**bits) :]
    for context in ([0, 1, 2], [1, 1], [3]):
        found = memory.lookup(context)
        if found is None:
            continue
        size = found.length
        follows = [
            kept[i + size] for i in range(len(kept) - size) if kept[i : i + size] == context[-size:]
        ]
        assert found.token in follows
        assert found.agreeing + found.opposing <= MAX_CHAIN


def test_the_oldest_tokens_are_overwritten() -> None:
    memory = AnswerCache(6)
    memory.learn([1, 2, 3])
    assert memory.lookup([1, 2]) is not None
    memory.learn(list(range(100, 100 + 64 + LONGEST_MATCH)))
    assert memory.lookup([1, 2]) is None
    assert memory.lookup([168, 169]) is not None
    assert len(memory) == 64


def test_bytes_and_back() -> None:
    rng = random.Random(1)
    memory = AnswerCache(8)
    for _ in range(10):
        memory.learn([rng.randrange(20) for _ in range(60)])
    data = memory.dump()
    again = AnswerCache.load(data)
    assert again.dump() == data
    for _ in range(50):
        context = [rng.randrange(20) for _ in range(4)]
        assert again.lookup(context) == memory.lookup(context)
    again.learn([1, 2, 3])
    memory.learn([1, 2, 3])
    assert again.dump() == memory.dump()


@pytest.mark.parametrize("cut", [0, 5, 27, 28, 100])
def test_cut_off_bytes_are_refused(cut: int) -> None:
    with pytest.raises(ValueError, match="answer cache"):
        AnswerCache.load(AnswerCache(4).dump()[:cut])


def test_altered_or_foreign_bytes_are_refused() -> None:
    memory = AnswerCache(4)
    memory.learn([1, 2, 3, 4])
    data = memory.dump()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 0x41
        with pytest.raises(ValueError, match="answer cache"):
            AnswerCache.load(bytes(altered))
    with pytest.raises(ValueError, match="something else"):
        AnswerCache.load(b"PK\x03\x04" + bytes(100))


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="capacity bits"):
        AnswerCache(30)
