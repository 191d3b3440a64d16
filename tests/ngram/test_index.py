"""The suffix index against brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.ngram.index import LONGEST_MATCH, MAX_CHAIN_1, SuffixIndex

token_lists = st.lists(st.integers(0, 2), max_size=60)
more_tokens = st.lists(st.integers(0, 4), max_size=40)


def matches_from_scratch(tokens: list[int]) -> dict[int, int]:
    found = {}
    for position in range(1, len(tokens)):
        length = 0
        while (
            length < min(position, LONGEST_MATCH)
            and tokens[position - 1 - length] == tokens[-1 - length]
        ):
            length += 1
        if length:
            found[position] = length
    return found


@given(token_lists, st.integers(0, 60))
def test_matches_are_true_and_include_the_latest(tokens: list[int], cut: int) -> None:
    index = SuffixIndex()
    index.extend(tokens[:cut])
    for token in tokens[cut:]:
        index.append(token)
    every = matches_from_scratch(tokens)
    found = dict(index.matches())
    assert found.items() <= every.items()
    assert set(sorted(every, reverse=True)[:MAX_CHAIN_1]) <= set(found)


@given(token_lists, token_lists)
def test_append_equals_extend(first: list[int], second: list[int]) -> None:
    one, other = SuffixIndex(), SuffixIndex()
    one.extend(first)
    one.extend(second)
    for token in first + second:
        other.append(token)
    assert vars(one) == vars(other)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), token_lists)
def test_tentative_tokens_are_looked_up_and_leave_nothing(
    history: list[int], tentative: list[int]
) -> None:
    index, untouched = SuffixIndex(), SuffixIndex()
    index.extend(history)
    untouched.extend(history)
    index.tokens.extend(tentative)
    found = dict(index.matches())
    every = matches_from_scratch(history + tentative)
    assert found.items() <= every.items()
    index.drop_tentative()
    assert vars(index) == vars(untouched)


def test_a_distant_long_match_is_found_behind_many_short_ones() -> None:
    index = SuffixIndex()
    passage = [11, 12, 13, 14, 15, 16, 17, 1, 2]
    index.extend([*passage, 99, *([7, 1, 2] * 100), *passage])
    assert (len(passage), len(passage)) in index.matches()


@pytest.mark.long
@given(st.integers(0, 2000), st.integers(0, 2**32))
def test_digits_of_two_kinds_are_found_where_they_were(start: int, seed: int) -> None:
    digits = random.Random(seed).choices((0, 1), k=2100)
    index = SuffixIndex()
    index.extend([*digits, 2, *digits[start : start + 24]])
    assert (start + 24, 24) in index.matches()


@pytest.mark.long
@settings(max_examples=80, deadline=None)
@given(more_tokens, more_tokens, more_tokens, st.booleans())
def test_a_rewound_index_equals_one_that_was_never_extended(
    first: list[int], forgotten: list[int], then: list[int], one_by_one: bool
) -> None:
    index, fresh = SuffixIndex(), SuffixIndex()
    index.extend(first)
    if one_by_one:
        for token in forgotten:
            index.append(token)
    else:
        index.extend(forgotten)
    index.tokens.append(3)  # a tentative one
    index.rewind(len(first))
    fresh.extend(first)
    assert vars(index) == vars(fresh)
    for token in then:
        index.append(token)
    fresh.extend(then)
    assert vars(index) == vars(fresh)
    assert index.matches() == fresh.matches()
