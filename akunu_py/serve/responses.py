"""OpenAI's Responses API for stateless clients such as Codex: bodies, jobs, replies, the endpoint.

Input items may have all fields of output items. The server does not store responses.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import from_json

from akunu_py.engine import events
from akunu_py.engine.answer import chat_job, prompt_job
from akunu_py.engine.constraint.matcher import compile_constraint, matches
from akunu_py.engine.job import Job
from akunu_py.serve.dialect.bodies import (
    AsJsonText,
    Body,
    ByType,
    JsonText,
    ListEntry,
    OtherPart,
    RefusalPart,
    known_only,
    merge_messages,
    text_of,
)
from akunu_py.serve.dialect.fields import (
    GenerationFields,
    StreamOptions,
    TokenLimit,
    ToolChoiceBody,
    ToolChoiceField,
    choose_tools,
    format_constraint,
    function_name,
    generate_options,
    plan_thinking,
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
from akunu_py.serve.openai import error_body
from akunu_py.types import Constraint, Message, Tool, ToolCall, ToolChoice


class ItemText(Body):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    logprobs: Any = None


Part = Annotated[ItemText | RefusalPart | OtherPart, ByType()]


class MessageItem(Body):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]


class CallItem(Body):
    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallItem(CallItem):
    type: Literal["function_call"]
    arguments: JsonText = ""


class CustomToolCallItem(CallItem):
    type: Literal["custom_tool_call"]
    input: str


class OutputItem(Body):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | list[Part], AsJsonText] = ""


class ReasoningItem(Body):
    type: Literal["reasoning"]
    summary: list[ItemText] = Field(default=[])
    content: list[ItemText] | None = None
    encrypted_content: str | None = None


class StoredItem(Body):
    """A reference to an item on the server."""

    type: Literal["item_reference"]


class OtherItem(ListEntry):
    """An item of a tool that servers run; dropped."""

    known_types = "(?!)"

    type: str


def _with_type(value: Any) -> Any:
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
    syntax: Annotated[Literal["lark", "regex"] | None, known_only()] = None
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


class FormatBody(ListEntry):
    known_types = "text|json_object|json_schema"

    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    name: Any = None  # repeated in the response, as the description
    description: Any = None


class TextBody(Body):
    format: FormatBody | None = None
    verbosity: Any = None  # repeated in the response


class ResponsesBody(GenerationFields):
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
    truncation: Annotated[Literal["auto", "disabled"] | None, known_only()] = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    moderation: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream_options: StreamOptions | None = None


_INPUT = "input"  # the only argument of a custom tool


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


def map_tools(bodies: Sequence[ResponsesTool], choice: str | ToolChoiceBody | None) -> ToolMap:
    """Convert the tools and the choice. Raises RequestError.

    Chat templates support only functions. A custom tool, which takes a text, becomes a function
    with one string argument. A tool in a namespace becomes a function named NAMESPACE__TOOL.
    """
    by_name: dict[str, MappedTool] = {}
    for number, body in enumerate(bodies):
        for mapped in _map_tool(body, "", f"tools.{number}"):
            if mapped.tool.name in by_name:
                raise RequestError(f"tools: duplicate tool {mapped.tool.name[:100]!r}")
            by_name[mapped.tool.name] = mapped
    return ToolMap(*choose_tools(choice, by_name, "tool_choice.name"))


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
    if body.format is not None and body.format.syntax:
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


_ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Values of `include` accepted without effect: results of server-side tools.
_NO_EFFECT = ("web_search_call.", "file_search_call.", "code_interpreter_call.", "computer_call")
_NOT_STORED = "responses are not stored; send the whole conversation as input"


def prepare_response(body: ResponsesBody, service: Service) -> PreparedRequest:
    """Answer a conversation."""
    tools = map_tools(body.tools or [], body.tool_choice)
    for offered in tools.by_name.values():
        if offered.grammar is not None:
            compile_constraint(service.engine.tokens, offered.grammar)  # raises if invalid
    thinking = plan_thinking(body, service)
    grammar_tool, constraint = tools.grammar_tool, _constraint(body)
    grammar = grammar_tool.grammar if grammar_tool else constraint
    options = generate_options(
        body, service, body.max_output_tokens, grammar, thinking_budget=thinking.budget
    )
    engine, messages = service.engine, messages_of(body)
    service.check_length(messages)
    if grammar_tool is not None:
        prompt = engine.tokens.encode_chat(messages, tools.tools, thinking.variables)
        job: Job = prompt_job(engine, prompt, options)
    else:
        job = chat_job(
            engine,
            messages,
            options,
            tools.tools,
            tools.choice,
            parallel=body.parallel_tool_calls is not False,
            variables=thinking.variables,
        )
    return PreparedRequest(
        [job],
        lambda encoder: encoder.set_model(service, tools),
        count_tokens=service.count_tokens,
        shows_thinking=thinking.shown,
    )


def _refuse(body: ResponsesBody) -> None:
    """Raise RequestError for what a server without state cannot do; ignore other parameters."""
    refused = {
        "previous_response_id": (body.previous_response_id, _NOT_STORED),
        "conversation": (body.conversation, _NOT_STORED),
        "prompt": (body.prompt, "prompt templates are not stored"),
        "background": (body.background, "responses run only while the client is connected"),
    }
    for name, (value, reason) in refused.items():
        if value:
            raise RequestError(f"unsupported parameter: {name}: {reason}", param=name)
    for name in ("context_management", "moderation", "top_logprobs"):
        if getattr(body, name):
            body.ignore(name)
    if body.truncation == "auto":
        body.ignore("truncation")
    for name in body.include or ():
        if name != _ENCRYPTED_REASONING and not name.startswith(_NO_EFFECT):
            body.ignore(f"include.*.{name}")


def _constraint(body: ResponsesBody) -> Constraint | None:
    format = body.text.format if body.text else None
    if format is None:
        return None
    return format_constraint(format.type, format.schema_, "text.format.schema")


def messages_of(body: ResponsesBody) -> list[Message]:
    """Return the conversation. Raises RequestError for an unsupported item."""
    messages = [Message("system", body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, Message("user", body.input)]
    names: dict[str, str] = {}  # tool names by call id
    messages += [_message(item, f"input.{number}", names) for number, item in enumerate(body.input)]
    return merge_messages(messages, "input")


def _message(item: InputItem, param: str, names: dict[str, str]) -> Message:
    if isinstance(item, MessageItem):
        role = "system" if item.role == "developer" else item.role
        return Message(role, text_of(item.content))
    if isinstance(item, FunctionCallItem | CustomToolCallItem):
        name = names[item.call_id] = function_name(item.name, item.namespace)
        text = item.arguments if isinstance(item, FunctionCallItem) else to_arguments(item.input)
        return Message("assistant", "", tool_calls=(ToolCall(name, text, item.call_id),))
    if isinstance(item, OutputItem):
        text = text_of(item.output)
        return Message("tool", text, tool_call_id=item.call_id, name=names.get(item.call_id, ""))
    if isinstance(item, ReasoningItem):
        text = "".join(part.text for part in item.content or [])
        return Message(
            "assistant", "", thinking=text or decode_thinking(item.encrypted_content or "")
        )
    raise invalid(param, "responses are not stored; send the whole item")


Values = dict[str, Any]
_REASONING_PREFIX = "akunu."  # marks thinking encoded by this server


class ResponseEncoder(Encoder):
    """Encodes a response; its heartbeat repeats response.in_progress."""

    names_events = True

    def __init__(self, body: ResponsesBody, name: str) -> None:
        super().__init__(body, name)
        _refuse(body)
        self._output: list[Values] = []
        sent = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self._response: Values = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
            "model": name,
            # The request parameters that every response repeats.
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "previous_response_id": None,
            "reasoning": sent.get("reasoning") or {"effort": None, "summary": None},
            "store": False,
            "text": sent.get("text") or {"format": {"type": "text"}},
            "tool_choice": sent.get("tool_choice") or "auto",
            "tools": sent.get("tools") or [],
            "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": body.temperature,
            "top_p": body.top_p,
        }
        self._includes_encrypted = _ENCRYPTED_REASONING in (body.include or ())
        self._arguments = ""  # of the open call
        # A call with a grammar, held back until it is complete.
        self._pending: tuple[events.ToolCallStarted, MappedTool] | None = None
        self._number = 0  # of the next event

    def set_model(self, service: Service, tools: ToolMap) -> None:
        """Set what is known once the model is loaded."""
        self._codec, self._tools = service.engine.tokens, tools
        for name in ("temperature", "top_p"):
            if self._response[name] is None:
                self._response[name] = getattr(service.defaults.sampling, name)

    def whole(self, answers: Sequence[CollectedAnswer]) -> Values:
        (answer,) = answers
        for part in answer.parts:
            if not isinstance(part, ToolCall):
                self._update(part)
                continue
            self._update(events.ToolCallStarted(part.id, part.name))
            self._update(events.ToolCallArguments(part.arguments))
            if part in answer.complete_calls:
                self._update(events.ToolCallFinished())
        self._update(answer.finished)
        return self._response

    def heartbeat(self) -> None:
        if self._number:
            self._emit("in_progress", response=self._response)
        else:
            self._begin_stream()

    def fail(self, error: RequestError, body: Mapping[str, Any]) -> None:
        code = error.code or ("server_error" if error.status >= 500 else "invalid_prompt")
        self._response["error"] = {"code": code, "message": error.message}
        self._response["status"] = "failed"
        self._begin_stream()
        self._emit("failed", response=self._response)

    def add(self, event: events.Event, choice: int) -> None:
        self._begin_stream()
        self._update(event)

    def _emit(self, what: str, **values: Any) -> None:
        self.emit({"type": f"response.{what}", "sequence_number": self._number, **values})
        self._number += 1

    def _begin_stream(self) -> None:
        if not self._number:
            self._emit("created", response=self._response)
            self._emit("in_progress", response=self._response)

    @property
    def _open(self) -> Values | None:
        """The output item in progress, if any."""
        last = self._output[-1] if self._output else None
        return last if last and last["status"] == "in_progress" else None

    def _update(self, event: events.Event) -> None:
        match event:
            case events.ThinkingDelta(text):
                self._add_text("reasoning", text)
            case events.TextDelta(text):
                if self._tools.grammar_tool:
                    self._add_input(self._tools.grammar_tool, text)
                else:
                    self._add_text("message", text)
            case events.ToolCallStarted():
                self._begin_call(event)
            case events.ToolCallArguments(text):
                self._extend_call(text)
            case events.ToolCallFinished():
                self._end_call()
            case events.Finished():
                self._end(event)

    def _add_text(self, kind: str, text: str) -> None:
        if not text:
            return
        item = self._open
        if item is None or item["type"] != kind:
            item = self._begin_text(kind)
        part = item["content"][0]
        part["text"] += text
        more: Values = {"logprobs": []} if kind == "message" else {}
        self._emit_part(f"{part['type']}.delta", content_index=0, delta=text, **more)

    def _begin_text(self, kind: str) -> Values:
        if kind == "message":
            item = self._begin("msg", "message", role="assistant", content=[])
            part: Values = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
        else:
            item = self._begin("rs", "reasoning", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
        item["content"].append(part)
        self._emit_part("content_part.added", content_index=0, part=part)
        return item

    def _add_input(self, tool: MappedTool, text: str) -> None:
        """Extend the input of the only call, which is the whole answer after the thinking."""
        item = self._open
        if item is None or item["type"] != "custom_tool_call":
            call = events.ToolCallStarted(f"call_{secrets.token_hex(12)}", tool.tool.name)
            item = self._begin_item_of(call, tool)
        item["input"] += text
        if text:
            self._emit_part("custom_tool_call_input.delta", delta=text)

    def _begin_call(self, event: events.ToolCallStarted) -> None:
        self._close()
        tool, self._arguments = self._tools.find(event.name), ""
        self._pending = (event, tool) if tool.grammar is not None else None
        if self._pending is None:
            self._begin_item_of(event, tool)

    def _begin_item_of(self, call: events.ToolCallStarted, tool: MappedTool) -> Values:
        more: Values = {"namespace": tool.namespace} if tool.namespace else {}
        more |= {"call_id": call.id, "name": tool.name}
        if tool.custom:
            return self._begin("ctc", "custom_tool_call", input="", **more)
        return self._begin("fc", "function_call", arguments="", **more)

    def _extend_call(self, text: str) -> None:
        self._arguments += text
        item = self._open
        if self._pending is not None or item is None or not text:
            return
        if item["type"] == "function_call":
            item["arguments"] += text
            self._emit_part("function_call_arguments.delta", delta=text)
        else:
            self._extend_input(item)

    def _extend_input(self, item: Values) -> None:
        """Append to a custom tool's input the text that its JSON arguments now contain."""
        text = to_input(self._arguments)
        delta = text[len(item["input"]) :]
        if delta and text.startswith(item["input"]):
            item["input"] = text
            self._emit_part("custom_tool_call_input.delta", delta=delta)

    def _end_call(self) -> None:
        """End the call. Input that violates the grammar becomes text instead."""
        if self._pending is not None:
            (event, tool), self._pending = self._pending, None
            text = to_input(self._arguments)
            assert tool.grammar is not None
            if matches(self._codec, tool.grammar, text):
                self._extend_input(self._begin_item_of(event, tool))
            else:
                error = f"[a call of {tool.name} that violates its grammar]\n{text}"
                self._add_text("message", error)
        self._close("completed")

    def _end(self, finished: events.Finished) -> None:
        incomplete = finished.reason in ("length", "context")
        if self._tools.grammar_tool is not None:
            self._add_input(self._tools.grammar_tool, "")
        status = "incomplete" if incomplete else "completed"
        self._close(status)
        stats, response = finished.stats, self._response
        response["status"] = status
        if incomplete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": finished.thinking_tokens},
            "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        }
        response["akunu"] = statistics(finished)
        self._emit(status, response=response)

    def _close(self, status: str = "") -> None:
        item = self._open
        if item is None:
            return
        # A call without its end is incomplete. Its text follows.
        item["status"] = status or ("completed" if "content" in item else "incomplete")
        match item["type"]:
            case "function_call":
                done = {"name": item["name"], "arguments": item["arguments"]}
                self._emit_part("function_call_arguments.done", **done)
            case "custom_tool_call":
                self._emit_part("custom_tool_call_input.done", input=item["input"])
            case kind:
                part = item["content"][0]
                more: Values = {"logprobs": []} if kind == "message" else {}
                more |= {"content_index": 0, "text": part["text"]}
                self._emit_part(f"{part['type']}.done", **more)
                self._emit_part("content_part.done", content_index=0, part=part)
                if kind == "reasoning" and self._includes_encrypted:
                    item["encrypted_content"] = encode_thinking(part["text"])
        self._emit_item("output_item.done")

    def _begin(self, prefix: str, kind: str, **values: Any) -> Values:
        self._close()
        id = f"{prefix}_{secrets.token_hex(12)}"
        item = {"type": kind, "id": id, "status": "in_progress", **values}
        self._output.append(item)
        self._emit_item("output_item.added")
        return item

    def _emit_item(self, what: str) -> None:
        self._emit(what, output_index=len(self._output) - 1, item=self._output[-1])

    def _emit_part(self, what: str, **values: Any) -> None:
        index, id = len(self._output) - 1, self._output[-1]["id"]
        self._emit(what, output_index=index, item_id=id, **values)


def encode_thinking(thinking: str) -> str:
    """Return thinking as `encrypted_content`, which clients send back unread."""
    return _REASONING_PREFIX + base64.b64encode(thinking.encode()).decode()


def decode_thinking(text: str) -> str:
    """Return the thinking, or "" if another server encoded it."""
    if not text.startswith(_REASONING_PREFIX):
        return ""
    try:
        return base64.b64decode(text[len(_REASONING_PREFIX) :], validate=True).decode()
    except ValueError:
        return ""


RESPONSES = Dialect(
    (Endpoint("/v1/responses", ResponsesBody, prepare_response, ResponseEncoder),), error_body
)
