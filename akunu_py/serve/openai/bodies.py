"""Tools as Chat Completions has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from akunu_py.serve.dialect.bodies import Body, Ignored
from akunu_py.serve.dialect.errors import RequestError
from akunu_py.types import Message, Tool, ToolCall, ToolChoice


class FunctionTool(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Body):
    """A tool; those of type "custom", with texts for arguments, are not supported."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ChoiceBody = Literal["none", "auto", "required"] | NamedTool


def tools_of(bodies: Sequence[ChatTool]) -> list[Tool]:
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


class ChatText(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # of Anthropic's, which gateways pass on


class ChatRefusal(Body):
    type: Literal["refusal"]
    refusal: str


class FunctionBody(Body):
    name: str
    arguments: str
    parsed_arguments: Ignored = None  # the official client's, of strict tools


class CallBody(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionBody
    index: Ignored = None  # of the chunks that it was put together from


Part = Annotated[ChatText | ChatRefusal, Field(discriminator="type")]


class MessageBody(Body):
    """A message of any role. reasoning_content: as it came with an earlier answer."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Clients send back what they were given, with all that was empty in it.
    annotations: Ignored = None
    parsed: Ignored = None
    audio: None = None
    function_call: None = None


def messages_of(bodies: Sequence[MessageBody]) -> list[Message]:
    """Raises RequestError for what is no conversation."""
    called: dict[str, str] = {}
    return [_message(each, f"messages.{number}", called) for number, each in enumerate(bodies)]


def _message(body: MessageBody, place: str, called: dict[str, str]) -> Message:
    """called: the names of tools by the ids of their calls; grows with those of this message."""
    content = _text(body)
    if body.role == "tool":
        if not body.tool_call_id:
            raise RequestError(
                f"{place}.tool_call_id: expected the id of the call that it is the result of",
                param=f"{place}.tool_call_id",
            )
        name = body.name or called.get(body.tool_call_id, "")
        return Message("tool", content, tool_call_id=body.tool_call_id, name=name)
    if body.role != "assistant":
        if body.content is None:
            raise RequestError(f"{place}.content: expected a text", param=f"{place}.content")
        if body.tool_calls:
            raise RequestError(
                f"{place}.tool_calls: only an assistant calls tools", param=f"{place}.tool_calls"
            )
        return Message("user" if body.role == "user" else "system", content)
    calls = tuple(
        ToolCall(call.function.name, call.function.arguments, call.id)
        for call in body.tool_calls or ()
    )
    called |= {call.id: call.name for call in calls}
    thinking = body.reasoning_content or body.reasoning or ""
    return Message("assistant", content or body.refusal or "", thinking, calls)


def _text(body: MessageBody) -> str:
    if isinstance(body.content, str):
        return body.content
    return "".join(
        part.text if isinstance(part, ChatText) else part.refusal for part in body.content or ()
    )
