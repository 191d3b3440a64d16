"""Stop sequences, thinking and channels in a streamed text: the same in any pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from akunu_py.decoding.text.stop_sequences import Kind, StopText, TextRun
from akunu_py.decoding.text.thinking import (
    HARMONY,
    MUSE,
    ChannelSplitter,
    ThinkingSplitter,
    opens_thinking,
    special_marker_tokens,
    thinking_markers,
)
from akunu_py.errors import UsageError

START, END = "<think>", "</think>"
# Short markers that share beginnings, so that random text is full of them and of their parts.
SHORT = ("<<a", "<b")
ALPHABET = "ab\n\u00e9\u0301\U0001f600"
STOPS = st.lists(
    st.text(ALPHABET, min_size=1, max_size=4) | st.text("ab", min_size=1, max_size=6), max_size=5
)
Pieces = list[tuple[str, bool]]  # texts, and whether they were drafted
Marked = tuple[str, bool, Kind]


def pieces(alphabet: str) -> st.SearchStrategy[Pieces]:
    return st.lists(st.tuples(st.text(alphabet, max_size=8), st.booleans()), max_size=20)


def marked(runs: Iterable[TextRun]) -> list[Marked]:
    return [(c, run.drafted, run.kind) for run in runs for c in run.text]


def before_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the stop that is complete first, the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def unsure(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of the text may begin a stop."""
    longest = min(len(text), max((len(stop) for stop in stops), default=0))
    return next(
        (n for n in range(longest, 0, -1) if any(s.startswith(text[-n:]) for s in stops)), 0
    )


@given(pieces(ALPHABET) | pieces("ab"), STOPS)
def test_text_before_a_stop_comes_out_as_early_as_it_is_certain(
    pieces: Pieces, stops: list[str]
) -> None:
    stopping, shown, seen = StopText(stops), list[TextRun](), ""
    for text, drafted in pieces:
        shown += stopping.add(text, drafted)
        seen += text
        before, stop = before_stop(seen, stops)
        assert stopping.found == stop
        certain = len(before) if stop else len(seen) - unsure(seen, stops)
        assert "".join(run.text for run in shown) == seen[:certain]
    shown += stopping.finish()
    before, _ = before_stop(seen, stops)
    expected = marked(TextRun(text, drafted) for text, drafted in pieces)
    assert marked(shown) == expected[: len(before)]
    assert stopping.finish() == []


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one character") as caught:
        StopText(["a", ""])
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_long_stops_and_texts_take_linear_time() -> None:
    # Comparing afresh at each character would take thousand million steps.
    stopping = StopText(["a" * 20_000 + "b"])
    shown = sum(len(run.text) for _ in range(60_000) for run in stopping.add("a"))
    assert shown == 40_000
    assert stopping.add("b") == []
    assert stopping.found


def split_at_once(characters: Pieces, *, inside: bool) -> list[Marked]:
    """Return the characters of a whole text without its markers, each with its kind."""
    text = "".join(character for character, _ in characters)
    out: list[Marked] = []

    def skip(position: int, white: str | None) -> int:
        return len(text) - len(text[position:].lstrip(white))

    position = skip(0, "\r\n") if inside else 0
    while True:
        if inside:
            end = text.find(SHORT[1], position)
            stop = len(text) if end < 0 else end
            out += [(*mark, "thinking") for mark in characters[position:stop]]
            if end < 0:
                return out
            position, inside = skip(end + len(SHORT[1]), "\r\n"), False
        start = skip(position, None)
        if not text.startswith(SHORT[0], start):
            return out + [(*mark, "answer") for mark in characters[position:]]
        position, inside = skip(start + len(SHORT[0]), "\r\n"), True


@given(pieces("<ab \n"), st.booleans())
def test_thinking_is_split_off_early_and_never_taken_back(pieces: Pieces, inside: bool) -> None:
    splitter, seen, shown = ThinkingSplitter(*SHORT, inside=inside), Pieces(), list[Marked]()
    for text, drafted in pieces:
        runs = splitter.add(text, drafted)
        assert all(run.text for run in runs)
        shown += marked(runs)
        seen += [(c, drafted) for c in text]
        whole = split_at_once(seen, inside=inside)
        assert whole[: len(shown)] == shown
        # Held back: part of a marker, and whitespace where a marker may follow it.
        late = "".join(c for c, _, _ in whole[len(shown) :]).lstrip()
        assert len(late) < max(map(len, SHORT))
    shown += marked(splitter.finish())
    assert shown == split_at_once(seen, inside=inside)
    assert splitter.finish() == []


