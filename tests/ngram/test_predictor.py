"""The n-gram predictor against worked examples and against counting from scratch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.fixed import (
    FNV_OFFSET_BASIS,
    FNV_PRIME,
    ORDERS,
    WINDOW,
    FixedDrafter,
    Predictor,
    fnv1a,
)
from akunu_py.types import Drafter

Tables = dict[int, dict[int, dict[int, int]]]

# Few different tokens, so that contexts repeat.
token_lists = st.lists(st.integers(0, 3), max_size=80)


def count_from_scratch(tokens: list[int]) -> Tables:
    tables: Tables = {order: {} for order in ORDERS}
    for i, token in enumerate(tokens):
        for order in ORDERS:
            if i >= order - 1:
                counts = tables[order].setdefault(fnv1a(tokens[i - order + 1 : i]), {})
                counts[token] = counts.get(token, 0) + 1
    return tables


def predict_from_scratch(tokens: list[int], limit: int) -> list[int]:
    """Reads the answer off the token list, without hashes or tables."""
    history, draft = list(tokens), []
    for _ in range(limit):
        followers: list[int] = []
        for size in (3, 2, 1):
            context = history[-size:]
            if len(context) == size:
                followers = [
                    tokens[i] for i in range(size, len(tokens)) if tokens[i - size : i] == context
                ]
            if followers:
                break
        if not followers:
            break
        best = followers[0]
        for candidate in followers:
            if followers.count(candidate) > followers.count(best):
                best = candidate
        draft.append(best)
        history.append(best)
    return draft


def test_hash_of_nothing_is_the_offset_basis() -> None:
    assert fnv1a([]) == FNV_OFFSET_BASIS == 0xCBF29CE484222325


def test_hash_of_the_basis_itself_is_zero() -> None:
    # x xor x = 0, and 0 times the prime is 0; a second token then yields token times prime.
    assert fnv1a([FNV_OFFSET_BASIS]) == 0
    assert fnv1a([FNV_OFFSET_BASIS, 1]) == FNV_PRIME == 0x100000001B3
    assert fnv1a([FNV_OFFSET_BASIS, 3]) == 3 * FNV_PRIME


def test_hash_agrees_with_published_byte_vectors() -> None:
    # Tokens below 256 hash as the bytes do: test vectors from the FNV draft, appendix C.
    assert fnv1a(b"a") == 0xAF63DC4C8601EC8C
    assert fnv1a(b"foobar") == 0x85944171F73967E8


def test_a_token_is_mixed_in_whole() -> None:
    assert fnv1a([0x6162]) != fnv1a([0x61, 0x62])
    assert fnv1a([49151]) == ((FNV_OFFSET_BASIS ^ 49151) * FNV_PRIME) % 2**64


def test_worked_example() -> None:
    predictor = Predictor()
    predictor.update_batch([1, 2, 3, 1, 2])
    assert predictor.tables[2] == {fnv1a([1]): {2: 2}, fnv1a([2]): {3: 1}, fnv1a([3]): {1: 1}}
    assert predictor.tables[3] == {
        fnv1a([1, 2]): {3: 1},
        fnv1a([2, 3]): {1: 1},
        fnv1a([3, 1]): {2: 1},
    }
    assert predictor.tables[4] == {fnv1a([1, 2, 3]): {1: 1}, fnv1a([2, 3, 1]): {2: 1}}
    # 1 2 -> 3, then 2 3 -> 1, 3 1 -> 2, and round again.
    assert predictor.predict() == [3, 1, 2, 3]
    assert predictor.predict(limit=1) == [3]
    assert predictor.predict(limit=0) == []


def test_longest_context_wins() -> None:
    predictor = Predictor()
    # After 1 2 mostly 9, but after 8 1 2 it was 5.
    predictor.update_batch([8, 1, 2, 5, 0, 1, 2, 9, 0, 1, 2, 9, 4, 8, 1, 2])
    assert predictor.predict(limit=1) == [5]


def test_first_seen_wins_a_tie_until_strictly_beaten() -> None:
    predictor = Predictor()
    predictor.update_batch([1, 2, 8, 0, 1, 2, 5, 3, 1, 2])
    assert predictor.predict(limit=1) == [8]
    predictor.update_batch([5, 6, 1, 2])
    assert predictor.predict(limit=1) == [5]


def test_drafts_stop_where_nothing_matches() -> None:
    predictor = Predictor()
    assert predictor.predict() == []
    predictor.update_batch([1, 2, 3, 9, 8, 1, 2])
    assert predictor.predict(limit=10) == [3, 9, 8, 1, 2, 3, 9, 8, 1, 2]
    predictor.update_batch([6, 5])
    assert predictor.predict() == []


def test_predicting_changes_nothing() -> None:
    predictor = Predictor()
    predictor.update_batch([1, 2, 1, 2, 1])
    before = count_from_scratch([1, 2, 1, 2, 1])
    predictor.predict(8)
    assert predictor.tables == before
    assert predictor.window == [1, 2, 1, 2, 1]


@given(token_lists)
def test_incremental_equals_counting_from_scratch(tokens: list[int]) -> None:
    predictor = Predictor()
    for token in tokens:
        predictor.update(token)
    assert predictor.tables == count_from_scratch(tokens)


@given(token_lists, st.integers(0, 80))
def test_batches_equal_single_updates(tokens: list[int], cut: int) -> None:
    single, batched = Predictor(), Predictor()
    for token in tokens:
        single.update(token)
    batched.update_batch(tokens[:cut])
    batched.update_batch(tokens[cut:])
    assert single.tables == batched.tables
    assert single.window == batched.window


@given(token_lists, st.integers(0, 8))
def test_predictions_equal_reading_the_list(tokens: list[int], limit: int) -> None:
    predictor = Predictor()
    predictor.update_batch(tokens)
    assert predictor.predict(limit) == predict_from_scratch(tokens, limit)


def test_window_is_bounded_and_tables_outlive_it() -> None:
    predictor = Predictor()
    early = [1, 2, 3, 4, 5]
    filler = list(range(1000, 1000 + 3 * WINDOW))
    predictor.update_batch(early + filler)
    assert predictor.window == filler[-WINDOW:]
    assert len(predictor.history) <= 2 * WINDOW
    assert predictor.tables == count_from_scratch(early + filler)
    predictor.update_batch([1, 2])
    assert predictor.predict(3) == [3, 4, 5]


def test_fixed_drafter_never_exceeds_either_limit() -> None:
    drafter: Drafter = FixedDrafter(draft_tokens=4)
    drafter.extend([1, 2, 3] * 3)
    assert drafter.propose(32) == [1, 2, 3, 1]
    assert drafter.propose(2) == [1, 2]
    assert drafter.propose(0) == []
    drafter.observe(0, 0, 1, 1.0)
    assert drafter.propose(4) == [1, 2, 3, 1]


def test_fixed_drafter_refuses_a_negative_ceiling() -> None:
    with pytest.raises(ValueError, match="draft_tokens"):
        FixedDrafter(draft_tokens=-1)
