"""Earlier answers in a prompt: found wherever they are, forgotten with what is taken back, and
drafted from before other text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.index import SuffixIndex, earlier_answers

NEWLINE, END, START, USER, ASSISTANT = range(5)
ASKS = [END, NEWLINE, START, USER, NEWLINE]
ANSWERS = [END, NEWLINE, START, ASSISTANT, NEWLINE]
texts = st.lists(st.integers(5, 7) | st.just(NEWLINE), max_size=8)


@pytest.mark.long
@given(st.lists(st.tuples(texts, texts), max_size=5), texts)
def test_what_follows_an_earlier_header_is_an_answer(
    turns: list[tuple[list[int], list[int]]], last: list[int]
) -> None:
    tokens = [START, USER, NEWLINE]
    answers: list[tuple[int, int]] = []
    by_turn: list[tuple[int, int]] = []
    searched = 0
    for asked, answer in [*turns, (last, [])]:
        tokens += [*asked, *ANSWERS]
        start = len(tokens)
        by_turn += earlier_answers(tokens, start, searched)
        searched = start
        if len(answers) < len(turns):
            answers.append((start, start + len(answer) + 1))  # with the token that ends it
        tokens += [*answer, *ASKS]
    assert by_turn == answers == list(earlier_answers(tokens, start))


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 2), max_size=20),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_answers_are_forgotten_with_the_tokens(
    kept: list[int], forgotten: list[int], start: int, length: int
) -> None:
    index, fresh = SuffixIndex(), SuffixIndex()
    index.extend(kept + forgotten)
    index.mark_answer(start, min(start + length, index.size))
    index.rewind(len(kept))
    fresh.extend(kept)
    fresh.mark_answer(start, min(start + length, fresh.size))
    assert vars(index) == vars(fresh)
    assert index.matches() == fresh.matches()


def test_answers_are_drafted_from_before_other_text() -> None:
    said, told = [11, 12, 13], [11, 22, 23]
    prompt = [*ANSWERS, *said, *ASKS, *told, 30, *told, 31]
    for header, follows in ((ANSWERS, 12), (ASKS[::-1], 22)):
        drafter = AutoDrafter(CostCurve({1: 1.0, 5: 1.01}))
        drafter.extend([*prompt, *header])
        drafter.extend([40])
        drafter.propose(8)
        drafter.extend([11])
        assert drafter.propose(8)[:1] == [follows]


def test_what_was_generated_is_an_answer_whatever_the_prompts_look_like() -> None:
    said, told = [11, 12, 13], [11, 22, 23]
    drafter = AutoDrafter(CostCurve({1: 1.0, 5: 1.01}))
    drafter.extend([50, 51])
    for token in [52, *said, 53]:  # the answer
        drafter.extend([token])
        drafter.propose(8)
    drafter.extend([54, *told, 30, *told, 31])
    drafter.extend([40])
    drafter.propose(8)
    drafter.extend([11])
    assert drafter.propose(8)[:1] == [12]


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=7), st.integers(0, 30))))
def test_answers_are_kept_track_of_however_the_history_goes_back(
    steps: list[tuple[list[int], int]],
) -> None:
    drafter = AutoDrafter(CostCurve({1: 1.0, 5: 1.01}))
    for tokens, length in steps:
        drafter.extend(tokens)
        for token in tokens[:2]:
            drafter.propose(4)
            drafter.extend([token])
        if length < drafter.index.size:
            drafter.rewind(length)
            drafter.propose(4)  # goes on at once, as when an answer is made again
    drafter.rewind(0)
    assert vars(drafter.index) == vars(SuffixIndex())