Splitter = ThinkingSplitter | ChannelSplitter
Case = tuple[Callable[[], Splitter], str, str, str]
CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
BY_ITSELF, OPENED = (lambda inside=inside: ThinkingSplitter(START, END, inside=inside)
                     for inside in (False, True))  # fmt: skip
# A splitter, a text, its thinking and its answer.
CASES: list[Case] = [
    (BY_ITSELF, "<think>\nHm.\n</think>\n\nYes.", "Hm.\n", "Yes."),
    (OPENED, "\nHm.</think>\n\n  Yes.\n", "Hm.", "  Yes.\n"),
    *(
        ((lambda start=start, end=end: ThinkingSplitter(start, end, inside=False)), text, "", text)
        for start, end in ((None, None), (START, None), (None, END))
        for text in (" <think>\n</think>",)
    ),
    *(
        ((lambda channels=channels: ChannelSplitter(channels)), text, thinking, answer)
        for channels, text, thinking, answer in (
            (
                HARMONY,
                "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis"
                "<|message|>B.<|end|><|start|>assistant<|channel|>final<|message|>C",
                "A.B.",
                "C",
            ),
            (HARMONY, CALL.removeprefix("<|start|>assistant") + "{}<|call|>", "", CALL + "{}"),
            (HARMONY, "<|channel|>analysis<|message|>A<|end|>" + CALL + "{}", "A", CALL + "{}"),
            (
                HARMONY,
                " to=functions.f<|channel|>commentary json<|message|>{}",
                "",
                "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}",
            ),
            (
                MUSE,
                " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.",
                "Hm.",
                "Yes.",
            ),
            *((HARMONY, text, "", text) for text in ("No header.", '{"a": "<|"}', "<", "")),
        )
    ),
]  # fmt: skip


def parts(splitter: Splitter, pieces: Iterable[str]) -> tuple[str, str]:
    """Return the thinking and the answer."""
    runs = [run for piece in pieces for run in splitter.add(piece)] + splitter.finish()
    kinds: tuple[Kind, Kind] = ("thinking", "answer")
    thinking, answer = ("".join(run.text for run in runs if run.kind == kind) for kind in kinds)
    return thinking, answer


@pytest.mark.parametrize(("make", "text", "thinking", "answer"), CASES)
def test_every_split_point(
    make: Callable[[], Splitter], text: str, thinking: str, answer: str
) -> None:
    for pieces in (list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))):
        assert parts(make(), pieces) == (thinking, answer)


@pytest.mark.parametrize("case", [case for case in CASES if case[1].startswith("<|channel|>")])
def test_no_header_shows_where_an_answer_is_cut_off(case: Case) -> None:
    """Markers are single tokens, so an answer never ends within one."""
    make, text, thinking, answer = case
    for at in range(12, len(text)):
        if not re.search(r"<\|?[a-z]*\|?$", text[:at]):
            early = parts(make(), [text[:at]])
            assert thinking.startswith(early[0])
            assert answer.startswith(early[1])


def test_drafted_text_of_channels_stays_marked() -> None:
    splitter = ChannelSplitter(HARMONY)
    runs = splitter.add("<|channel|>final<|message|>a") + splitter.add("b", drafted=True)
    assert [(run.text, run.drafted) for run in runs] == [("a", False), ("b", True)]


@pytest.mark.parametrize(
    ("prompt", "markers", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", (START, END), True),
        ("<think>", (START, END), True),
        ("<think>\n\n</think>\n\n", (START, END), False),
        ("what does <think> mean?<|im_end|>assistant\n", (START, END), False),
        ("<think>", None, False),
        ("", (START, END), False),
    ],
)
def test_prompts_that_open_thinking(
    prompt: str, markers: tuple[str, str] | None, opened: bool
) -> None:
    assert opens_thinking(prompt, markers) is opened


def wrapped(*added: str, special: bool = False) -> Any:
    """Return a tokenizer of mlx-lm with a few words, and `added` as tokens of their own."""
    words = Tokenizer(WordLevel({"?": 0, "thought": 1, "hello": 2}, unk_token="?"))
    words.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"))


@pytest.mark.parametrize(
    ("added", "markers"),
    [
        ((START, END), (START, END)),
        (("<|channel>", "<channel|>"), ("<|channel>thought", "<channel|>")),
        ((), None),
    ],
)
def test_markers_of_tokenizers(added: tuple[str, ...], markers: tuple[str, str] | None) -> None:
    special = added[:1] == ("<|channel>",)
    tokenizer = wrapped(*added, special=special)
    assert thinking_markers(tokenizer) == markers
    assert set(special_marker_tokens(tokenizer).values()) == set(added if special else ())
    assert thinking_markers(object()) is None
