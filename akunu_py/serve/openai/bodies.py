"""Bodies of Chat Completions: messages, tools and formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from akunu_py.serve.dialect.bodies import (
    Body,
    ByType,
    Ignored,
    JsonText,
    ListEntry,
    OtherPart,
    RefusalPart,
    choose_tool,
)
from akunu_py.serve.dialect.fields import ConversationFields, TokenLimit
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.sampling_body import SamplingBody
from akunu_py.types import Message, Tool, ToolCall, ToolChoice


class ChatText(Body):
    type: Literal["text"]
    text: str
    cache_control: Ignored = None  # from gateways for Anthropic


class FunctionBody(Body):
    name: str
    arguments: JsonText = ""
    parsed_arguments: Ignored = None  # from the official client, for strict tools


class CallBody(Body):
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionBody
    index: Ignored = None  # of merged chunks


Part = Annotated[ChatText | RefusalPart | OtherPart, ByType()]


class MessageBody(Body):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None  # from an earlier answer
    reasoning: str | None = None
    refusal: str | None = None
    # Clients send earlier answers back with all their empty fields.
    annotations: Ignored = None
    parsed: Ignored = None
    audio: Ignored = None
    function_call: FunctionBody | None = None  # OpenAI's older form of `tool_calls`

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        # A part that is no text gets a line of its own.
        return "".join(
            f"{part.text}\n" if isinstance(part, OtherPart) else part.text
            for part in self.content or ()
        )


class FunctionTool(Body):
    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(ListEntry):
    """A function. Tools of other types are dropped."""

    known_types = "function"

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ChoiceBody = Literal["none", "auto", "required"] | NamedTool


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    model_config = ConfigDict(serialize_by_alias=True)

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")]


class PredictionBody(Body):
    """Text to draft from: the answer may repeat it with changes."""

    type: Literal["content"]
    content: str | list[ChatText]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(SamplingBody, ConversationFields):
    """The body of /v1/chat/completions."""

    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: TokenLimit | None = None
    response_format: Format | None = None
    tools: list[ChatTool] | None = None
    tool_choice: ChoiceBody | None = None
    # OpenAI's older form of `tools` and `tool_choice`, with at most one call in an answer.
    functions: list[FunctionTool] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    parallel_tool_calls: bool | None = None
    prediction: PredictionBody | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    verbosity: Ignored = None  # no template supports it
    modalities: list[Literal["text"]] | None = None

    @property
    def has_functions(self) -> bool:
        """Whether the reply has OpenAI's older form of a call."""
        return bool(self.functions) and not self.tools

    @property
    def functions_offered(self) -> list[FunctionTool]:
        """The functions of both forms."""
        return [*(tool.function for tool in self.tools or ()), *(self.functions or ())]

    @property
    def choice(self) -> ChoiceBody | None:
        """The tool choice of either form."""
        if self.tool_choice is not None or self.function_call is None:
            return self.tool_choice
        if isinstance(self.function_call, FunctionName):
            return NamedTool(type="function", function=self.function_call)
        return self.function_call


def messages_of(bodies: Sequence[MessageBody]) -> list[Message]:
    """Return the conversation. Raises RequestError for invalid messages."""
    tool_names: dict[str, str] = {}  # names of tools by the ids of their calls
    return [_message(each, f"messages.{number}", tool_names) for number, each in enumerate(bodies)]


def _message(body: MessageBody, param: str, tool_names: dict[str, str]) -> Message:
    """Convert a message. param: its place in the body. tool_names: by id of the tool call."""
    if body.role == "function":
        if not body.name:
            raise invalid(f"{param}.name", "expected the name of the function")
        ids = [call for call, name in tool_names.items() if name == body.name]
        return Message("tool", body.text, tool_call_id=ids[-1] if ids else param, name=body.name)
    if body.role == "tool":
        if not body.tool_call_id:
            raise invalid(f"{param}.tool_call_id", "expected the id of the tool call")
        name = body.name or tool_names.get(body.tool_call_id, "")
        return Message("tool", body.text, tool_call_id=body.tool_call_id, name=name)
    if body.role != "assistant":
        if body.content is None:
            raise invalid(f"{param}.content", "expected text")
        if body.tool_calls:
            raise invalid(f"{param}.tool_calls", "only allowed in assistant messages")
        return Message("user" if body.role == "user" else "system", body.text)
    calls = tuple(
        ToolCall(call.function.name, call.function.arguments, call.id or "")
        for call in body.tool_calls or ()
    )
    if body.function_call is not None:
        called = body.function_call
        calls += (ToolCall(called.name, called.arguments, f"{param}.function_call"),)
    tool_names |= {call.id: call.name for call in calls}
    thinking = body.reasoning_content or body.reasoning or ""
    return Message("assistant", body.text or body.refusal or "", thinking, calls)


def tools_of(bodies: Sequence[FunctionTool]) -> list[Tool]:
    """Return the tools. Raises RequestError if two have the same name."""
    tools: dict[str, Tool] = {}
    for number, tool in enumerate(bodies):
        if tool.name in tools:
            param = f"tools.{number}.function.name"
            raise invalid(param, f"duplicate tool {tool.name[:100]!r}")
        tools[tool.name] = Tool(
            tool.name, tool.description or "", tool.parameters or {}, bool(tool.strict)
        )
    return list(tools.values())


def tool_choice_of(body: ChoiceBody | None, tools: Sequence[Tool]) -> ToolChoice:
    """Convert a tool choice. Raises RequestError for a tool that is not among `tools`."""
    names = [tool.name for tool in tools]
    if isinstance(body, NamedTool):
        return choose_tool("named", body.function.name, names)
    return choose_tool(body or "auto", "", names)
