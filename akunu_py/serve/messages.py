"""Anthropic's Messages API: bodies, jobs, replies and endpoints."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from akunu_py.engine import events
from akunu_py.engine.answer import chat_job
from akunu_py.serve.dialect.bodies import (
    BLANK_LINE,
    Body,
    ByType,
    JsonText,
    ListEntry,
    OtherPart,
    describe,
    merge_messages,
    text_of,
)
from akunu_py.serve.dialect.fields import (
    EffortField,
    GenerationFields,
    ThinkingFields,
    ThinkingPlan,
    TokenLimit,
    ToolChoiceBody,
    ToolChoiceField,
    choose_tools,
    generate_options,
    plan_thinking,
    schema_constraint,
    shows_thinking,
)
from akunu_py.serve.dialect.interface import (
    CollectedAnswer,
    Dialect,
    Encoder,
    Endpoint,
    PreparedRequest,
    statistics,
)
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.serve.dialect.service import Service
from akunu_py.types import FinishReason, Message, Tool, ToolCall


def prepare_message(body: MessagesBody, service: Service) -> PreparedRequest:
    """Answer a conversation."""
    format = (body.output_config and body.output_config.format) or body.output_format
    constraint = schema_constraint(format.schema_) if format else None
    messages, thinking = messages_of(body), thinking_of(body, service)
    service.check_length(messages)
    options = generate_options(
        body, service, body.max_tokens, constraint, thinking_budget=thinking.budget
    )
    tools, choice = choose_tools(
        body.tool_choice, {tool.name: tool for tool in tools_of(body)}, "tool_choice.name"
    )
    chosen = body.tool_choice if isinstance(body.tool_choice, ToolChoiceBody) else None
    job = chat_job(
        service.engine,
        messages,
        options,
        list(tools.values()),
        choice,
        parallel=chosen is None or not chosen.disable_parallel_tool_use,
        variables=thinking.variables,
    )
    return PreparedRequest(
        [job],
        lambda encoder: encoder.set_thinks(thinking.shown and thinking.possible),
        shows_thinking=thinking.shown,
    )


def count_tokens(body: PromptBody, service: Service) -> Mapping[str, Any]:
    """Count prompt tokens."""
    variables = thinking_of(body, service).variables
    prompt = service.engine.tokens.encode_chat(messages_of(body), tools_of(body), variables)
    return {"input_tokens": len(prompt)}


def thinking_of(body: PromptBody, service: Service) -> ThinkingPlan:
    """Return how much the answer thinks. Anthropic's clients request thinking from any model."""
    return plan_thinking(body, service, body.output_config.effort if body.output_config else None)


# Claude Code's first system text. It changes with every request, so no prefix would be cached.
_BILLING_HEADER = re.compile(r"\A\s*x-anthropic-billing-header:[^\n]*\n*")


def messages_of(body: PromptBody) -> list[Message]:
    """Return the conversation; blocks that the model cannot read become a line of text."""
    system = _BILLING_HEADER.sub("", text_of(body.system or ""))
    messages = [Message("system", system)] if system else []
    tool_names: dict[str, str] = {}  # by call id
    for number, turn in enumerate(body.messages):
        messages += _turn_messages(turn, f"messages.{number}.content", tool_names)
    return merge_messages(messages, "messages")


def _turn_messages(
    turn: MessagesTurn, prefix: str, tool_names: dict[str, str]
) -> Iterator[Message]:
    """Yield a turn as messages; add the names of its tool calls to `tool_names`, by id."""
    blocks = turn.content
    if isinstance(blocks, str):
        yield Message(turn.role, blocks)
        return
    for number, block in enumerate(blocks):
        param = f"{prefix}.{number}"
        if isinstance(block, ToolUseBlock):
            tool_names[block.id] = block.name
            call = ToolCall(block.name, block.input, block.id)
            yield Message(_check_role("assistant", turn, block, param), "", tool_calls=(call,))
        elif isinstance(block, ToolResultBlock):
            _check_role("user", turn, block, param)
            text = text_of(block.content or "")
            yield Message(
                "tool",
                f"Error: {text}" if block.is_error else text,
                tool_call_id=block.tool_use_id,
                name=tool_names.get(block.tool_use_id, ""),
            )
        elif isinstance(block, ThinkingBlock):
            yield Message(_check_role("assistant", turn, block, param), "", thinking=block.thinking)
        else:
            yield Message(turn.role, block.text)


