"""Calls as markup: the name and every parameter in tags. What a tag is made of differs from family
to family, and stands in an `Xml`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from akunu_py.decoding.tool_calls import values
from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.reader import Malformed, Reader, Reading

_ATTRIBUTE = re.compile(r"""([\w:]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_CDATA = "<![CDATA[", "]]>"


@dataclass(frozen=True, slots=True)
class Xml:
    """The tags of a family.

    call, call_end: around a call ("": its opener is that). parameter, parameter_end: around a
    value. head: what ends an opening tag. name, key: the attributes that name the function and the
    parameter, "" where the whole tag does. typed: the attribute that says whether a value is a
    string, and what it says then. newlines: whether a newline at both ends of a value is no part
    of it.
    """

    call: str
    call_end: str
    parameter: str
    parameter_end: str
    head: str = ">"
    name: str = ""
    key: str = ""
    typed: tuple[str, str] | None = None
    newlines: bool = False

    def __call__(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Reads a call."""
        yield from reader.skip()
        if self.call:
            yield from reader.expect(self.call)
        head, _ = yield from reader.until(self.head)
        name = _named(head, self.name)
        calls.begin(name)
        while True:
            yield from reader.skip()
            if (yield from reader.expect(self.parameter, self.call_end)) == self.call_end:
                break
            head, _ = yield from reader.until(self.head)
            yield from self._value(reader, calls, name, head)
        calls.end(parameters=True)

    def _value(self, reader: Reader, calls: Calls, name: str, head: str) -> Reading[None]:
        key = _named(head, self.key)
        types = values.types_of(calls.schema(name), key)
        if self.typed:
            kind = _attributes(head).get(self.typed[0], "")
            types = frozenset({"string"} if kind == self.typed[1] else types - {"string"})
        calls.parameter(key)
        trim: Trim = "newlines" if self.newlines else "none"
        yield from value(reader, calls, types, self.parameter_end, trim)


Trim = Literal["none", "newlines"]


def value(
    reader: Reader, calls: Calls, types: frozenset[str], end: str, trim: Trim = "none"
) -> Reading[None]:
    """A value and the tag that ends it. A string streams."""
    if (yield from reader.accept(_CDATA[0])):
        text, _ = yield from reader.until(_CDATA[1])
        yield from reader.skip()
        yield from reader.expect(end)
        calls.arguments(values.from_text(text, types))
    elif types != {"string"}:
        text, _ = yield from reader.until(end)
        if trim == "newlines":
            text = text.removeprefix("\n").removesuffix("\n")
        calls.arguments(values.from_text(text, types))
    else:
        if trim == "newlines":
            yield from reader.accept("\n")
        calls.arguments('"')
        ends = ("\n" + end, end) if trim == "newlines" else (end,)
        yield from reader.pass_until(ends, lambda text: calls.arguments(values.escaped(text)))
        calls.arguments('"')


def _attributes(head: str) -> dict[str, str]:
    """Raises Malformed where there is anything else."""
    if _ATTRIBUTE.sub("", head).strip():
        raise Malformed
    found = (
        (each[1], next((text for text in each.groups()[1:] if text is not None), ""))
        for each in _ATTRIBUTE.finditer(head)
    )
    return {name: text.replace("&quot;", '"').replace("&amp;", "&") for name, text in found}


def _named(head: str, attribute: str) -> str:
    """Raises Malformed where a tag names nothing."""
    name = _attributes(head).get(attribute, "") if attribute else head.strip().strip("\"'")
    if not name:
        raise Malformed
    return name


@dataclass(frozen=True, slots=True)
class KeyValue:
    """The name, then pairs of a key and a value in tags of their own; `tag` begins their names."""

    tag: str = ""

    def __call__(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Reads a call, up to the tag that closes it."""
        key, key_end = f"<{self.tag}arg_key>", f"</{self.tag}arg_key>"
        value_begin, value_end = f"<{self.tag}arg_value>", f"</{self.tag}arg_value>"
        yield from reader.skip()
        name = ""
        while (character := (yield from reader.peek())) not in ("<", "\n", ""):
            name += reader.take(len(character))
        calls.begin(name)
        while True:
            yield from reader.skip()
            if not (yield from reader.accept(key)):
                break
            parameter, _ = yield from reader.until(key_end)
            yield from reader.skip()
            yield from reader.expect(value_begin)
            calls.parameter(parameter.strip())
            types = values.types_of(calls.schema(name), parameter.strip())
            yield from value(reader, calls, types, value_end)
        if (yield from reader.peek(2)) != "</":
            yield from reader.expect("</")
        calls.end(parameters=True)
