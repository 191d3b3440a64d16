"""Tools of Responses as functions for the model, and calls converted back.

Chat templates support only functions. A custom tool, which takes text, becomes a function with one
string; a tool in a namespace gets a name with both parts.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import from_json

from akunu_py.decoding.events import (
    Event,
    Finished,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.scheduling.job import Job
from akunu_py.serve.dialect.bodies import check_tool, refuse_extra
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.serve.responses.bodies import Grammar, ResponsesTool, ResponsesToolChoice
from akunu_py.types import Constraint, Tool, ToolChoice

_INPUT = "input"  # the one argument of a custom tool
_SEPARATOR = "__"
# Clients also work without these.
_DISPENSABLE = ("web_search", "web_search_preview")


@dataclass(frozen=True, slots=True)
class MappedTool:
    """A tool as the client and the model know it."""

    name: str  # the client's
    namespace: str
    tool: Tool  # the model's
    custom: bool = False  # takes text
    grammar: Constraint | None = None  # of the text


@dataclass(frozen=True, slots=True)
class ToolMap:
    """The tools by the model's names, and the choice among them."""

    by_name: dict[str, MappedTool] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def tools(self) -> list[Tool]:
        return [offered.tool for offered in self.by_name.values()]

    @property
    def grammar_tool(self) -> MappedTool | None:
        """The chosen custom tool with a grammar, if any: the whole answer is its input."""
        offered = self.by_name.get(self.choice.name)
        return offered if offered is not None and offered.grammar is not None else None

    def find(self, name: str) -> MappedTool:
        """Return a tool; an unknown one becomes a function, which the client may refuse."""
        return self.by_name.get(name) or MappedTool(name, "", Tool(name))


def function_name(name: str, namespace: str | None) -> str:
    """Return the model's name of a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def input_as_arguments(text: str) -> str:
    """Return the input of a custom tool as the model writes it."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def input_from_arguments(arguments: str) -> str:
    """Return the input of a custom tool so far, or arguments without one unchanged."""
    try:
        values = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = values.get(_INPUT, "") if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def map_tools(
    bodies: Sequence[ResponsesTool],
    choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None,
) -> ToolMap:
    """Return the tools and the choice. Raises RequestError for tools that servers run."""
    found: dict[str, MappedTool] = {}
    for number, body in enumerate(bodies):
        for offered in _offered(body, "", f"tools.{number}"):
            if offered.tool.name in found:
                raise RequestError(f"tools: duplicate tool {offered.tool.name[:100]!r}")
            found[offered.tool.name] = offered
    return _chosen(ToolMap(found), choice or "auto")


def _offered(body: ResponsesTool, namespace: str, place: str) -> list[MappedTool]:
    if body.type in _DISPENSABLE:
        return []
    if body.type not in ("function", "custom", "namespace") or (
        body.type == "namespace" and namespace
    ):
        message = f"{place}: unsupported tool type {body.type[:100]}; use function or custom"
        raise RequestError(message, param=f"{place}.type")
    refuse_extra(body, place)
    if not body.name:
        raise invalid(f"{place}.name", "field required")
    if body.type == "namespace":
        return [
            offered
            for number, tool in enumerate(body.tools or [])
            for offered in _offered(tool, body.name, f"{place}.tools.{number}")
        ]
    known = function_name(body.name, namespace)
    if body.type == "custom":
        return [_custom(body, known, namespace)]
    tool = Tool(known, body.description or "", body.parameters or {}, bool(body.strict))
    return [MappedTool(body.name, namespace, tool)]


def _custom(body: ResponsesTool, known: str, namespace: str) -> MappedTool:
    """Convert a custom tool, and describe its grammar to the model.

    A regular expression constrains sampling; a Lark grammar is checked after the call.
    """
    assert body.name is not None
    description, grammar, strict = body.description or "", None, False
    schema: dict[str, Any] = {"type": "string", "description": "All of the input, a plain text."}
    if isinstance(body.format, Grammar):
        kind = "Lark grammar" if body.format.syntax == "lark" else "regular expression"
        description = (
            f"{description}\n\nThe input must match this {kind}:\n{body.format.definition}".strip()
        )
        strict = body.format.syntax == "regex"
        grammar = Constraint("regex" if strict else "grammar", body.format.definition)
        schema |= {"pattern": f"^(?:{body.format.definition})$"} if strict else {}
    parameters = {"type": "object", "properties": {_INPUT: schema}, "required": [_INPUT]}
    tool = Tool(known, description, parameters, strict)
    return MappedTool(body.name, namespace, tool, True, grammar)


def _chosen(
    offered: ToolMap, choice: Literal["none", "auto", "required"] | ResponsesToolChoice
) -> ToolMap:
    if isinstance(choice, str):
        if choice == "required" and not offered.by_name:
            raise invalid("tool_choice", "requires tools")
        return replace(offered, choice=ToolChoice(choice))
    if choice.type == "allowed_tools":
        names = [
            function_name(str(tool.get("name", "")), tool.get("namespace"))
            for tool in choice.tools or []
        ]
        for name in names:
            check_tool(name, offered.by_name, "tool_choice.name")
        allowed = {name: offered.by_name[name] for name in names}
        return ToolMap(allowed, ToolChoice(choice.mode or "auto"))
    if choice.type not in ("function", "custom"):
        message = f"tool_choice: {choice.type[:100]} is not supported"
        raise RequestError(message, param="tool_choice.type")
    name = function_name(choice.name or "", choice.namespace)
    check_tool(name, offered.by_name, "tool_choice.name")
    return replace(offered, choice=ToolChoice("named", name))


def grammar_tool_job(job: Job, tool: MappedTool) -> Job:
    """Return a job that calls `tool` with the answer of `job` as input."""

    def events(session: Session) -> Iterator[Event | None]:
        parts = []
        for event in job(session):
            if isinstance(event, TextDelta):
                parts.append(event.text)
                yield None
                continue
            if isinstance(event, Finished):
                yield ToolCallStarted(f"call_{secrets.token_hex(12)}", tool.tool.name)
                yield ToolCallArguments(input_as_arguments("".join(parts)))
                if event.reason == "stop":
                    yield ToolCallFinished()
            yield event

    return events


MatchesGrammar = Callable[[Constraint, str], bool]  # True if a text matches a grammar
