"""The API of Ollama, for its clients: /api/chat, /api/generate, /api/embed and the lists of models.

Source: docs/api.md of Ollama. Streams are lines of JSON.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AliasChoices, Field, model_validator

from akunu_py.engine import events
from akunu_py.engine.answer import chat_job, prompt_job
from akunu_py.engine.job import Job
from akunu_py.serve.dialect.bodies import Body, describe
from akunu_py.serve.dialect.fields import (
    FormatField,
    SamplingFields,
    ThinkingFields,
    ThinkingPlan,
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
from akunu_py.serve.dialect.service import Embedder, Service
from akunu_py.serve.openai import ChatTool, EmbeddingsBody, chat_logprobs, embeddings, tools_of
from akunu_py.types import GenerateOptions, Message, TokenLogprobs, ToolCall

API_VERSION = "0.12.11"  # of Ollama; clients such as Copilot refuse versions before 0.6.4


class OptionsBody(SamplingFields):
    """The `options` of a request. Those of Ollama's loader, such as num_ctx, are unknown."""

    num_predict: Annotated[int, Field(ge=-2)] | None = None  # 0 or less: no limit


class OllamaBody(ThinkingFields):
    """Fields of both kinds of requests."""

    model: str | None = None
    keep_alive: int | float | str | None = None  # 0: unload the model after the request
    stream: bool = True
    options: OptionsBody | None = None
    format: FormatField = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: dict[str, Any]) -> dict[str, Any]:
        """Drop fields that are null, as Ollama does."""
        return {k: v for k, v in body.items() if v is not None or k not in cls.model_fields}

    @property
    def has_prompt(self) -> bool:
        """Whether to answer; otherwise the client only loads or unloads the model."""
        return any(getattr(self, name, None) for name in ("messages", "prompt", "images"))

    @property
    def streams(self) -> bool:
        return self.stream and self.has_prompt

    @property
    def unloads(self) -> bool:
        return re.fullmatch(r"0+(\.0*)?(ms|s|m|h)?", str(self.keep_alive)) is not None

    @property
    def needs_model(self) -> bool:
        return self.has_prompt or not self.unloads


class OllamaCall(Body):
    name: str
    arguments: dict[str, Any] = Field(default={})


class OllamaCallBody(Body):
    function: OllamaCall


class OllamaMessage(Body):
    """A message of any role. Results of tools follow their calls in order, or name their tool."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # in base64
    tool_calls: list[OllamaCallBody] | None = None
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    messages: list[OllamaMessage] = Field(default=[])
    tools: list[ChatTool] | None = None


class OllamaGenerateBody(OllamaBody):
    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False  # the prompt needs no template
    images: list[str] | None = None


class OllamaEmbedBody(Body):
    model: str | None = None
    input: str | list[str]
    dimensions: int | None = Field(default=None, ge=1)
    truncate: bool | None = None  # the default is true


class OllamaEmbeddingsBody(Body):
    model: str | None = None
    prompt: str


class OllamaShowBody(Body):
    # The other name is that of old clients.
    model: str = Field(default="", validation_alias=AliasChoices("model", "name"))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def prepare_chat(body: OllamaChatBody, service: Service) -> PreparedRequest | Mapping[str, Any]:
    """Answer a conversation, for Ollama."""
    if not body.has_prompt:
        return _loaded(body, service)
    messages = messages_of(body.messages)
    service.check_length(messages)
    thinking = plan_thinking(body, service)
    tools = tools_of([tool.function for tool in body.tools or ()])
    options, variables = _options(body, service, thinking), thinking.variables
    job = chat_job(service.engine, messages, options, tools, variables=variables)
    return _prepared(job, body, thinking)


def prepare_generate(
    body: OllamaGenerateBody, service: Service
) -> PreparedRequest | Mapping[str, Any]:
    """Continue, for Ollama."""
    if not body.has_prompt:
        return _loaded(body, service)
    engine = service.engine
    if not body.suffix:
        service.check_length([body.system, body.prompt])
    thinking = plan_thinking(body, service)
    options = _options(body, service, thinking)
    if body.suffix:
        infill = service.infill_prompt(body.prompt, body.suffix)
        options = replace(options, stop_tokens=(*options.stop_tokens, *infill.stop_tokens))
        job: Job = prompt_job(engine, infill.tokens, options, infill.draft_context)
    elif body.raw or not engine.tokens.tokenizer.has_chat_template:
        job = prompt_job(engine, engine.tokens.encode(body.prompt), options)
    else:
        system = [Message("system", body.system)] if body.system else []
        user = Message("user", _with_images(body.prompt, body.images))
        job = chat_job(engine, [*system, user], options, variables=thinking.variables)
    return _prepared(job, body, thinking)


def _options(body: OllamaBody, service: Service, thinking: ThinkingPlan) -> GenerateOptions:
    format = {} if body.format is None else {"format": body.format}
    options = (body.options or OptionsBody()).model_copy(update=format)
    requested = options.num_predict
    limit = -1 if requested is not None and requested <= 0 else requested
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return generate_options(options, service, limit, None, logprobs, thinking.budget)


def _prepared(job: Job, body: OllamaBody, thinking: ThinkingPlan) -> PreparedRequest:
    return PreparedRequest([job], shows_thinking=thinking.shown and body.think is not False)


def _loaded(body: OllamaBody, service: Service) -> Mapping[str, Any]:
    """Return the reply to a request without a prompt, which loads or unloads the model."""
    encoder = OllamaEncoder(body, service.name)
    return encoder.line(done=True, done_reason="unload" if body.unloads else "load")


def messages_of(bodies: Sequence[OllamaMessage]) -> list[Message]:
    """Return the conversation. Raises RequestError for a result without a call."""
    messages: list[Message] = []
    open_calls: list[ToolCall] = []  # without a result
    for number, body in enumerate(bodies):
        text = _with_images(body.content or "", body.images)
        if body.role == "tool":
            named = [call for call in open_calls if body.tool_name in (None, call.name)]
            if not named:
                raise invalid(f"messages.{number}", "expected a call before the result of a tool")
            open_calls.remove(named[0])
            messages.append(Message("tool", text, tool_call_id=named[0].id, name=named[0].name))
            continue
        calls = tuple(
            ToolCall(call.function.name, json.dumps(call.function.arguments), f"{number}_{index}")
            for index, call in enumerate(body.tool_calls or ())
        )
        open_calls += calls
        messages.append(Message(body.role, text, body.thinking or "", calls))
    return messages


def _with_images(text: str, images: Sequence[str] | None) -> str:
    """Return a text with a line for each image, which the model cannot read."""
    return "\n".join([*(describe({"type": "image", "data": each}) for each in images or ()), text])


def _calls(answer: CollectedAnswer) -> list[dict[str, Any]]:
    """Return the complete calls in Ollama's form."""
    return [
        {"function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")}}
        for call in answer.complete_calls
    ]


