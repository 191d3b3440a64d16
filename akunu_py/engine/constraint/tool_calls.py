"""Grammars of forced and strict tool calls, in llguidance's dialect of Lark.

`tool_choice` "required" and "named" allow only calls, after the thinking of a reasoning model.
Strict tools allow text, and calls that fit their schemas.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from llguidance import LLTokenizer

from akunu_py.engine.constraint.matcher import lark, literal, refusal, token_tables
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.engine.tools.formats import HARMONY
from akunu_py.engine.tools.rendering import format_of, template_features
from akunu_py.engine.tools.syntaxes import STRING, CallLayout, Tags, types_of
from akunu_py.errors import SchemaError, Unsatisfiable, UsageError
from akunu_py.json_schema import grammar
from akunu_py.json_schema.formula import TYPES
from akunu_py.json_schema.layouts import COMPACT, FREE, ONE_LINE, UNORDERED, Layout, Notation
from akunu_py.json_schema.regex import (
    SHORT_ESCAPES,
    Expr,
    both,
    concat,
    either,
    quoted,
    raw_text,
    without,
)
from akunu_py.json_schema.rules import Symbol, Verbatim
from akunu_py.types import Constraint, SamplingOptions, Tool, ToolChoice

_ANY_OBJECT = {"type": "object"}
_PLACEHOLDERS = re.compile(r"(NAME|ARGUMENTS|INDEX)")
_TEXT = r"/(.|\n)*/"
_Likely = Literal["", "closed", "open"]  # "": the grammar itself
_DEFINITIONS = ("$defs", "definitions")
_BANNED = -1e9  # added to a logit


def constrained(
    codec: TokenCodec,
    sampling: SamplingOptions,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool,
    enforce: bool = False,
) -> SamplingOptions:
    """Return `sampling` with the constraint of a tool choice and of strict tools.

    With a response format the answer either matches the format or consists of calls. enforce: calls
    match the tools' schemas where a grammar can express them, even if no tool is strict. Raises
    UsageError for an unknown tool, and for a tool format or strict schema without a grammar.
    """
    forced = choice.mode in ("required", "named")
    enforce = enforce or any(tool.strict for tool in tools)
    if choice.mode == "none":
        return _without_calls(codec, sampling) if tools else sampling
    if not (forced or (tools and (enforce or sampling.constraint is not None))):
        return sampling
    offered = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    if not offered:
        named = f"is no tool {choice.name!r}" if choice.mode == "named" else "are no tools"
        raise UsageError(f"tool_choice {choice.mode!r}: there {named} in this request")
    format = None if forced else sampling.constraint
    if format is not None and format.kind == "grammar":
        raise UsageError(
            "an answer constrained by a grammar cannot call tools; use tool_choice 'none'"
        )
    tool_format = format_of(codec.tokenizer)
    layout = tool_format.layout_for(template_features(codec.tokenizer).template)
    single = choice.mode == "named" or not parallel
    constraint = calls_constraint(
        codec.tokenizer,
        token_tables(codec),
        layout,
        CallRequirements(offered, forced, single, format),
    )
    if constraint is not None:
        return replace(sampling, constraint=constraint)
    if not forced:
        return sampling  # calls may violate the schema
    raise UsageError(
        f"tool_choice {choice.mode!r}: {codec.name} calls tools in a format "
        f"({tool_format.name}) that cannot be enforced; use tool_choice 'auto'"
    )


def _without_calls(codec: TokenCodec, sampling: SamplingOptions) -> SamplingOptions:
    """Ban the call openers that consist of a single token."""
    format = format_of(codec.tokenizer)
    openers = () if format is HARMONY else format.openers
    encoded = map(codec.encode_text, openers)
    banned = tuple((tokens[0], _BANNED) for tokens in encoded if len(tokens) == 1)
    return replace(sampling, logit_bias=sampling.logit_bias + banned)


@dataclass(frozen=True, slots=True)
class CallRequirements:
    """The requirements of a request on the grammar of its tool calls."""

    tools: Sequence[Tool]
    forced: bool  # only calls; otherwise text with calls in it
    single: bool  # at most one call
    text_format: Constraint | None = None  # of an answer without calls


def calls_constraint(
    tokenizer: Any, tables: LLTokenizer, layout: CallLayout, requirements: CallRequirements
) -> Constraint | None:
    """Return the grammar of calls, if the format has one. Raises UsageError if inexpressible."""
    levels: tuple[_Likely, ...] = ("", "closed", "open")
    try:
        text, *likely = [
            _GrammarWriter(tokenizer, tables, layout, level).grammar(requirements)
            for level in levels
        ]
    except _Inexpressible:
        return None
    return Constraint("grammar", text, likely=tuple(likely))


class _Inexpressible(Exception):
    """No grammar tells calls in this format from text."""


class _GrammarWriter:
    def __init__(
        self, tokenizer: Any, tables: LLTokenizer, calls: CallLayout, likely: _Likely
    ) -> None:
        """likely: expect one line and, if "closed", the schema's properties in its order."""
        self._tokenizer, self._calls, self._likely = tokenizer, calls, likely
        self._special = tables.is_special_token
        self._lines: list[str] = []
        self._rule_names = (f"x{number}" for number in count(1))
        layout = FREE
        if calls.notation == "marked":
            quote = self._marker(calls.quote)
            layout = marked(quote, quote)
        elif calls.notation == "python":
            layout = keywords(spaced=bool(self._likely))
        self._layout = self._likely_layout(layout)  # of the arguments

    def _likely_layout(self, layout: Layout) -> Layout:
        if self._likely and layout is FREE:
            layout = ONE_LINE
        if self._likely != "closed":
            return layout
        outermost = layout.outermost and replace(layout.outermost, ordered=True, closed=True)
        return replace(layout, ordered=True, closed=True, outermost=outermost)

    def grammar(self, requirements: CallRequirements) -> str:
        if (format := requirements.text_format) is not None:
            return self._calls_or_text(replace(requirements, forced=True, text_format=None), format)
        layout, opened, single = self._calls, "", requirements.single
        if not requirements.forced and not layout.opener:
            raise _Inexpressible
        text_start, end = self._text_rules(requirements)
        if not requirements.forced and not text_start:
            opened = self._text_until(layout.opener)
            single = single or not layout.prefix.startswith(layout.opener)
            self._calls = layout = replace(
                layout,
                prefix=layout.prefix.removeprefix(layout.opener),
                call=layout.call.removeprefix(layout.opener),
            )
        self._lines.append(f"call: {' | '.join([self._call(tool) for tool in requirements.tools])}")
        more = "" if single else f"({self._text(layout.separator)} call)*"
        calls = f"{self._text(layout.prefix)} call {more} {self._text(layout.suffix)}"
        if text_start:
            start = f"{text_start} ({calls}){'' if requirements.forced else '?'} {end}"
            start += "" if requirements.forced else " | text"
        elif not requirements.forced:
            start = f"({opened} {calls})* text"
        elif layout.text_before:
            before, behind = map(self._text, layout.text_before)
            start = f"({before} text {behind})? {calls}"
        else:
            start = calls
        return "\n".join([f"start: {start}", f"text: {_TEXT}", *self._lines]) + "\n"

    def _calls_or_text(self, requirements: CallRequirements, format: Constraint) -> str:
        layout = COMPACT if format.compact else self._likely_layout(FREE)
        bare = not (self._calls.opener or self._calls.text_opener)
        if bare and format.kind in ("json_schema", "json"):
            # Both are JSON, so one schema has to cover the format and a single call.
            return lark(_or_call(format, requirements.tools), layout)
        rules, text, calls = lark(format, layout, "format"), "formatstart", self._calls
        if calls.text_markup:
            begin, end, last = map(self._text, calls.text_markup)
            text = f"({begin})? {text} ({end} ({last})?)?"
        elif calls.text_opener:
            before = ""
            if calls.text_before:
                begin, end = map(self._text, calls.text_before)
                before = f"({begin} text {end})?"
            text = f"{text} | {before} {self._text(calls.text_opener)} {text}"
        start, _, others = self.grammar(requirements).partition("\n")
        return f"{start} | {text}\n{others}{rules}"

    def _text_rules(self, requirements: CallRequirements) -> tuple[str, str]:
        """Return the rules for text in markup, before and after the calls; "" for no rule."""
        if self._calls.text_markup is None:
            return "", ""
        begin, end, last = self._calls.text_markup
        if not requirements.forced and isinstance(self._marker(end), str):
            raise _Inexpressible  # the text could contain the opener
        text = self._text(end) if requirements.forced else self._text_until(end)
        return f"(({self._text(begin)})? {text})?", f"({self._text(last)})?"

    def _text_until(self, end: str) -> str:
        """Return symbols for any text that ends with `end`, and has it nowhere else."""
        found = self._marker(end)
        if isinstance(found, Verbatim):
            return f"text {found.text}"
        rule = next(self._rule_names)
        self._lines.append(f"{rule}[suffix={literal(found)}]: {_TEXT}")
        return rule

    def _call(self, tool: Tool) -> str:
        tags = self._calls.tags
        try:
            arguments = self._parameters(tool, tags) if tags else self._arguments_rule(tool)
        except SchemaError as error:
            raise refusal(f"the parameters of the strict tool {tool.name!r}", error) from error
        parts = []
        for part in _PLACEHOLDERS.split(self._calls.call):
            if part == "ARGUMENTS":
                parts.append(arguments)
            elif part == "INDEX":
                parts.append("/[0-9]{1,3}/")
            elif part:
                parts.append(self._text(tool.name if part == "NAME" else part))
        name = next(self._rule_names)
        self._lines.append(f"{name}: {' '.join(parts)}")
        return name

    def _arguments_rule(self, tool: Tool) -> str:
        schema = {**_ANY_OBJECT, **tool.parameters}
        try:
            return self._rule(schema, tool, _ANY_OBJECT, self._layout)
        except Unsatisfiable:
            if tool.strict:
                raise
            return self._rule(_ANY_OBJECT, tool, _ANY_OBJECT, self._layout)

    def _rule(self, schema: Mapping[str, Any], tool: Tool, fallback: Any, layout: Layout) -> str:
        """Add a rule for `schema`, else for `fallback`. Raises Unsatisfiable, SchemaError."""
        prefix = next(self._rule_names)
        try:
            text = grammar(schema, layout, prefix)
        except SchemaError as error:
            if tool.strict or isinstance(error, Unsatisfiable):
                raise
            text = grammar(fallback, layout, prefix)
        self._lines += text.splitlines()
        return f"{prefix}start"

    def _parameters(self, tool: Tool, tags: Tags) -> str:
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        required = required if isinstance(required, list) else []
        parts = []
        for name, schema in properties.items() if isinstance(properties, Mapping) else ():
            if part := self._parameter(tool, tags, name, schema):
                parts.append(part if name in required else f"({part})?")
        return " ".join(parts) or '""'

    def _parameter(self, tool: Tool, tags: Tags, name: str, schema: Any) -> str:
        """Return alternatives by the type of the value, "" if there are none."""
        options, refused = [], None
        for begin, types in _opening_tags(tool, tags, name):
            try:
                value = self._value(tool, tags, schema, types)
            except Unsatisfiable as error:
                refused = error
            else:
                end = self._text(tags.separator.replace("KEY", name))
                options.append(f"{self._text(begin)} {value} {end}")
        if not options and tool.strict and refused is not None:
            raise refused
        return f"({' | '.join(options)})" if options else ""

    def _value(self, tool: Tool, tags: Tags, schema: Any, types: tuple[str, ...]) -> str:
        """Return the value of a parameter with its closing tag."""
        defined = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
        typed = {"type": list(types)} if types else {}
        whole = {"allOf": [schema, typed], **defined}
        if types != ("string",):
            rule = self._rule(whole, tool, typed or True, self._likely_layout(FREE))
            return f"{rule} {self._text(tags.newline + tags.end)}"
        head, end = self._split_end(tags.end)
        return self._rule(whole, tool, typed, marked("", end, tags.newline + head))

    def _marker(self, text: str) -> str | Verbatim:
        """Return an end marker, as symbols if it begins with a special token."""
        head, end = self._split_end(text)
        if head:
            raise _Inexpressible  # no terminal can express a special token within other text
        return end

    def _split_end(self, text: str) -> tuple[str, str | Verbatim]:
        """Split the end of a text at its first special token."""
        head, token, others = self._text(text).partition("<[")
        if not token:
            return "", text
        return json.loads(head) if head else "", Verbatim(token + others)

    def _text(self, text: str) -> str:
        """Return `text` as symbols: strings, and special tokens by their ids."""
        symbols: list[str] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            if self._special(token):
                marker = self._tokenizer.decode([token], skip_special_tokens=False)
                before, _, text = text.partition(marker)
                symbols += [literal(before)] if before else []
                symbols.append(f"<[{token}]>")
        if text or not symbols:
            symbols.append(literal(text))
        return " ".join(symbols)


