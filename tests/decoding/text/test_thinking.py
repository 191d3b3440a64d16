"""Thinking and answer are separated, whatever the pieces, and neither loses a character."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from akunu_py.decoding.text.stop_sequences import Finder, Kind, StopText, TextRun
from akunu_py.decoding.text.thinking import (
    ThinkingSplitter,
    opens_thinking,
    special_marker_tokens,
    thinking_markers,
)

START, END = "<think>", "</think>"
# Short markers that share beginnings, so that random text is full of them and of their parts.
SHORT = ("<<a", "<b")
PIECES = st.lists(st.tuples(st.text("<ab \n", max_size=8), st.booleans()), max_size=20)
Marked = tuple[str, bool, Kind]


def expected(characters: list[tuple[str, bool]], *, inside: bool) -> list[Marked]:
    """By brute force, on the whole text: its characters without markers, each with its kind."""
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


def marked(runs: list[TextRun]) -> list[Marked]:
    return [(c, run.drafted, run.kind) for run in runs for c in run.text]


def split(
    *texts: str, inside: bool = False, start: str | None = START, end: str | None = END
) -> list[tuple[str, Kind]]:
    """Neighbours of one kind joined, so that how the text was cut does not show."""
    splitter = ThinkingSplitter(start, end, inside=inside)
    runs = [run for text in texts for run in splitter.add(text)] + splitter.finish()
    parts: list[tuple[str, Kind]] = []
    for run in runs:
        if parts and parts[-1][1] == run.kind:
            parts[-1] = (parts[-1][0] + run.text, run.kind)
        else:
            parts.append((run.text, run.kind))
    return parts


@given(PIECES, st.booleans())
def test_equals_brute_force_however_it_is_cut(pieces: list[tuple[str, bool]], inside: bool) -> None:
    splitter = ThinkingSplitter(*SHORT, inside=inside)
    runs = [run for text, drafted in pieces for run in splitter.add(text, drafted)]
    runs += splitter.finish()
    assert all(run.text for run in runs)
    characters = [(c, drafted) for text, drafted in pieces for c in text]
    assert marked(runs) == expected(characters, inside=inside)
    assert splitter.finish() == []


@given(PIECES, st.booleans())
def test_what_is_shown_is_never_taken_back(pieces: list[tuple[str, bool]], inside: bool) -> None:
    splitter = ThinkingSplitter(*SHORT, inside=inside)
    seen: list[tuple[str, bool]] = []
    shown: list[Marked] = []
    for text, drafted in pieces:
        shown += marked(splitter.add(text, drafted))
        seen += [(c, drafted) for c in text]
        whole = expected(seen, inside=inside)
        assert whole[: len(shown)] == shown
        # Held back: part of a marker, and whitespace where a marker may follow it.
        late = "".join(c for c, _, _ in whole[len(shown) :]).lstrip()
        assert len(late) < max(map(len, SHORT))


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "inside", "parts"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, [("Hm.\n", "thinking"), ("Yes.", "answer")]),
        ("\nHm.</think>\n\n  Yes.\n", True, [("Hm.", "thinking"), ("  Yes.\n", "answer")]),
        (" \n<think>Hm.</think>Yes.", False, [("Hm.", "thinking"), ("Yes.", "answer")]),
        ("<think>\n\n</think>\n\nYes.", False, [("Yes.", "answer")]),
        ("Hm, without end </thin", True, [("Hm, without end </thin", "thinking")]),
        ("<think>a</think>\n<think>b</think>c", False, [("ab", "thinking"), ("c", "answer")]),
        ("  indented", False, [("  indented", "answer")]),
        (" \n", False, [(" \n", "answer")]),
        ("<th", False, [("<th", "answer")]),
        ("Tags: <think> and </think>.", False, [("Tags: <think> and </think>.", "answer")]),
        ("</think>Yes.", False, [("</think>Yes.", "answer")]),
        ("a <think> b</think>c", True, [("a <think> b", "thinking"), ("c", "answer")]),
    ],
)
def test_cases(text: str, inside: bool, parts: list[tuple[str, Kind]], cut: int) -> None:
    pieces = [text[at : at + cut] for at in range(0, len(text), cut)]
    assert split(*pieces, inside=inside) == parts


def test_drafted_stays_with_its_characters() -> None:
    splitter = ThinkingSplitter(START, END, inside=False)
    assert splitter.add("<thi", True) == []
    assert splitter.add("nk>\nHm", False) == [TextRun("Hm", False, "thinking")]
    assert splitter.add(". </", True) == [TextRun(". ", True, "thinking")]
    assert splitter.add("b", False) == [
        TextRun("</", True, "thinking"),
        TextRun("b", False, "thinking"),
    ]
    assert splitter.add("</think>\n\nYes", True) == [TextRun("Yes", True, "answer")]
    assert splitter.add(" <think>", True) == [TextRun(" <think>", True, "answer")]


@pytest.mark.parametrize("markers", [(None, None), (START, None), (None, END)])
def test_without_markers_everything_is_answer(
    markers: tuple[str | None, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Finder, "search", lambda *_: pytest.fail("searched for nothing"))
    text = " <think>\n</think>"
    assert split(*text, start=markers[0], end=markers[1]) == [(text, "answer")]


def test_stop_sequences_apply_to_the_answer_only() -> None:
    splitter, stopping = ThinkingSplitter(START, END, inside=True), StopText(["\n\n"])
    shown: list[TextRun] = []
    for character in "one\n\ntwo</think>\n\nthree\n\nfour":
        for run in splitter.add(character):
            shown += [run] if run.kind == "thinking" else stopping.add(run.text, run.drafted)
    text = {
        kind: "".join(run.text for run in shown if run.kind == kind)
        for kind in ("thinking", "answer")
    }
    assert text == {"thinking": "one\n\ntwo", "answer": "three"}
    assert stopping.found == "\n\n"


def test_a_template_that_opens_the_block() -> None:
    markers = (START, END)
    assert opens_thinking("<|im_start|>assistant\n<think>\n", markers)
    assert opens_thinking("<think>", markers)
    assert not opens_thinking("<think>\n\n</think>\n\n", markers)
    assert not opens_thinking("what does <think> mean?<|im_end|>assistant\n", markers)
    assert not opens_thinking("<think>", None)
    assert not opens_thinking("", markers)


def wrapped(*added: str, special: bool) -> Any:
    """A tokenizer of mlx-lm with a few words and `added` as tokens of their own."""
    words = Tokenizer(WordLevel({"?": 0, "thought": 1, "hello": 2}, unk_token="?"))
    words.add_tokens([AddedToken(text, special=special, normalized=False) for text in added])
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?"))


def test_markers_of_tokenizers() -> None:
    plain = wrapped(START, END, special=False)
    assert thinking_markers(plain) == (START, END)
    assert special_marker_tokens(plain) == {}
    hidden = wrapped("<|channel>", "<channel|>", special=True)
    assert thinking_markers(hidden) == ("<|channel>thought", "<channel|>")
    assert set(special_marker_tokens(hidden).values()) == {"<|channel>", "<channel|>"}


@pytest.mark.parametrize("tokenizer", [wrapped(special=False), object()])
def test_tokenizers_without_markers(tokenizer: Any) -> None:
    assert thinking_markers(tokenizer) is None
    assert special_marker_tokens(tokenizer) == {}
