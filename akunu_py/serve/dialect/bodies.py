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

MAX_BYTES = 32 << 20  # of a body; more than any context needs
MAX_DEPTH = 64  # of nested JSON values
_UNION_MEMBERS = ("str", "int", "float", "bool", "none")  # in pydantic's locations
_MAX_EXACT = 2.0**53  # floats below it represent integers exactly
_MAX_MESSAGE = 300  # characters of an error message

BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """A request body, or part of one. Refuses unknown parameters."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


# The type of a parameter that is accepted without effect.
Ignored = Any


def parse(data: bytes, kind: type[BodyType]) -> BodyType:
    """Parse a body. Raises RequestError, which names the invalid parameter."""
    try:
        value = parse_json(data)
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    _normalize(value)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _validation_error(value, error.errors(include_url=False)) from error


def _normalize(value: Any) -> None:
    """Convert floats such as 2.0 to integers, because some languages write integers as floats.

    Raises RequestError for deep nesting and lone surrogates.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                for name, item in each.items():
                    if isinstance(item, float) and item.is_integer() and abs(item) < _MAX_EXACT:
                        each[name] = int(item)
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


def _validation_error(value: Any, errors: list[ErrorDetails]) -> RequestError:
    """Return the most specific error: an unknown parameter if any, else the deepest one."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = max(unknown or errors, key=lambda error: len(error["loc"]))
    name = ".".join(_param_parts(value, error["loc"]))
    if unknown:
        message = f"unsupported parameter: {name}"
    else:
        message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return RequestError(on_one_line(message)[:_MAX_MESSAGE], param=name[:_MAX_MESSAGE])


def _param_parts(value: Any, location: Sequence[str | int]) -> list[str]:
    """Return the parts of a pydantic location, without the names of union members."""
    parts: list[str] = []
    for number, part in enumerate(location):
        last = number == len(location) - 1
        if isinstance(value, dict) and (part in value or (last and part not in _UNION_MEMBERS)):
            parts.append(str(part))
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            parts.append(str(part))
            value = value[part]
    return parts


BLANK_LINE = "\n\n"  # between merged texts


def merge_messages(messages: Iterable[Message], param: str) -> list[Message]:
    """Merge consecutive messages of the same role, as chat templates expect.

    Tool results and text after tool calls stay separate. Raises RequestError if all messages are
    system messages. param: the name of the messages in the body.
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
            content=BLANK_LINE.join(text for text in (last.content, message.content) if text),
            thinking=BLANK_LINE.join(text for text in (last.thinking, message.thinking) if text),
            tool_calls=last.tool_calls + message.tool_calls,
        )
    if not any(turn.role != "system" for turn in turns):
        raise invalid(param, "expected a message to answer")
    return turns


def refuse_extra(body: Body, param: str) -> None:
    """Raise RequestError for an unknown parameter of a body that pydantic accepts with extras."""
    if body.model_extra:
        name = f"{param}.{next(iter(body.model_extra))}"
        raise RequestError(f"unsupported parameter: {name}", param=name)


def check_tool(name: str, names: Collection[str], param: str = "tool_choice") -> None:
    """Raise RequestError if a chosen tool is not offered."""
    if name not in names:
        raise RequestError(f"tool_choice: unknown tool {name[:100]!r}", param=param)
