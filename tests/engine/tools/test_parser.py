"""Tool calls parsed from the text of every family's format, whole or in any pieces."""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from akunu_py.engine.events import (
    Event,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
    append_event,
)
from akunu_py.engine.tools.formats import FORMATS, ToolFormat
from akunu_py.engine.tools.tool_call_parser import MALFORMED, REFUSED, UNFINISHED, ToolCallParser
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
        "size": {"type": ["integer", "string"]},
        "people": {"type": "array", "items": {"$ref": "#/$defs/person"}},
    },
    "$defs": {
        "code": {"type": "string"},
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "tags": {"type": "array"}},
        },
    },
}
TOOLS = [Tool("find", "", SCHEMA), Tool("write_file", "", SCHEMA), Tool("now")]


FRAGMENTS = sorted(
    {marker for family in FORMATS.values() for marker in family.all_markers}
    | {"</parameter>", "<parameter=", "</function>", "</arg_value>", "</invoke>", "```", "]]>"}
    | {'{"name": "find", "arguments": {}}', '"', "\\", "'", "\n", "{", "}", "[", "]", "(", ")", ","}
)
PIECES = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=6)
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


def parser_of(family: ToolFormat, **options: bool) -> ToolCallParser:
    ids = (f"id{index}" for index in itertools.count())
    return ToolCallParser(replace(family, new_id=lambda: next(ids)), TOOLS, **options)


