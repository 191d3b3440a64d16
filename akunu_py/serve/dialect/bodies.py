"""Request bodies: bounded JSON, pydantic models, conversations."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from akunu_py.files import parse_json
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.text import on_one_line
from akunu_py.types import Message

MAX_BYTES = 32 << 20  # of a body, more than any context
MAX_DEPTH = 64  # of JSON in JSON
_KINDS = ("str", "int", "float", "bool", "none")  # in pydantic's locations
_EXACT = 2.0**53  # floats below it represent integers exactly
_LONGEST = 300  # characters of an error message

BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """A body or a part of one, without unknown parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


# A parameter that does not change the answer.
Ignored = Any


def parse(data: bytes, kind: type[BodyType]) -> BodyType:
    """Parse a body. Raises RequestError, which names the invalid parameter."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _check(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _refusal(value, error.errors(include_url=False)) from error


def _check(value: Any) -> None:
    """Refuse deep nesting and lone surrogates, and convert floats such as 2.0 to integers.

    Some languages write integers as floats. Raises RequestError.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for name, number in each.items():
                    if isinstance(number, float) and number.is_integer() and abs(number) < _EXACT:
                        each[name] = int(number)
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif isinstance(each, str):
                try:
                    each.encode()
                except UnicodeEncodeError:
                    raise RequestError("the body has a lone surrogate in a string") from None
        level = inner
        if not level:
            return
    raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _refusal(value: Any, errors: list[ErrorDetails]) -> RequestError:
    """Return one of the errors: an unknown parameter if there is any, else the deepest."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = max(unknown or errors, key=lambda error: len(error["loc"]))
    name = ".".join(_place(value, error["loc"]))
    if unknown:
        message = f"unsupported parameter: {name}"
    else:
        message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return RequestError(on_one_line(message)[:_LONGEST], param=name[:_LONGEST])


def _place(value: Any, location: Sequence[str | int]) -> list[str]:
    """Return the names and numbers of a location, without the names of union members."""
    found: list[str] = []
    for number, part in enumerate(location):
        last = number == len(location) - 1
        if isinstance(value, dict) and (part in value or (last and part not in _KINDS)):
            found.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            found.append(str(part))
            value = value[part]
    return found


PARAGRAPH_BREAK = "\n\n"  # separates parts of a text


def merge_messages(messages: Iterable[Message], param: str) -> list[Message]:
    """Merge neighboring messages of a role, as templates expect.

    Tool results and text after tool calls stay separate. Raises RequestError if all messages are
    system messages. param: of the messages.
    """
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        if (
            last is None
            or last.role != message.role
            or message.role == "tool"
            or (last.tool_calls and message.content)
        ):
            turns.append(message)
            continue
        turns[-1] = replace(
            last,
            content=PARAGRAPH_BREAK.join(text for text in (last.content, message.content) if text),
            thinking=PARAGRAPH_BREAK.join(
                text for text in (last.thinking, message.thinking) if text
            ),
            tool_calls=last.tool_calls + message.tool_calls,
        )
    if not any(turn.role != "system" for turn in turns):
        raise invalid(param, "expected a message to answer")
    return turns


def refuse_extra(body: Body, place: str) -> None:
    """Raise RequestError if a body that allows extra parameters has one."""
    if body.model_extra:
        name = f"{place}.{next(iter(body.model_extra))}"
        raise RequestError(f"unsupported parameter: {name}", param=name)


def check_tool(name: str, names: Collection[str], param: str = "tool_choice") -> None:
    """Raise RequestError if a chosen tool is not offered."""
    if name not in names:
        raise RequestError(f"tool_choice: unknown tool {name[:100]!r}", param=param)