def _logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    return {"logprobs": chat_logprobs(tokens)["content"]} if tokens else {}


class OllamaEncoder(Encoder):
    """Encodes lines, or a whole reply; a call is sent once it is complete."""

    media_type: ClassVar[str] = "application/x-ndjson"

    def __init__(self, body: OllamaBody, name: str) -> None:
        super().__init__(body, name)
        self._started = time.monotonic()
        self._chat = isinstance(body, OllamaChatBody)  # the text is in a message
        self._held = CollectedAnswer()  # calls and logprobs for the next line

    def whole(self, answers: Sequence[CollectedAnswer]) -> dict[str, Any]:
        (answer,) = answers
        end, logprobs = self._end(answer.finished), _logprobs(answer.logprobs)
        calls = _calls(answer)
        return self.line(answer.text, answer.thinking, tool_calls=calls, **end, **logprobs)

    def line(self, text: str = "", thinking: str = "", **more: Any) -> dict[str, Any]:
        """Return a line, or a whole reply. more: further fields of the message, or `done`."""
        calls = more.pop("tool_calls", None)
        part: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if self._chat:
            part |= {"role": "assistant", "content": text}
            part |= {"tool_calls": calls} if calls else {}
            part = {"message": part}
        else:
            part |= {"response": text}
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **part, "done": False} | more

    def _end(self, event: events.Finished) -> dict[str, Any]:
        stats = event.stats
        return {
            "done": True,
            "done_reason": "length" if event.reason in ("length", "context") else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._started),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_s),
            "eval_count": stats.generated_tokens,
            "eval_duration": _nanoseconds(stats.decode_s),
            "akunu": statistics(event) | {"cached_tokens": stats.cached_tokens},
        }

    def heartbeat(self) -> None:
        self.emit(self.line())

    def frame(self, value: Mapping[str, Any]) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    def add(self, event: events.Event, choice: int) -> None:
        match event:
            case events.TextDelta(text):
                self._emit_line(text)
            case events.ThinkingDelta(text):
                self._emit_line(thinking=text)
            case events.ToolCallFinished():
                self._held.add(event)
                if calls := _calls(self._held):
                    self._emit_line(tool_calls=calls)
            case events.Finished():
                self._emit_line(**self._end(event))
            case _:
                self._held.add(event)

    def _emit_line(self, text: str = "", thinking: str = "", **more: Any) -> None:
        logprobs, self._held = _logprobs(self._held.logprobs), CollectedAnswer()
        self.emit(self.line(text, thinking, **more, **logprobs))


def embed(body: OllamaEmbedBody, embedder: Embedder) -> Mapping[str, Any]:
    """Embed texts, for Ollama."""
    request = EmbeddingsBody(model=body.model, input=body.input, dimensions=body.dimensions)
    found = embeddings(request, embedder, truncate=body.truncate is not False)
    return {
        "model": found["model"],
        "embeddings": [each["embedding"] for each in found["data"]],
        "prompt_eval_count": found["usage"]["prompt_tokens"],
    }


def embed_prompt(body: OllamaEmbeddingsBody, embedder: Embedder) -> Mapping[str, Any]:
    """Embed one text, for older clients of Ollama."""
    (found,) = embedder.embed([body.prompt], truncate=True)
    return {"embedding": found.values}


def show(body: OllamaShowBody, description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Describe a model, for Ollama, without loading it."""
    length = description["context_length"]
    context = {"mlx.context_length": length} if length else {}
    return {
        "modified_at": description["created_at"],
        "details": _DETAILS,
        "model_info": {"general.architecture": "mlx"} | context,
        "capabilities": ["embedding"] if description["embeds"] else ["completion", "tools"],
        "template": "",
        "parameters": "",
    }


_DETAILS = {"format": "mlx"}


def tags(descriptions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "models": [
            {
                "name": each["id"],
                "model": each["id"],
                "modified_at": each["created_at"],
                "digest": sha256(each["id"].encode()).hexdigest(),  # the client needs one
                "details": _DETAILS,
            }
            for each in descriptions
        ]
    }


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    return {"error": error.message}


OLLAMA = Dialect(
    (
        Endpoint("/api/chat", OllamaChatBody, prepare_chat, OllamaEncoder),
        Endpoint("/api/generate", OllamaGenerateBody, prepare_generate, OllamaEncoder),
        Endpoint("/api/embed", OllamaEmbedBody, embed, needs="embedder"),
        Endpoint("/api/embeddings", OllamaEmbeddingsBody, embed_prompt, needs="embedder"),
        Endpoint("/api/show", OllamaShowBody, show, needs="description"),
    ),
    error_body,
)
