"""Bodies of Messages. `cache_control` is accepted but ignored: prefixes are always cached."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from akunu_py.decoding.chat_format.effort import Effort
from akunu_py.serve.dialect.bodies import Body, Ignored


class CachedPart(Body):
    cache_control: Ignored = None


class TextBlock(CachedPart):
    type: Literal["text"]
    text: str
    citations: Ignored = None
    parsed_output: Ignored = None


class ThinkingBlock(CachedPart):
    type: Literal["thinking"]
    thinking: str
    signature: Ignored = None


class RedactedThinkingBlock(CachedPart):
    type: Literal["redacted_thinking"]
    data: Ignored = None


class ToolUseBlock(CachedPart):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Ignored = None
    toolset_name: Ignored = None


class ImageBlock(CachedPart):
    type: Literal["image"]
    source: Ignored = None
    transformations: Ignored = None


class DocumentBlock(CachedPart):
    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: Ignored = None


class ToolResultBlock(CachedPart):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    toolset_name: Ignored = None


ResultBlock = Annotated[TextBlock | ImageBlock | DocumentBlock, Field(discriminator="type")]
Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock,
    Field(discriminator="type"),
]


class MessagesTurn(CachedPart):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(CachedPart):
    """A tool; types other than "custom" have more parameters."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(min_length=1, max_length=128)
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    eager_input_streaming: Ignored = None
    input_examples: Ignored = None


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Ignored = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: Effort | None = None
    format: OutputFormat | None = None


class ContextEdit(Body):
    """Only for thinking, which the chat template drops or keeps."""

    type: Literal["clear_thinking_20251015"]
    keep: Ignored = None


class ContextManagement(Body):
    edits: list[ContextEdit] = Field(default=[])


class PromptBody(CachedPart):
    """Parameters of the prompt."""

    model: str
    messages: list[MessagesTurn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


class MessagesBody(PromptBody):
    """The body of /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, ge=0, le=1)
    seed: int | None = None  # an extension
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None


class CountBody(PromptBody):
    pass
