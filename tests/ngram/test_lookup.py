"""Matches of the history's end in the suffix index and the answer cache, and `--draft fixed`."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.ngram import answer_cache
from akunu_py.ngram.answer_cache import AnswerCache, AnswerMatch
from akunu_py.ngram.fixed import ORDERS, WINDOW, FixedDrafter, Predictor, fnv1a
from akunu_py.ngram.index import LONGEST_MATCH, MAX_CHAIN_1, SuffixIndex, earlier_answers
from akunu_py.types import Drafter

tokens_of_3 = st.lists(st.integers(0, 2), max_size=60)
tokens_of_5 = st.lists(st.integers(0, 4), max_size=40)


def index_of(tokens: Sequence[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(tokens)
    return index


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


@given(tokens_of_3, st.integers(0, 60), tokens_of_3)
def test_matches_are_true_and_include_the_latest(
    tokens: list[int], cut: int, tentative: list[int]
) -> None:
    index = index_of(tokens[:cut])
    for token in tokens[cut:]:
        index.append(token)
    every = matches_from_scratch(tokens)
    found = dict(index.matches())
    assert found.items() <= every.items()
    assert set(sorted(every, reverse=True)[:MAX_CHAIN_1]) <= set(found)
    assert vars(index) == vars(index_of(tokens))
    index.tokens.extend(tentative)  # looked up, and leave nothing
    if tokens:
        assert dict(index.matches()).items() <= matches_from_scratch(tokens + tentative).items()
    index.drop_tentative()
    assert vars(index) == vars(index_of(tokens))


def test_a_distant_long_match_is_found_behind_many_short_ones() -> None:
    passage = [11, 12, 13, 14, 15, 16, 17, 1, 2]
    index = index_of([*passage, 99, *([7, 1, 2] * 100), *passage])
    assert (len(passage), len(passage)) in index.matches()


@settings(max_examples=50, deadline=None)
@given(tokens_of_5, tokens_of_5, tokens_of_5, st.booleans(), st.integers(0, 60), st.integers(0, 60))
def test_a_rewound_index_equals_one_that_was_never_extended(
    first: list[int], rejected: list[int], then: list[int], batch: bool, start: int, length: int
) -> None:
    index = index_of([*first, *(rejected if batch else [])])
    for token in [] if batch else rejected:
        index.append(token)
    index.mark_answer(start, min(start + length, index.size))
    index.tokens.append(3)  # a tentative one
    index.rewind(len(first))
    fresh = index_of(first)
    fresh.mark_answer(start, min(start + length, fresh.size))
    assert vars(index) == vars(fresh)
    for token in then:
        index.append(token)
    fresh.extend(then)
    assert vars(index) == vars(fresh)
    assert index.matches() == fresh.matches()


NEWLINE, END, START, USER, ASSISTANT = range(5)
AFTER_ANSWER = [END, NEWLINE, START, USER, NEWLINE]
BEFORE_ANSWER = [END, NEWLINE, START, ASSISTANT, NEWLINE]
texts = st.lists(st.integers(5, 7) | st.just(NEWLINE), max_size=8)


@given(st.lists(st.tuples(texts, texts), max_size=5), texts)
def test_answers_are_found_by_the_header_before_them(
    turns: list[tuple[list[int], list[int]]], last: list[int]
) -> None:
    tokens = [START, USER, NEWLINE]
    answers: list[tuple[int, int]] = []
    by_turn: list[tuple[int, int]] = []
    searched = 0
    for message, answer in [*turns, (last, [])]:
        tokens += [*message, *BEFORE_ANSWER]
        start = len(tokens)
        by_turn += earlier_answers(tokens, start, searched)
        searched = start
        if len(answers) < len(turns):
            answers.append((start, start + len(answer) + 1))  # with the token that ends it
        tokens += [*answer, *AFTER_ANSWER]
    assert by_turn == answers == list(earlier_answers(tokens, start))


def cache_of(*items: list[int], bits: int = 8) -> AnswerCache:
    cache = AnswerCache(bits)
    for item in items:
        cache.learn(item)
    return cache


@pytest.mark.parametrize(("items", "context", "found"), [
    ([[1, 2, 3, 4, 5], [9, 2, 3, 6], [8, 2, 3, 6]], [1, 2, 3], AnswerMatch(4, 3, 1, 0)),
    ([[1, 2, 3, 4, 5], [9, 2, 3, 6], [8, 2, 3, 6]], [7, 2, 3], AnswerMatch(6, 2, 2, 1)),
    ([[1, 2, 3, 4, 5], [9, 2, 3, 6], [8, 2, 3, 6]], [7, 7, 4], AnswerMatch(5, 1, 1, 0)),
    ([[1, 2], [3, 4]], [0, 3], AnswerMatch(4, 1, 1, 0)),
    ([[1, 2], [3, 4]], [1, 2], None),  # never from one item to the next
    ([[1, 2], [3, 4]], [], None),
    ([], [1, 2], None),
])  # fmt: skip
def test_lookup_finds_the_token_after_the_longest_context(
    items: list[list[int]], context: list[int], found: AnswerMatch | None
) -> None:
    assert cache_of(*items).lookup(context) == found


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=20), st.integers(4, 6))
def test_lookups_match_the_stored_tokens_also_after_saving(
    items: list[list[int]], bits: int
) -> None:
    cache, log = cache_of(*items, bits=bits), [each for item in items for each in (*item, -1)]
    loaded = AnswerCache.load(cache.dump())
    assert loaded.dump() == cache.dump()
    assert cache.total == len(log)
    kept = log[-(2**bits) :]
    for context in ([0, 1, 2], [1, 1], [3]):
        found = cache.lookup(context)
        assert loaded.lookup(context) == found
        if found is None:
            continue
        size = found.length
        follows = [
            kept[i + size] for i in range(len(kept) - size) if kept[i : i + size] == context[-size:]
        ]
        assert found.token in follows
        assert found.agreeing + found.opposing <= answer_cache.MAX_CHAIN
    for each in (cache, loaded):
        each.learn([1, 2, 3])
    assert loaded.dump() == cache.dump()


def test_truncated_altered_and_foreign_bytes_are_refused() -> None:
    data = cache_of([1, 2, 3, 4], bits=4).dump()
    broken = [data[:cut] for cut in (0, 5, 27, 28, 100)]
    broken += [data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :] for at in range(len(data))]
    for each in broken:
        with pytest.raises(ValueError, match="answer cache"):
            AnswerCache.load(each)
    with pytest.raises(ValueError, match="of version"):
        AnswerCache.load(b"PK\x03\x04" + bytes(100))
    for bits in (3, 25):
        with pytest.raises(ValueError, match="capacity bits"):
            AnswerCache(bits)


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


@pytest.mark.parametrize(("tokens", "digest"), [
    ([], 0xCBF29CE484222325),
    (b"a", 0xAF63DC4C8601EC8C),  # test vectors from the FNV draft, appendix C
    (b"foobar", 0x85944171F73967E8),
    ([49151], ((0xCBF29CE484222325 ^ 49151) * 0x100000001B3) % 2**64),  # mixed in whole
])  # fmt: skip
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
