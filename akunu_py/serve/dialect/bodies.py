"""Bodies of requests: JSON within bounds, then a pydantic model of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from akunu_py.decoding.chat_format.effort import Effort, thinking_variables
from akunu_py.files import parse_json
from akunu_py.serve.dialect.errors import RequestError
from akunu_py.serve.dialect.service import Service
from akunu_py.text import on_one_line
from akunu_py.types import Message

MAX_BYTES = 32 << 20  # of a body: more than any context holds, with room for what is not text
MAX_DEPTH = 64  # of JSON in JSON
_KINDS = ("str", "int", "float", "bool", "none")  # of values, as locations name them
_EXACT = 2.0**53  # floats below it are the integers that they look like
_LONGEST = 300  # characters of a message that repeats what was sent

BodyType = TypeVar("BodyType", bound="Body")


class Body(BaseModel):
    """A body, or a part of one. What it does not name is refused: parameters that would change
    nothing are declared, as `Ignored`; a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


# A parameter that tells a provider about its customer, and nothing about the answer.
Ignored = Any


def parse(data: bytes, kind: type[BodyType]) -> BodyType:
    """Raises RequestError, which names the parameter at fault."""
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
    """Raises RequestError where it is nested too deeply, or has text that is none. Makes integers
    of numbers that are: to JSON 2.0 is one, and languages without them write it so."""
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
                    raise RequestError("the body has half a surrogate pair in a string") from None
        level = inner
        if not level:
            return
    raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _refusal(value: Any, errors: list[ErrorDetails]) -> RequestError:
    """Of the first thing that is wrong; a parameter that is not known comes first, and of the kinds
    in a union that which came furthest."""
    unknown = [error for error in errors if error["type"] == "extra_forbidden"]
    error = max(unknown or errors, key=lambda error: len(error["loc"]))
    name = ".".join(_place(value, error["loc"]))
    if unknown:
        message = f"unsupported parameter: {name}"
    else:
        message = f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return RequestError(on_one_line(message)[:_LONGEST], param=name[:_LONGEST])


def _place(value: Any, location: Sequence[str | int]) -> list[str]:
    """The names and numbers of a location. Between them it has the names of the kinds in unions,
    and at its end what may be missing."""
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


BETWEEN = "\n\n"  # two parts of a text that a template knows one of


def joined(messages: Iterable[Message]) -> list[Message]:
    """The conversation with neighbours of a role made one turn, as templates expect it. Results of
    tools stay apart, and so do texts of an assistant behind its calls."""
    turns: list[Message] = []
    for message in messages:
        last = turns[-1] if turns else None
        apart = last is None or last.role != message.role or message.role == "tool"
        if last is None or apart or (last.tool_calls and message.content):
            turns.append(message)
            continue
        turns[-1] = replace(
            last,
            content=BETWEEN.join(text for text in (last.content, message.content) if text),
            thinking=BETWEEN.join(text for text in (last.thinking, message.thinking) if text),
            tool_calls=last.tool_calls + message.tool_calls,
        )
    return turns


def effort_variables(service: Service, effort: Effort | None, param: str) -> dict[str, Any]:
    """The chat template's variables for how much to think. Raises RequestError where the model
    cannot be told that."""
    variables = thinking_variables(service.engine.tokenizer).of(effort)
    if variables is None:
        raise RequestError(
            f"{param}: {service.name} cannot be told {effort!r}; leave it out", param=param
        )
    return variables
