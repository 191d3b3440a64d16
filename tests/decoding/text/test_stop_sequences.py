"""The text before the first stop sequence comes out: all of it, as early as possible, no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding.text.stop_sequences import StopText, TextRun, merge_runs
from akunu_py.errors import UsageError

ALPHABET = "ab\n\u00e9\u0301\U0001f600"
PIECES = st.lists(st.tuples(st.text(ALPHABET, max_size=6), st.booleans()), max_size=20)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4)


def characters(runs: Iterable[TextRun]) -> list[TextRun]:
    return [TextRun(c, run.drafted, run.kind) for run in runs for c in run.text]


def expected(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """By brute force: the text before the stop that is complete first, and that stop."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held(text: str, stops: Sequence[str]) -> int:
    """By brute force: how many characters at the end of the text may begin a stop."""
    longest = min(len(text), max((len(stop) for stop in stops), default=0))
    return next(
        (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )


def stream(stops: Sequence[str], *texts: str) -> tuple[list[str], str, str | None]:
    """What each text gave out, what the end gave out, and the stop that was found."""
    stopping = StopText(stops)
    shown = ["".join(run.text for run in stopping.add(text)) for text in texts]
    return shown, "".join(run.text for run in stopping.finish()), stopping.found


@given(PIECES, STOPS)
def test_equals_brute_force_however_it_is_cut(
    pieces: list[tuple[str, bool]], stops: list[str]
) -> None:
    stopping = StopText(stops)
    shown: list[TextRun] = []
    seen = ""
    for text, drafted in pieces:
        shown += stopping.add(text, drafted)
        seen += text
        before, stop = expected(seen, stops)
        assert stopping.found == stop
        # As much as is certain, and not one character more.
        certain = len(before) if stop else len(seen) - held(seen, stops)
        assert "".join(run.text for run in shown) == seen[:certain]
    shown += stopping.finish()
    before, _ = expected(seen, stops)
    marked = characters(TextRun(text, drafted) for text, drafted in pieces)
    assert characters(shown) == marked[: len(before)]
    assert stopping.finish() == []


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=6), max_size=5))
def test_the_cut_does_not_matter(text: str, stops: list[str]) -> None:
    whole, rest, found = stream(stops, text)
    pieces, last, also_found = stream(stops, *text)
    assert "".join(whole) + rest == "".join(pieces) + last == expected(text, stops)[0]
    assert found == also_found


def test_a_stop_across_tokens_and_drafts() -> None:
    stopping = StopText(["\nUser:"])
    assert stopping.add("Yes.", True) == [TextRun("Yes.", True)]
    assert stopping.add("\n", True) == []
    assert stopping.add("Us", False) == []
    assert stopping.add("ed\nUse", True) == [
        TextRun("\n", True),
        TextRun("Us", False),
        TextRun("ed", True),
    ]
    assert stopping.add("r: hello", False) == []
    assert stopping.found == "\nUser:"
    assert stopping.finish() == []
    assert stopping.add("more") == []


def test_a_beginning_comes_out_at_the_end() -> None:
    assert stream(["###"], "a#", "#") == (["a", ""], "##", None)


@pytest.mark.parametrize(
    ("stops", "text", "shown", "found"),
    [
        (["ab", "abc"], "xabc", "x", "ab"),  # complete first
        (["bc", "abc"], "xabc", "x", "abc"),  # complete at once: the longest
        (["abcd", "bc"], "xabcd", "xa", "bc"),  # complete first, though it starts later
        (["aab"], "aaab", "a", "aab"),  # begins again inside a beginning
        (["\u0301"], "cafe\u0301", "cafe", "\u0301"),  # code points, not what they look like
    ],
)
def test_which_stop_wins(stops: list[str], text: str, shown: str, found: str) -> None:
    assert stream(stops, text) == ([shown], "", found)
    assert stream(stops[::-1], text) == ([shown], "", found)


def test_no_stops_and_empty_ones() -> None:
    assert stream([], "a", "", "b") == (["a", "", "b"], "", None)
    with pytest.raises(UsageError, match="at least one character") as caught:
        StopText(["a", ""])
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_long_stops_and_texts_take_linear_time() -> None:
    # Comparing afresh at each character would take 10 thousand million steps.
    stops = ["a" * 50_000 + "b"]
    stopping = StopText(stops)
    shown = sum(len(run.text) for _ in range(200_000) for run in stopping.add("a"))
    assert shown == 150_000
    assert stopping.add("b") == []
    assert stopping.found == stops[0]


def test_joined_runs() -> None:
    runs = [TextRun("a"), TextRun(""), TextRun("b"), TextRun("c", True), TextRun("", False)]
    assert merge_runs(runs) == [TextRun("ab"), TextRun("c", True)]
    assert merge_runs([TextRun("a"), TextRun("b", kind="thinking")]) == [
        TextRun("a"),
        TextRun("b", kind="thinking"),
    ]