def _check_role(role: Any, turn: MessagesTurn, block: Block, param: str) -> Any:
    if turn.role != role:
        raise invalid(param, f"{block.type} is only allowed in {role} messages")
    return role


def tools_of(body: PromptBody) -> list[Tool]:
    return [
        Tool(each.name, each.description or "", each.input_schema, bool(each.strict))
        for each in body.tools or ()
    ]


_STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "repetition": "end_turn",
    "cancelled": "end_turn",  # never sent
}
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(error: RequestError, request_id: str) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}}
    return body | ({"request_id": request_id} if request_id else {})


def _call_block(call: ToolCall) -> dict[str, Any]:
    values = json.loads(call.arguments or "{}")
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": values}


def _message(model: str, usage: dict[str, int], content: Sequence[Any] = ()) -> dict[str, Any]:
    """Return a message that has not ended."""
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _usage(prompt: int, cached: int, generated: int = 0) -> dict[str, int]:
    """Return the token counts; input_tokens excludes cached tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
    }


def _usage_of(finished: events.Finished) -> dict[str, int]:
    stats = finished.stats
    return _usage(stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens)


def _stop_fields(finished: events.Finished, has_calls: bool) -> dict[str, str | None]:
    reason = _STOP_REASONS[finished.reason]
    if finished.reason == "stop":
        reason = "tool_use" if has_calls else "stop_sequence" if finished.stop else reason
    return {"stop_reason": reason, "stop_sequence": finished.stop or None}


def _signature(thinking: str) -> str:
    """Return a signature: clients keep only signed thinking. The server never verifies it."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


