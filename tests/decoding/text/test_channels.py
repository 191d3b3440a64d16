"""Thinking, answer and calls of an answer in channels come apart, however it is cut."""

from __future__ import annotations

import re

import pytest

from akunu_py.decoding.text.thinking import HARMONY, MUSE, Channels, ChannelSplitter

CALL = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
CASES = [
    (HARMONY, "<|channel|>final<|message|>Yes.<|return|>", "", "Yes."),
    (HARMONY, "<|channel|>analysis<|message|>Hm <b>.<|end|>", "Hm <b>.", ""),
    (
        HARMONY,
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B."
        "<|end|><|start|>assistant<|channel|>final<|message|>C",
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
    (MUSE, " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.", "Hm.", "Yes."),
    (MUSE, "to=f<|message|><atem:function_calls>", "", "<atem:function_calls>"),
    (HARMONY, "No header.", "", "No header."),
    (HARMONY, '{"a": "<|"}', "", '{"a": "<|"}'),
    (HARMONY, "<", "", "<"),
    (HARMONY, "", "", ""),
]


def split(channels: Channels, pieces: list[str]) -> tuple[str, str]:
    splitter = ChannelSplitter(channels)
    runs = [run for piece in pieces for run in splitter.add(piece)] + splitter.finish()
    thinking = "".join(run.text for run in runs if run.kind == "thinking")
    return thinking, "".join(run.text for run in runs if run.kind == "answer")


@pytest.mark.parametrize(("channels", "text", "thinking", "answer"), CASES)
def test_every_split_point(channels: Channels, text: str, thinking: str, answer: str) -> None:
    assert split(channels, list(text)) == (thinking, answer)
    for at in range(len(text) + 1):
        assert split(channels, [text[:at], text[at:]]) == (thinking, answer)


@pytest.mark.parametrize(("channels", "text", "thinking", "answer"), CASES[:5])
def test_no_header_shows_where_an_answer_is_cut_off(
    channels: Channels, text: str, thinking: str, answer: str
) -> None:
    """What is there by then is the beginning of it all; markers are whole, as their tokens are."""
    ends = [at for at in range(12, len(text)) if not re.search(r"<\|?[a-z]*\|?$", text[:at])]
    for at in [*ends, *(found.end() for found in re.finditer(r"<\|[a-z]+\|>", text))]:
        thought, said = split(channels, [text[:at]])
        assert thinking.startswith(thought)
        assert answer.startswith(said)


def test_drafted_text_stays_so() -> None:
    splitter = ChannelSplitter(HARMONY)
    runs = splitter.add("<|channel|>final<|message|>a") + splitter.add("b", drafted=True)
    assert [(run.text, run.drafted) for run in runs] == [("a", False), ("b", True)]
