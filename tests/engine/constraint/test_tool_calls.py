"""Grammars of tool calls allow the calls that templates write, if they fit, and nothing else."""

import json
import random
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from akunu_py.engine.constraint.tool_calls import CallRequirements, calls_constraint, constrained
from akunu_py.engine.events import TextDelta
from akunu_py.engine.tools.formats import FORMATS
from akunu_py.engine.tools.syntaxes import CallLayout
from akunu_py.engine.tools.tool_call_parser import ToolCallParser
from akunu_py.errors import UsageError
from akunu_py.json_schema.regex import LIMITS
from akunu_py.types import Constraint, SamplingOptions, Tool, ToolChoice
from tests.support.json_schema import is_valid
from tests.support.tiny_fim import load_tiny
from tests.support.tool_call_formats import EXAMPLES, Call, calls_in
from tests.support.tool_models import TEMPLATE

SIGNS = {
    "mistral": "[ARGS]", "deepseek v3": "```json", "hy3:opensource": ":opensource>",
    "gigachat3.1": "<|function_call|>",
}  # of a template  # fmt: skip
OTHERWISE = {
    "hermes array", "llama3 tag", "mistral once", "mistral array", "unknown", "qwen3_coder bare",
}  # fmt: skip
WRITTEN = [name for name in EXAMPLES if name not in OTHERWISE]
FORMAT = {
    "type": "object",
    "properties": {"count": {"type": "integer"}, "text": {"type": "string"}},
    "required": ["count", "text"],
}
# Values that fit `PROPERTIES`, among them texts that look like other values or like markup.
TEXTS = ["", "5", "true", "None", "a, b", '{"a": 1}', "[x]", "#<b>&amp;", " æ\n", "\"'\\"]
VALUES: dict[str, Any] = {
    **{f"text{place}": text for place, text in enumerate(TEXTS)}, "größe": -2.5, "b_2": None,
    "c-d": [True, False], "Key": {"a": 12, "unit": "C"}, "more": [{"a": -3, "unit": "F"}],
    "none": [],
}  # fmt: skip
INNER = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -3, "maximum": 12},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["a", "unit"],
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    **{name: {"type": "string"} for name in VALUES if name.startswith("text")},
    "größe": {"type": "number"}, "b_2": {"type": ["integer", "null"]},
    "c-d": {"type": "array", "items": {"type": "boolean"}},
    "Key": INNER, "more": {"type": "array", "items": INNER},
    "none": {"type": "array", "items": {"type": "string", "minLength": 1}},
}  # fmt: skip
CLOSED = {"type": "object", "properties": PROPERTIES, "additionalProperties": False}


class Tables:
    """Each byte is a token, and some texts are, as special ones."""

    bos_token_id, eos_token_id = None, 256

    def __init__(self, special: Sequence[str]) -> None:
        self.special = list(special)
        self.tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
        self.tokens += [text.encode() for text in special]
        self.special_token_ids = list(range(256, len(self.tokens)))

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