def _opening_tags(tool: Tool, tags: Tags, name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the opening tags of a parameter, each with the types of its value; none for all."""
    declared = types_of(tool.parameters, name)
    possible = [
        each
        for each in TYPES
        if not declared or each in declared or (each == "number" and "integer" in declared)
    ]
    quoted = '"KEY"' in tags.value_start
    key = name.replace("&", "&amp;").replace('"', "&quot;") if quoted else name
    string, other = tags.string_start.replace("KEY", key), tags.value_start.replace("KEY", key)
    if tags.string_start == tags.value_start:
        yield string, (("string",) if declared == STRING else ())
        return
    if "string" in possible:
        yield string, ("string",)
        possible.remove("string")
    if "TYPE" in tags.value_start:
        yield from ((other.replace("TYPE", each), (each,)) for each in possible)
    elif possible:
        yield other, tuple(possible)


def _or_call(format: Constraint, tools: Sequence[Tool]) -> Constraint:
    """Return a JSON schema for the format or for one call in Llama's notation."""
    schemas: list[Any] = [json.loads(format.text) if format.kind == "json_schema" else True]
    schemas += [{**_ANY_OBJECT, **tool.parameters} for tool in tools]
    apart = [  # each schema resolves its own references
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


_ANY = Expr(r"(?:.|\n)*")
_SYMBOL = r"(?:\\x\{[0-9a-f]+\}|[0-9A-Za-z])"
_ESCAPED = re.compile(
    r"\\x\{5c\}(?:\[(?P<letters>" + _SYMBOL + r"+)\]|u00\(\?:(?P<controls>[0-9a-f|]+)\)"
    r"|u(?P<code>[0-9a-f]{4})|(?P<letter>" + _SYMBOL + "))"
)
_LETTERS = {letter: code for code, letter in SHORT_ESCAPES.items()}
# Names that are written without quotes.
_PLAIN_NAME = re.compile(r"""[^\s:=,{}()\[\]<>"'\x00-\x1f]+""")
_PLAIN_NAMES = Expr(r"[^\x{0}-\x{20}\x{22}\x{27}-\x{29}\x{2c}\x{3a}<=>\[\]\{\}\x{a0}]+")
# Strings as Python writes them, but with raw newlines and tabs.
_PYTHON_ESCAPE = (
    r"\x{5c}(?:[\x{22}\x{27}\x{5c}bfnrt]|x[0-9a-fA-F]{2}"
    r"|U00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}|u(?:[0-9a-cA-Ce-fE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"
)
_IN_SINGLE = Expr(r"(?:[^\x{27}\x{5c}\x{0}-\x{1f}]|[\n\t])*")
_NO_QUOTES = Expr(r"(?:[^\x{22}\x{27}\x{5c}]|\x{5c}[^\x{22}])*")
_PYTHON_STRING = Expr(
    "(?:"
    + "|".join(
        rf"\x{{{mark}}}(?:[^\x{{{mark}}}\x{{5c}}\x{{0}}-\x{{1f}}]|[\n\t]|{_PYTHON_ESCAPE})*\x{{{mark}}}"
        for mark in ("22", "27")
    )
    + ")"
)


@dataclass(frozen=True)
class QuotedNotation(Notation):
    """Strings without escapes between markers, and names without markers."""

    begin: str | Verbatim
    end: str | Verbatim
    line: str = ""  # between a string and `end`

    def word(self, value: bool | None) -> Expr:
        # Templates write null as Python's None.
        return Expr({None: "(?:null|None)", True: "true", False: "false"}[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        expr = _ANY if content is None else unescaped(content)
        behind = self.line
        if isinstance(self.end, str):
            # One terminal, so that the text stops at the end marker.
            ending = concat(_ANY, raw_text(self.end), _ANY)
            expr, behind = without(expr, ending, inhabited=content is None), behind + self.end
        text = concat(expr, raw_text(behind))
        ends = (self.end,) if isinstance(self.end, Verbatim) else ()
        if isinstance(self.begin, Verbatim):
            return (self.begin, text, *ends)
        return (concat(raw_text(self.begin), text), *ends)

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        if name is None:
            return (_plain_names(content),)
        return (raw_text(name),) if _PLAIN_NAME.fullmatch(name) else self.string(content)


@dataclass(frozen=True)
class PythonNotation(Notation):
    """Python's literals."""

    keywords: bool = False  # members are arguments of a call, not of a dictionary

    def word(self, value: bool | None) -> Expr:
        found = {None: "(?:None|null)", True: "(?:True|true)", False: "(?:False|false)"}
        return Expr(found[value])

    def string(self, content: Expr | None) -> tuple[Symbol, ...]:
        if content is None:
            return (_PYTHON_STRING,)
        mark = raw_text("'")
        single = [both(content, _NO_QUOTES), both(unescaped(content), _IN_SINGLE)]
        found = either([quoted(content), *(concat(mark, each, mark) for each in single)])
        return (replace(found, inhabited=content.inhabited),)

    def key(self, name: str | None, content: Expr | None) -> tuple[Symbol, ...]:
        if not self.keywords:
            return self.string(content)
        return (_plain_names(content) if name is None else raw_text(name),)

    def has_key(self, name: str) -> bool:
        return not self.keywords or _PLAIN_NAME.fullmatch(name) is not None


def marked(begin: str | Verbatim, end: str | Verbatim, line: str = "") -> Layout:
    """Return the layout with strings between markers and without whitespace."""
    return replace(UNORDERED, notation=QuotedNotation(begin, end, line))


def keywords(*, spaced: bool = False) -> Layout:
    """Return the layout of a Python call's arguments. spaced: commas and colons need a space."""
    space = r"\x{20}" if spaced else r"\x{20}?"
    comma, colon = Expr(f",{space}"), Expr(f":{space}")
    inside = replace(UNORDERED, comma=comma, colon=colon, notation=PythonNotation())
    opening, closing, named = Expr(r"\("), Expr(r"\)"), PythonNotation(keywords=True)
    outside = replace(inside, open_object=opening, close_object=closing, notation=named)
    return replace(inside, outermost=replace(outside, colon=Expr("=")))


def unescaped(content: Expr) -> Expr:
    """Return the same content without JSON's escapes. Each escape is one character."""
    return replace(content, text=_ESCAPED.sub(_character, content.text))


def _plain_names(content: Expr | None) -> Expr:
    return _PLAIN_NAMES if content is None else both(_PLAIN_NAMES, unescaped(content))


def _character(found: re.Match[str]) -> str:
    if symbols := re.findall(_SYMBOL, found["letters"] or found["letter"] or ""):
        letters = (chr(int(each[3:-1], 16)) if len(each) > 1 else each for each in symbols)
        codes = [_LETTERS[letter] for letter in letters]
    else:
        codes = [int(each, 16) for each in (found["controls"] or found["code"]).split("|")]
    return "[" + "".join(f"\\x{{{code:x}}}" for code in codes) + "]"
