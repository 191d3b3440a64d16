"""Chat Completions: bodies in, jobs out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from akunu_py.decoding.chat_format.effort import Effort
from akunu_py.decoding.scheduling.job import chat_job
from akunu_py.serve.bodies import Body, Ignored
from akunu_py.serve.dialect import Prepared
from akunu_py.serve.errors import RequestError
from akunu_py.serve.openai.chat_encoder import ChatEncoder, ChatHead, whole_chat
from akunu_py.serve.openai.messages import MessageBody, TextPart, messages_of
from akunu_py.serve.openai.tools import ChoiceBody, ToolBody, choice_of, tools_of
from akunu_py.serve.sampling import (
    JSON_OBJECT,
    SamplingBody,
    choices,
    generate_options,
    includes_usage,
    schema_constraint,
)
from akunu_py.serve.service import Service
from akunu_py.serve.turns import effort_variables
from akunu_py.types import Constraint


class TextFormat(Body):
    type: Literal["text"]


class JsonFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True)

    name: str = ""
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(True, alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


Format = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class Prediction(Body):
    """What the answer may repeat, with changes."""

    type: Literal["content"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(SamplingBody):
    """The body of /v1/chat/completions."""

    messages: list[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    response_format: Format | None = None
    tools: list[ToolBody] | None = None
    tool_choice: ChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    reasoning_effort: Effort | None = None
    verbosity: Ignored = None  # a hint at how long to write, of which models have no notion
    modalities: list[Literal["text"]] | None = None


def prepare_chat(body: ChatBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    service.check_model(body.model)
    messages = messages_of(body.messages)
    limit = body.max_completion_tokens or body.max_tokens or service.most_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs: only with logprobs", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    constraint = _constraint(body.response_format)
    options = generate_options(body, service, limit, constraint, logprobs)
    tools = tools_of(body.tools or ())
    choice = choice_of(body.tool_choice, tools)
    predicted = body.prediction.text if body.prediction else ""
    variables = effort_variables(service, body.reasoning_effort, "reasoning_effort")
    jobs = [
        chat_job(
            service.engine,
            messages,
            each,
            tools,
            choice,
            parallel=body.parallel_tool_calls is not False,
            predicted=predicted,
            variables=variables,
        )
        for each in choices(options, body.n or 1)
    ]
    head = ChatHead(service.name)
    usage = includes_usage(body)
    encoder = ChatEncoder(head, len(jobs), usage=usage) if body.stream else None
    return Prepared(jobs, lambda answers: whole_chat(head, answers), encoder)


def _constraint(format: Format | None) -> Constraint | None:
    if isinstance(format, SchemaFormat):
        return schema_constraint(format.json_schema.json_schema)
    return JSON_OBJECT if isinstance(format, JsonFormat) else None
