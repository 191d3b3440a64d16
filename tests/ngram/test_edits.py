"""Copies through edits that come again: line numbers, indentation, escapes, names replaced."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.copies import INSERTION, MAX_REPLACED, MAX_WRITTEN, UNKNOWN, Edit, Edits
from akunu_py.ngram.cost import CostCurve

NEWLINE, DEEPER, COLON, BACKSLASH, LETTER_N, QUOTE, ESCAPED, OLD, NEW = range(1, 10)
DIGITS = range(20, 30)
LINES = 40

Line = list[int]


def some_lines(seed: int) -> list[Line]:
    rng = random.Random(seed)
    words = range(100, 400)
    return [
        [*rng.choices(words, k=4), QUOTE, *rng.choices(words, k=3), QUOTE, OLD, rng.choice(words)]
        for _ in range(LINES)
    ]


def number(at: int) -> Line:
    return [DIGITS[int(digit)] for digit in str(at + 10)]


def plain(lines: Sequence[Line]) -> list[int]:
    return [token for line in lines for token in (NEWLINE, *line)]


def numbered(lines: Sequence[Line]) -> list[int]:
    return [t for i, line in enumerate(lines) for t in (NEWLINE, *number(i), COLON, *line)]


def indented(lines: Sequence[Line]) -> list[int]:
    return [DEEPER if token == NEWLINE else token for token in plain(lines)]


def escaped(lines: Sequence[Line]) -> list[int]:
    written = {NEWLINE: [BACKSLASH, LETTER_N], QUOTE: [ESCAPED]}
    return [new for token in plain(lines) for new in written.get(token, [token])]


def renamed(lines: Sequence[Line]) -> list[int]:
    return [NEW if token == OLD else token for token in plain(lines)]


def replay(prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int, int]:
    """(passes, drafted, accepted) of a target whose output is `output`."""
    drafter = AutoDrafter(CostCurve({1: 1.0, 5: 1.1, 32: 1.5}))
    drafter.extend(prompt)
    drafter.extend(output[:1])
    done, passes, drafted, accepted = 1, 0, 0, 0
    while done < len(output):
        draft = drafter.propose(len(output) - done - 1)
        right = 0
        while right < len(draft) and draft[right] == output[done + right]:
            right += 1
        drafter.observe(right, len(draft), 1 + len(draft), 1.0)
        drafter.extend(output[done : done + right + 1])
        done += right + 1
        passes, drafted, accepted = passes + 1, drafted + len(draft), accepted + right
    return passes, drafted, accepted


Form = Callable[[Sequence[Line]], list[int]]


@pytest.mark.parametrize(
    ("source", "target", "most_passes"),
    [
        (numbered, plain, 30),  # 46 before edits were learned
        (plain, indented, 30),  # 51 to 55
        (indented, plain, 30),
        (plain, escaped, 75),  # 84 to 89
        (escaped, plain, 75),  # 114 to 125
        (plain, renamed, 26),  # 26 to 28
    ],
)
def test_an_edit_made_on_every_line_is_learned(
    source: Form, target: Form, most_passes: int
) -> None:
    for seed in range(4):
        lines = some_lines(seed)
        output = target(lines)
        passes, drafted, accepted = replay([0, *source(lines), 0, 0, 50, 51], [52, *output])
        assert passes < most_passes
        assert accepted > 0.78 * drafted
        assert accepted > 0.84 * len(output)


@pytest.mark.parametrize("tokens_a_line", [16, 18, 20, 22])
def test_an_edit_between_long_rows_of_the_answer_is_learned_whole(tokens_a_line: int) -> None:
    """The answer has the rows twice, the second time with the line breaks escaped."""
    for seed in range(4):
        rng = random.Random(seed)
        lines = [rng.choices(range(100, 9000), k=tokens_a_line) for _ in range(LINES)]
        passes, _, accepted = replay([0, 50, 51], [52, *plain(lines), *escaped(lines)])
        # 50 to 56 passes for the second half if only the first token of an edit is learned.
        assert passes < len(plain(lines)) + 45
        assert accepted > 0.9 * len(escaped(lines))


def edits_of(tokens: list[int], source: int, began: int, place: int, end: int) -> Edit | None:
    """What is learned when the output of `began` on leaves the source at `source`, and its token
    at `end` is the source's at `place`."""
    edits = Edits(tokens, {})
    edits.begin(source, tokens[began])
    edits.complete(source, began, place, end)
    found = edits.find(source)
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("source", "output", "edit"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 9, 3, 4], Edit((9,), 2)),  # replaced
        ([1, 2, 3, 4, 5, 6], [1, 9, 8, 3, 4], Edit((9, 8), 2)),  # by two
        ([1, 2, 3, 4, 5, 6], [1, 9, 2, 3], Edit((9,), INSERTION)),  # inserted
        ([1, 2, 3, 4, 5, 6], [1, 4, 5], Edit((), 3)),  # left out
        ([1, 2, 3, 4, 5, 6], [1, 9, 8, 7, 0, 9, 8, 7, 0, 9, 3, 4], Edit((9,), UNKNOWN)),  # too long
    ],
)
def test_an_edit_is_what_is_written_and_what_is_passed(
    source: list[int], output: list[int], edit: Edit
) -> None:
    tokens = [*source, 50, 51, *output]
    place = source.index(output[-1])
    assert edits_of(tokens, 1, len(source) + 3, place, len(tokens) - 1) == edit


def test_an_edit_that_goes_on_differently_is_known_by_its_first_token_only() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 50, 51, 1, 9, 8, 3, 4]
    edits = Edits(tokens, {})
    edits.begin(1, 9)
    edits.complete(1, 9, 3, 12)
    found = edits.find(1)
    assert found is not None
    assert found[1:] == (Edit((9, 8), 2), 2)
    edits.mark_varying(found[0])
    edits.complete(1, 9, 3, 12)
    found = edits.find(1)
    assert found is not None
    assert found[1] == Edit((9,), UNKNOWN)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=20), st.data())
def test_an_edit_leads_from_its_source_to_its_output(
    source: list[int], data: st.DataObject
) -> None:
    """Whatever was written in place of whatever: the source with the edit is the output."""
    start = data.draw(st.integers(1, len(source) - 2))
    stop = data.draw(st.integers(start, min(start + MAX_REPLACED, len(source) - 2)))
    written = data.draw(st.lists(st.integers(11, 19), min_size=1, max_size=MAX_WRITTEN))
    tokens = [*source, 50, 51, *source[:start], *written, *source[stop : stop + 2]]
    began = len(source) + 2 + start
    edits = Edits(tokens, {})
    edits.begin(start, tokens[began])
    edits.complete(start, began, stop + 1, len(tokens) - 1)
    found = edits.find(start)
    assert found is not None
    _, edit, place = found
    assert list(edit.written) == written
    # Behind the first of equal tokens, where there are several.
    passed = source[start:stop]
    assert place == (start + passed.index(passed[-1]) + 1 if passed else start)
