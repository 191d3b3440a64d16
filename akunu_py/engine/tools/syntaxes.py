"""Syntaxes in which models write the calls between two markers.

A syntax is a callable that reads one call or several and streams names and arguments to `Calls`.
`layout(opener, closer)` returns how the same calls are written; a plain function has none.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from akunu_py.engine.events import Event, ToolCallArguments, ToolCallFinished, ToolCallStarted
from akunu_py.engine.text.reader import SPACE, CutOff, Emit, Malformed, ParserSteps
from akunu_py.engine.tools.call_reader import CallReader
from akunu_py.types import Tool

STRING = frozenset({"string"})
_NAME = re.compile(r"[\w.:/-]{1,256}")
_NAME_SO_FAR = re.compile(r"[\w.:/-]{0,256}")
_NAME_KEYS = ("name", "function", "tool_name", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
_IGNORED_KEYS = ("type", "id", "call_id", "tool_call_id")
_MISTRAL_NEXT = re.compile(r"[\w.-]+\s*(\[ARGS\]|\[CALL_ID\])")
_MISTRAL_PARTIAL = re.compile(r"[\w.-]{0,256}\s*(?:\[[A-Z_]{0,8})?")
_PYTHON_KEY = re.compile(r"""[^\s:=,{}()\[\]<>"']+""")  # more than Python allows
_PYTHON_JSON = {"true": True, "false": False, "null": None}
_ATTRIBUTE = re.compile(r"""(?<![\w:])([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_CDATA = "<![CDATA[", "]]>"
_MAX_DEPTH = 60  # nested values without JSON
_COMBINERS = ("anyOf", "oneOf", "allOf")


@dataclass(slots=True)
class Calls:
    """Receives the parts of calls that a syntax reads, and emits them as events."""

    tools: Mapping[str, Tool]  # by name
    emit: Callable[[Event], None]
    new_id: Callable[[], str]
    allowed: bool  # whether the answer may call tools at all
    known_only: bool = False  # whether only `tools` can be called
    in_call: bool = False
    _first: bool = True  # whether the next parameter is the first of its call

    def begin(self, name: str) -> None:
        """Begin a call with a new id. Ids that models write are not unique in a conversation.

        Raises Malformed for a bad `name`, if calls are not allowed, or if another call is open.
        """
        name = name.strip()
        known = not self.known_only or name in self.tools
        if not self.allowed or self.in_call or not known or not _NAME.fullmatch(name):
            raise Malformed
        self.in_call = self._first = True
        self.emit(ToolCallStarted(self.new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Append to the JSON object."""
        self.emit(ToolCallArguments(text))

    def begin_parameter(self, name: str) -> None:
        """Begin another member of the object; `add_arguments` adds its value."""
        self.add_arguments(("{" if self._first else ", ") + to_json(name) + ": ")
        self._first = False

    def end(self, *, parameters: bool = False) -> None:
        """End the call. parameters: whether `begin_parameter` built its arguments."""
        if parameters:
            self.add_arguments("{}" if self._first else "}")
        self.in_call = False
        self.emit(ToolCallFinished())

    def parameters_of(self, tool: str) -> Mapping[str, Any]:
        """Return the schema of a tool's parameters, an empty one for an unknown tool."""
        known = self.tools.get(tool.strip())
        return known.parameters if known else {}


Syntax = Callable[[CallReader, Calls], ParserSteps[None]]


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags around a parameter; KEY stands for its name, TYPE for its type."""

    string_start: str
    value_start: str  # of a value of another type
    end: str  # closes a value; no string can contain it
    newline: str = ""  # between a value and `end`
    separator: str = "\n"  # follows `end`; KEY stands for the name


@dataclass(frozen=True, slots=True)
class CallLayout:
    """How calls are written, for grammars and for rendering earlier calls."""

    prefix: str  # before all calls
    call: str  # with NAME, ARGUMENTS (a JSON object, or parameters) and INDEX (a number)
    separator: str = "\n"  # between two calls
    suffix: str = ""  # after all calls
    tags: Tags | None = None  # of the parameters; None if the arguments are one value
    opener: str = ""  # occurs in no text outside calls
    text_before: tuple[str, str] | None = None  # markup of a text before a forced call
    text_opener: str = ""  # opens a text after `text_before`
    text_markup: tuple[str, str, str] | None = None  # start and end of a text, end of the answer
    notation: Literal["json", "marked", "python"] = "json"  # of ARGUMENTS
    quote: str = ""  # around the strings of "marked"


def _one_or_array(read_call: Syntax, *, empty: bool = False) -> Syntax:
    """Return the syntax of one call, or of an array of calls. empty: accept `[]`."""

    def read_calls(reader: CallReader, calls: Calls) -> ParserSteps[None]:
        if not (yield from reader.accept("[", skip=SPACE)):
            yield from read_call(reader, calls)
        elif not (empty and (yield from reader.accept("]", skip=SPACE))):
            separator = ","
            while separator == ",":
                yield from reader.skip()
                yield from read_call(reader, calls)
                separator = yield from reader.expect(",", "]", skip=SPACE)

    return read_calls


@partial(_one_or_array, empty=True)
def json_calls(reader: CallReader, calls: Calls) -> ParserSteps[None]:
    """Read `{"name": ..., "arguments": {...}}`; arguments stream if the name precedes them."""
    yield from reader.expect("{")
    name = ""
    pending: str | None = None  # arguments before the name
    emitted = unknown = False
    while (yield from _has_next_key(reader)):
        key = json.loads((yield from reader.read_json_text()))
        yield from reader.expect(":", skip=SPACE)
        bracket = yield from reader.skip()
        if key in _ARGUMENT_KEYS and name and not emitted and bracket == "{":
            yield from _read_arguments(reader, calls, name)
            emitted = True
            continue
        value = _parsed_json((yield from reader.read_json_text()))
        if key in _NAME_KEYS and isinstance(value, dict):
            arguments = next((value[each] for each in _ARGUMENT_KEYS if each in value), None)
            pending, value = _as_object(arguments), value.get("name")
        if key in _NAME_KEYS and isinstance(value, str):
            name = name or value
        elif key in _ARGUMENT_KEYS and not emitted:
            pending = _as_object(value)
        elif key not in _IGNORED_KEYS:
            unknown = True
    if not emitted:
        if pending is None and unknown:
            raise Malformed
        calls.begin(name)
        calls.add_arguments(pending or "{}")
        calls.end()


def _has_next_key(reader: CallReader) -> ParserSteps[bool]:
    if (yield from reader.skip(SPACE + ",")) == '"':
        return True
    yield from reader.expect("}")
    return False


def _parsed_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def _as_object(value: Any) -> str:
    """Return arguments as a JSON object; some models write them as a string that holds one."""
    if isinstance(value, str):
        value = _parsed_json(value) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise Malformed
    return json.dumps(value, ensure_ascii=False)


def _read_arguments(reader: CallReader, calls: Calls, name: str) -> ParserSteps[None]:
    """Read the JSON object that completes a call."""
    if (yield from reader.skip()) != "{":
        yield from reader.expect("{")
    calls.begin(name)
    yield from reader.read_json(calls.add_arguments)
    calls.end()


@_one_or_array
def keyed_json(reader: CallReader, calls: Calls) -> ParserSteps[None]:
    """Read an object whose only key is the function's name."""
    yield from reader.expect("{")
    if (yield from reader.skip()) != '"':
        raise Malformed
    name = _parsed_json((yield from reader.read_json_text()))
    yield from reader.expect(":", skip=SPACE)
    yield from _read_arguments(reader, calls, name)
    yield from reader.expect("}", skip=SPACE)


def mistral(reader: CallReader, calls: Calls) -> ParserSteps[None]:
    """Read `[{"name": ..., "arguments": ...}, ...]`, or `NAME[CALL_ID]ID[ARGS]{...}`, repeated."""
    if (yield from reader.skip()) in ("[", "{"):
        yield from json_calls(reader, calls)
        return
    while True:
        name, end = yield from reader.read_until("[ARGS]", "[CALL_ID]")
        if end == "[CALL_ID]":
            yield from reader.read_until("[ARGS]")
        yield from _read_arguments(reader, calls, name)
        yield from reader.skip()
        while _MISTRAL_PARTIAL.fullmatch(reader.unread) and not reader.closed:
            yield
        if not _MISTRAL_NEXT.match(reader.unread):
            if reader.closed and reader.unread and _MISTRAL_PARTIAL.fullmatch(reader.unread):
                raise CutOff
            return


@dataclass(frozen=True, slots=True)
class NamedJson:
    """A header with the name, a separator, and the arguments as a JSON object."""

    separator: str
    header: str = "NAME"
    name: str = "(.*)"  # regular expression that finds the name in the header
    begin: str = ""
    end: str = ""
    fenced: bool = False  # whether there may be `function`, the name and a fence instead
    text_name: str = ""  # name in the header of a text; then `begin` may be in the prompt

    def __call__(self, reader: CallReader, calls: Calls) -> ParserSteps[None]:
        if self.text_name:
            yield from reader.accept(self.begin)
            while not reader.closed and _NAME_SO_FAR.fullmatch(reader.unread):
                yield
            if not re.match(_NAME.pattern + self.separator, reader.unread):
                raise Malformed
        elif self.begin:
            yield from reader.expect(self.begin)
        header, _ = yield from reader.read_until(self.separator)
        found = re.search(self.name, header, re.DOTALL)
        name = found[1] if found else ""
        if self.text_name and name == self.text_name:
            return
        trailing = SPACE
        if self.fenced and (yield from reader.skip()) != "{":
            if name.strip() != "function":
                raise Malformed
            name, _ = yield from reader.read_until("\n")
            yield from reader.expect("```json", "```", skip=SPACE)
            trailing += "`"
        yield from _read_arguments(reader, calls, name)
        if self.end:
            yield from reader.skip(trailing)
            if not reader.cut_off_in(self.end):
                yield from reader.expect(self.end)

    @property
    def call(self) -> str:
        """The text of a call with a placeholder for arguments, as in `CallLayout`."""
        return f"{self.begin}{self.header}{self.separator}ARGUMENTS{self.end}"

    def layout(self, opener: str, closer: str) -> CallLayout:
        return CallLayout(opener, self.call, "", closer, opener=opener)


@dataclass(frozen=True, slots=True)
class Xml:
    """The name and every parameter in tags."""

    call: str  # begins a call; "" if the format's opener does
    call_end: str
    parameter: str  # begins a parameter
    parameter_end: str
    head: str = ">"  # ends an opening tag
    name: str = ""  # attribute with the function; "" if it follows `call`
    key: str = ""  # attribute with the parameter; "" if it follows `parameter`
    typed: tuple[str, str, str] | None = None  # attribute with the type: name, string, other
    newlines: bool = False  # whether newlines surround a value
    quote: str = ""  # of a name that is no attribute
    separator: str = "\n"  # between two tags
    extra: str = ""  # further attributes of a call
    parameter_head: str = ""  # ends the opening tag of a parameter; "": `head`

    def __call__(self, reader: CallReader, calls: Calls) -> ParserSteps[None]:
        if self.call:
            yield from reader.expect(self.call, skip=SPACE)
        head, _ = yield from reader.read_until(self.head)
        name = _name_in_tag(head, self.name)
        calls.begin(name)
        ends = self.parameter, self.call_end
        while (yield from reader.expect(*ends, skip=SPACE)) == self.parameter:
            head, _ = yield from reader.read_until(self.parameter_head or self.head)
            key = _name_in_tag(head, self.key)
            types = types_of(calls.parameters_of(name), key)
            if self.typed:
                kind = _parsed_attributes(head).get(self.typed[0], "")
                types = STRING if kind == self.typed[1] else types - STRING
            calls.begin_parameter(key)
            yield from _read_value(reader, calls, types, self.parameter_end, "\n" * self.newlines)
        calls.end(parameters=True)

    def layout(self, opener: str, closer: str) -> CallLayout:
        line = "\n" if self.newlines else ""
        kinds = [f' {self.typed[0]}="{each}"' for each in self.typed[1:]] if self.typed else [""]
        begin = self.parameter + self._attribute(self.key, "KEY")
        begins = [f"{begin}{kind}{self.parameter_head or self.head}{line}" for kind in kinds]
        tags = Tags(begins[0], begins[-1], self.parameter_end, line, self.separator)
        head = self.call + self._attribute(self.name, "NAME") + self.extra + self.head
        between = self.separator.removeprefix(self.head)
        call = f"{head}{between}ARGUMENTS{self.call_end}"
        if not closer:  # the opener is part of the call
            return CallLayout("", opener + call, tags=tags, opener=opener)
        if not self.name:
            return CallLayout("", f"{opener}\n{call}\n{closer}", tags=tags, opener=opener)
        # The newline belongs to the call: a grammar cannot choose between texts that begin alike.
        before, call = opener + self.separator, call + self.separator
        return CallLayout(before, call, "", closer, tags, opener)

    def _attribute(self, name: str, value: str) -> str:
        return f' {name}="{value}"' if name else f"{self.quote}{value}{self.quote}"


def _read_value(
    reader: CallReader, calls: Calls, types: frozenset[str], end: str, newline: str = ""
) -> ParserSteps[None]:
    """Read a value and the tag `end`. A string streams; `newline` at both ends is left out."""
    if (yield from reader.accept(_CDATA[0])):
        text, _ = yield from reader.read_until(_CDATA[1])
        yield from reader.expect(end, skip=SPACE)
        calls.add_arguments(json_from_text(text, types))
    elif types != STRING:
        text, _ = yield from reader.read_until(end)
        text = text.removeprefix(newline).removesuffix(newline)
        calls.add_arguments(json_from_text(text, types))
    else:
        if newline:
            yield from reader.accept(newline)
        calls.add_arguments('"')
        ends = (newline + end, end)
        yield from reader.emit_until(ends, lambda text: calls.add_arguments(json_escaped(text)))
        calls.add_arguments('"')


def _parsed_attributes(head: str) -> dict[str, str]:
    """Return the attributes in a tag. Raises Malformed for anything else."""
    if _ATTRIBUTE.sub("", head).strip():
        raise Malformed
    found = {each[1]: each[2] or each[3] or each[4] or "" for each in _ATTRIBUTE.finditer(head)}
    return {key: text.replace("&quot;", '"').replace("&amp;", "&") for key, text in found.items()}


def _name_in_tag(head: str, attribute: str) -> str:
    """Return the name in a tag. Raises Malformed if there is none."""
    name = _parsed_attributes(head).get(attribute, "") if attribute else head.strip().strip("\"'")
    if not name:
        raise Malformed
    return name


@dataclass(frozen=True, slots=True)
class Elements:
    """A tag for the call, for each parameter, and for each member and `item` of its value."""

    mark: str  # before every tag

    def __call__(self, reader: CallReader, calls: Calls) -> ParserSteps[None]:
        begin = f"{self.mark}<"
        yield from reader.expect(f"{begin}invoke", skip=SPACE)
        head, _ = yield from reader.read_until(">")
        tool = _name_in_tag(head, "name")
        calls.begin(tool)
        root = calls.parameters_of(tool)
        while (yield from reader.expect(f"{begin}/invoke>", begin, skip=SPACE)) == begin:
            key, _ = yield from reader.read_until(">")
            calls.begin_parameter(key)
            if types_of(root, key) == STRING:
                yield from _read_value(reader, calls, STRING, f"{begin}/{key}>")
            else:
                value = yield from self._value(reader, key, part_of(root, root, key), root)
                calls.add_arguments(to_json(value))
        calls.end(parameters=True)

    def layout(self, opener: str, closer: str) -> CallLayout:
        """Return the layout of calls with objects and arrays as JSON."""
        begin = f"{self.mark}<KEY>"
        tags = Tags(begin, begin, self.mark, separator="</KEY>")
        call = f'{self.mark}<invoke name="NAME">ARGUMENTS{self.mark}</invoke>\n'
        return CallLayout(f"{opener}\n", call, "", closer, tags, opener)

    def _value(
        self, reader: CallReader, tag: str, schema: Any, root: Any, depth: int = _MAX_DEPTH
    ) -> ParserSteps[Any]:
        """Read the rest of an element: text, or the elements of an object or an array."""
        text, _ = yield from reader.read_until(self.mark)
        found: list[tuple[str, Any]] = []
        while not (yield from reader.accept(f"</{tag}>")):
            yield from reader.expect("<")
            key, _ = yield from reader.read_until(">")
            if not depth or key.startswith("/"):
                raise Malformed
            inner = part_of(schema, root, key)
            found.append((key, (yield from self._value(reader, key, inner, root, depth - 1))))
            yield from reader.expect(self.mark, skip=SPACE)
        types = _schema_types(schema, root)
        if found:
            items = "object" not in types and all(key == "item" for key, _ in found)
            listed = items or "array" in types
            return [value for _, value in found] if listed else dict(found)
        if not text and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return json.loads(json_from_text(text, types))


@dataclass(frozen=True, slots=True)
class KeyValue:
    """The name, then keys and values in separate tags."""

    prefix: str = ""  # of the tags' names
    # Ends of the tags' names, by model; with these, `tool_call` and `tool_sep` enclose the name.
    suffixes: tuple[str, ...] = ()

    def __call__(self, reader: CallReader, calls: Calls) -> ParserSteps[None]:
        suffix = ""
        if self.suffixes:
            begin = "<tool_call"
            tags = (f"{begin}{each}>" for each in self.suffixes)
            found = yield from reader.expect(*tags, skip=SPACE)
            suffix = found[len(begin) : -1]
        key, key_end, value, value_end = self._tags(suffix)
        yield from reader.skip()
        name = ""
        while (character := (yield from reader.peek())) not in ("<", "\n", ""):
            name += reader.consume(len(character))
        calls.begin(name)
        if self.suffixes:
            yield from reader.expect(f"<tool_sep{suffix}>")
        while (yield from reader.accept(key, skip=SPACE)):
            text, _ = yield from reader.read_until(key_end)
            parameter = text.strip()
            yield from reader.expect(value, skip=SPACE)
            calls.begin_parameter(parameter)
            types = types_of(calls.parameters_of(name), parameter)
            yield from _read_value(reader, calls, types, value_end)
        if self.suffixes:
            yield from reader.expect(f"</tool_call{suffix}>")
        elif (yield from reader.peek(2)) != "</":
            yield from reader.expect("</")
        calls.end(parameters=True)

    def _tags(self, suffix: str) -> tuple[str, str, str, str]:
        names = [f"{self.prefix}{each}{suffix}>" for each in ("arg_key", "arg_value")]
        return f"<{names[0]}", f"</{names[0]}", f"<{names[1]}", f"</{names[1]}"

    def layout(self, opener: str, closer: str) -> CallLayout:
        suffix = next((each for each in self.suffixes if each and each in opener), "")
        key, key_end, value, value_end = self._tags(suffix)
        begin = f"{key}KEY{key_end}\n{value}"
        tags = Tags(begin, begin, value_end)
        if self.suffixes:
            call = f"<tool_call{suffix}>NAME<tool_sep{suffix}>\nARGUMENTS</tool_call{suffix}>\n"
            return CallLayout(f"{opener}\n", call, "", closer, tags, opener)
        return CallLayout("", f"{opener}NAME\nARGUMENTS{closer}", tags=tags, opener=opener)


@dataclass(frozen=True, slots=True)
class Gemma:
    """`call:NAME{key:value,...}`: JSON with `quote` around strings, and keys without quotes."""

    quote: str

    def __call__(self, reader: CallReader, calls: Calls) -> ParserSteps[None]:
        yield from reader.expect("call:", skip=SPACE)
        name, _ = yield from reader.read_until("{")
        calls.begin(name)
        yield from self._members(reader, calls.add_arguments, "{", _MAX_DEPTH)
        calls.end()

    def layout(self, opener: str, closer: str) -> CallLayout:
        call = f"{opener}call:NAMEARGUMENTS{closer}"
        return CallLayout("", call, "", opener=opener, notation="marked", quote=self.quote)

    def _members(
        self, reader: CallReader, emit: Emit, bracket: str, depth: int
    ) -> ParserSteps[None]:
        """Read the rest of an object or an array, after its opening bracket."""
        close = "}" if bracket == "{" else "]"
        emit(bracket)
        first = True
        while not (yield from reader.accept(close, skip=SPACE)):
            if not first:
                yield from reader.expect(",")
                emit(", ")
            first = False
            if bracket == "{":
                yield from self._read_key(reader, emit)
            yield from self._read_value(reader, emit, depth)
        emit(close)

    def _read_key(self, reader: CallReader, emit: Emit) -> ParserSteps[None]:
        if (yield from reader.accept(self.quote, skip=SPACE)):
            key, _ = yield from reader.read_until(self.quote)
            yield from reader.expect(":", skip=SPACE)
        else:
            key, _ = yield from reader.read_until(":")
        emit(to_json(key.strip().strip('"')) + ": ")

    def _read_value(self, reader: CallReader, emit: Emit, depth: int) -> ParserSteps[None]:
        if not depth:
            raise Malformed
        if (yield from reader.accept(self.quote, skip=SPACE)):
            emit('"')
            yield from reader.emit_until((self.quote,), lambda text: emit(json_escaped(text)))
            emit('"')
        elif bracket := (yield from reader.accept("{", "[")):
            yield from self._members(reader, emit, bracket, depth - 1)
        elif (yield from reader.peek()) == '"':
            yield from reader.read_json(emit)
        else:
            # A number, true, false or null; anything else is a string without quotes.
            text = ""
            while (character := (yield from reader.peek())) and character not in ",}]":
                text += reader.consume(1)
            if not text:
                raise Malformed
            emit(json_from_text(text.strip(), frozenset()))


@_one_or_array
def pythonic(reader: CallReader, calls: Calls) -> ParserSteps[None]:
    """Read `NAME(key=value, ...)`. Parameters stream one by one."""
    name, _ = yield from reader.read_until("(")
    calls.begin(name)
    while not (yield from reader.accept(")", skip=SPACE)):
        key, _ = yield from reader.read_until("=")
        if not _PYTHON_KEY.fullmatch(key.strip()):
            raise Malformed
        text = yield from _read_expression(reader)
        try:
            tree = _Literals().visit(ast.parse(text.strip(), mode="eval"))
            value = ast.literal_eval(tree)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise Malformed from None
        calls.begin_parameter(key.strip())
        calls.add_arguments(to_json(value))
        yield from reader.accept(",")
    calls.end(parameters=True)


class _Literals(ast.NodeTransformer):
    """Replaces JSON's literals, which are names in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_PYTHON_JSON[node.id]) if node.id in _PYTHON_JSON else node


def _read_expression(reader: CallReader) -> ParserSteps[str]:
    """Return the text of a value, up to the comma or bracket that ends it."""
    text = quote = ""
    depth = 0
    while True:
        character = yield from reader.peek()
        if not character:
            raise CutOff
        if quote and character == "\\":
            text += reader.consume(1)
            character = yield from reader.peek()
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif not depth and character in ",)]}":
            return text
        else:
            depth += (character in "([{") - (character in ")]}")
        reader.consume(1)
        # Models write newlines in strings, where Python needs an escape.
        text += "\\n" if quote and character == "\n" else character


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types that a parameter may have, none if the schema declares none."""
    return _schema_types(part_of(schema, schema, name), schema)


def part_of(schema: Any, root: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a member, or of an array's items; None if `schema` has none."""
    parts = _alternatives(schema, root)
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
    keys = ["items", "additionalProperties"] if name == "item" else ["additionalProperties"]
    others = (part.get(key) for part in parts for key in keys)
    return next((each for each in others if isinstance(each, Mapping)), None)


def _alternatives(
    schema: Any, root: Mapping[str, Any], *, typed: bool = True
) -> list[Mapping[str, Any]]:
    """Return `schema`, a part of `root`, and those it combines. typed: even if it has a type."""
    found: dict[int, Mapping[str, Any]] = {}  # by `id`
    pending = [schema]
    for part in pending:  # grows
        if isinstance(part, Mapping) and id(part) not in found:
            found[id(part)] = part
            if part.get("type") and not typed:
                continue
            pending += [each for key in _COMBINERS for each in _listed(part, key)]
            pending.append(_referenced(part, root))
    return list(found.values())


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []


def _referenced(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return the part of `root` that a schema refers to, None for none."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that `schema`, a part of `root`, names."""
    found = list[Any]()
    for part in _alternatives(schema, root, typed=False):
        if declared := part.get("type"):
            found += declared if isinstance(declared, list) else [declared]
        else:
            values = [*_listed(part, "enum"), *([part["const"]] if "const" in part else [])]
            found += map(_json_type, values)
    return frozenset(each for each in found if isinstance(each, str))


def _json_type(value: Any) -> str:
    known = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else known.get(type(value), "object")


def json_from_text(text: str, types: frozenset[str]) -> str:
    """Convert a value written without JSON's quotes; a string if no other type fits."""
    if types == STRING:
        return to_json(text)
    value = _parsed_literal(text.strip())
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        value = int(value)
    kind = "string" if value is ... else _json_type(value)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    # A value of a wrong type keeps its type, unless a string would fit.
    return to_json(text if value is ... or (not fits and "string" in types) else value)


def _parsed_literal(text: str) -> Any:
    """Parse JSON or a literal of Python; return ... for neither."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            return ...
    return ... if isinstance(value, float) and not math.isfinite(value) else value


def to_json(value: Any) -> str:
    """Return `value` as JSON, or as a JSON string where JSON has no such value."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(str(value), ensure_ascii=False)


def json_escaped(text: str) -> str:
    """Escape part of a string for JSON."""
    return to_json(text)[1:-1]