def parse(family: ToolFormat, pieces: Iterator[str] | list[str]) -> list[Event]:
    parser = parser_of(family)
    events = [event for piece in pieces for event in parser.add(piece)]
    return events + parser.finish()


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring parts of one thing made one."""
    found: list[Event] = []
    for event in events:
        append_event(found, event)
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


def test_every_family_has_an_example() -> None:
    assert {family for family, _, _ in EXAMPLES.values()} == set(FORMATS)


# Calls with values of all types, and with texts that contain markers of all formats.
ODD: list[Call] = [
    ("find", {"integer": -(10**15), "number": -2.5e-07, "boolean": False, "any": None, "code": ""}),
    ("write_file", {"array": [[], {"key": [None, "æ"]}], "object": {}, "any": [0, 9]}),
    *(
        ("find", {"string": "x" + "".join(FRAGMENTS[at : at + 10])})
        for at in range(0, len(FRAGMENTS), 10)
    ),
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_all_calls_are_found_in_any_pieces(name: str) -> None:
    family, text, calls = written(name, ODD)
    calls_first = family.bare_opener and not text.startswith(tuple(family.openers))
    texts = ("", "Let me look. ", "1 < 2 {and} [so on]\n\n")
    for before, cuts in zip(texts, ([len(text)], [3, 1, 7, 2], [1]), strict=True):
        start = "\n" if calls_first and before else before
        expected = [start.strip(), *calls] if start.strip() else list(calls)
        assert collected(parse(family, chopped(start + text, cuts))) == expected


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_split_point_and_every_early_end(name: str) -> None:
    """Complete calls are calls; the rest of an unfinished one is text behind a marker."""
    family, text, calls = written(name, CALLED)
    for at in range(0, len(text), 1 + len(text) // 40):
        parser = parser_of(family)
        events = parser.add(text[:at])
        assert collected([*events, *parser.add(text[at:]), *parser.finish()]) == calls, at
        events = joined(parse(family, [text[:at]]))
        made = sum(isinstance(event, ToolCallFinished) for event in events)
        begun = sum(isinstance(event, ToolCallStarted) for event in events)
        shown = [event.text for event in events if isinstance(event, TextDelta)]
        arguments = [event.text for event in events if isinstance(event, ToolCallArguments)]
        assert [json.loads(each) for each in arguments[:made]] == [a for _, a in calls[:made]]
        assert made <= begun <= made + 1
        assert len(shown) <= 1
        if shown and not text[:at].endswith(shown[0]):
            kind, rest = shown[0].lstrip().split("] ", 1)
            assert kind + "] " == UNFINISHED
            assert text[:at].endswith(rest)
        elif shown:
            bare = family.bare_opener and shown[0].startswith("{")
            start = family.bare_call or "{"  # of what may be no call
            openers = (*family.openers, start)
            assert (
                bare
                or any(each.startswith(shown[0]) for each in openers)
                or (family.bare_call and shown[0].startswith(start))
            )
        assert (begun == made) or shown


@pytest.mark.parametrize("name", EXAMPLES)
@given(st.data())
@settings(max_examples=3, deadline=None)
def test_damaged_calls_lose_no_text(name: str, data: st.DataObject) -> None:
    """One character too many, too few, or wrong."""
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
@settings(max_examples=40, deadline=None)
@example("llama3", '{"a": 1} and more', [1])
@example("hermes", " \n", [1])
def test_any_text_is_parsed_the_same_in_any_pieces(name: str, text: str, cuts: list[int]) -> None:
    """And stays as it is if it has no opener of a call."""
    whole = joined(parse(FORMATS[name], [text]))
    assert joined(parse(FORMATS[name], chopped(text, cuts))) == whole
    family = FORMATS[name]
    if not any(each in text for each in family.all_markers) and "find" not in text:
        assert whole == [TextDelta(text)] * bool(text)


@pytest.mark.parametrize(
    "name", ["hermes", "qwen3_coder", "glm47", "gemma4", "mistral", "deepseek v3", "dsml"]
)
def test_long_arguments_stream(name: str) -> None:
    family, text, _ = written(name, [("write_file", {"code": "line\n" * 100})])
    events = parse(family, list(text))
    assert sum(isinstance(event, ToolCallArguments) for event in events) > 250


def test_calls_that_are_not_allowed_or_malformed_are_text_behind_a_marker() -> None:
    family, text, _ = written("hermes", CALLED)
    parser = parser_of(family, allowed=False)
    (refused,) = joined([*parser.add(text), *parser.finish()])
    assert isinstance(refused, TextDelta)
    assert refused.text.replace(REFUSED, "") == text
    text = 'So:\n<tool_call>\n{"name": "find", "arguments": {"a": bad}}\n</tool_call>\nHm.'
    *_, last = joined(parse(family, [text]))
    assert last == TextDelta("\n" + MALFORMED + text.removeprefix("So:\n"))


@pytest.mark.parametrize(("members", "calls"), [
    ('"name": "find"', [("find", {})]),
    ('"id": "x", "type": "function", "name": "find"', [("find", {})]),
    ('"function": {"name": "find", "arguments": {"a": 1}}', [("find", {"a": 1})]),
    ('"arguments": {"a": 1}, "name": "find"', [("find", {"a": 1})]),
    ('"name": "find", "arguments": "{\\"a\\": 1}"', [("find", {"a": 1})]),
    ('"name": "find", "other": 1', []),
])  # fmt: skip
def test_members_of_a_call_in_any_order(members: str, calls: list[Call]) -> None:
    text = f"<tool_call>{{{members}}}</tool_call>"
    for pieces in ([text], list(text)):
        expected: Found = [*calls] or [MALFORMED + text]
        assert collected(parse(FORMATS["hermes"], pieces)) == expected


@pytest.mark.parametrize(("name", "text", "arguments"), [
    (
        "minicpm5",
        '<function name="find"><param name="string"><![CDATA[a < b]]></param>'
        '<param name="integer">3</param><param name="size">1.5</param></function>',
        {"string": "a < b", "integer": 3, "size": "1.5"},
    ),
    (
        "pythonic",
        '<|tool_call_start|>[find(string="Oslo, N", array=[1, {"a": true}])]<|tool_call_end|>',
        {"string": "Oslo, N", "array": [1, {"a": True}]},
    ),
    (
        "function_gemma",
        "<start_function_call>call:find{string:<escape>Oslo<escape>,integer:3}",
        {"string": "Oslo", "integer": 3},
    ),
    (
        "minimax_m3",
        '<tool_call>\n<invoke name="find"><string>a <b></string><object><id>521</id>'
        "<id2>x</id2><none></none></object><array><item>1</item><item><item>[2]</item></item>"
        "</array><any><item>3</item></any></invoke>\n</tool_call>",
        {
            "string": "a <b>", "object": {"id": 521, "id2": "x", "none": ""},
            "array": [1, [[2]]], "any": [3],
        },
    ),
    (
        "minimax_m3",
        '<tool_call><invoke name="find"><people><item><name>7</name><tags></tags></item>'
        "</people>\n<object></object></invoke></tool_call>",
        {"people": [{"name": "7", "tags": []}], "object": {}},
    ),
])  # fmt: skip
def test_values_that_templates_write_otherwise(
    name: str, text: str, arguments: dict[str, Any]
) -> None:
    if name == "minimax_m3":  # its mark precedes every tag
        text = re.sub("<(?!b>)", "]<]minimax[>[<", text)
    for pieces in ([text], list(text)):
        assert collected(parse(FORMATS[name], pieces)) == [("find", arguments)]


@pytest.mark.parametrize(("text", "found"), [
    ('find\n{"any": 1}>>>now\n{}', [("find", {"any": 1}), ("now", {})]),
    ("all\nI will look>>>now\n{}", ["I will look", ("now", {})]),
    ("all\n>>> 1 + 1\n2\n>>>", [">>> 1 + 1\n2\n>>>"]),
    ('{"any": 1}', ['{"any": 1}']),
    ("elsewhere\n{}", ["elsewhere\n{}"]),
])  # fmt: skip
def test_calls_and_texts_after_a_prompt_that_ends_with_the_opener(text: str, found: Found) -> None:
    for pieces in ([text], list(text)):
        assert collected(parse(FORMATS["functionary_v3.2"], pieces)) == found


def test_bare_calls_are_only_of_known_tools() -> None:
    text = "Write <function=other>\n<parameter=a>\n1\n</parameter>\n</function> to call it."
    assert collected(parse(FORMATS["qwen3_coder"], list(text))) == [text]
    text = "Look:\n<function=now>\n</function>\n</tool_call>\nDone."
    assert collected(parse(FORMATS["qwen3_coder"], list(text))) == ["Look:", ("now", {}), "Done."]
