"""Anthropic's Messages: bodies, jobs, replies and endpoints.

`cache_control` is accepted but ignored: prefixes are always cached.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from akunu_py.decoding.chat_format.effort import Effort, thinking_variables
from akunu_py.decoding.events import (
    Event,
    Finished,
    PromptProcessed,
    TextDelta,
    ThinkingDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.scheduling.job import chat_job
from akunu_py.serve.dialect.bodies import (
    PARAGRAPH_BREAK,
    Body,
    Ignored,
    check_tool,
    merge_messages,
    refuse_extra,
)
from akunu_py.serve.dialect.interface import (
    CollectedAnswer,
    Dialect,
    Endpoint,
    PreparedRequest,
    frame,
    statistics,
)
from akunu_py.serve.dialect.request_errors import ErrorKind, RequestError, invalid
from akunu_py.serve.dialect.sampling_body import SamplingBody, generate_options, schema_constraint
from akunu_py.serve.dialect.service import Service, check_model
from akunu_py.types import FinishReason, Message, Tool, ToolCall, ToolChoice

_CHOICES: dict[str, Literal["auto", "required", "named", "none"]] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}


def prepare_message(body: MessagesBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    check_model(body.model, service.names)
    sampling = SamplingBody(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=body.stop_sequences,
    )
    format = body.output_config.format if body.output_config else None
    constraint = schema_constraint(format.schema_) if format else None
    options = generate_options(sampling, service, body.max_tokens, constraint)
    tools = tools_of(body)
    choice, parallel = tool_choice_of(body, tools)
    job = chat_job(
        service.engine,
        messages_of(body),
        options,
        tools,
        choice,
        parallel=parallel,
        variables=template_variables(body, service),
    )
    shown = shows_thinking(body.thinking)
    return PreparedRequest(
        [job],
        lambda answers: build_message(service.name, answers, shows_thinking=shown),
        MessageEncoder(service.name, shows_thinking=shown) if body.stream else None,
    )


def count_tokens(body: CountBody, service: Service) -> Mapping[str, Any]:
    """Return the number of prompt tokens. Raises RequestError."""
    check_model(body.model, service.names)
    variables = template_variables(body, service)
    prompt = service.engine.tokens.encode_chat(messages_of(body), tools_of(body), variables)
    return {"input_tokens": len(prompt)}


def template_variables(body: PromptBody, service: Service) -> dict[str, Any]:
    """Return the chat template's variables for thinking, if it has any.

    Anthropic's clients request thinking from any model.
    """
    asked = body.thinking.type if body.thinking else None
    known = thinking_variables(service.engine.tokens.tokenizer)
    if asked == "disabled":
        return known.off() or {}
    effort = body.output_config.effort if body.output_config else None
    return (known.on(effort) or {}) if asked or effort else {}


def shows_thinking(asked: ThinkingBody | None) -> bool:
    """Return True if the reply includes thinking, which some models cannot turn off."""
    return asked is None or not (asked.type == "disabled" or asked.display == "omitted")


def messages_of(body: PromptBody) -> list[Message]:
    """Return the conversation. Raises RequestError for an unsupported block."""
    found = [Message("system", _text(body.system, "system"))] if body.system else []
    tools: dict[str, str] = {}  # names by the ids of the calls
    for number, turn in enumerate(body.messages):
        found += _of_turn(turn, f"messages.{number}.content", tools)
    return merge_messages(found, "messages")


def _of_turn(turn: MessagesTurn, place: str, tools: dict[str, str]) -> Iterator[Message]:
    blocks = turn.content
    if isinstance(blocks, str):
        yield Message(turn.role, blocks)
        return
    for number, block in enumerate(blocks):
        where = f"{place}.{number}"
        if isinstance(block, ToolUseBlock):
            tools[block.id] = block.name
            call = ToolCall(block.name, json.dumps(block.input, ensure_ascii=False), block.id)
            yield Message(_only("assistant", turn, block, where), "", tool_calls=(call,))
        elif isinstance(block, ToolResultBlock):
            _only("user", turn, block, where)
            text = _text(block.content or "", f"{where}.content")
            yield Message(
                "tool",
                f"Error: {text}" if block.is_error else text,
                tool_call_id=block.tool_use_id,
                name=tools.get(block.tool_use_id, ""),
            )
        elif isinstance(block, ThinkingBlock):
            yield Message(_only("assistant", turn, block, where), "", thinking=block.thinking)
        elif not isinstance(block, RedactedThinkingBlock):
            yield Message(turn.role, _block_text(block, where))


def _only(role: Any, turn: MessagesTurn, block: Block, where: str) -> Any:
    if turn.role != role:
        raise invalid(where, f"{block.type} is only allowed in {role} messages")
    return role


def _text(content: str | Sequence[ResultBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    texts = (_block_text(block, f"{place}.{number}") for number, block in enumerate(content))
    return PARAGRAPH_BREAK.join(text for text in texts if text)


def _block_text(block: ResultBlock, where: str) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ImageBlock):
        raise invalid(where, "images are not supported; send text")
    data = block.source.get("data")
    if block.source.get("type") != "text" or not isinstance(data, str):
        message = f"{where}: documents must be plain text"
        raise RequestError(message, param=f"{where}.source")
    return PARAGRAPH_BREAK.join(text for text in (block.title, block.context, data) if text)


def tools_of(body: PromptBody) -> list[Tool]:
    """Return the tools. Raises RequestError for tools that Anthropic defines."""
    return [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or [])]


def _tool(tool: MessagesTool, place: str) -> Tool:
    if tool.type not in (None, "custom"):
        message = f"{place}: unsupported tool type {tool.type[:100]}; use one with input_schema"
        raise RequestError(message, param=f"{place}.type")
    refuse_extra(tool, place)
    if tool.input_schema is None:
        raise invalid(f"{place}.input_schema", "field required")
    return Tool(tool.name, tool.description or "", tool.input_schema, bool(tool.strict))


def tool_choice_of(body: PromptBody, tools: Sequence[Tool]) -> tuple[ToolChoice, bool]:
    """Return the choice, and whether several calls are allowed. Raises RequestError."""
    asked = body.tool_choice
    if asked is None:
        return ToolChoice(), True
    if asked.type == "tool":
        check_tool(asked.name or "", [tool.name for tool in tools], "tool_choice.name")
    if asked.type == "any" and not tools:
        raise invalid("tool_choice", "requires tools")
    return ToolChoice(_CHOICES[asked.type], asked.name or ""), not asked.disable_parallel_tool_use


_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "cancelled": "end_turn",  # never sent
}
_ERRORS: dict[ErrorKind, str] = {
    "invalid": "invalid_request_error",
    "unauthorized": "authentication_error",
    "forbidden": "permission_error",
    "not_found": "not_found_error",
    "method": "invalid_request_error",
    "too_large": "request_too_large",
    "unavailable": "overloaded_error",
    "internal": "api_error",
}


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    kind = _ERRORS[error.kind]
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body | ({"request_id": request_id} if request_id else {})


def build_message(
    model: str, answers: Sequence[CollectedAnswer], *, shows_thinking: bool
) -> dict[str, Any]:
    """Return the answer as a message."""
    answer = answers[0]
    assert answer.ended is not None
    content: list[dict[str, Any]] = []
    for part in answer.parts:
        if isinstance(part, TextDelta):
            content.append({"type": "text", "text": part.text})
        elif isinstance(part, ToolCall):
            content.append(_called(part))
        elif shows_thinking:
            signed = _signature(part.text)
            content.append({"type": "thinking", "thinking": part.text, "signature": signed})
    begun = answer.begun or _begun(answer.ended)
    message = _message(model, begun)
    message |= {"content": content} | _stop(answer.ended, bool(answer.calls))
    message["usage"] |= {"output_tokens": answer.ended.stats.generated_tokens}
    return message | {"akunu": statistics(answer.ended)}


def _called(call: ToolCall) -> dict[str, Any]:
    """Return a call as a block, or as text if its JSON is incomplete."""
    try:
        values = json.loads(call.arguments or "{}")
    except ValueError:
        return {"type": "text", "text": f"{call.name} {call.arguments}"}
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": values}


def _message(model: str, begun: PromptProcessed) -> dict[str, Any]:
    """Return a message without content."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _input_usage(begun) | {"output_tokens": 0},
    }


