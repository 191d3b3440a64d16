"""Chat Completions: bodies, the jobs built from them, and chunks or replies from events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from akunu_py.engine import events
from akunu_py.engine.answer import chat_job
from akunu_py.serve.dialect.bodies import (
    Body,
    ByType,
    Ignored,
    JsonText,
    KnownOnly,
    ListEntry,
    OtherPart,
    RefusalPart,
)
from akunu_py.serve.dialect.fields import (
    JSON_OBJECT,
    ConversationFields,
    SamplingBody,
    TokenLimit,
    choice_options,
    generate_options,
    plan_thinking,
    schema_constraint,
)
from akunu_py.serve.dialect.interface import CollectedAnswer, PreparedRequest
from akunu_py.serve.dialect.request_errors import invalid
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.dialect.tool_choice import ToolChoiceField, choose_tools
from akunu_py.serve.openai.shapes import (
    ChunkEncoder,
    CountTokens,
    ReplyHead,
    chat_logprobs,
    finish_reason,
)
from akunu_py.types import Constraint, Message, TokenLogprobs, Tool, ToolCall


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
    type: Ignored = None
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
        # A part that is no text gets its own line.
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


class NamedSchema(Body):
    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class Format(ListEntry):
    known_types = "text|json_object|json_schema"

    type: str
    json_schema: NamedSchema | None = None


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
    tool_choice: ToolChoiceField = None
    # OpenAI's older form of `tools` and `tool_choice`, with at most one call in an answer.
    functions: list[FunctionTool] | None = None
    function_call: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    prediction: PredictionBody | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    verbosity: Ignored = None  # no template supports it
    modalities: list[Annotated[Literal["text"], KnownOnly()]] | None = None

    @property
    def has_functions(self) -> bool:
        """Whether the reply has OpenAI's older form of a call."""
        return bool(self.functions) and not self.tools

    @property
    def functions_offered(self) -> list[FunctionTool]:
        """The functions of both forms."""
        return [*(tool.function for tool in self.tools or ()), *(self.functions or ())]


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


def prepare_chat(body: ChatBody, service: Service) -> PreparedRequest:
    """Return the prepared request. Raises RequestError."""
    messages = body.check_continuation(messages_of(body.messages))
    service.check_length(messages)
    limit = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "requires logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = _constraint(body.response_format)
    thinking = plan_thinking(body, service)
    options = generate_options(body, service, limit, constraint, logprobs, thinking.budget)
    tools = {tool.name: tool for tool in tools_of(body.functions_offered)}
    tools, choice = choose_tools(body.tool_choice or body.function_call, tools)
    jobs = [
        chat_job(
            service.engine,
            messages,
            each,
            list(tools.values()),
            choice,
            parallel=body.parallel_tool_calls is not False and not body.has_functions,
            predicted=body.prediction.text if body.prediction else "",
            variables=thinking.variables,
        )
        for each in choice_options(options, body.n or 1)
    ]
    head = ReplyHead(service.name, "chatcmpl")
    count = service.count_tokens
    return PreparedRequest(
        jobs,
        lambda answers: build_chat_completion(head, answers, count, old=body.has_functions),
        lambda encoder: encoder.set_count_tokens(count),
        shows_thinking=thinking.shown,
    )


def chat_encoder(body: ChatBody, name: str) -> ChatEncoder:
    """Return the encoder of a streamed reply. name: the model's."""
    head, usage = ReplyHead(name, "chatcmpl"), body.includes_usage
    return ChatEncoder(head, body.n or 1, usage=usage, old=body.has_functions)


def _constraint(format: Format | None) -> Constraint | None:
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return JSON_OBJECT
    if format.json_schema is None:
        raise invalid("response_format.json_schema", "field required")
    return schema_constraint(format.json_schema.json_schema)


