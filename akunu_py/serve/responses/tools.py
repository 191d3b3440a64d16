"""The tools of a request, as the model is offered them, and its calls of them on the way back.

Chat templates know functions with JSON arguments. A custom tool, which takes a text, is offered as
a function of one string; a tool of a namespace by a name that has both.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import from_json

from akunu_py.decoding.generate.events import (
    CallArguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Text,
)
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.scheduling.job import Job
from akunu_py.serve.errors import RequestError
from akunu_py.serve.responses.bodies import Grammar, ToolBody, ToolChoiceBody
from akunu_py.types import Constraint, Tool, ToolChoice

_INPUT = "input"  # the one argument of a custom tool
_SEPARATOR = "__"
# A model that is not offered these searches nothing; a client that runs without them is the same.
_DISPENSABLE = ("web_search", "web_search_preview")


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """name, namespace: the client's. tool: the model's. custom: whether it takes a text, which
    matches `grammar`."""

    name: str
    namespace: str
    tool: Tool
    custom: bool = False
    grammar: Constraint | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools by the names that the model knows them by, and the choice of one of those."""

    by_name: dict[str, OfferedTool] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def tools(self) -> list[Tool]:
        return [offered.tool for offered in self.by_name.values()]

    @property
    def dictated(self) -> OfferedTool | None:
        """The custom tool that must be called and whose input has a grammar: the answer is that
        input, and nothing else."""
        offered = self.by_name.get(self.choice.name)
        return offered if offered is not None and offered.grammar is not None else None

    def find(self, name: str) -> OfferedTool:
        """A tool that was not offered is a function that the client knows, or refuses."""
        return self.by_name.get(name) or OfferedTool(name, "", Tool(name))


def known_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def as_arguments(text: str) -> str:
    """The input of a custom tool as the model writes it."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool, as far as it is there; arguments that have none as they are."""
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = values.get(_INPUT, "") if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def offered_tools(
    bodies: Sequence[ToolBody], choice: Literal["none", "auto", "required"] | ToolChoiceBody | None
) -> OfferedTools:
    """Raises RequestError for tools that a server is to run, and for a choice of none of them."""
    found: dict[str, OfferedTool] = {}
    for number, body in enumerate(bodies):
        for offered in _offered(body, "", f"tools.{number}"):
            if offered.tool.name in found:
                raise RequestError(f"tools: there are two of {offered.tool.name[:100]!r}")
            found[offered.tool.name] = offered
    return _chosen(OfferedTools(found), choice or "auto")


def _offered(body: ToolBody, namespace: str, place: str) -> list[OfferedTool]:
    if body.type in _DISPENSABLE:
        return []
    if body.type not in ("function", "custom", "namespace") or (
        body.type == "namespace" and namespace
    ):
        raise RequestError(
            f"{place}: tools of the type {body.type[:100]} are not supported, only function, "
            "custom and namespace are",
            param=f"{place}.type",
        )
    if body.model_extra:
        name = f"{place}.{next(iter(body.model_extra))}"
        raise RequestError(f"unsupported parameter: {name}", param=name)
    if not body.name:
        raise RequestError(f"{place}.name: field required", param=f"{place}.name")
    if body.type == "namespace":
        inner = enumerate(body.tools or [])
        return [
            offered
            for number, tool in inner
            for offered in _offered(tool, body.name, f"{place}.tools.{number}")
        ]
    known = known_name(body.name, namespace)
    if body.type == "custom":
        return [_custom(body, known, namespace)]
    tool = Tool(known, body.description or "", body.parameters or {}, bool(body.strict))
    return [OfferedTool(body.name, namespace, tool)]


def _custom(body: ToolBody, known: str, namespace: str) -> OfferedTool:
    """The model is told the grammar. To a regular expression it is held as it writes; whether it
    kept to another is seen when the call is whole."""
    assert body.name is not None
    told, grammar, strict = body.description or "", None, False
    schema: dict[str, Any] = {"type": "string", "description": "All of the input, a plain text."}
    if isinstance(body.format, Grammar):
        kind = "Lark grammar" if body.format.syntax == "lark" else "regular expression"
        told = f"{told}\n\nThe input must match this {kind}:\n{body.format.definition}".strip()
        strict = body.format.syntax == "regex"
        grammar = Constraint("regex" if strict else "grammar", body.format.definition)
        schema |= {"pattern": f"^(?:{body.format.definition})$"} if strict else {}
    parameters = {"type": "object", "properties": {_INPUT: schema}, "required": [_INPUT]}
    tool = Tool(known, told, parameters, strict)
    return OfferedTool(body.name, namespace, tool, True, grammar)


def _chosen(
    offered: OfferedTools, choice: Literal["none", "auto", "required"] | ToolChoiceBody
) -> OfferedTools:
    if isinstance(choice, str):
        if choice == "required" and not offered.by_name:
            raise RequestError("tool_choice: there are no tools", param="tool_choice")
        return replace(offered, choice=ToolChoice(choice))
    if choice.type == "allowed_tools":
        names = [
            known_name(str(tool.get("name", "")), tool.get("namespace"))
            for tool in choice.tools or []
        ]
        for name in names:
            _check(offered, name)
        allowed = {name: offered.by_name[name] for name in names}
        return OfferedTools(allowed, ToolChoice(choice.mode or "auto"))
    if choice.type not in ("function", "custom"):
        message = f"tool_choice: {choice.type[:100]} is not supported"
        raise RequestError(message, param="tool_choice.type")
    name = known_name(choice.name or "", choice.namespace)
    _check(offered, name)
    return replace(offered, choice=ToolChoice("named", name))


def _check(offered: OfferedTools, name: str) -> None:
    if name not in offered.by_name:
        message = f"tool_choice: there is no tool {name[:100]!r}"
        raise RequestError(message, param="tool_choice.name")


def dictated_job(job: Job, tool: OfferedTool) -> Job:
    """A call of `tool` whose input is the answer that `job` makes; none where that is cut off."""

    def events(session: Session) -> Iterator[Event | None]:
        parts = []
        for event in job(session):
            if isinstance(event, Text):
                parts.append(event.text)
                yield None
                continue
            if isinstance(event, Ended):
                yield CallBegun(f"call_{secrets.token_hex(12)}", tool.tool.name)
                yield CallArguments(as_arguments("".join(parts)))
                if event.reason == "stop":
                    yield CallEnded()
            yield event

    return events


Matches = Callable[[Constraint, str], bool]  # whether a text is one of a grammar
