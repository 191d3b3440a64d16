"""Gemma's calls: `call:NAME{key:value,...}`, where a string stands between two markers, and lists
and objects are nested. They are JSON but for the quotes, and so they stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from akunu_py.decoding.tool_calls import values
from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.reader import Malformed, Reader, Reading

_DEEPEST = 60


@dataclass(frozen=True, slots=True)
class Gemma:
    """quote: the marker on both sides of a string."""

    quote: str

    def __call__(self, reader: Reader, calls: Calls) -> Reading[None]:
        """Reads a call."""
        yield from reader.skip()
        yield from reader.expect("call:")
        name, _ = yield from reader.until("{")
        calls.begin(name)
        yield from self._members(reader, calls.arguments, _DEEPEST)
        calls.end()

    def _members(self, reader: Reader, emit: Callable[[str], None], depth: int) -> Reading[None]:
        """An object behind its bracket."""
        emit("{")
        first = True
        while True:
            yield from reader.skip()
            if (yield from reader.accept("}")):
                break
            if not first:
                yield from reader.expect(",")
                yield from reader.skip()
                emit(", ")
            first = False
            if (yield from reader.accept(self.quote)):
                key, _ = yield from reader.until(self.quote)
                yield from reader.skip()
                yield from reader.expect(":")
            else:
                key, _ = yield from reader.until(":")
            emit(values.as_json(key.strip().strip('"')) + ": ")
            yield from self._value(reader, emit, depth)
        emit("}")

    def _value(self, reader: Reader, emit: Callable[[str], None], depth: int) -> Reading[None]:
        if not depth:
            raise Malformed
        yield from reader.skip()
        if (yield from reader.accept(self.quote)):
            emit('"')
            yield from reader.pass_until((self.quote,), lambda text: emit(values.escaped(text)))
            emit('"')
        elif (yield from reader.accept("{")):
            yield from self._members(reader, emit, depth - 1)
        elif (yield from reader.accept("[")):
            yield from self._items(reader, emit, depth - 1)
        elif (yield from reader.peek()) == '"':
            yield from reader.json(emit)
        else:
            yield from _scalar(reader, emit)

    def _items(self, reader: Reader, emit: Callable[[str], None], depth: int) -> Reading[None]:
        emit("[")
        first = True
        while True:
            yield from reader.skip()
            if (yield from reader.accept("]")):
                break
            if not first:
                yield from reader.expect(",")
                emit(", ")
            first = False
            yield from self._value(reader, emit, depth)
        emit("]")


def _scalar(reader: Reader, emit: Callable[[str], None]) -> Reading[None]:
    """A number, true, false or null; anything else is a string without quotes."""
    parts = []
    while (character := (yield from reader.peek())) and character not in ",}]":
        parts.append(reader.take(1))
    if not parts:
        raise Malformed
    emit(values.from_text("".join(parts).strip(), frozenset()))
