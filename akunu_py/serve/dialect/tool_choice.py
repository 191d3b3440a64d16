"""`tool_choice` in the forms of all dialects, each of which accepts the forms of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from akunu_py.serve.dialect.bodies import Body, KnownOnly, ListEntry
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.types import ToolChoice

_SEPARATOR = "__"
Value = TypeVar("Value")


class FunctionName(Body):
    name: str


class AllowedTools(Body):
    mode: Annotated[Literal["auto", "required"] | None, KnownOnly(any="required")] = None
    tools: list[dict[str, Any]] | None = None


class ToolChoiceBody(AllowedTools, ListEntry):
    """A choice as an object: a mode, one tool, or a list of allowed tools."""

    known_types = "auto|none|any|required|tool|function|custom|allowed_tools"

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    function: FunctionName | None = None  # Chat Completions' form of `name`
    allowed_tools: AllowedTools | None = None  # Chat Completions' form of `mode` and `tools`
    disable_parallel_tool_use: bool | None = None


ToolChoiceField = Annotated[
    Literal["none", "auto", "required"] | ToolChoiceBody | None, KnownOnly(any="required")
]


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model calls a tool."""
    return f"{namespace}{_SEPARATOR}{name}" if namespace else name


def choose_tools(
    choice: str | ToolChoiceBody | None, offered: Mapping[str, Value], param: str = "tool_choice"
) -> tuple[dict[str, Value], ToolChoice]:
    """Return the allowed tools of the offered ones, and the choice among them.

    offered: by name. param: the parameter with the name of a tool. Raises RequestError if a chosen
    tool is not offered.
    """
    body = ToolChoiceBody(type=choice) if isinstance(choice, str) else choice
    if body is None or body.type == "auto":
        return dict(offered), ToolChoice()
    if body.type == "none":
        return dict(offered), ToolChoice("none")
    names = list(offered)
    mode: Literal["auto", "required", "named"] = "required"
    if body.type == "allowed_tools":
        allowed = body.allowed_tools or body
        names = [_name_of(each) for each in allowed.tools or ()]
        mode = allowed.mode or "auto"
    elif body.type not in ("any", "required"):
        name = body.function.name if body.function else body.name or ""
        names, mode = [function_name(name, body.namespace)], "named"
    for name in names:
        if name not in offered:
            raise RequestError(f"tool_choice: unknown tool {name[:100]!r}", param=param)
    if mode == "required" and not names:
        raise invalid("tool_choice", "requires tools")
    if mode == "named":
        return dict(offered), ToolChoice("named", names[0])
    return {name: offered[name] for name in names}, ToolChoice(mode)


def _name_of(tool: Mapping[str, Any]) -> str:
    """Return the function name of an allowed tool, in either form."""
    function = tool.get("function")
    inner = function if isinstance(function, dict) else tool
    return function_name(str(inner.get("name", "")), tool.get("namespace"))
