"""Calls as templates write them are what the grammar allows, and what it allows fits the schema."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from akunu_py.decoding.constraint import tool_calls
from akunu_py.decoding.constraint.tool_calls import CallRequirements, calls_constraint
from akunu_py.decoding.events import TextDelta, ToolCallArguments, ToolCallFinished, ToolCallStarted
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.json_schema.regex import limits
from akunu_py.types import Constraint, Tool
from tests.support.json_schema import is_valid
from tests.support.slow import cover
from tests.support.tool_call_formats import EXAMPLES

SIGNS = {"mistral": "[ARGS]", "deepseek v3": "```json"}  # of a template
OTHERWISE = {"hermes array", "llama3 tag", "mistral once", "mistral array", "unknown"}
WRITTEN = [name for name in EXAMPLES if name not in OTHERWISE]
STRINGS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.sampled_from(" \n"), max_size=5)
STRINGS |= st.sampled_from(["", "5", "true", "None", "a, b", '{"a": 1}', "[x]", "#<b>&amp;", "æ\n"])
FORMAT = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["count", "text"],
}
NAMES = st.sampled_from(["a", "Key", "größe", "b_2", "c-d"])


def choices(strings: Any) -> Any:
    return st.lists(strings, min_size=1, max_size=3, unique=True).map(lambda each: {"enum": each})


SCALARS = st.one_of(
    st.sampled_from(
        [{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]
    ),
    choices(STRINGS).map(lambda each: {"type": "string", **each}),
    st.just({"type": "string", "pattern": "^[a-c ]{1,3}$"}),
    st.just({"type": "string", "minLength": 1, "maxLength": 2}),
    st.just({"type": "integer", "minimum": -3, "maximum": 12}),
    st.just({"type": ["integer", "null"]}),
)


def objects(inner: Any) -> Any:
    def made(members: dict[str, Any], optional: frozenset[str]) -> dict[str, Any]:
        required = [name for name in members if name not in optional]
        closed = {"required": required, "additionalProperties": False}
        return {"type": "object", "properties": members, **closed}

    return st.builds(made, st.dictionaries(NAMES, inner, max_size=3), st.frozensets(NAMES))


NESTED = st.recursive(
    SCALARS,
    lambda inner: objects(inner) | inner.map(lambda item: {"type": "array", "items": item}),
    max_leaves=4,
)
PARAMETERS = objects(NESTED)


def fitting(schema: Any) -> Any:
    """Values that fit."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "object":
            known = {name: fitting(each) for name, each in schema["properties"].items()}
            needed = {name: known.pop(name) for name in schema["required"]}
            return st.fixed_dictionaries(needed, optional=known)
        case "array":
            return st.lists(fitting(schema["items"]), max_size=3)
        case "string" if "pattern" in schema:
            return st.from_regex(r"\A[a-c ]{1,3}\Z")
        case "string":
            return STRINGS.filter(lambda text: is_valid(schema, text))
        case "integer":
            return st.integers(schema.get("minimum", -(10**9)), schema.get("maximum", 10**9))
        case "number":
            return st.floats(allow_nan=False, allow_infinity=False, width=32)
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
    return st.none() | st.integers(-99, 99)


