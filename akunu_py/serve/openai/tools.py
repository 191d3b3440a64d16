"""Tools as Chat Completions has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from akunu_py.serve.bodies import Body
from akunu_py.serve.errors import RequestError
from akunu_py.types import Tool, ToolChoice


class FunctionTool(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Body):
    """A tool; those of type "custom", with texts for arguments, are not supported."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ChoiceBody = Literal["none", "auto", "required"] | NamedTool


def tools_of(bodies: Sequence[ToolBody]) -> list[Tool]:
    """Raises RequestError where two have the same name."""
    tools: dict[str, Tool] = {}
    for number, body in enumerate(bodies):
        given = body.function
        if given.name in tools:
            place = f"tools.{number}.function.name"
            raise RequestError(f"{place}: there are two of {given.name[:100]!r}", param=place)
        tools[given.name] = Tool(
            given.name, given.description or "", given.parameters or {}, bool(given.strict)
        )
    return list(tools.values())


def choice_of(body: ChoiceBody | None, tools: Sequence[Tool]) -> ToolChoice:
    """Raises RequestError where it chooses from what is not there."""
    if body is None or isinstance(body, str):
        if body == "required" and not tools:
            raise RequestError("tool_choice: there are no tools", param="tool_choice")
        return ToolChoice(body or "auto")
    name = body.function.name
    if name not in (tool.name for tool in tools):
        raise RequestError(
            f"tool_choice: there is no tool called {name[:100]!r}", param="tool_choice"
        )
    return ToolChoice("named", name)
