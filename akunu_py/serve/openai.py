"""OpenAI's Chat Completions, Completions and Embeddings: bodies, jobs, replies and endpoints."""

import base64
import secrets
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from akunu_py.engine import events
from akunu_py.engine.answer import chat_job, prompt_job
from akunu_py.engine.job import Job
from akunu_py.serve.dialect.bodies import (
    Body,
    ByType,
    JsonText,
    ListEntry,
    OtherPart,
    RefusalPart,
    known_only,
)
from akunu_py.serve.dialect.fields import (
    SamplingBody,
    TokenLimit,
    ToolChoiceField,
    choice_options,
    choose_tools,
    format_constraint,
    generate_options,
    plan_thinking,
)
from akunu_py.serve.dialect.interface import (
    DONE,
    CollectedAnswer,
    Dialect,
    Encoder,
    Endpoint,
    PreparedRequest,
    statistics,
)
from akunu_py.serve.dialect.request_errors import RequestError, invalid
from akunu_py.serve.dialect.service import Embedder, Service, TextPrompt
from akunu_py.types import Message, TokenLogprobs, Tool, ToolCall

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ChunkEncoder(Encoder):
    """Encodes chunks, the last one with the usage on request, or a whole reply."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]  # of a whole reply
    chunk_name: ClassVar[str]

    def __init__(self, body: SamplingBody, name: str) -> None:
        super().__init__(body, name)
        self._created = int(time.time())
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._count = body.n or 1
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._finished: list[events.Finished] = []

    def _object(self, name: str, choices: Sequence[Any], **extra: Any) -> dict[str, Any]:
        common = {"id": self._id, "object": name, "created": self._created, "model": self._model}
        return {**common, "choices": choices, **extra}

    def _reply(self, choices: Sequence[Any], answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        finished = [answer.finished for answer in answers]
        total = usage(finished, self._count)
        return self._object(self.object_name, choices, usage=total, akunu=statistics(*finished))

    def _emit_choice(self, choice: Mapping[str, Any], **extra: Any) -> None:
        none = {"usage": None} if self._usage else {}
        self.emit(self._object(self.chunk_name, [choice], **none, **extra))

    def _end(self, event: events.Finished, choice: Mapping[str, Any], total: int) -> None:
        """Emit the last frame of a choice; after the last of `total` choices, also the end."""
        self._finished.append(event)
        self._emit_choice(choice, akunu=statistics(event))
        if len(self._finished) == total:
            if self._usage:
                whole = usage(self._finished, self._count)
                self.emit(self._object(self.chunk_name, [], usage=whole))
            self._data += DONE


def error_body(error: RequestError, request_id: str = "") -> Mapping[str, Any]:
    """Return an error in OpenAI's shape; clients get the request id from a header."""
    return {
        "error": {
            "message": error.message,
            "type": _ERROR_TYPES.get(error.status, "invalid_request_error"),
            "param": error.param or None,
            "code": error.code or None,
        }
    }


def texts_of(value: str | Sequence[Any]) -> list[Any]:
    """Return one or several texts as a list; each is a string or token ids."""
    single = isinstance(value, str) or bool(value and isinstance(value[0], int))
    return [value] if single else list(value)


def finish_reason(event: events.Finished, *, calls: bool, old: bool = False) -> str:
    """Return OpenAI's finish reason. calls: the answer calls tools. old: as a `function_call`."""
    if event.reason in ("length", "context"):
        return "length"
    return ("function_call" if old else "tool_calls") if calls else "stop"


def usage(answers: Sequence[events.Finished], count: int) -> dict[str, Any]:
    """Return the token counts of `count` answers to each prompt."""
    prompts = answers[::count]
    prompt = sum(each.stats.prompt_tokens for each in prompts)
    completion = sum(each.stats.generated_tokens for each in answers)
    cached = sum(each.stats.cached_tokens for each in prompts)
    thinking = sum(each.thinking_tokens for each in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thinking},
    }