class Tables:
    """Each byte is a token, and some texts are, as special ones."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, special: Sequence[str]) -> None:
        self.special = list(special)
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.tokens += [text.encode() for text in special]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.name, self.tokenizer = "tables", self

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str, **_: Any) -> list[int]:
        """As tokenizers do: special tokens by their texts."""
        tokens: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self.special)) or '$^'})", text):
            known = part in self.special
            tokens += [257 + self.special.index(part)] if known else list(part.encode())
        return tokens

    def decode(self, tokens: list[int], **_: Any) -> str:
        return b"".join(self.tokens[token] for token in tokens).decode()


@cache
def tables(family: str, special: bool) -> tuple[Tables, LLTokenizer]:
    found: list[str] = []
    for marker in FORMATS[family].all_markers if special else ():
        found += re.findall(r"<\|[a-z]+\|>", marker) if family == "kimi_k3" else [marker]
    made = Tables(list(dict.fromkeys(found)))
    wrapped: Any = TokenizerWrapper(made)
    return made, LLTokenizer(wrapped, n_vocab=len(made.tokens), slices=[])


def read(family: str, tools: list[Tool], text: str) -> list[tuple[str, Any]] | None:
    """The calls in an answer that holds nothing else; None where it does."""
    parser = ToolCallParser(FORMATS[family], tools)
    events = [*parser.add(text), *parser.finish()]
    parts: list[tuple[str, list[str]]] = []
    for event in events:
        if isinstance(event, TextDelta):
            return None
        if isinstance(event, ToolCallStarted):
            parts.append((event.name, []))
        elif isinstance(event, ToolCallArguments):
            parts[-1][1].append(event.text)
    ended = sum(isinstance(event, ToolCallFinished) for event in events) == len(parts)
    return [(name, json.loads("".join(text))) for name, text in parts] if ended else None


def held(value: Any, ends: tuple[str, ...]) -> bool:
    return not any(end in json.dumps(value, ensure_ascii=False) for end in ends)


@pytest.mark.rotating
@pytest.mark.parametrize(("special", "name"), cover([True, False], WRITTEN))
@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
@given(st.data())
def test_what_templates_write_is_allowed_if_it_fits(
    name: str, special: bool, data: st.DataObject
) -> None:
    """Token by token, and it is read as what was written; other arguments are refused."""
    family, write, ends = EXAMPLES[name]
    engine, tokens = tables(family, special)
    format = Constraint("json_schema", json.dumps(FORMAT))
    tools = [Tool(each, "", data.draw(PARAMETERS), strict=True) for each in ("find", "now")]
    layout = FORMATS[family].layout_for(SIGNS.get(name, ""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_calls, "token_tables", lambda engine: tokens)
        found = [
            calls_constraint(engine, layout, wanted)  # type: ignore[arg-type]
            for wanted in (
                CallRequirements(tools, True, False),
                CallRequirements(tools, False, False, format),
            )
        ]
    made, either = found
    assert made is not None
    assert either is not None

    def allowed(text: str, written: str = made.text) -> bool:
        grammar = LLMatcher.grammar_from_lark(written)
        matcher = LLMatcher(tokens, grammar, limits=limits())
        assert not matcher.is_error(), matcher.get_error()
        given = engine.encode(text.removeprefix("<|start|>assistant"))
        return matcher.try_consume_tokens(given) == len(given) and matcher.is_accepting()

    one = 1 if family == "harmony" else 3
    calls = [
        (tool.name, data.draw(fitting(tool.parameters).filter(lambda each: held(each, ends))))
        for tool in data.draw(st.lists(st.sampled_from(tools), min_size=1, max_size=one))
    ]
    if layout.tags:  # parameters come in the order of the schema
        order = {tool.name: list(tool.parameters["properties"]) for tool in tools}
        calls = [
            (each, dict(sorted(values.items(), key=lambda item: order[each].index(item[0]))))
            for each, values in calls
        ]
    text = write(calls)
    assert allowed(text), text
    assert allowed(text, made.likely[1])
    alone = not (layout.opener or layout.text_before)  # JSON, as the text is
    assert allowed(text, either.text) is (len(calls) == 1 or not alone)
    assert read(family, tools, text) == calls
    other = data.draw(PARAMETERS.flatmap(fitting).filter(lambda each: held(each, ends)))
    altered = write([("find", other)])
    if allowed(altered):
        known = read(family, tools, altered)
        assert known is not None
        assert all(is_valid(tools[0].parameters, each) for _, each in known), altered
    unknown = write([("elsewhere", calls[0][1])])
    assert not allowed(unknown)
    opener = next(iter(FORMATS[family].openers))
    for count, fits in ((1, True), (0.5, False)):
        answer = json.dumps({"count": count, "text": "" if special else opener})
        assert allowed(answer, either.text) is fits
        assert allowed(answer, either.likely[0]) is fits
        assert not allowed(answer)
        parser = ToolCallParser(FORMATS[family], tools, exclusive=True)
        events = [*parser.add(answer[:30]), *parser.add(answer[30:]), *parser.finish()]
        assert all(isinstance(event, TextDelta) for event in events)
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == answer
