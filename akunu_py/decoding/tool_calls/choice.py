"""Calls that the model must make, or may only make as a schema wants: as a grammar of what it may
write. `tool_choice` "required" and "named" leave nothing but calls, behind the thinking of a
reasoning model; strict tools leave text, and calls that fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from akunu_py.decoding.chat_format.conversation import abilities
from akunu_py.decoding.constraint.schema.formula import Refused
from akunu_py.decoding.constraint.schema.grammar import grammar
from akunu_py.decoding.constraint.token_tables import token_tables
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.tool_calls import values
from akunu_py.decoding.tool_calls.families import HARMONY, family_of
from akunu_py.decoding.tool_calls.shapes import Shape, Tags, shape_of
from akunu_py.errors import UsageError
from akunu_py.text import on_one_line
from akunu_py.types import Constraint, SamplingOptions, Tool, ToolChoice

_ANY_OBJECT = {"type": "object"}
_PLACES = re.compile(r"(NAME|ARGUMENTS|INDEX|KEY)")
_BANNED = -1e9  # added to a logit
_TEXT = r"/(.|\n)*/"
_PLAIN_STRING = {"type", "description", "title", "default", "examples"}


def constrained(
    engine: Engine,
    sampling: SamplingOptions,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
) -> SamplingOptions:
    """`sampling` with what the choice and strict tools ask for.

    Raises UsageError where that cannot be honoured: an unknown tool, a family whose calls cannot be
    held to a grammar, or a schema of a strict tool that cannot.
    """
    forced = choice.mode in ("required", "named")
    strict = any(tool.strict for tool in tools)
    if choice.mode == "none":
        return _without_calls(engine, sampling) if tools else sampling
    if not (forced or strict):
        return sampling
    offered = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if not offered:
        named = f"is no tool {choice.name!r}" if choice.mode == "named" else "are no tools"
        raise UsageError(f"tool_choice {choice.mode!r}: there {named} in this request")
    if sampling.constraint is not None:
        if not forced:
            return sampling  # what the answer must match leaves no room for calls
        raise UsageError(f"tool_choice {choice.mode!r}: the answer must match a format already")
    family = family_of(engine.tokenizer)
    shape = shape_of(family, abilities(engine.tokenizer).template)
    text = None
    if shape is not None:
        one = choice.mode == "named" or not parallel
        text = calls_grammar(engine, shape, offered, forced=forced, one=one)
    if text is not None:
        return replace(sampling, constraint=Constraint("grammar", text))
    if not forced:
        return sampling  # what it calls is not held to the schema
    raise UsageError(
        f"tool_choice {choice.mode!r}: {engine.name} calls tools in a format ({family.name}) that "
        "it cannot be held to; use tool_choice 'auto'"
    )


def _without_calls(engine: Engine, sampling: SamplingOptions) -> SamplingOptions:
    """What opens a call, and nothing else, is not sampled, where that is one token."""
    family = family_of(engine.tokenizer)
    openers = () if family is HARMONY else family.openers
    encoded = [engine.tokenizer.encode(text, add_special_tokens=False) for text in openers]
    banned = tuple((int(tokens[0]), _BANNED) for tokens in encoded if len(tokens) == 1)
    return replace(sampling, logit_bias=sampling.logit_bias + banned)


def calls_grammar(
    engine: Engine, shape: Shape, tools: Sequence[Tool], *, forced: bool, one: bool
) -> str | None:
    """In llguidance's dialect of Lark; None where there is none.

    forced: nothing but calls; otherwise text, with calls in it. one: at most one. Raises UsageError
    for the schema of a strict tool that cannot be followed.
    """
    try:
        return _Writer(engine, shape).written(tools, forced=forced, one=one)
    except _Unbounded:
        return None


class _Unbounded(Exception):
    """A text that ends with a special token in the middle of other text: no terminal says that."""


class _Writer:
    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._tokenizer, self._shape = engine.tokenizer, shape
        self._special = token_tables(engine).is_special_token
        self._lines: list[str] = []
        self._count = 0

    def written(self, tools: Sequence[Tool], *, forced: bool, one: bool) -> str | None:
        shape, opened = self._shape, ""
        if not forced:
            found = self._opened()
            if found is None:
                return None
            opened = found
            one = one or not shape.before.startswith(shape.opener)
            self._shape = shape = replace(
                shape,
                before=shape.before.removeprefix(shape.opener),
                call=shape.call.removeprefix(shape.opener),
            )
        self._lines.append(f"call: {' | '.join([self._call(tool) for tool in tools])}")
        more = "" if one else f"({self._text(shape.between)} call)*"
        calls = f"{self._text(shape.before)} call {more} {self._text(shape.behind)}"
        if not forced:
            start = f"({opened} {calls})* text"
        elif shape.text_first:
            begin, end = map(self._text, shape.text_first)
            start = f"({begin} text {end})? {calls}"
        else:
            start = calls
        return "\n".join([f"start: {start}", f"text: {_TEXT}", *self._lines]) + "\n"

    def _opened(self) -> str | None:
        """Text up to the opener of a call, with it; None where that cannot be told."""
        opener = self._text(self._shape.opener)
        if opener.startswith("<["):
            return f"text {opener}"
        if not self._shape.opener:
            return None
        if "<[" in opener:
            raise _Unbounded
        self._lines.append(f"opened[suffix={opener}]: {_TEXT}")
        return "opened"

    def _call(self, tool: Tool) -> str:
        """A rule for a call of a tool, whose name it returns."""
        arguments = self._parameters(tool) if self._shape.tags else self._object(tool)
        parts = []
        for part in _PLACES.split(self._shape.call):
            if part == "ARGUMENTS":
                parts.append(arguments)
            elif part == "INDEX":
                parts.append("/[0-9]{1,3}/")
            elif part:
                parts.append(self._text(tool.name if part == "NAME" else part))
        name = self._new()
        self._lines.append(f"{name}: {' '.join(parts)}")
        return name

    def _object(self, tool: Tool) -> str:
        schema = {**_ANY_OBJECT, **tool.parameters}
        return self._json(schema, tool, _ANY_OBJECT)

    def _json(self, schema: Mapping[str, Any], tool: Tool, otherwise: Any) -> str:
        """A rule for JSON that fits; for `otherwise` where that cannot be, of a tool that is not
        strict."""
        prefix = self._new()
        try:
            text = grammar(schema, prefix=prefix)
        except Refused as error:
            if tool.strict:
                place = "" if error.place == "#" else f" at {error.place}"
                reason = on_one_line(str(error))
                raise UsageError(
                    f"the parameters of the strict tool {tool.name!r} cannot be used{place}: "
                    f"{reason}"
                ) from error
            text = grammar(otherwise, prefix=prefix)
        self._lines += text.splitlines()
        return f"{prefix}start"

    def _parameters(self, tool: Tool) -> str:
        """Markup for each parameter, in the order of the schema; those that must be there, are."""
        tags = self._shape.tags
        assert tags is not None
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            begin = tags.string if values.is_string(tool.parameters, name) else tags.other
            inside = self._value(tool, name, schema, tags)
            part = f"{self._text(begin.replace('KEY', name))} {inside} {self._text(tags.behind)}"
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts) or '""'

    def _value(self, tool: Tool, name: str, schema: Any, tags: Tags) -> str:
        """The value of a parameter and what ends it."""
        if not values.is_string(tool.parameters, name):
            if isinstance(schema, dict):
                defined = ("$defs", "definitions")
                schema = schema | {
                    key: tool.parameters[key] for key in defined if key in tool.parameters
                }
            rule = self._json(schema, tool, True)
            return f"{rule} {self._text(tags.line + tags.end)}"
        choices = schema.get("enum")
        if choices:
            listed = " | ".join(self._text(str(each)) for each in choices)
            return f"({listed}) {self._text(tags.line + tags.end)}"
        if tool.strict and (further := sorted(set(schema) - _PLAIN_STRING)):
            raise UsageError(
                f"the parameters of the strict tool {tool.name!r} cannot be used at "
                f"#/properties/{name}: this model writes strings without quotes, which "
                f"{further[0]!r} cannot be applied to"
            )
        end = self._text(tags.end)
        rule = self._new()
        if "<[" in end[1:]:
            raise _Unbounded
        if end.startswith("<["):
            self._lines.append(f"{rule}: {_TEXT}")
            return f"{rule} {end}"
        self._lines.append(f"{rule}[suffix={end}]: {_TEXT}")
        return rule

    def _text(self, text: str) -> str:
        """`text` as symbols: strings, and its special tokens by their numbers."""
        symbols: list[str] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            if self._special(token):
                marker = self._tokenizer.decode([token], skip_special_tokens=False)
                before, _, text = text.partition(marker)
                symbols += [_quoted(before)] if before else []
                symbols.append(f"<[{token}]>")
        if text or not symbols:
            symbols.append(_quoted(text))
        return " ".join(symbols)

    def _new(self) -> str:
        self._count += 1
        return f"x{self._count}"


def _quoted(text: str) -> str:
    # The one character that JSON leaves as it is and a string in a grammar cannot hold.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