def chat_logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return logprobs in the shape of Chat Completions."""

    def entry(text: str, logprob: float, raw: bytes) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(raw)}

    return {
        "content": [
            entry(each.text, each.logprob, each.raw)
            | {"top_logprobs": [entry(*other) for other in each.top]}
            for each in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """Return logprobs in the shape of Completions. offset: the first token's, in characters."""
    offsets = [*accumulate((len(each.text) for each in tokens), initial=offset)]
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [
            {text: logprob for text, logprob, _ in reversed(each.top)} for each in tokens
        ],
        "text_offset": offsets[:-1],
    }


# Chat Completions


class ChatText(Body):
    type: Literal["text"]
    text: str


class FunctionBody(Body):
    name: str
    arguments: JsonText = ""


class CallBody(Body):
    id: str | None = None
    function: FunctionBody


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
    function_call: FunctionBody | None = None  # OpenAI's older form of `tool_calls`

    @property
    def text(self) -> str:
        return _text_of(self.content or "")


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


class ChatBody(SamplingBody):
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
    modalities: list[Annotated[Literal["text"], known_only()]] | None = None

    @property
    def has_functions(self) -> bool:
        """Whether the reply has OpenAI's older form of a call."""
        return bool(self.functions) and not self.tools


def _text_of(content: str | Sequence[ChatText | RefusalPart | OtherPart]) -> str:
    """Return the text of a content; a part that is no text gets its own line."""
    if isinstance(content, str):
        return content
    return "".join(
        f"{part.text}\n" if isinstance(part, OtherPart) else part.text for part in content
    )


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
    """Answer a conversation."""
    messages = messages_of(body.messages)
    service.check_length(messages)
    limit = body.max_completion_tokens or body.max_tokens
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "requires logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = None
    if (format := body.response_format) is not None:
        schema = format.json_schema and format.json_schema.json_schema
        constraint = format_constraint(format.type, schema, "response_format.json_schema")
    thinking = plan_thinking(body, service)
    options = generate_options(body, service, limit, constraint, logprobs, thinking.budget)
    functions = [*(tool.function for tool in body.tools or ()), *(body.functions or ())]
    tools = {tool.name: tool for tool in tools_of(functions)}
    tools, choice = choose_tools(body.tool_choice or body.function_call, tools)
    jobs = [
        chat_job(
            service.engine,
            messages,
            each,
            list(tools.values()),
            choice,
            parallel=body.parallel_tool_calls is not False and not body.has_functions,
            predicted=_text_of(body.prediction.content) if body.prediction else "",
            variables=thinking.variables,
        )
        for each in choice_options(options, body.n or 1)
    ]
    return PreparedRequest(jobs, count_tokens=service.count_tokens, shows_thinking=thinking.shown)


