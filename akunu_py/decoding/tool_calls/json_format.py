"""Calls as JSON: `{"name": ..., "arguments": {...}}`, one or an array of them; and the arguments
alone as JSON, behind the name in the markup of the family."""

from __future__ import annotations

import json
import re
from typing import Any

from akunu_py.decoding.tool_calls.calls import Calls
from akunu_py.decoding.tool_calls.reader import SPACE, CutOff, Malformed, Reader, Reading

_NAMES = ("name", "function", "tool_name", "tool")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
_OTHERS = ("type", "id", "call_id", "tool_call_id")
_KIMI_ID = re.compile(r"\s*(?:functions\.)?(.+?)(?::\d+)?\s*", re.DOTALL)
_MISTRAL_NEXT = re.compile(r"[\w.-]+\s*(\[ARGS\]|\[CALL_ID\])")
_MISTRAL_BEGUN = re.compile(r"[\w.-]{0,256}\s*(?:\[[A-Z_]{0,8})?")
_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def json_calls(reader: Reader, calls: Calls) -> Reading[None]:
    """One call, or an array of them."""
    yield from reader.skip()
    if not (yield from reader.accept("[")):
        yield from _json_call(reader, calls)
        return
    yield from reader.skip()
    if (yield from reader.accept("]")):
        return
    while True:
        yield from _json_call(reader, calls)
        yield from reader.skip()
        if (yield from reader.expect(",", "]")) == "]":
            return
        yield from reader.skip()


def _json_call(reader: Reader, calls: Calls) -> Reading[None]:
    """Its arguments stream where its name comes before them."""
    yield from reader.expect("{")
    name = ""
    pending: str | None = None  # arguments that came before the name
    done = unknown = False
    while (yield from _next_key(reader)):
        key = json.loads((yield from reader.json_text()))
        yield from reader.skip()
        yield from reader.expect(":")
        yield from reader.skip()
        if key in _ARGUMENTS and name and not done and (yield from reader.peek()) == "{":
            yield from _arguments(reader, calls, name)
            done = True
            continue
        value = _loaded((yield from reader.json_text()))
        if key in _NAMES and isinstance(value, dict):
            arguments = next((value[each] for each in _ARGUMENTS if each in value), None)
            pending, value = _as_object(arguments), value.get("name")
        if key in _NAMES and isinstance(value, str):
            name = name or value
        elif key in _ARGUMENTS and not done:
            pending = _as_object(value)
        elif key not in _OTHERS:
            unknown = True
    if not done:
        if pending is None and unknown:
            raise Malformed
        calls.begin(name)
        calls.arguments(pending or "{}")
        calls.end()


def _next_key(reader: Reader) -> Reading[bool]:
    yield from reader.skip(" \t\r\n,")
    if (yield from reader.peek()) == '"':
        return True
    yield from reader.expect("}")
    return False


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def _as_object(value: Any) -> str:
    """The arguments as JSON; some write them as a string that holds it. Raises Malformed."""
    if isinstance(value, str):
        value = _loaded(value) if value.strip() else {}
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise Malformed
    return json.dumps(value, ensure_ascii=False)


def _arguments(reader: Reader, calls: Calls, name: str) -> Reading[None]:
    """A JSON object, as it comes."""
    yield from reader.skip()
    if (yield from reader.peek()) != "{":
        yield from reader.expect("{")
    calls.begin(name)
    yield from reader.json(calls.arguments)
    calls.end()


def keyed_json(reader: Reader, calls: Calls) -> Reading[None]:
    """An array of objects whose one key is the name."""
    yield from reader.skip()
    yield from reader.expect("[")
    while True:
        yield from reader.skip()
        yield from reader.expect("{")
        yield from reader.skip()
        if (yield from reader.peek()) != '"':
            raise Malformed
        name = _loaded((yield from reader.json_text()))
        yield from reader.skip()
        yield from reader.expect(":")
        yield from _arguments(reader, calls, name)
        yield from reader.skip()
        yield from reader.expect("}")
        yield from reader.skip()
        if (yield from reader.expect(",", "]")) == "]":
            return


def named_json(reader: Reader, calls: Calls) -> Reading[None]:
    """The name in the tag that opens, behind it the arguments."""
    name, _ = yield from reader.until(">")
    yield from _arguments(reader, calls, name)


def mistral(reader: Reader, calls: Calls) -> Reading[None]:
    """`[{"name": ..., "arguments": ...}, ...]`, or `NAME[CALL_ID]ID[ARGS]{...}` of newer models,
    several in a row."""
    yield from reader.skip()
    if (yield from reader.peek()) in ("[", "{"):
        yield from json_calls(reader, calls)
        return
    while True:
        name, end = yield from reader.until("[ARGS]", "[CALL_ID]")
        if end == "[CALL_ID]":
            yield from reader.until("[ARGS]")
        yield from _arguments(reader, calls, name)
        yield from reader.skip()
        while _MISTRAL_BEGUN.fullmatch(reader.rest) and not reader.closed:
            yield
        if not _MISTRAL_NEXT.match(reader.rest):
            if reader.closed and reader.rest and _MISTRAL_BEGUN.fullmatch(reader.rest):
                raise CutOff
            return


def deepseek(reader: Reader, calls: Calls) -> Reading[None]:
    """V3.1: the name, a separator and the arguments; before that (V3, R1): what kind of tool, a
    separator, the name, and the arguments in a fence."""
    yield from reader.expect("<｜tool▁call▁begin｜>")
    name, _ = yield from reader.until("<｜tool▁sep｜>")
    yield from reader.skip()
    fenced = (yield from reader.peek()) != "{"
    if fenced:
        if name.strip() != "function":
            raise Malformed
        name, _ = yield from reader.until("\n")
        yield from reader.skip()
        yield from reader.expect("```json", "```")
    yield from _arguments(reader, calls, name)
    yield from reader.skip(SPACE + "`" if fenced else SPACE)
    if not reader.ended_within("<｜tool▁call▁end｜>"):
        yield from reader.expect("<｜tool▁call▁end｜>")


def kimi_k2(reader: Reader, calls: Calls) -> Reading[None]:
    """`functions.NAME:INDEX` instead of the name."""
    yield from reader.expect("<|tool_call_begin|>")
    call_id, _ = yield from reader.until("<|tool_call_argument_begin|>")
    name = _KIMI_ID.fullmatch(call_id)
    yield from _arguments(reader, calls, name[1] if name else "")
    yield from reader.skip()
    if not reader.ended_within("<|tool_call_end|>"):
        yield from reader.expect("<|tool_call_end|>")


def harmony(reader: Reader, calls: Calls) -> Reading[None]:
    """A message whose header names a function as its recipient; see `channels`."""
    header, _ = yield from reader.until("<|message|>")
    name = _RECIPIENT.search(header) if "{" not in header else None
    yield from _arguments(reader, calls, name[1] if name else "")