class MessageEncoder(Encoder):
    names_events = True

    def __init__(self, body: MessagesBody, name: str) -> None:
        super().__init__(body, name)
        self._thinks = body.thinking is not None and shows_thinking(body)
        self._prompt = 0  # known prompt tokens
        self._started = False
        self._open_type = ""  # type of the open block, or ""
        self._index = -1  # of the last block
        self._thinking = ""
        self._has_calls = False

    def set_thinks(self, thinks: bool) -> None:
        """Set whether a thinking block is likely to be the first block."""
        self._thinks = thinks

    def whole(self, answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        (answer,) = answers
        content: list[dict[str, Any]] = []
        for part in answer.parts:
            if isinstance(part, events.TextDelta):
                content.append({"type": "text", "text": part.text})
            elif isinstance(part, ToolCall):
                if part in answer.complete_calls:  # the text of others is in the answer
                    content.append(_call_block(part))
            else:
                signature = _signature(part.text)
                content.append({"type": "thinking", "thinking": part.text, "signature": signature})
        finished = answer.finished
        message = _message(self._model, _usage_of(finished), content)
        message |= _stop_fields(finished, bool(answer.complete_calls))
        return message | {"akunu": statistics(finished)}

    def heartbeat(self) -> None:
        """Emit an empty delta: client libraries drop `ping` before their timeouts see it."""
        self._start(_usage(self._prompt, 0))
        if self._index < 0:
            self._open_text("thinking" if self._thinks else "text")
        if self._open_type:
            self._emit_text(self._open_type, "")
        else:
            self.emit({"type": "ping"})

    def add(self, event: events.Event, choice: int) -> None:
        match event:
            case events.PrefillProgress(_, total):
                self._prompt = total
            case events.PromptProcessed(prompt, cached):
                self._start(_usage(prompt, cached))
            case events.ThinkingDelta(text):
                self._thinking += text
                self._add_text("thinking", text)
            case events.TextDelta(text):
                self._add_text("text", text)
            case events.ToolCallStarted(id, name):
                self._open_block({"type": "tool_use", "id": id, "name": name, "input": {}})
            case events.ToolCallArguments(text) if text:
                self._emit_text("tool_use", text)
            case events.ToolCallFinished():
                self._has_calls = True
                self._close_block()
            case events.Finished():
                usage, stop = _usage_of(event), _stop_fields(event, self._has_calls)
                self._start(usage | {"output_tokens": 0})
                self._close_block()
                delta = {"type": "message_delta", "delta": stop, "usage": usage}
                self.emit(delta | {"akunu": statistics(event)})
                self.emit({"type": "message_stop"})

    def _start(self, usage: dict[str, int]) -> None:
        if not self._started:
            self._started = True
            self.emit({"type": "message_start", "message": _message(self._model, usage)})

    def _add_text(self, kind: str, text: str) -> None:
        if text:
            if self._open_type != kind:
                self._open_text(kind)
            self._emit_text(kind, text)

    def _open_text(self, kind: str) -> None:
        extra = {"signature": ""} if kind == "thinking" else {}
        self._open_block({"type": kind, kind: "", **extra})

    def _emit_text(self, kind: str, text: str) -> None:
        name, field = (kind, kind) if kind != "tool_use" else ("input_json", "partial_json")
        self._emit_block("delta", delta={"type": f"{name}_delta", field: text})

    def _open_block(self, block: Mapping[str, Any]) -> None:
        self._close_block()
        self._open_type, self._index = block["type"], self._index + 1
        self._emit_block("start", content_block=block)

    def _close_block(self) -> None:
        if not self._open_type:
            return
        if self._open_type == "thinking":
            signature = {"type": "signature_delta", "signature": _signature(self._thinking)}
            self._emit_block("delta", delta=signature)
            self._thinking = ""
        self._open_type = ""
        self._emit_block("stop")

    def _emit_block(self, event: str, **values: Any) -> None:
        self.emit({"type": f"content_block_{event}", "index": self._index, **values})


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: JsonText = ""


class DocumentBlock(Body):
    type: Literal["document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        source = self.source
        found = source.get("data") if source.get("type") == "text" else source.get("content")
        text = found if isinstance(found, str) else _source_text(found)
        if text:
            return BLANK_LINE.join(filter(None, (self.title, self.context, text)))
        return describe(self.model_dump())


def _source_text(blocks: Any) -> str:
    """Return the text of a document that consists of blocks."""
    blocks = [each for each in blocks if isinstance(each, dict)] if isinstance(blocks, list) else []
    texts = (
        each["text"] if isinstance(each.get("text"), str) else describe(each) for each in blocks
    )
    return BLANK_LINE.join(texts)


ResultBlock = Annotated[TextBlock | DocumentBlock | OtherPart, ByType()]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | DocumentBlock | OtherPart, ByType()
]


class MessagesTurn(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(ListEntry):
    """A tool of the client. Tools that Anthropic's server runs or defines are dropped."""

    known_types = "custom"

    name: str = Field(min_length=1, max_length=128)
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class OutputFormat(ListEntry):
    known_types = "json_schema"

    type: str
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: EffortField = None
    format: OutputFormat | None = None


class ContextEdit(ListEntry):
    """Removal of earlier thinking; has no effect, because the chat template decides."""

    known_types = "clear_thinking_.*"

    type: str


class ContextManagement(Body):
    edits: list[ContextEdit] = Field(default=[])


class PromptBody(ThinkingFields):
    """Parameters of the prompt."""

    model: str
    messages: list[MessagesTurn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: ToolChoiceField = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # older form of `output_config.format`
    context_management: ContextManagement | None = None


class MessagesBody(PromptBody, GenerationFields):
    max_tokens: TokenLimit
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)


MESSAGES = Dialect(
    (
        Endpoint("/v1/messages", MessagesBody, prepare_message, MessageEncoder),
        Endpoint("/v1/messages/count_tokens", PromptBody, count_tokens),
    ),
    error_body,
)