class ChatEncoder(ChunkEncoder):
    """Encodes answers; the first chunk of each choice has the role."""

    id_prefix, object_name, chunk_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, name: str) -> None:
        super().__init__(body, name)
        self._old = body.has_functions  # calls have OpenAI's older form, `function_call`
        self._calls = [0] * self._count
        self._has_complete_call = [False] * self._count
        self._has_role = [False] * self._count
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(self._count)]
        self._choice = 0  # the last one

    def whole(self, answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        choices = [
            _chat_choice(number, answer, old=self._old) for number, answer in enumerate(answers)
        ]
        return self._reply(choices, answers)

    def heartbeat(self) -> None:
        """Emit an empty delta: clients do not count comments as progress."""
        if self._has_role[self._choice]:
            self._emit_delta(self._choice, {"content": ""})
        else:
            self._start(self._choice)

    def add(self, event: events.Event, choice: int) -> None:
        match event:
            case events.PromptProcessed():
                self._start(choice)
            case events.TextDelta(text):
                self._emit_delta(choice, {"content": text})
            case events.ThinkingDelta(text):
                self._emit_delta(choice, {"reasoning_content": text})
            case events.ToolCallStarted(id, name):
                self._calls[choice] += 1
                function = {"name": name, "arguments": ""}
                self._emit_call(choice, {"id": id, "type": "function", "function": function})
            case events.ToolCallArguments(text):
                self._emit_call(choice, {"function": {"arguments": text}})
            case events.ToolCallFinished():
                self._has_complete_call[choice] = True
            case events.Logprobs(tokens):
                self._logprobs[choice] += tokens
            case events.Finished():
                self._start(choice)
                self._choice = min(choice + 1, self._count - 1)
                reason = finish_reason(event, calls=self._has_complete_call[choice], old=self._old)
                self._end(event, self._entry(choice, {}, reason), self._count)

    def _start(self, choice: int) -> None:
        """Emit the first chunk of a choice, with the role, unless it was sent."""
        self._choice = choice
        if not self._has_role[choice]:
            self._has_role[choice] = True
            self._emit_choice(self._entry(choice, {"role": "assistant", "content": ""}))

    def _emit_delta(self, choice: int, delta: Mapping[str, Any]) -> None:
        self._start(choice)
        self._emit_choice(self._entry(choice, delta))

    def _emit_call(self, choice: int, call: Mapping[str, Any]) -> None:
        if self._old:
            self._emit_delta(choice, {"function_call": call["function"]})
        else:
            index = self._calls[choice] - 1
            self._emit_delta(choice, {"tool_calls": [{"index": index, **call}]})

    def _entry(
        self, choice: int, delta: Mapping[str, Any], reason: str | None = None
    ) -> dict[str, Any]:
        """Return an entry of `choices`, with the logprobs so far."""
        entry = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        if self._logprobs[choice] and "role" not in delta:
            entry["logprobs"] = chat_logprobs(self._logprobs[choice])
            self._logprobs[choice] = []
        return entry


def _chat_choice(index: int, answer: CollectedAnswer, *, old: bool) -> dict[str, Any]:
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
    reason = finish_reason(answer.finished, calls=bool(answer.complete_calls), old=old)
    logprobs = chat_logprobs(answer.logprobs) if answer.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


# Completions


_COMPLETION_TOKENS = 16  # OpenAI's default here
_MAX_CHOICES = 128
_SHORT_ANSWER, _SHORT_PROMPTS = 64, 4096  # maximum tokens of a short request


class CompletionsBody(SamplingBody):
    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: str | None = None
    echo: bool | None = None  # begin the text with the prompt
    logprobs: int | None = Field(default=None, ge=0, le=20)


def prepare_completions(body: CompletionsBody, service: Service) -> PreparedRequest:
    """Continue texts, or fill in their middle."""
    count = body.n or 1
    texts = texts_of(body.prompt)
    if not texts:
        raise invalid("prompt", "expected at least one prompt")
    prompts = [_prompt(text, body.suffix, service) for text in texts]
    if len(prompts) * count > _MAX_CHOICES:
        raise invalid("prompt", f"expected at most {_MAX_CHOICES} choices")
    if body.logprobs is not None and body.echo:
        raise invalid("echo", "cannot be combined with logprobs")
    thinking = plan_thinking(body, service)
    limit = body.max_tokens or _COMPLETION_TOKENS
    options = generate_options(body, service, limit, None, body.logprobs, thinking.budget)
    jobs: list[Job] = []
    for prompt in prompts:
        ends = replace(options, stop_tokens=(*options.stop_tokens, *prompt.stop_tokens))
        jobs += [
            prompt_job(service.engine, prompt.tokens, each, prompt.draft_context)
            for each in choice_options(ends, count)
        ]
    echoes = [_echo(text, service) if body.echo else "" for text in texts for _ in range(count)]
    return PreparedRequest(
        jobs,
        lambda encoder: encoder.set_echoes(echoes),
        count_tokens=service.count_tokens,
        short=options.max_tokens <= _SHORT_ANSWER
        and sum(len(each.tokens) for each in prompts) <= _SHORT_PROMPTS,
        shows_thinking=thinking.shown,
    )


def _prompt(prompt: str | list[int], suffix: str | None, service: Service) -> TextPrompt:
    """Return the prompt for a text or token ids. Raises RequestError."""
    tokens = service.engine.tokens
    if suffix:
        if not isinstance(prompt, str):
            raise invalid("suffix", "requires a prompt of text")
        return service.infill_prompt(prompt, suffix)
    if isinstance(prompt, str):
        service.check_length([prompt])
        return TextPrompt(tokens.encode(prompt))
    if any(not 0 <= token < tokens.vocabulary for token in prompt):
        raise invalid("prompt", f"expected token ids from 0 to {tokens.vocabulary - 1}")
    return TextPrompt(prompt)


def _echo(prompt: str | list[int], service: Service) -> str:
    text = prompt if isinstance(prompt, str) else service.engine.tokens.tokenizer.decode(prompt)
    return str(text)


class CompletionsEncoder(ChunkEncoder):
    """Encodes a stream of chunks, with thinking in the field `reasoning_content`."""

    id_prefix, object_name, chunk_name = "cmpl", "text_completion", "text_completion"
    _echoes: Sequence[str] = ("",)

    def set_echoes(self, echoes: Sequence[str]) -> None:
        """Set the text before each choice: its prompt, or ""."""
        self._echoes, self._offsets = echoes, [len(text) for text in echoes]

    def whole(self, answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        choices = []
        for number, (answer, echo) in enumerate(zip(answers, self._echoes, strict=True)):
            reason = finish_reason(answer.finished, calls=False)
            choice = _text_choice(number, echo + answer.text, answer.thinking, reason)
            if answer.logprobs:
                choice["logprobs"] = completion_logprobs(answer.logprobs, len(echo))
            choices.append(choice)
        return self._reply(choices, answers)

    def heartbeat(self) -> None:
        """Emit an empty text: clients do not count comments as progress."""
        self._emit_choice(_text_choice(min(len(self._finished), len(self._echoes) - 1), ""))

    def add(self, event: events.Event, choice: int) -> None:
        match event:
            case events.PromptProcessed() if self._echoes[choice]:
                self._emit_choice(_text_choice(choice, self._echoes[choice]))
            case events.TextDelta(text):
                self._emit_choice(_text_choice(choice, text))
            case events.ThinkingDelta(text):
                self._emit_choice(_text_choice(choice, "", text))
            case events.Logprobs(tokens):  # sent in a separate chunk before the text
                logprobs = completion_logprobs(tokens, self._offsets[choice])
                self._offsets[choice] += sum(len(token.text) for token in tokens)
                self._emit_choice(_text_choice(choice, "") | {"logprobs": logprobs})
            case events.Finished():
                last = _text_choice(choice, "", "", finish_reason(event, calls=False))
                self._end(event, last, len(self._echoes))


def _text_choice(
    index: int, text: str, thinking: str = "", reason: str | None = None
) -> dict[str, Any]:
    return {
        "text": text,
        "index": index,
        "logprobs": None,
        "finish_reason": reason,
        **({"reasoning_content": thinking} if thinking else {}),
    }


# Embeddings


_MAX_TEXTS = 2048  # OpenAI's limit


class EmbeddingsBody(Body):
    model: str | None = None
    input: str | list[str] | list[int] | list[list[int]]  # texts or token ids
    dimensions: int | None = Field(default=None, ge=1)
    encoding_format: Annotated[Literal["float", "base64"] | None, known_only()] = None


def embeddings(
    body: EmbeddingsBody, embedder: Embedder, *, truncate: bool = False
) -> Mapping[str, Any]:
    """Embed texts. truncate: long ones to the context, else they are refused."""
    texts = texts_of(body.input)
    if not 1 <= len(texts) <= _MAX_TEXTS:
        raise invalid("input", f"expected 1 to {_MAX_TEXTS} texts, got {len(texts)}")
    found = embedder.embed(texts, dimensions=body.dimensions, truncate=truncate)
    in_base64 = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _in_base64(each.values) if in_base64 else each.values,
        }
        for index, each in enumerate(found)
    ]
    tokens = sum(each.tokens for each in found)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": embedder.name, "data": data, "usage": usage}


def _in_base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


OPENAI = Dialect(
    (
        Endpoint("/v1/chat/completions", ChatBody, prepare_chat, ChatEncoder),
        Endpoint("/v1/completions", CompletionsBody, prepare_completions, CompletionsEncoder),
        Endpoint("/v1/embeddings", EmbeddingsBody, embeddings, needs="embedder"),
    ),
    error_body,
)
