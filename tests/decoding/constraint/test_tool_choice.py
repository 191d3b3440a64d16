"""What a grammar of calls allows is what the parser of the family finds, and nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher

from akunu_py.decoding.constraint import tool_calls
from akunu_py.decoding.constraint.tool_calls import CallRequirements, calls_constraint, constrained
from akunu_py.decoding.events import TextDelta, ToolCallArguments, ToolCallFinished, ToolCallStarted
from akunu_py.decoding.tools.formats import FORMATS
from akunu_py.decoding.tools.syntaxes import CallLayout
from akunu_py.decoding.tools.tool_call_parser import ToolCallParser
from akunu_py.errors import UsageError
from akunu_py.json_schema.regex import byte_tables, limits
from akunu_py.types import Constraint, SamplingOptions, Tool, ToolChoice

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [Tool("weather", "", SCHEMA, strict=True), Tool("now", "", {}, strict=True)]
TEMPLATES = {"mistral": ("", "[ARGS]"), "deepseek": ("", "```json")}
CASES = [(name, template) for name in FORMATS for template in TEMPLATES.get(name, ("",))]
CLOSING = b'"}])<>\n,:=/|0'


class Plain:
    """Stands for an engine whose tokenizer has no special tokens."""

    name = "plain"

    @property
    def tokenizer(self) -> Any:
        return self

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tool_calls, "token_tables", lambda engine: byte_tables())
    return Plain()


def matcher(grammar: str) -> LLMatcher:
    made = LLMatcher(byte_tables(), LLMatcher.grammar_from_lark(grammar), limits=limits())
    assert not made.is_error(), made.get_error()
    return made


def walk(grammar: str, layout: CallLayout, seed: int, begin: str = "") -> str | None:
    """A text that the grammar allows; None where it did not come to an end."""
    generator = random.Random(seed)
    ending = list((layout.tags.end if layout.tags else layout.quote or '"').encode())
    found = matcher(grammar)
    written = bytearray(begin.encode())
    assert found.try_consume_tokens(list(written)) == len(written)
    while len(written) < 1200:
        if found.is_stopped() or (found.is_accepting() and generator.random() < 0.5):
            return written.decode()
        if generator.random() < 0.2:
            if (taken := found.try_consume_tokens(ending)) == len(ending):
                written += bytes(ending)
                continue
            found.rollback(taken)
        bits = found.compute_bitmask()
        allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
        allowed = [byte for byte in allowed if byte < 128] or allowed
        closing = [byte for byte in allowed if byte in CLOSING]
        byte = generator.choice(closing if closing and generator.random() < 0.8 else allowed)
        assert found.try_consume_tokens([byte]) == 1
        written.append(byte)
    return None


def calls_in(name: str, text: str) -> tuple[list[tuple[str, Any]], str]:
    parser = ToolCallParser(FORMATS[name], TOOLS)
    events = [*parser.add(text), *parser.finish()]
    names = [event.name for event in events if isinstance(event, ToolCallStarted)]
    arguments = "".join(
        event.text if isinstance(event, ToolCallArguments) else "\0"
        for event in events
        if isinstance(event, ToolCallArguments | ToolCallFinished)
    )
    loaded = [json.loads(each) for each in arguments.split("\0")[:-1]]
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    return list(zip(names, loaded, strict=True)), said


def fits(name: str, arguments: Any) -> bool:
    if name == "now":
        return isinstance(arguments, dict)
    kinds = {"city": str, "unit": str, "days": int, "tags": list}
    return (
        {"city", "unit"} <= set(arguments) <= set(kinds)
        and all(isinstance(value, kinds[key]) for key, value in arguments.items())
        and arguments["unit"] in ("C", "F")
        and all(isinstance(each, bool) for each in arguments.get("tags", []))
    )


@pytest.mark.parametrize(("name", "template"), CASES)
def test_nothing_but_calls_that_fit(name: str, template: str, plain: Any) -> None:
    layout = FORMATS[name].layout_for(template)
    ended = 0
    for one in (True, False):
        written = calls_constraint(plain, layout, CallRequirements(TOOLS, True, one))
        assert written is not None
        for seed in range(2):
            text = walk(written.text, layout, seed)
            if text is None:
                continue
            ended += 1
            text = "<|start|>assistant" * (name == "harmony") + text
            calls, said = calls_in(name, text.replace("<|call|>", ""))
            assert calls
            assert len(calls) == 1 or not one
            assert not said
            assert all(fits(*call) for call in calls), calls
    assert ended


@pytest.mark.parametrize(("name", "template"), [case for case in CASES if case[0] != "llama3"])
def test_text_with_calls_that_fit(name: str, template: str, plain: Any) -> None:
    layout = FORMATS[name].layout_for(template)
    written = calls_constraint(plain, layout, CallRequirements(TOOLS, False, False))
    if not layout.opener or layout.text_markup:  # the latter's need special tokens
        assert written is None
        return
    assert written is not None
    ended = 0
    for seed in range(2):
        text = walk(written.text, layout, seed, f"I < look.\n{layout.opener}")
        if text is not None:
            ended += 1
            calls, said = calls_in(name, text)
            assert calls
            assert said.startswith("I < look.")
            assert "tool call]" not in said
            assert all(fits(*call) for call in calls), calls
    assert ended
    free = matcher(written.text)
    assert free.try_consume_tokens(list(b"Just <b>text</b> {}.")) == 20
    assert free.is_accepting()
    wrong = list(f"{layout.opener}\nnothing of the kind".encode())
    assert matcher(written.text).try_consume_tokens(wrong) < len(wrong)


def test_what_cannot_be_honoured_is_refused(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SamplingOptions()

    def ask(mode: Any, tools: list[Tool], name: str = "", family: str = "hermes") -> Any:
        monkeypatch.setattr(tool_calls, "format_of", lambda tokenizer: FORMATS[family])
        monkeypatch.setattr(
            tool_calls, "template_features", lambda tokenizer: type("A", (), {"template": ""})
        )
        return constrained(plain, sampling, tools, ToolChoice(mode, name), parallel=True)

    loose = Tool("any", "", {"type": "object", "not": {"$ref": "https://elsewhere"}})
    strict = Tool("any", "", loose.parameters, strict=True)
    unnamed = {"properties": {"a b": {}}, "required": ["a b"]}
    with pytest.raises(UsageError, match="no value can fit"):
        ask("auto", [Tool("any", "", unnamed, strict=True)], family="pythonic")
    assert ask("auto", [loose]) is sampling
    assert ask("required", [loose]).constraint is not None
    format = Constraint("json_schema", "{}")
    sampling = SamplingOptions(constraint=format)
    assert "formatstart" not in ask("required", TOOLS).constraint.text
    assert ask("none", TOOLS).constraint is format
    assert "formatstart" in ask("auto", [loose]).constraint.text
    sampling = SamplingOptions(constraint=Constraint("grammar", "start: A"))
    with pytest.raises(UsageError, match="constrained by a grammar"):
        ask("auto", TOOLS)
    sampling = SamplingOptions()
    for args, reason in (
        (("named", TOOLS, "elsewhere"), "no tool 'elsewhere'"),
        (("required", []), "no tools"),
        (("auto", [strict]), "'any' cannot be used"),
        (("required", [strict], "", "pythonic"), "at #/not: .* not in the schema"),
    ):
        with pytest.raises(UsageError, match=reason):
            ask(*args)
