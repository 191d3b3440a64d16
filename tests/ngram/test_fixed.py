"""`--draft fixed`: the n-gram predictor against worked examples and counting from scratch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.fixed import (
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


def predictor_of(*batches: list[int]) -> Predictor:
    predictor = Predictor()
    for tokens in batches:
        predictor.update_batch(tokens)
    return predictor


def count_from_scratch(tokens: list[int]) -> Tables:
    tables: Tables = {order: {} for order in ORDERS}
    for i, token in enumerate(tokens):
        for order in ORDERS:
            if i >= order - 1:
                counts = tables[order].setdefault(fnv1a(tokens[i - order + 1 : i]), {})
                counts[token] = counts.get(token, 0) + 1
    return tables


def predict_from_scratch(tokens: list[int], limit: int) -> list[int]:
    """Predict from the token list, without hashes or tables."""
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
        draft.append(max(followers, key=followers.count))  # the first seen of equals
        history.append(draft[-1])
    return draft


@pytest.mark.parametrize(
    ("tokens", "digest"),
    [
        ([], 0xCBF29CE484222325),
        (b"a", 0xAF63DC4C8601EC8C),  # test vectors from the FNV draft, appendix C
        (b"foobar", 0x85944171F73967E8),
        ([49151], ((0xCBF29CE484222325 ^ 49151) * 0x100000001B3) % 2**64),  # mixed in whole
    ],
)
def test_hashes(tokens: list[int], digest: int) -> None:
    assert fnv1a(tokens) == digest


@given(token_lists, st.integers(0, 80), st.integers(0, 8))
def test_any_batches_predict_as_counting_from_scratch(
    tokens: list[int], cut: int, limit: int
) -> None:
    predictor = predictor_of(tokens[:cut], tokens[cut:])
    assert predictor.predict(limit) == predict_from_scratch(tokens, limit)
    assert predictor.tables == count_from_scratch(tokens)  # predicting changes nothing
    assert predictor.window == tokens


def test_window_is_bounded_and_tables_outlive_it() -> None:
    early, filler = [1, 2, 3, 4, 5], list(range(1000, 1000 + 3 * WINDOW))
    predictor = predictor_of(early + filler)
    assert predictor.window == filler[-WINDOW:]
    assert len(predictor.history) <= 2 * WINDOW
    assert predictor.tables == count_from_scratch(early + filler)
    predictor.update_batch([1, 2])
    assert predictor.predict(3) == [3, 4, 5]


def test_drafts_exceed_no_limit_and_learn_nothing_from_passes() -> None:
    drafter: Drafter = FixedDrafter(draft_tokens=4)
    drafter.extend([1, 2, 3] * 3)
    for limit in (32, 2, 0, 4):
        assert drafter.propose(limit) == [1, 2, 3, 1][:limit]
        drafter.observe(0, 0, 1, 1.0)
    with pytest.raises(ValueError, match="draft_tokens"):
        FixedDrafter(draft_tokens=-1)