def _begun(ended: Finished) -> PromptProcessed:
    return PromptProcessed(ended.stats.prompt_tokens, ended.stats.cached_tokens)


def _input_usage(begun: PromptProcessed) -> dict[str, int]:
    """Return the token counts; input_tokens excludes cached tokens."""
    return {
        "input_tokens": begun.prompt_tokens - begun.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": begun.cached_tokens,
    }


def _stop(ended: Finished, called: bool) -> dict[str, str | None]:
    reason = _STOP_REASONS[ended.reason]
    if ended.reason == "stop":
        reason = "tool_use" if called else "stop_sequence" if ended.stop else reason
    return {"stop_reason": reason, "stop_sequence": ended.stop or None}


def _signature(thinking: str) -> str:
    """Return a signature, because clients keep only signed thinking; it is never verified."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


class MessageEncoder:
    """Encodes a streamed message."""

    def __init__(self, model: str, *, shows_thinking: bool) -> None:
        self._model, self._shows_thinking = model, shows_thinking
        self._started = False
        self._open = ""  # type of the open block, or ""
        self._index = -1  # of the last block
        self._thinking = ""
        self._called = False

    def heartbeat(self) -> bytes:
        return _frame({"type": "ping"})

    def fail(self, error: RequestError) -> list[bytes]:
        return [_frame(error_body(error, ""))]

    def encode(self, event: Event, choice: int) -> list[bytes]:
        return [_frame(value) for value in self._values(event)]

    def _values(self, event: Event) -> list[dict[str, Any]]:
        match event:
            case PromptProcessed():
                return self._start(event)
            case ThinkingDelta(text):
                self._thinking += text
                return self._delta("thinking", text) if self._shows_thinking else []
            case TextDelta(text):
                return self._delta("text", text)
            case ToolCallStarted(id, name):
                self._called = True
                block = {"type": "tool_use", "id": id, "name": name, "input": {}}
                return [*self._close(), *self._begin(block)]
            case ToolCallArguments(text):
                delta = {"type": "input_json_delta", "partial_json": text}
                return [self._block("delta", delta=delta)] if text else []
            case ToolCallFinished():
                return self._close()
            case Finished():
                return self._end(event)
            case _:
                return []

    def _start(self, begun: PromptProcessed) -> list[dict[str, Any]]:
        if self._started:
            return []
        self._started = True
        return [{"type": "message_start", "message": _message(self._model, begun)}]

    def _end(self, ended: Finished) -> list[dict[str, Any]]:
        usage = _input_usage(_begun(ended)) | {"output_tokens": ended.stats.generated_tokens}
        delta = {"type": "message_delta", "delta": _stop(ended, self._called), "usage": usage}
        return [
            *self._start(_begun(ended)),
            *self._close(),
            delta | {"akunu": statistics(ended)},
            {"type": "message_stop"},
        ]

    def _delta(self, kind: str, text: str) -> list[dict[str, Any]]:
        """Extend a block of thinking or text, or begin one."""
        if not text:
            return []
        values: list[dict[str, Any]] = []
        if self._open != kind:
            extra = {"signature": ""} if kind == "thinking" else {}
            values = [*self._close(), *self._begin({"type": kind, kind: "", **extra})]
        return [*values, self._block("delta", delta={"type": f"{kind}_delta", kind: text})]

    def _begin(self, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        self._open, self._index = block["type"], self._index + 1
        return [self._block("start", content_block=block)]

    def _close(self) -> list[dict[str, Any]]:
        if not self._open:
            return []
        values = []
        if self._open == "thinking":
            signed = {"type": "signature_delta", "signature": _signature(self._thinking)}
            values = [self._block("delta", delta=signed)]
            self._thinking = ""
        self._open = ""
        return [*values, self._block("stop")]

    def _block(self, what: str, **values: Any) -> dict[str, Any]:
        return {"type": f"content_block_{what}", "index": self._index, **values}


def _frame(value: dict[str, Any]) -> bytes:
    return frame(value, value["type"])


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


MESSAGES = Dialect(
    "messages",
    (
        Endpoint("/v1/messages", MessagesBody, prepare_message, "Answer a conversation."),
        Endpoint("/v1/messages/count_tokens", CountBody, count_tokens, "Count its tokens."),
    ),
    error_body,
)
