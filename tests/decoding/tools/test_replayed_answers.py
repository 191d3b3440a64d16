"""Answers that broke tool calls in other servers, whole and cut at every character."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from akunu_py.decoding.events import Event, PromptProcessed, ThinkingDelta
from akunu_py.decoding.generate.answer_jobs import AnswerEvents
from akunu_py.decoding.generate.session import Status, Step
from akunu_py.decoding.text.thinking import ThinkingSplitter
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.serve.dialect.interface import CollectedAnswer
from akunu_py.serve.openai.chat_completions import ChatEncoder
from akunu_py.serve.openai.shapes import ReplyHead
from akunu_py.types import Piece, Stats, TextPiece, Tool

TYPES = {
    "path": {"type": "string"},
    "line": {"type": "integer"},
    "all": {"type": "boolean"},
    "edits": {"type": "array"},
    "range": {"type": "object"},
    "limit": {"type": ["integer", "null"]},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "part": {"type": "number"},
}
TOOLS = [Tool("edit", "", {"type": "object", "properties": TYPES}), Tool("now")]
# By parameter: the text that models write, and the value that the schema requires.
WRITTEN: dict[str, tuple[str, Any]] = {
    "path": ("123", "123"),
    "line": ("42", 42),
    "all": ("True", True),
    "edits": ('[{"a": 1}]', [{"a": 1}]),
    "range": ("{'a': 1}", {"a": 1}),
    "limit": ("None", None),
    "note": ("null", None),
    "part": ("1", 1),
}


def edit_call(*names: str) -> str:
    values = [f"<parameter={name}>\n{WRITTEN[name][0]}\n</parameter>\n" for name in names]
    return f"<tool_call>\n<function=edit>\n{''.join(values)}</function>\n</tool_call>"


EDIT, SHORT_EDIT = edit_call(*WRITTEN), edit_call("line")
NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
HERMES_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
EDITED = ("edit", {name: value for name, (_, value) in WRITTEN.items()})
SHORT_EDITED = ("edit", {"line": 42})
Expected = tuple[str, list[tuple[str, Any]]]  # the text and the calls of an answer

ANSWERS: dict[str, tuple[str, str, Expected]] = {
    "argument types": ("qwen3_coder", f"</think>\n\n{EDIT}", ("", [EDITED])),
    "parallel calls": (
        "qwen3_coder",
        f"</think>\n\nSo.\n{SHORT_EDIT}\n{NOW}\n{SHORT_EDIT}",
        ("So.", [SHORT_EDITED, ("now", {}), SHORT_EDITED]),
    ),
    "parallel calls in one block": (
        "qwen3_coder",
        f"</think>{NOW.replace('</tool_call>', '') + NOW.replace('<tool_call>', '')}",
        ("", [("now", {}), ("now", {})]),
    ),
    "thinking without an end": ("hermes", "Hm. I wonder", ("", [])),
    "a call in thinking without an end": ("hermes", f"Hm.\n{HERMES_NOW}", ("", [("now", {})])),
    "calls before the end of thinking": (
        "qwen3_coder",
        f"Hm.\n{SHORT_EDIT}\n{NOW}\n</think>\n\n",
        ("", [SHORT_EDITED, ("now", {})]),
    ),
    "a planned call": ("hermes", f"Hm.\n{HERMES_NOW}\n</think>\nNo.", ("No.", [])),
    "a planned call that follows": (
        "qwen3_coder",
        f"Hm.\n{NOW}\n</think>\n{SHORT_EDIT}",
        ("", [SHORT_EDITED]),
    ),
    "half a call in thinking": ("hermes", f"Hm.\n{HERMES_NOW[:-20]}", ("", [])),
}


class Generated:
    """A request that generates a text in pieces, after a prompt that opens thinking."""

    finish_reason, stop_sequence, logprobs, stats = "stop", "", (), Stats()

    def __init__(self, pieces: Sequence[str]) -> None:
        splitter = ThinkingSplitter("<think>", "</think>", inside=True)
        runs = [*(splitter.add(piece) for piece in pieces), splitter.finish()]
        self.steps = [
            TextPiece(
                "".join(run.text for run in each if run.kind == "answer"),
                Piece(()),
                thinking="".join(run.text for run in each if run.kind == "thinking"),
            )
            for each in runs
        ]
        self.status = Status.DECODING

    def cancel(self) -> None:
        self.steps.clear()


def events_of(format: str, pieces: Sequence[str], *, one_call: bool = False) -> list[Event]:
    request: Any = Generated(pieces)
    parser, thought = (ToolCallParser(FORMATS[format], TOOLS) for _ in range(2))
    answer = AnswerEvents(request, parser, thought, one_call=one_call)
    events: list[Event] = []
    while request.steps:
        step: Step = request.steps.pop(0)
        request.status = Status.DECODING if request.steps else Status.FINISHED
        events += answer.add([step])
    return events


def in_pieces(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def arguments_of(text: str) -> Any:
    """Return the arguments of a call; their text if they are unfinished."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def collected(events: list[Event]) -> Expected:
    """Return the answer of a reply that is not streamed."""
    answer = CollectedAnswer()
    for event in events:
        answer.add(event)
    return answer.text, [(call.name, arguments_of(call.arguments)) for call in answer.calls]


def streamed(events: list[Event]) -> Expected:
    """Return the answer of a stream of Chat Completions."""
    encoder = ChatEncoder(ReplyHead("m", "c"))
    frames = b"".join(frame for event in events for frame in encoder.encode(event, 0)).decode()
    text, names, arguments = "", list[str](), list[str]()
    for line in frames.split("\n\n"):
        if "{" not in line:
            continue
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            if "name" in call["function"]:
                names.append(call["function"]["name"])
                arguments.append("")
            arguments[call["index"]] += call["function"]["arguments"]
    return text, [(name, arguments_of(each)) for name, each in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_is_the_same_whole_and_cut_at_every_character(name: str) -> None:
    format, text, expected = ANSWERS[name]
    ways = [in_pieces(text, size) for size in (1, 2, 7, len(text))]
    ways += [[text[:cut], text[cut:]] for cut in range(1, len(text))]
    for pieces in ways:
        events = events_of(format, pieces)
        assert isinstance(events[0], PromptProcessed)
        assert collected(events) == expected
        assert streamed(events) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_that_ends_at_any_character_is_the_same_in_any_pieces(name: str) -> None:
    """Every call is one of the whole answer, the last one perhaps unfinished."""
    format, text, _ = ANSWERS[name]
    for cut in range(1, len(text)):
        whole = events_of(format, [text[:cut]])
        found = collected(whole)
        assert streamed(whole) == found
        events = events_of(format, [text[: cut // 2], text[cut // 2 : cut]])
        assert collected(events) == streamed(events) == found
        for called, values in found[1]:
            assert called in ("edit", "now")
            assert isinstance(values, str) or values in ({}, EDITED[1], SHORT_EDITED[1])


def test_only_one_call_of_thinking_if_calls_are_not_parallel() -> None:
    events = events_of("qwen3_coder", in_pieces(f"Hm.{NOW}{NOW}", 3), one_call=True)
    assert collected(events) == ("", [("now", {})])
    assert any(isinstance(event, ThinkingDelta) for event in events)