@lru_cache(8)
def compiled(tables: LLTokenizer, grammar: str) -> LLMatcher:
    made = LLMatcher(tables, LLMatcher.grammar_from_lark(grammar), limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def matcher(tables: LLTokenizer, grammar: str) -> LLMatcher:
    return compiled(tables, grammar).deep_copy()


def parse(family: str, tools: Sequence[Tool], text: str) -> tuple[list[Call], str]:
    parser = ToolCallParser(FORMATS[family], tools)
    return calls_in([*parser.add(text), *parser.finish()])


def expressible(value: Any, ends: tuple[str, ...]) -> bool:
    """Return whether a format with these ends of values can express `value`."""
    return not any(end in json.dumps(value, ensure_ascii=False) for end in ends)


@pytest.mark.parametrize(
    ("special", "name"), [(place % 2 == 0, name) for place, name in enumerate(WRITTEN)]
)
def test_calls_of_templates_are_allowed_if_they_fit(name: str, special: bool) -> None:
    """Token by token, and parsed as they were written. special: markers are special tokens."""
    family, write, ends = EXAMPLES[name]
    codec, tokens = tables(family, special)
    format = Constraint("json_schema", json.dumps(FORMAT))
    tools = [Tool("find", "", CLOSED, strict=True), Tool("now", "", INNER, strict=True)]
    layout = FORMATS[family].layout_for(SIGNS.get(name, ""))
    made, either = (
        calls_constraint(codec, tokens, layout, requirements)
        for requirements in (
            CallRequirements(tools, True, False),
            CallRequirements(tools, False, False, format),
        )
    )
    assert made is not None
    assert either is not None

    def allowed(text: str, written: str = made.text) -> bool:
        found = matcher(tokens, written)
        encoded = codec.encode(text.removeprefix("<|start|>assistant").removeprefix(">>>"))
        return found.try_consume_tokens(encoded) == len(encoded) and found.is_accepting()

    values = {key: value for key, value in VALUES.items() if expressible(value, ends)}
    one: list[Call] = [("find", values)]
    several: list[Call] = [*one, ("now", {"a": -3, "unit": "F"}), ("find", {})]
    for calls in [one] if family == "harmony" else [one, several]:  # its messages have one call
        text = write(calls)
        assert allowed(text), text
        assert allowed(text, made.likely[1])
        alone = not (layout.opener or layout.text_opener)  # JSON, as the text is
        assert allowed(text, either.text) is (len(calls) == 1 or not alone)
        assert parse(family, tools, text) == (calls, "")
    assert not allowed(write([("elsewhere", values)]))
    opener = next(iter(FORMATS[family].openers))
    for count, fits in ((1, True), (0.5, False)):
        answer = json.dumps({"count": count, "text": "" if special else opener})
        assert allowed(answer, either.text) is fits
        assert allowed(answer, either.likely[0]) is fits
        assert not allowed(answer)
        parser = ToolCallParser(FORMATS[family], tools, exclusive=True)
        events = [*parser.add(answer[:30]), *parser.add(answer[30:]), *parser.finish()]
        assert "".join(event.text for event in events if isinstance(event, TextDelta)) == answer


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
TEMPLATES = {
    "mistral": ("", "[ARGS]"), "deepseek": ("", "```json"), "hy3": ("", ":opensource>"),
    "gigachat3": ("", "<|function_call|>"),
}  # fmt: skip
CASES = [(name, template) for name in FORMATS for template in TEMPLATES.get(name, ("",))]
CLOSING = b'"}])<>\n,:=/|0'


def walk(found: LLMatcher, layout: CallLayout, seed: int, start: str = "") -> str | None:
    """Return a text that the grammar allows, drawn byte by byte; None if it becomes too long."""
    generator = random.Random(seed)
    ending = list((layout.tags.end if layout.tags else layout.quote or '"').encode())
    written = bytearray(start.encode())
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


@pytest.mark.parametrize(("name", "template"), CASES)
@pytest.mark.parametrize("kind", ["one call", "calls", "text and calls"])
def test_texts_of_the_grammar_are_calls_that_fit(name: str, template: str, kind: str) -> None:
    if kind == "text and calls" and name == "llama3":
        return
    codec, tokens = tables(name, False)
    layout, forced = FORMATS[name].layout_for(template), kind != "text and calls"
    requirements = CallRequirements(TOOLS, forced, kind == "one call")
    made: Any = calls_constraint(codec, tokens, layout, requirements)
    if not forced and (not layout.opener or layout.text_markup):  # needs special tokens
        assert made is None
        return
    start = "" if forced else f"I < look.\n{layout.opener}"
    texts = (walk(matcher(tokens, made.text), layout, seed, start) for seed in range(9))
    text = next(filter(None, texts))
    answer = "<|start|>assistant" * (name == "harmony") + text.replace("<|call|>", "")
    calls, shown = parse(name, TOOLS, answer)
    assert 0 < len(calls) <= (1 if kind == "one call" else 99)
    assert shown.startswith("" if forced else "I < look.")
    assert not (forced and shown)
    assert "tool call]" not in shown
    for called, arguments in calls:
        assert is_valid(SCHEMA if called == "weather" else {"type": "object"}, arguments)
    if not forced:
        free = matcher(tokens, made.text)
        assert free.try_consume_tokens(list(b"Just <b>text</b> {}.")) == 20
        assert free.is_accepting()
        wrong = list(f"{layout.opener}\nnothing of the kind".encode())
        assert matcher(tokens, made.text).try_consume_tokens(wrong) < len(wrong)


def codec_of(directory: Path, sign: str) -> Any:
    """Return the codec of a model with this text in its template and in its vocabulary."""
    template = TEMPLATE.replace("SIGN", sign + "tool_call.name")
    return load_tiny(directory, ["<|end|>", sign], template=template).tokens


def test_requirements_that_cannot_be_enforced_are_refused(tmp_path: Path) -> None:
    hermes = codec_of(tmp_path / "hermes", "<tool_call>")
    pythonic = codec_of(tmp_path / "pythonic", "<|tool_call_start|>")
    free = SamplingOptions()
    json_only = SamplingOptions(constraint=Constraint("json_schema", "{}"))
    by_grammar = SamplingOptions(constraint=Constraint("grammar", "start: A"))

    def sampling_of(
        mode: Any, tools: list[Tool], name: str = "", codec: Any = hermes, options: Any = free
    ) -> Any:
        return constrained(codec, options, tools, ToolChoice(mode, name), parallel=True)

    loose = Tool("any", "", {"type": "object", "not": {"$ref": "https://elsewhere"}})
    strict = Tool("any", "", loose.parameters, strict=True)
    unnamed = Tool("any", "", {"properties": {"a b": {}}, "required": ["a b"]}, strict=True)
    assert sampling_of("auto", [loose]) is free
    assert sampling_of("required", [loose]).constraint is not None
    text = [
        sampling_of(mode, tools, options=json_only).constraint.text
        for mode, tools in (("required", TOOLS), ("auto", [loose]))
    ]
    assert ["formatstart" in each for each in text] == [False, True]
    assert sampling_of("none", TOOLS, options=json_only).constraint is json_only.constraint
    for arguments, reason in (
        (("auto", [unnamed], "", pythonic), "no value can fit"),
        (("auto", TOOLS, "", hermes, by_grammar), "constrained by a grammar"),
        (("named", TOOLS, "elsewhere"), "no tool 'elsewhere'"),
        (("required", []), "no tools"),
        (("auto", [strict]), "'any' cannot be used"),
        (("required", [strict], "", pythonic), "at #/not: .* not in the schema"),
    ):
        with pytest.raises(UsageError, match=reason):
            sampling_of(*arguments)
