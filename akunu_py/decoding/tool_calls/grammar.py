"""Calls that a model must make, or may only make as a schema wants, as a grammar of what it may
write, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from akunu_py.decoding.constraint.matcher import lark
from akunu_py.decoding.constraint.schema.builder import (
    COMPACT,
    FREE,
    ONE_LINE,
    Layout,
    keywords,
    marked,
)
from akunu_py.decoding.constraint.schema.formula import Impossible, Refused
from akunu_py.decoding.constraint.schema.grammar import grammar
from akunu_py.decoding.constraint.schema.rules import Verbatim
from akunu_py.decoding.constraint.token_tables import token_tables
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.decoding.tool_calls import values
from akunu_py.decoding.tool_calls.shapes import Shape
from akunu_py.errors import UsageError
from akunu_py.text import on_one_line
from akunu_py.types import Constraint, Tool

_ANY_OBJECT = {"type": "object"}
_PLACES = re.compile(r"(NAME|ARGUMENTS|INDEX)")
_TEXT = r"/(.|\n)*/"
_TYPES = ("string", "number", "boolean", "null", "object", "array")
_Guess = Literal["", "closed", "open"]
_DEFINED = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Wanted:
    """forced: nothing but calls; otherwise text, with calls in it. one: at most one call. format:
    what a text must match; then there are either calls or that."""

    tools: Sequence[Tool]
    forced: bool
    one: bool
    format: Constraint | None = None


def calls_constraint(codec: TokenCodec, shape: Shape, wanted: Wanted) -> Constraint | None:
    """None where there is none. Raises UsageError for the schema of a strict tool, and a format,
    that cannot be followed."""
    try:
        text = _Writer(codec, shape).written(wanted)
        if text is None:
            return None
        known: tuple[_Guess, ...] = ("closed", "open")
        guesses = [_Writer(codec, shape, guess).written(wanted) for guess in known]
        return Constraint("grammar", text, guesses=tuple(each for each in guesses if each))
    except _Unbounded:
        return None


class _Unbounded(Exception):
    """A text that ends with a special token in the middle of other text: no terminal says that."""


class _Writer:
    def __init__(self, codec: TokenCodec, shape: Shape, guess: _Guess = "") -> None:
        """guess: how arguments probably are: on one line and, "closed", of the properties that the
        schema names, in its order."""
        self._tokenizer, self._shape = codec.tokenizer, shape
        self._guess: _Guess = guess
        self._special = token_tables(codec).is_special_token
        self._lines: list[str] = []
        self._count = 0
        self._layout = self._layout_of(shape)

    def _layout_of(self, shape: Shape) -> Layout:
        """How the arguments are written."""
        if shape.notation == "marked":
            quote = self._marker(shape.quote)
            return self._guessed(marked(quote, quote))
        python = shape.notation == "python"
        return self._guessed(keywords(spaced=bool(self._guess)) if python else FREE)

    def _guessed(self, layout: Layout) -> Layout:
        if self._guess and layout is FREE:
            layout = ONE_LINE
        if self._guess != "closed":
            return layout
        outermost = layout.outermost and replace(layout.outermost, ordered=True, closed=True)
        return replace(layout, ordered=True, closed=True, outermost=outermost)

    def written(self, wanted: Wanted) -> str | None:
        if wanted.format is not None:
            return self._either(replace(wanted, forced=True, format=None), wanted.format)
        shape, opened, one = self._shape, "", wanted.one
        if not wanted.forced and not shape.opener:
            return None
        said, end = self._around(wanted)
        if not wanted.forced and not said:
            opened = self._text_until(shape.opener)
            one = one or not shape.before.startswith(shape.opener)
            self._shape = shape = replace(
                shape,
                before=shape.before.removeprefix(shape.opener),
                call=shape.call.removeprefix(shape.opener),
            )
        self._lines.append(f"call: {' | '.join([self._call(tool) for tool in wanted.tools])}")
        more = "" if one else f"({self._text(shape.between)} call)*"
        calls = f"{self._text(shape.before)} call {more} {self._text(shape.behind)}"
        if said:
            start = f"{said} ({calls}){'' if wanted.forced else '?'} {end}"
            start += "" if wanted.forced else " | text"
        elif not wanted.forced:
            start = f"({opened} {calls})* text"
        elif shape.text_first:
            before, behind = map(self._text, shape.text_first)
            start = f"({before} text {behind})? {calls}"
        else:
            start = calls
        return "\n".join([f"start: {start}", f"text: {_TEXT}", *self._lines]) + "\n"

    def _either(self, wanted: Wanted, format: Constraint) -> str:
        """Calls, or what matches the format."""
        layout = COMPACT if format.compact else self._guessed(FREE)
        bare = not (self._shape.opener or self._shape.text_first)
        if bare and format.kind in ("json_schema", "json"):
            # Both are JSON, so that only a grammar of one kind of JSON can tell them apart: it
            # has one call.
            return lark(_or_call(format, wanted.tools), layout)
        rules, text, shape = lark(format, layout, "format"), "formatstart", self._shape
        if shape.around:
            begin, end, last = map(self._text, shape.around)
            text = f"({begin})? {text} ({end} ({last})?)?"
        elif shape.text_first:
            before, behind = map(self._text, shape.text_first)
            text = f"{text} | ({before} text {behind})? {self._text(shape.text_head)} {text}"
        written = self.written(wanted)
        assert written is not None
        start, _, others = written.partition("\n")
        return f"{start} | {text}\n{others}{rules}"

    def _around(self, wanted: Wanted) -> tuple[str, str]:
        """The text of an answer in its markup, before the calls, and what may be behind them; empty
        where there is no such markup."""
        if self._shape.around is None:
            return "", ""
        begin, end, last = self._shape.around
        if not wanted.forced and isinstance(self._marker(end), str):
            raise _Unbounded  # it could hold the opener
        text = self._text(end) if wanted.forced else self._text_until(end)
        return f"(({self._text(begin)})? {text})?", f"({self._text(last)})?"

    def _text_until(self, end: str) -> str:
        found = self._marker(end)
        if isinstance(found, Verbatim):
            return f"text {found.text}"
        rule = self._new()
        self._lines.append(f"{rule}[suffix={_quoted(found)}]: {_TEXT}")
        return rule

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
        try:
            schema = {**_ANY_OBJECT, **tool.parameters}
            return self._rule(schema, tool, _ANY_OBJECT, self._layout)
        except Impossible as error:
            if tool.strict:
                raise _refused(tool, error) from error
            return self._rule(_ANY_OBJECT, tool, _ANY_OBJECT, self._layout)

    def _rule(self, schema: Mapping[str, Any], tool: Tool, otherwise: Any, layout: Layout) -> str:
        """A rule for what fits; for `otherwise` where that cannot be, of a tool that is not strict.
        Raises Impossible where nothing does."""
        prefix = self._new()
        try:
            text = grammar(schema, layout, prefix)
        except Impossible:
            raise
        except Refused as error:
            if tool.strict:
                raise _refused(tool, error) from error
            text = grammar(otherwise, layout, prefix)
        self._lines += text.splitlines()
        return f"{prefix}start"

    def _parameters(self, tool: Tool) -> str:
        """Markup for each parameter, in the order of the schema; those that must be there, are."""
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            if part := self._parameter(tool, name, schema):
                parts.append(part if name in required else f"({part})?")
        return " ".join(parts) or '""'

    def _parameter(self, tool: Tool, name: str, schema: Any) -> str:
        """Its alternatives, by the type of the value; "" where there is none."""
        tags = self._shape.tags
        assert tags is not None
        options, refusal = [], None
        for begin, types in self._kinds(tool, name):
            try:
                value = self._value(tool, schema, types)
            except Impossible as error:
                refusal = error
                continue
            options.append(f"{self._text(begin)} {value} {self._text(tags.behind)}")
        if not options and tool.strict and refusal is not None:
            raise _refused(tool, refusal)
        return f"({' | '.join(options)})" if options else ""

    def _kinds(self, tool: Tool, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        """What begins a value of which types; no types: of all."""
        tags = self._shape.tags
        assert tags is not None
        declared = values.types_of(tool.parameters, name)
        possible = [
            each
            for each in _TYPES
            if not declared or each in declared or (each == "number" and "integer" in declared)
        ]
        string = values.is_string(tool.parameters, name)
        key = name
        if '"KEY"' in tags.other:
            key = name.replace("&", "&amp;").replace('"', "&quot;")
        begins = {each: getattr(tags, each).replace("KEY", key) for each in ("string", "other")}
        if tags.string == tags.other:
            yield begins["string"], (("string",) if string else ())
            return
        if "string" in possible:
            yield begins["string"], ("string",)
        others = tuple(each for each in possible if each != "string")
        if "TYPE" in tags.other:
            for each in others:
                yield begins["other"].replace("TYPE", each), (each,)
        elif others:
            yield begins["other"], others

    def _value(self, tool: Tool, schema: Any, types: tuple[str, ...]) -> str:
        """The value of a parameter and what ends it."""
        tags = self._shape.tags
        assert tags is not None
        defined = {key: tool.parameters[key] for key in _DEFINED if key in tool.parameters}
        typed = {"type": list(types)} if types else {}
        whole = {"allOf": [schema, typed], **defined}
        if types != ("string",):
            rule = self._rule(whole, tool, typed or True, self._guessed(FREE))
            return f"{rule} {self._text(tags.line + tags.end)}"
        head, end = self._end(tags.end)
        return self._rule(whole, tool, typed, marked("", end, tags.line + head))

    def _marker(self, text: str) -> str | Verbatim:
        """What ends a text: as it is, or as symbols of which the first is a special token."""
        head, end = self._end(text)
        if head:
            raise _Unbounded
        return end

    def _end(self, text: str) -> tuple[str, str | Verbatim]:
        """The characters before the first special token of what ends a text, and the rest."""
        head, token, others = self._text(text).partition("<[")
        if not token:
            return "", text
        return json.loads(head) if head else "", Verbatim(token + others)

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


def _or_call(format: Constraint, tools: Sequence[Tool]) -> Constraint:
    """What matches the format, or is a call as Llama writes it."""
    schemas: list[Any] = [json.loads(format.text) if format.kind == "json_schema" else True]
    schemas += [{**_ANY_OBJECT, **tool.parameters} for tool in tools]
    apart = [  # their references are their own
        {"$id": f"http://{index}.invalid/", **each} if isinstance(each, dict) else each
        for index, each in enumerate(schemas)
    ]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": schema},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, apart[1:], strict=True)
    ]
    return Constraint("json_schema", json.dumps({"anyOf": [apart[0], *calls]}))


def _refused(tool: Tool, error: Refused) -> UsageError:
    place = "" if error.place == "#" else f" at {error.place}"
    reason = on_one_line(str(error))
    return UsageError(
        f"the parameters of the strict tool {tool.name!r} cannot be used{place}: {reason}"
    )


def _quoted(text: str) -> str:
    # The one character that JSON leaves as it is and a string in a grammar cannot hold.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
