"""Converts tools of Responses to functions for the model, and calls back.

Chat templates support only functions. A custom tool, which takes a text, becomes a function with
one string argument. A tool in a namespace becomes a function named NAMESPACE__TOOL.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
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
from akunu_py.decoding.generate.job import RunningJob
from akunu_py.decoding.generate.session import Request, Step
from akunu_py.serve.dialect.bodies import choose_tool
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.serve.responses.bodies import Grammar, ResponsesTool, ResponsesToolChoice
from akunu_py.types import Constraint, Tool, ToolChoice

_INPUT = "input"  # the only argument of a custom tool
_SEPARATOR = "__"


@dataclass(frozen=True, slots=True)
class MappedTool:
    """A client's tool and the function that the model calls for it."""

    name: str  # for the client
    namespace: str  # for the client; "" for none
    tool: Tool  # for the model
    custom: bool = False  # takes a text instead of JSON arguments
    grammar: Constraint | None = None  # for the text


@dataclass(frozen=True, slots=True)
class ToolMap:
    """The tools by their function names, and the tool choice."""

    by_name: dict[str, MappedTool] = field(default_factory=dict)
    choice: ToolChoice = field(default_factory=ToolChoice)

    @property
    def tools(self) -> list[Tool]:
        return [mapped.tool for mapped in self.by_name.values()]

    @property
    def grammar_tool(self) -> MappedTool | None:
        """The chosen tool, if it has a grammar: the whole answer is then the tool's input."""
        mapped = self.by_name.get(self.choice.name)
        return mapped if mapped is not None and mapped.grammar is not None else None

    def find(self, name: str) -> MappedTool:
        """Return a tool by its function name; an unknown name becomes a plain function."""
        return self.by_name.get(name) or MappedTool(name, "", Tool(name))


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model calls a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def to_arguments(text: str) -> str:
    """Return the input of a custom tool as JSON arguments."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def to_input(arguments: str) -> str:
    """Return the input in partial JSON arguments, or the arguments if they have no input."""
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
    """Convert the tools and the choice. Raises RequestError."""
    by_name: dict[str, MappedTool] = {}
    for number, body in enumerate(bodies):
        for mapped in _map_tool(body, "", f"tools.{number}"):
            if mapped.tool.name in by_name:
                raise RequestError(f"tools: duplicate tool {mapped.tool.name[:100]!r}")
            by_name[mapped.tool.name] = mapped
    return _apply_choice(ToolMap(by_name), choice or "auto")


def _map_tool(body: ResponsesTool, namespace: str, param: str) -> list[MappedTool]:
    """Convert a tool, or all tools of a namespace."""
    if body.type == "namespace" and namespace:
        raise invalid(f"{param}.type", "a namespace cannot contain a namespace")
    if not body.name:
        raise invalid(f"{param}.name", "field required")
    if body.type == "namespace":
        return [
            mapped
            for number, tool in enumerate(body.tools or [])
            for mapped in _map_tool(tool, body.name, f"{param}.tools.{number}")
        ]
    name = function_name(body.name, namespace)
    if body.type == "custom":
        return [_map_custom_tool(body, name, namespace)]
    tool = Tool(name, body.description or "", body.parameters or {}, bool(body.strict))
    return [MappedTool(body.name, namespace, tool)]


def _map_custom_tool(body: ResponsesTool, name: str, namespace: str) -> MappedTool:
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
    tool = Tool(name, description, parameters, strict)
    return MappedTool(body.name, namespace, tool, True, grammar)


def _apply_choice(
    mapped: ToolMap, choice: Literal["none", "auto", "required"] | ResponsesToolChoice
) -> ToolMap:
    """Apply `tool_choice` to the tools. Raises RequestError for an unknown tool."""
    if isinstance(choice, str):
        return replace(mapped, choice=choose_tool(choice, "", mapped.by_name))
    if choice.type == "allowed_tools":
        names = [
            function_name(str(tool.get("name", "")), tool.get("namespace"))
            for tool in choice.tools or []
        ]
        for name in names:
            choose_tool("named", name, mapped.by_name, "tool_choice.name")
        allowed = {name: mapped.by_name[name] for name in names}
        return ToolMap(allowed, ToolChoice(choice.mode or "auto"))
    if choice.type not in ("function", "custom"):
        message = f"tool_choice: {choice.type[:100]} is not supported"
        raise RequestError(message, param="tool_choice.type")
    name = function_name(choice.name or "", choice.namespace)
    chosen = choose_tool("named", name, mapped.by_name, "tool_choice.name")
    return replace(mapped, choice=chosen)


class GrammarToolCall:
    """Turns the text of an answer into a call of `tool`, as a `RunningJob`."""

    def __init__(self, answering: RunningJob, tool: MappedTool) -> None:
        self._answering = answering
        self._tool = tool
        self._text = ""

    @property
    def request(self) -> Request | None:
        return self._answering.request

    def add(self, steps: Sequence[Step]) -> list[Event]:
        events: list[Event] = []
        for event in self._answering.add(steps):
            if isinstance(event, TextDelta):
                self._text += event.text
                continue
            if isinstance(event, Finished):
                events.append(
                    ToolCallStarted(f"call_{secrets.token_hex(12)}", self._tool.tool.name)
                )
                events.append(ToolCallArguments(to_arguments(self._text)))
                if event.reason == "stop":
                    events.append(ToolCallFinished())
            events.append(event)
        return events


MatchesGrammar = Callable[[Constraint, str], bool]  # True if a text matches a grammar