class ChatEncoder(ChunkEncoder):
    """Encodes a stream of chunks; the first chunk of each choice has the role."""

    object_name = "chat.completion.chunk"

    def __init__(self, head: ReplyHead, count: int, *, usage: bool, old: bool) -> None:
        """count: number of choices. usage: send the usage in the last chunk.

        old: calls have OpenAI's older form, `function_call`.
        """
        super().__init__(head, count, usage=usage)
        self._old = old
        self._calls = [0] * count
        self._has_role = [False] * count
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(count)]
        self._kind: dict[str, Any] = {"content": ""}  # an empty delta like the last one
        self._choice = 0  # the last one

    def heartbeat(self) -> bytes:
        """Return an empty delta: clients do not count comments as progress."""
        choice = self._choice
        return b"".join(self._start(choice) or [self._chunk(choice, self._kind)])

    def encode(self, event: events.Event, choice: int) -> list[bytes]:
        if isinstance(event, events.Finished):
            return self._finish(event, choice)
        if isinstance(event, events.Logprobs):
            self._logprobs[choice] += event.tokens
            return []
        delta = self._delta(event, choice)
        if delta is None:
            return []
        self._choice = choice
        if isinstance(event, events.ThinkingDelta):
            self._thinking += event.text
        if isinstance(event, events.ToolCallStarted):
            self._kind = self._delta(events.ToolCallArguments(""), choice) or {}
        elif delta and not isinstance(event, events.ToolCallArguments):
            self._kind = dict.fromkeys(delta, "")
        return [*self._start(choice), self._chunk(choice, delta)] if delta else self._start(choice)

    def _delta(self, event: events.Event, choice: int) -> dict[str, Any] | None:
        """Return the delta of an event: {} for PromptProcessed, None for events without a delta."""
        match event:
            case events.PromptProcessed():
                return {}
            case events.TextDelta(text):
                return {"content": text}
            case events.ThinkingDelta(text):
                return {"reasoning_content": text}
            case events.ToolCallStarted(id, name):
                self._calls[choice] += 1
                function = {"name": name, "arguments": ""}
                more = {"id": id, "type": "function", "function": function}
            case events.ToolCallArguments(text):
                more = {"function": {"arguments": text}}
            case _:
                return None
        if self._old:
            return {"function_call": more["function"]}
        return {"tool_calls": [{"index": self._calls[choice] - 1, **more}]}

    def _start(self, choice: int) -> list[bytes]:
        """Return the first chunk of a choice, with the role; nothing if it was sent."""
        if self._has_role[choice]:
            return []
        self._has_role[choice] = True
        return [self._chunk(choice, {"role": "assistant", "content": ""})]

    def _finish(self, event: events.Finished, choice: int) -> list[bytes]:
        self._choice, self._kind = min(choice + 1, self._count - 1), {"content": ""}
        reason = finish_reason(event, calls=self._calls[choice] > 0, old=self._old)
        start = self._start(choice)
        return [*start, *self._end(event, self._entry(choice, {}, reason), self._count)]

    def _chunk(self, choice: int, delta: Mapping[str, Any]) -> bytes:
        return self._frame(self._entry(choice, delta))

    def _entry(
        self, choice: int, delta: Mapping[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        """Return an entry of `choices`, with the logprobs so far."""
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self._logprobs[choice] and "role" not in delta:
            entry["logprobs"] = chat_logprobs(self._logprobs[choice])
            self._logprobs[choice] = []
        return entry


def build_chat_completion(
    head: ReplyHead,
    answers: Sequence[CollectedAnswer],
    count_tokens: CountTokens = len,
    *,
    old: bool = False,
) -> dict[str, Any]:
    """Return the body of a reply that is not streamed. old: as in `ChatEncoder`."""
    choices = [_choice(number, answer, old=old) for number, answer in enumerate(answers)]
    return head.reply("chat.completion", choices, answers, len(answers), count_tokens)


def _choice(index: int, answer: CollectedAnswer, *, old: bool) -> dict[str, Any]:
    """Return one entry of `choices`. old: with `function_call` instead of `tool_calls`."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.calls
    ]
    message = {
        "role": "assistant",
        "content": None if calls and not answer.text else answer.text,
        "refusal": None,
        **({"reasoning_content": answer.thinking} if answer.thinking else {}),
        **({"tool_calls": calls} if calls and not old else {}),
        **({"function_call": calls[0]["function"]} if calls and old else {}),
    }
    reason = finish_reason(answer.finished, calls=bool(calls), old=old)
    logprobs = chat_logprobs(answer.logprobs) if answer.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}
