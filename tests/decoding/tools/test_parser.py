"""Calls come out of the text as they went in, in every family's format, however it is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.events import (
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.tools.formats import FORMATS, ToolFormat
from akunu_py.decoding.tools.tool_call_parser import MALFORMED, REFUSED, UNFINISHED, ToolCallParser
from akunu_py.types import Tool
from tests.support.tool_call_formats import EXAMPLES, Call

Found = list[str | Call]
TYPES = ("string", "integer", "number", "boolean", "object", "array")
SCHEMA = {
    "type": "object",
    "properties": {
        **{kind: {"type": kind} for kind in TYPES},
        "any": {"anyOf": [{"type": kind} for kind in ("null", "integer", "array")]},
        "code": {"$ref": "#/$defs/code"},
    },
    "$defs": {"code": {"type": "string"}},
}
TOOLS = [Tool("find", "", SCHEMA), Tool("write_file", "", SCHEMA), Tool("now")]


FRAGMENTS = sorted(
    {marker for family in FORMATS.values() for marker in family.all_markers}
    | {"</parameter>", "<parameter=", "</function>", "</arg_value>", "</invoke>", "```", "]]>"}
    | {'{"name": "find", "arguments": {}}', '"', "\\", "'", "\n", "{", "}", "[", "]", "(", ")", ","}
)
PIECES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=6)
STRINGS = PIECES.map("".join).filter(lambda text: not text.startswith("<!"))
KEYS = st.sampled_from(["a", "key", "deep_er"])
SCALARS = st.integers(-(10**15), 10**15) | st.booleans() | st.none() | STRINGS
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
VALUES = {
    "string": STRINGS,
    "integer": st.integers(-(10**15), 10**15),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "object": st.dictionaries(KEYS, NESTED, max_size=3),
    "array": st.lists(NESTED, max_size=3),
    "any": st.none() | st.integers(0, 9) | st.lists(st.integers(0, 9), max_size=2),
    "code": STRINGS,
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(
    st.tuples(st.sampled_from(["find", "write_file"]), ARGUMENTS), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(1, 9), min_size=1, max_size=8)
CALLED: list[Call] = [
    ("find", {"string": '"Ø" </tool_call>\n', "object": {"a": [-1, "}]"]}}),
    ("write_file", {"code": "\tif a < b:\n", "boolean": True}),
    ("now", {}),
]


def without(value: Any, ends: tuple[str, ...]) -> Any:
    """`value` with no such text in it."""
    if isinstance(value, str):
        while any(end in value for end in ends):
            for end in ends:
                value = value.replace(end, "")
        return value
    if isinstance(value, list):
        return [without(each, ends) for each in value]
    if isinstance(value, dict):
        return {key: without(each, ends) for key, each in value.items()}
    return value


def parse(family: ToolFormat, pieces: Iterator[str] | list[str]) -> list[Event]:
    ids = (f"id{index}" for index in itertools.count())
    parser = ToolCallParser(family, TOOLS, lambda: next(ids))
    events = [event for piece in pieces for event in parser.add(piece)]
    return events + parser.finish()


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring parts of one thing made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            found[-1] = ToolCallArguments(last.text + event.text)
        else:
            found.append(event)
    return found


def collected(events: list[Event]) -> Found:
    """Texts and calls; fails where the events are not in order."""
    found: Found = []
    waiting = iter(joined(events))
    for event in waiting:
        if isinstance(event, TextDelta):
            found.append(event.text)
            continue
        assert isinstance(event, ToolCallStarted)
        arguments = next(waiting)
        assert isinstance(arguments, ToolCallArguments)
        assert isinstance(next(waiting), ToolCallFinished)
        found.append((event.name, json.loads(arguments.text)))
    return found


def chopped(text: str, cuts: list[int]) -> Iterator[str]:
    at = 0
    for size in itertools.cycle(cuts):
        if at >= len(text):
            return
        yield text[at : at + size]
        at += size


def written(name: str, calls: list[Call]) -> tuple[ToolFormat, str, list[Call]]:
    """The family, and the calls as its models write them; without what its format cannot hold."""
    family, write, ends = EXAMPLES[name]
    calls = [(name, without(arguments, ends)) for name, arguments in calls]
    return FORMATS[family], write(calls), calls


def test_every_family_is_tried() -> None:
    assert {family for family, _, _ in EXAMPLES.values()} == set(FORMATS)


@pytest.mark.parametrize("name", EXAMPLES)
@given(CALLS, st.sampled_from(["", "Let me look. ", "1 < 2 {and} [so on]\n\n"]), CUTS)
@settings(max_examples=5)
def test_what_is_called_is_found_however_it_is_cut(
    name: str, calls: list[Call], before: str, cuts: list[int]
) -> None:
    family, text, calls = written(name, calls)
    if family.bare_opener and not text.startswith(tuple(family.openers)):
        before = "\n" if before else ""  # there, calls come first
    expected = [before.strip(), *calls] if before.strip() else list(calls)
    for pieces in ([before + text], chopped(before + text, cuts), list(before + text)):
        assert collected(parse(family, pieces)) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_split_point(name: str) -> None:
    family, text, calls = written(name, CALLED)
    for at in range(len(text)):
        assert collected(parse(family, [text[:at], text[at:]])) == calls, at


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_cut_off_is_text_behind_a_marker(name: str) -> None:
    """Wherever an answer ends: complete calls are calls, and nothing of them is text."""
    family, text, calls = written(name, CALLED)
    for at in range(len(text)):
        events = joined(parse(family, [text[:at]]))
        made = sum(isinstance(event, ToolCallFinished) for event in events)
        begun = sum(isinstance(event, ToolCallStarted) for event in events)
        said = [event.text for event in events if isinstance(event, TextDelta)]
        arguments = [event.text for event in events if isinstance(event, ToolCallArguments)]
        assert [json.loads(each) for each in arguments[:made]] == [a for _, a in calls[:made]]
        assert made <= begun <= made + 1
        assert len(said) <= 1
        if said and not text[:at].endswith(said[0]):
            kind, rest = said[0].lstrip().split("] ", 1)
            assert kind + "] " == UNFINISHED
            assert text[:at].endswith(rest)
        elif said:
            bare = family.bare_opener and said[0].startswith("{")
            assert bare or any(opener.startswith(said[0]) for opener in family.openers)
        assert (begun == made) or said


@pytest.mark.parametrize("name", EXAMPLES)
@given(st.data())
@settings(max_examples=5)
def test_damage_loses_nothing(name: str, data: st.DataObject) -> None:
    """One character too many, too few, or wrong: it is a call, or it is text, however it is cut."""
    family, text, _ = written(name, CALLED)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", "x", '"', "<", "}", "{"])) + text[at + 1 :]
    whole = joined(parse(family, [text]))
    assert joined(parse(family, chopped(text, data.draw(CUTS)))) == whole
    assert joined(parse(family, list(text))) == whole
    kept = "".join(getattr(each, "text", "") for each in whole)
    assert "Ø" in kept or "Ø" not in text
    assert "if a" in kept or "if a" not in text


@given(st.sampled_from(sorted(FORMATS)), PIECES.map("".join), CUTS)
@settings(max_examples=40)
def test_no_text_is_too_odd(name: str, text: str, cuts: list[int]) -> None:
    whole = joined(parse(FORMATS[name], [text]))
    assert joined(parse(FORMATS[name], chopped(text, cuts))) == whole


@given(STRINGS | st.sampled_from(["{", '{"name": "find"', '{"a": 1} and more', " \n"]), CUTS)
def test_an_answer_without_calls_is_as_it_is(text: str, cuts: list[int]) -> None:
    for name in ("llama3", "hermes", "gemma4"):
        if not any(opener in text for opener in FORMATS[name].openers) and "find" not in text:
            assert joined(parse(FORMATS[name], chopped(text, cuts))) == [TextDelta(text)] * bool(
                text
            )


def test_arguments_stream() -> None:
    """What is long comes as it is written: JSON, and strings between tags."""
    content = "line\n" * 100
    for name in ("hermes", "qwen3_coder", "glm47", "gemma4", "mistral", "deepseek v3", "dsml"):
        family, text, _ = written(name, [("write_file", {"code": content})])
        events = parse(family, list(text))
        parts = [event for event in events if isinstance(event, ToolCallArguments)]
        assert len(parts) > len(content) / 2


def test_a_call_that_is_not_allowed_is_text() -> None:
    _, text, _ = written("hermes", CALLED)
    parser = ToolCallParser(FORMATS["hermes"], TOOLS, allowed=False)
    events = joined([*parser.add(text), *parser.finish()])
    assert len(events) == 1
    assert isinstance(events[0], TextDelta)
    assert events[0].text.replace(REFUSED, "") == text


def test_a_malformed_call_is_text_behind_a_marker() -> None:
    text = 'So:\n<tool_call>\n{"name": "find", "arguments": {"a": bad}}\n</tool_call>\nHm.'
    *_, last = joined(parse(FORMATS["hermes"], [text]))
    assert last == TextDelta("\n" + MALFORMED + text.removeprefix("So:\n"))
