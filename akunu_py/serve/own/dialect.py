"""The API of akunu's own clients: all data that akunu's chat and editors need."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.completion_request import CompleteOptions, Completion, CompletionRequest
from akunu_py.engine.answer import ChatJob
from akunu_py.engine.engine import facts_of
from akunu_py.engine.events import Event, Finished
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.interface import Dialect, Encoder, Endpoint, PreparedRequest
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping
from akunu_py.serve.dialect.service import Service
from akunu_py.serve.own.remote_loop import SENT
from akunu_py.text import first_problem
from akunu_py.types import GenerateOptions, Message, Tool

Value = TypeVar("Value")


class ModelBody(Body):
    model: str = ""  # its name; "": the server's first


class RequestBody(ModelBody):
    id: str = Field(max_length=64)  # request id, chosen by the client

    @property
    def streams(self) -> bool:
        return True


class AkunuCompleteBody(RequestBody):
    request: dict[str, Any]  # fields of a CompletionRequest
    options: dict[str, Any]  # fields of CompleteOptions


class AkunuChatBody(RequestBody):
    messages: list[dict[str, Any]] = Field(min_length=1)  # fields of Messages
    options: dict[str, Any]  # fields of GenerateOptions
    tools: list[dict[str, Any]] = Field(default=[])  # fields of Tools


def prepare_model(body: ModelBody, service: Service) -> Mapping[str, Any]:
    """Describe the served model, for akunu."""
    return {"model": asdict(facts_of(service.engine)), "fills_in": service.fills_in}


def prepare_complete(body: AkunuCompleteBody, service: Service) -> PreparedRequest:
    """Complete text, for akunu."""
    request = _parse_dataclass(CompletionRequest, body.request, "request")
    options = _parse_dataclass(CompleteOptions, body.options, "options")
    job = CompletionJob(
        request,
        lambda loop: service.completer(loop, options),
        lambda: "time" if body.id in service.ending else None,
    )
    return PreparedRequest([job], short=True)


def prepare_chat(body: AkunuChatBody, service: Service) -> PreparedRequest:
    """Answer a conversation, for akunu."""
    messages = _parse_dataclass(list[Message], body.messages, "messages")
    service.check_length(messages)
    options = _parse_dataclass(GenerateOptions, body.options, "options")
    tools = _parse_dataclass(list[Tool], body.tools, "tools")
    return PreparedRequest([ChatJob(messages, options, tools)], idle=options.side_request)


def prepare_end(body: RequestBody, ending: Sequence[deque[str]]) -> Mapping[str, Any]:
    """End a request early, for akunu, even if it is still queued or its model is unloading."""
    for each in ending:
        each.append(body.id)
    return {}


def _parse_dataclass(kind: type[Value], fields: Any, name: str) -> Value:
    """Build a dataclass from its fields. Raises RequestError. name: the parameter."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        raise RequestError(first_problem(error, name)) from error


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """Return an error. gone: the server is stopping."""
    stopping = isinstance(error, ServerStopping)
    return {"error": {"message": error.message, "status": error.status, "gone": stopping}}


class AkunuEncoder(Encoder):
    """Encodes events by the names of their classes; `RemoteLoop` decodes them."""

    def add(self, event: Event, choice: int) -> None:
        sent: Event | Completion = event
        if isinstance(event, Finished) and isinstance(event.details, Completion):
            sent = event.details
        if isinstance(sent, SENT):
            self.emit({type(sent).__name__: asdict(sent)})


AKUNU = Dialect(
    (
        Endpoint("/akunu/model", ModelBody, prepare_model),
        Endpoint("/akunu/complete", AkunuCompleteBody, prepare_complete, AkunuEncoder),
        Endpoint("/akunu/chat", AkunuChatBody, prepare_chat, AkunuEncoder),
        Endpoint("/akunu/end", RequestBody, prepare_end, needs="ending"),
    ),
    error_body,
)
