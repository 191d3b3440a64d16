"""Calls come out of the text as they went in, in every family's format, however it is cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akunu_py.decoding.events import CallArguments, CallBegun, CallEnded, Event, Text
from akunu_py.decoding.tool_calls.families import FAMILIES, Family
from akunu_py.decoding.tool_calls.parser import MALFORMED, REFUSED, UNFINISHED, ToolCallParser
from akunu_py.types import Tool

Call = tuple[str, dict[str, Any]]
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


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    """As templates of markup write a value."""
    return value if isinstance(value, str) else dumped(value)


def hermes(calls: list[Call]) -> str:
    blocks = (f'<tool_call>\n{{"name": "{n}", "arguments": {dumped(a)}}}\n' for n, a in calls)
    return "\n".join(f"{block}</tool_call>" for block in blocks)


def array(begin: str, end: str, *names: str) -> Callable[[list[Call]], str]:
    name, arguments = names or ("name", "arguments")
    return lambda calls: begin + dumped([{name: n, arguments: a} for n, a in calls]) + end


def llama3(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": "{n}", "parameters": {dumped(a)}}}' for n, a in calls)


def markup(
    call: str, parameter: str, around: tuple[str, str], between: str = "\n"
) -> Callable[[list[Call]], str]:
    """`call` and `parameter` as formats of (name, inner) and (key, value)."""

    def write(calls: list[Call]) -> str:
        inner = [
            call.format(n, "".join(parameter.format(k, bare(v)) for k, v in a.items()))
            for n, a in calls
        ]
        return f"{around[0]}{between}{between.join(inner)}{between}{around[1]}"

    return write


def each(begin: str, end: str, write: Callable[[list[Call]], str]) -> Callable[[list[Call]], str]:
    return lambda calls: "\n".join(f"{begin}{write([call])}{end}" for call in calls)


def gemma(quote: str) -> Callable[[list[Call]], str]:
    def value(found: Any) -> str:
        if isinstance(found, str):
            return f"{quote}{found}{quote}"
        if isinstance(found, list):
            return f"[{','.join(map(value, found))}]"
        if isinstance(found, dict):
            return f"{{{','.join(f'{key}:{value(each)}' for key, each in found.items())}}}"
        return dumped(found)

    return lambda calls: f"call:{calls[0][0]}{value(calls[0][1])}"


def pythonic(calls: list[Call]) -> str:
    listed = (f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
    return f"<|tool_call_start|>[{', '.join(listed)}]<|tool_call_end|>"


def dsml(calls: list[Call]) -> str:
    def parameter(key: str, value: Any) -> str:
        kind = "true" if isinstance(value, str) else "false"
        return (
            f'<｜DSML｜parameter name="{key}" string="{kind}">{bare(value)}</｜DSML｜parameter>\n'
        )

    blocks = (
        f'<｜DSML｜invoke name="{n}">\n'
        + "".join(itertools.starmap(parameter, a.items()))
        + "</｜DSML｜invoke>\n"
        for n, a in calls
    )
    return f"<｜DSML｜function_calls>\n{''.join(blocks)}</｜DSML｜function_calls>"


def kimi_k3(calls: list[Call]) -> str:
    def argument(key: str, value: Any) -> str:
        kind = "string" if isinstance(value, str) else "other"
        head = f'<|open|>argument key="{key}" type="{kind}"<|sep|>'
        return f"{head}{bare(value)}<|close|>argument<|sep|>"

    blocks = (
        f'<|open|>call tool="{n}" index="1"<|sep|>'
        + "".join(itertools.starmap(argument, a.items()))
        + "<|close|>call<|sep|>"
        for n, a in calls
    )
    return f"<|open|>tools<|sep|>{''.join(blocks)}<|close|>tools<|sep|>"


def sectioned(begin: str, call: str, end: str, between: str = "") -> Callable[[list[Call]], str]:
    return lambda calls: (
        begin
        + between.join(
            call.replace("NAME", n).replace("INDEX", str(i)).replace("JSON", dumped(a))
            for i, (n, a) in enumerate(calls)
        )
        + end
    )


FUNCTION = "<function={0}>\n{1}</function>", "<parameter={0}>\n{1}\n</parameter>\n"
INVOKE = (
    '<{0}invoke name="{{0}}">\n{{1}}</{0}invoke>',
    ('<{0}parameter name="{{0}}">{{1}}</{0}parameter>\n'),
)
PAIRS = "<{0}arg_key>{{0}}</{0}arg_key>\n<{0}arg_value>{{1}}</{0}arg_value>\n"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
# What no value may hold where values stand unquoted; "" where they are JSON.
Written = tuple[str, Callable[[list[Call]], str], tuple[str, ...]]
FORMATS: dict[str, Written] = {
    "hermes": ("hermes", hermes, ()),
    "hermes array": ("hermes", array("<tool_call>", "</tool_call>"), ()),
    "llama3": ("llama3", llama3, ()),
    "llama3 tag": (
        "llama3",
        each("<|python_tag|>", "", llama3),
        (),
    ),
    "unknown": ("unknown", llama3, ()),
    "mistral": ("mistral", sectioned("", "[TOOL_CALLS]NAME[ARGS]JSON", ""), ()),
    "mistral once": ("mistral", sectioned("[TOOL_CALLS]", "NAME[ARGS]JSON", "", " "), ()),
    "mistral array": ("mistral", array("[TOOL_CALLS] ", ""), ()),
    "harmony": (
        "harmony",
        sectioned(
            "",
            "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json"
            "<|message|>JSON",
            "",
        ),
        (),
    ),
    "deepseek v3": (
        "deepseek",
        sectioned(
            DEEPSEEK[0],
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nJSON\n```<｜tool▁call▁end｜>",
            DEEPSEEK[1],
            "\n",
        ),
        (),
    ),
    "deepseek v3.1": (
        "deepseek",
        sectioned(
            DEEPSEEK[0],
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>",
            DEEPSEEK[1],
        ),
        (),
    ),
    "kimi_k2": (
        "kimi_k2",
        sectioned(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON"
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
        (),
    ),
    "phi4": ("phi4", array("<|tool_call|>", "<|/tool_call|>"), ()),
    "granite": ("granite", array("<|tool_call|>", ""), ()),
    "nemotron": ("nemotron", array("<TOOLCALL>", "</TOOLCALL>"), ()),
    "jamba": ("jamba", array("<tool_calls>", "</tool_calls>"), ()),
    "functionary": ("functionary", sectioned("", "<function=NAME>JSON</function>", ""), ()),
    "apertus": (
        "apertus",
        lambda calls: f"<|tools_prefix|>{dumped([{n: a} for n, a in calls])}<|tools_suffix|>",
        (),
    ),
    "cohere": (
        "cohere",
        array("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters"),
        (),
    ),
    "qwen3_coder": (
        "qwen3_coder",
        each("<tool_call>\n", "\n</tool_call>", markup(*FUNCTION, ("", ""), "")),
        ("</parameter>",),
    ),
    "seed": (
        "seed",
        each(
            "<seed:tool_call>",
            "</seed:tool_call>",
            markup(FUNCTION[0], "<parameter={0}>{1}</parameter>", ("", ""), ""),
        ),
        ("</parameter>",),
    ),
    "minimax_m2": (
        "minimax_m2",
        markup(
            INVOKE[0].format(""),
            INVOKE[1].format(""),
            ("<minimax:tool_call>", "</minimax:tool_call>"),
        ),
        ("</parameter>",),
    ),
    "muse_spark": (
        "muse_spark",
        markup(
            INVOKE[0].format("atem:"),
            INVOKE[1].format("atem:"),
            ("<atem:function_calls>", "</atem:function_calls>"),
        ),
        ("</atem:parameter>",),
    ),
    "minicpm5": (
        "minicpm5",
        markup(
            '<function name="{0}">{1}</function>', '<param name="{0}">{1}</param>', ("", ""), ""
        ),
        ("</param>",),
    ),
    "dsml": ("dsml", dsml, ("</｜DSML｜parameter>",)),
    "kimi_k3": ("kimi_k3", kimi_k3, ("<|close|>argument<|sep|>",)),
    "glm47": (
        "glm47",
        each(
            "<tool_call>",
            "</tool_call>",
            markup("{0}\n{1}", PAIRS.format(""), ("", ""), ""),
        ),
        ("</arg_value>",),
    ),
    "longcat": (
        "longcat",
        each(
            "<longcat_tool_call>",
            "</longcat_tool_call>",
            markup("{0}\n{1}", PAIRS.format("longcat_"), ("", ""), ""),
        ),
        ("</longcat_arg_value>",),
    ),
    "gemma4": (
        "gemma4",
        each(
            "<|tool_call>",
            "<tool_call|>",
            gemma('<|"|>'),
        ),
        ('<|"|>',),
    ),
    "function_gemma": (
        "function_gemma",
        each(
            "<start_function_call>",
            "<end_function_call>",
            gemma("<escape>"),
        ),
        ("<escape>",),
    ),
    "pythonic": ("pythonic", pythonic, ()),
}
FRAGMENTS = sorted(
    {marker for family in FAMILIES.values() for marker in family.all_markers}
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
EXAMPLE: list[Call] = [
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


def parse(family: Family, pieces: Iterator[str] | list[str]) -> list[Event]:
    ids = (f"id{index}" for index in itertools.count())
    parser = ToolCallParser(family, TOOLS, lambda: next(ids))
    events = [event for piece in pieces for event in parser.add(piece)]
    return events + parser.finish()


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring parts of one thing made one."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            found[-1] = CallArguments(last.text + event.text)
        else:
            found.append(event)
    return found


def collected(events: list[Event]) -> Found:
    """Texts and calls; fails where the events are not in order."""
    found: Found = []
    waiting = iter(joined(events))
    for event in waiting:
        if isinstance(event, Text):
            found.append(event.text)
            continue
        assert isinstance(event, CallBegun)
        arguments = next(waiting)
        assert isinstance(arguments, CallArguments)
        assert isinstance(next(waiting), CallEnded)
        found.append((event.name, json.loads(arguments.text)))
    return found


def chopped(text: str, cuts: list[int]) -> Iterator[str]:
    at = 0
    for size in itertools.cycle(cuts):
        if at >= len(text):
            return
        yield text[at : at + size]
        at += size


def written(name: str, calls: list[Call]) -> tuple[Family, str, list[Call]]:
    """The family, and the calls as its models write them; without what its format cannot hold."""
    family, write, ends = FORMATS[name]
    calls = [(name, without(arguments, ends)) for name, arguments in calls]
    return FAMILIES[family], write(calls), calls


def test_every_family_is_tried() -> None:
    assert {family for family, _, _ in FORMATS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", FORMATS)
@given(CALLS, st.sampled_from(["", "Let me look. ", "1 < 2 {and} [so on]\n\n"]), CUTS)
@settings(max_examples=5)
def test_what_is_called_is_found_however_it_is_cut(
    name: str, calls: list[Call], before: str, cuts: list[int]
) -> None:
    family, text, calls = written(name, calls)
    if family.bare and not text.startswith(tuple(family.openers)):
        before = "\n" if before else ""  # there, calls come first
    expected = [before.strip(), *calls] if before.strip() else list(calls)
    for pieces in ([before + text], chopped(before + text, cuts), list(before + text)):
        assert collected(parse(family, pieces)) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_every_split_point(name: str) -> None:
    family, text, calls = written(name, EXAMPLE)
    for at in range(len(text)):
        assert collected(parse(family, [text[:at], text[at:]])) == calls, at


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_cut_off_is_text_behind_a_marker(name: str) -> None:
    """Wherever an answer ends: complete calls are calls, and nothing of them is text."""
    family, text, calls = written(name, EXAMPLE)
    for at in range(len(text)):
        events = joined(parse(family, [text[:at]]))
        made = sum(isinstance(event, CallEnded) for event in events)
        begun = sum(isinstance(event, CallBegun) for event in events)
        said = [event.text for event in events if isinstance(event, Text)]
        arguments = [event.text for event in events if isinstance(event, CallArguments)]
        assert [json.loads(each) for each in arguments[:made]] == [a for _, a in calls[:made]]
        assert made <= begun <= made + 1
        assert len(said) <= 1
        if said and not text[:at].endswith(said[0]):
            kind, rest = said[0].lstrip().split("] ", 1)
            assert kind + "] " == UNFINISHED
            assert text[:at].endswith(rest)
        elif said:
            bare = family.bare and said[0].startswith("{")
            assert bare or any(opener.startswith(said[0]) for opener in family.openers)
        assert (begun == made) or said


@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
@settings(max_examples=5)
def test_damage_loses_nothing(name: str, data: st.DataObject) -> None:
    """One character too many, too few, or wrong: it is a call, or it is text, however it is cut."""
    family, text, _ = written(name, EXAMPLE)
    at = data.draw(st.integers(0, len(text) - 1))
    text = text[:at] + data.draw(st.sampled_from(["", "x", '"', "<", "}", "{"])) + text[at + 1 :]
    whole = joined(parse(family, [text]))
    assert joined(parse(family, chopped(text, data.draw(CUTS)))) == whole
    assert joined(parse(family, list(text))) == whole
    kept = "".join(getattr(each, "text", "") for each in whole)
    assert "Ø" in kept or "Ø" not in text
    assert "if a" in kept or "if a" not in text


@given(st.sampled_from(sorted(FAMILIES)), PIECES.map("".join), CUTS)
@settings(max_examples=100)
def test_no_text_is_too_odd(name: str, text: str, cuts: list[int]) -> None:
    whole = joined(parse(FAMILIES[name], [text]))
    assert joined(parse(FAMILIES[name], chopped(text, cuts))) == whole


@given(STRINGS | st.sampled_from(["{", '{"name": "find"', '{"a": 1} and more', " \n"]), CUTS)
def test_an_answer_without_calls_is_as_it_is(text: str, cuts: list[int]) -> None:
    for name in ("llama3", "hermes", "gemma4"):
        if not any(opener in text for opener in FAMILIES[name].openers) and "find" not in text:
            assert joined(parse(FAMILIES[name], chopped(text, cuts))) == [Text(text)] * bool(text)


def test_arguments_stream() -> None:
    """What is long comes as it is written: JSON, and strings between tags."""
    content = "line\n" * 100
    for name in ("hermes", "qwen3_coder", "glm47", "gemma4", "mistral", "deepseek v3", "dsml"):
        family, text, _ = written(name, [("write_file", {"code": content})])
        events = parse(family, list(text))
        parts = [event for event in events if isinstance(event, CallArguments)]
        assert len(parts) > len(content) / 2


def test_a_call_that_is_not_allowed_is_text() -> None:
    _, text, _ = written("hermes", EXAMPLE)
    parser = ToolCallParser(FAMILIES["hermes"], TOOLS, allowed=False)
    events = joined([*parser.add(text), *parser.finish()])
    assert len(events) == 1
    assert isinstance(events[0], Text)
    assert events[0].text.replace(REFUSED, "") == text


def test_a_malformed_call_is_text_behind_a_marker() -> None:
    text = 'So:\n<tool_call>\n{"name": "find", "arguments": {"a": bad}}\n</tool_call>\nHm.'
    *_, last = joined(parse(FAMILIES["hermes"], [text]))
    assert last == Text("\n" + MALFORMED + text.removeprefix("So:\n"))
