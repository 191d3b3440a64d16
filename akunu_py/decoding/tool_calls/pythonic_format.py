"""Calls as Python: `[NAME(key=value, ...), ...]`. Parameters come out one by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Generator

from akunu_py.decoding.tool_calls import values
from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.reader import CutOff, Malformed, Reader, Reading

_KEY = re.compile(r"""[^\s:=,{}()\[\]<>"']+""")  # more than Python takes
_JSON = {"true": True, "false": False, "null": None}


def pythonic(reader: Reader, calls: Calls) -> Reading[None]:
    """A list of calls, or one alone."""
    yield from reader.skip()
    listed = yield from reader.accept("[")
    while True:
        yield from _call(reader, calls)
        yield from reader.skip()
        if not listed or (yield from reader.expect(",", "]")) == "]":
            return


def _call(reader: Reader, calls: Calls) -> Reading[None]:
    name, _ = yield from reader.until("(")
    calls.begin(name)
    while True:
        yield from reader.skip()
        if (yield from reader.accept(")")):
            break
        key, _ = yield from reader.until("=")
        if not _KEY.fullmatch(key.strip()):
            raise Malformed
        text = yield from _expression(reader)
        try:
            tree = _Literals().visit(ast.parse(text.strip(), mode="eval"))
            value = ast.literal_eval(tree)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            raise Malformed from None
        calls.parameter(key.strip())
        calls.arguments(values.as_json(value))
        yield from reader.accept(",")
    calls.end(parameters=True)


class _Literals(ast.NodeTransformer):
    """Nested values are written as JSON, whose literals are names in Python."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON[node.id]) if node.id in _JSON else node


def _expression(reader: Reader) -> Generator[None, None, str]:
    """The text of a value, up to the comma or the bracket behind it."""
    parts: list[str] = []
    depth, quote = 0, ""
    while True:
        character = yield from reader.peek()
        if not character:
            raise CutOff
        if quote and character == "\\":
            parts.append(reader.take(1))
            character = yield from reader.peek()
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            if not depth:
                return "".join(parts)
            depth -= 1
        elif character == "," and not depth:
            return "".join(parts)
        # A newline in a string, which Python wants escaped.
        reader.take(1)
        parts.append("\\n" if quote and character == "\n" else character)
