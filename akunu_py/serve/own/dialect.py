"""The dialect of our own clients: all that the chat and the completion helper show of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from akunu_py.completion.types import CompleteOptions, CompletionRequest
from akunu_py.decoding.generate.chat_model import facts_of
from akunu_py.decoding.generate.events import Event, Reading, Told
from akunu_py.serve import sse
from akunu_py.serve.bodies import Body
from akunu_py.serve.dialect import CommentHeartbeat, Dialect, Endpoint, Prepared, WholeAnswer
from akunu_py.serve.errors import RequestError, Stopping
from akunu_py.serve.own.jobs import chat_job, complete_job
from akunu_py.serve.service import Service
from akunu_py.types import GenerateOptions, Message

Value = TypeVar("Value")


class ModelBody(Body):
    """Nothing."""


class CompleteBody(Body):
    """id: by which it can be ended. request, options: the fields of a CompletionRequest and of
    CompleteOptions."""

    id: str = Field(max_length=64)
    request: dict[str, Any]
    options: dict[str, Any]


class ChatBody(Body):
    """id: by which it can be ended. messages, options: the fields of Messages and of
    GenerateOptions."""

    id: str = Field(max_length=64)
    messages: list[dict[str, Any]] = Field(min_length=1)
    options: dict[str, Any]


class EndBody(Body):
    """id: of the request that shall end with what it has."""

    id: str = Field(max_length=64)


def prepare_model(body: ModelBody, service: Service) -> Mapping[str, Any]:
    """What our clients tell their users of the model."""
    facts = asdict(facts_of(service.engine))
    del facts["server"]  # which its client knows better
    return {"model": facts, "fills_in": service.infill.family is not None}


def prepare_complete(body: CompleteBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    request = _value(CompletionRequest, body.request, "request")
    options = _value(CompleteOptions, body.options, "options")
    job = complete_job(
        lambda session: service.completer(session, options),
        request,
        lambda: body.id in service.ending,
    )
    return Prepared([job], _whole, OwnEncoder(), short=True)


def prepare_chat(body: ChatBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    messages = _value(list[Message], body.messages, "messages")
    options = _value(GenerateOptions, body.options, "options")
    job = chat_job(messages, options, lambda: body.id in service.ending)
    return Prepared([job], _whole, OwnEncoder())


def prepare_end(body: EndBody, service: Service) -> Mapping[str, Any]:
    """Has a request end soon, whether or not it has begun."""
    service.ending.append(body.id)
    return {}


def _value(kind: type[Value], given: Any, name: str) -> Value:
    """A value of ours that was sent as JSON."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([name, *map(str, first["loc"])])
        raise RequestError(f"{place}: {first['msg']}", param=place) from error


def _whole(answers: Sequence[WholeAnswer]) -> Mapping[str, Any]:
    raise NotImplementedError  # all is streamed


class OwnEncoder(CommentHeartbeat):
    """Writes down how far the prompt is read, then what the job tells."""

    def encode(self, event: Event, choice: int) -> list[bytes]:
        """See `Encoder`."""
        if isinstance(event, Reading):
            return [sse.frame({"reading": [event.done, event.total]})]
        return [sse.frame(event.value)] if isinstance(event, Told) else []

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [sse.frame(error_body(error))]


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """gone: whether the server is about to be."""
    gone = isinstance(error, Stopping)
    return {"error": {"message": error.message, "kind": error.kind, "gone": gone}}


OWN = Dialect(
    "own",
    (
        Endpoint("/akunu/model", ModelBody, prepare_model, "What is served, for akunu's clients."),
        Endpoint("/akunu/complete", CompleteBody, prepare_complete, "Completes, for akunu's own."),
        Endpoint("/akunu/chat", ChatBody, prepare_chat, "Answers, for akunu's own chat."),
        Endpoint("/akunu/end", EndBody, prepare_end, "Ends a request of akunu's own clients."),
    ),
    error_body,
)
