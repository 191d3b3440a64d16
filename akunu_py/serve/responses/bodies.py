"""Bodies of Responses; input items may have all fields of output items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from akunu_py.serve.dialect.bodies import (
    AsJsonText,
    Body,
    ByType,
    Ignored,
    JsonText,
    KnownOnly,
    ListEntry,
    OtherPart,
    RefusalPart,
)
from akunu_py.serve.dialect.fields import ConversationFields, GenerationFields, TokenLimit
from akunu_py.serve.dialect.tool_choice import ToolChoiceField


class Item(Body):
    """An item of an input or an output."""

    id: Ignored = None
    status: Ignored = None
    internal_chat_message_metadata_passthrough: Ignored = None


class ItemText(Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None


Part = Annotated[ItemText | RefusalPart | OtherPart, ByType()]


class MessageItem(Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    phase: Ignored = None


class CallItem(Item):
    call_id: str
    name: str
    namespace: str | None = None
    caller: Ignored = None


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: JsonText = ""
    parsed_arguments: Ignored = None


class CustomToolCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class OutputItem(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | list[Part], AsJsonText] = ""
    name: Ignored = None
    namespace: Ignored = None
    caller: Ignored = None
    created_by: Ignored = None


class ReasoningItem(Item):
    type: Literal["reasoning"]
    summary: list[ItemText] = Field(default=[])
    content: list[ItemText] | None = None
    encrypted_content: str | None = None


class StoredItem(Body):
    """A reference to an item on the server."""

    type: Literal["item_reference"]
    id: Ignored = None


class OtherItem(ListEntry):
    """An item of a tool that servers run; dropped."""

    known_types = "(?!)"

    type: str


def _with_type(value: Any) -> Any:
    """Add the type to messages without one."""
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return {"type": "message", **value}
    return value


InputItem = Annotated[
    MessageItem
    | FunctionCallItem
    | CustomToolCallItem
    | OutputItem
    | ReasoningItem
    | StoredItem
    | OtherItem,
    ByType(),
    BeforeValidator(_with_type),
]


class InputFormat(ListEntry):
    """The form of a custom tool's input: any text, or a grammar."""

    known_types = "text|grammar"

    type: str
    syntax: Annotated[Literal["lark", "regex"] | None, KnownOnly()] = None
    definition: str = ""


class ResponsesTool(ListEntry):
    """A function, custom tool, or namespace of both. Tools that servers run are dropped."""

    known_types = "function|custom|namespace"

    type: Literal["function", "custom", "namespace"]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: list[ResponsesTool] | None = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    output_schema: Ignored = None


class FormatBody(ListEntry):
    known_types = "text|json_object|json_schema"

    type: str
    name: Ignored = None
    description: Ignored = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextBody(Body):
    format: FormatBody | None = None
    verbosity: Ignored = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Ignored = None


class ResponsesBody(GenerationFields, ConversationFields):
    """The body of /v1/responses."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: TokenLimit | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    text: TextBody | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_logprobs: int | None = None
    stream: bool | None = None
    include: list[str] | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, KnownOnly()] = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: Ignored = None  # for tools that servers run
    client_metadata: Ignored = None
    prompt_cache_options: Ignored = None
