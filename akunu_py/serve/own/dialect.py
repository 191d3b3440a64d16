"""The API of akunu's own clients: all data that akunu's chat and editors need."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from akunu_py.completion.completer import Completer
from akunu_py.completion.request import (
    FINISH_REASONS,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.events import Event, Finished, PieceDetails, PrefillProgress
from akunu_py.decoding.generate.chat_model import LoadedAnswer, facts_of
from akunu_py.decoding.generate.job import Job
from akunu_py.decoding.generate.session import Session, Status, Step
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.interface import (
    CollectedAnswer,
    CommentEncoder,
    Dialect,
    Endpoint,
    PreparedRequest,
    frame,
)
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping
from akunu_py.serve.dialect.service import CompletionEvents, Service
from akunu_py.types import GenerateOptions, Message

Value = TypeVar("Value")


class ModelBody(Body):
    """The empty body of /akunu/model."""


class RequestBody(Body):
    id: str = Field(max_length=64)  # request id, chosen by the client


class AkunuCompleteBody(RequestBody):
    request: dict[str, Any]  # fields of a CompletionRequest
    options: dict[str, Any]  # fields of CompleteOptions


class AkunuChatBody(RequestBody):
    messages: list[dict[str, Any]] = Field(min_length=1)  # fields of Messages
    options: dict[str, Any]  # fields of GenerateOptions


def prepare_model(body: ModelBody, service: Service) -> Mapping[str, Any]:
    """Return facts about the served model."""
    facts = asdict(facts_of(service.engine))
    del facts["server"]  # set by the client
    return {"model": facts, "fills_in": service.infill.family is not None}


def prepare_complete(body: AkunuCompleteBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    request = _parse_dataclass(CompletionRequest, body.request, "request")
    options = _parse_dataclass(CompleteOptions, body.options, "options")
    job = akunu_completion_job(
        lambda session: service.completer(session, options),
        request,
        lambda: body.id in service.ending,
    )
    return PreparedRequest([job], _build_reply, AkunuEncoder(), short=True)


def prepare_chat(body: AkunuChatBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    messages = _parse_dataclass(list[Message], body.messages, "messages")
    options = _parse_dataclass(GenerateOptions, body.options, "options")
    job = akunu_chat_job(messages, options, lambda: body.id in service.ending)
    return PreparedRequest([job], _build_reply, AkunuEncoder())


def prepare_end(body: RequestBody, service: Service) -> Mapping[str, Any]:
    """End a request with its text so far, even if it is still queued."""
    service.ending.append(body.id)
    return {}


def _parse_dataclass(kind: type[Value], fields: Any, name: str) -> Value:
    """Build a dataclass from its fields. Raises RequestError. name: the parameter."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([name, *map(str, first["loc"])])
        raise RequestError(f"{place}: {first['msg']}", param=place) from error


def _build_reply(answers: Sequence[CollectedAnswer]) -> Mapping[str, Any]:
    raise NotImplementedError  # every answer is streamed


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """Return an error. gone: the server is stopping."""
    stopping = isinstance(error, ServerStopping)
    return {"error": {"message": error.message, "kind": error.kind, "gone": stopping}}


class AkunuEncoder(CommentEncoder):
    """Encodes prefill progress and piece details."""

    error_body = staticmethod(error_body)

    def encode(self, event: Event, choice: int) -> list[bytes]:
        if isinstance(event, PrefillProgress):
            return [frame({"reading": [event.done, event.total]})]
        return [frame(event.value)] if isinstance(event, PieceDetails) else []


_GAUGES_INTERVAL_S = 1 / 16  # between two updates


def akunu_completion_job(
    get_completer: Callable[[Session], Completer],
    request: CompletionRequest,
    stop_requested: Callable[[], bool],
) -> Job:
    """Return the job of a completion: its pieces, then the complete result.

    get_completer: called in the session's thread. stop_requested: polled; True ends the completion.
    """

    def begin(session: Session) -> CompletionEvents:
        def end_reason() -> CompletionReason | None:
            if session.cancelled:
                return "cancelled"
            return "time" if stop_requested() else None

        def drain(step: Event | None) -> list[Event]:
            text = "".join(new)
            new.clear()
            return [PieceDetails(text, {"text": text})] if text else []

        def end(completion: Completion) -> list[Event]:
            last = Finished(FINISH_REASONS[completion.finish_reason], completion.stats)
            if completion.finish_reason == "cancelled":
                return [last]
            return [PieceDetails("", {"completion": asdict(completion)}), last]

        new: list[str] = []
        run = get_completer(session).begin(session, request, end_reason, new.append)
        return CompletionEvents(run, drain, end)

    return begin


def akunu_chat_job(
    messages: Sequence[Message], options: GenerateOptions, stop_requested: Callable[[], bool]
) -> Job:
    """Return the job of an answer: pieces with statistics, and periodic gauges.

    stop_requested: polled; True ends the answer.
    """

    def begin(session: Session) -> ChatEvents:
        return ChatEvents(session, LoadedAnswer(session, messages, options), stop_requested)

    return begin


class ChatEvents:
    """The events of an answer for akunu's chat, as an `Answering`."""

    def __init__(
        self, session: Session, answer: LoadedAnswer, stop_requested: Callable[[], bool]
    ) -> None:
        self._session = session
        self._answer = answer
        self._stop_requested = stop_requested
        self._gauges_time = 0.0
        self.request = answer.request

    def add(self, steps: Sequence[Step]) -> list[Event]:
        answer = self._answer
        if self._stop_requested():
            answer.cancel()
        events: list[Event] = []
        for step in answer.show(steps):
            if isinstance(step, PrefillProgress):
                events.append(step)
                continue
            details = {"piece": asdict(step), "stats": asdict(answer.stats)}
            if time.monotonic() - self._gauges_time >= _GAUGES_INTERVAL_S:
                self._gauges_time = time.monotonic()
                details["gauges"] = asdict(answer.gauges())
            events.append(PieceDetails(step.piece.thinking + step.piece.text, details))
        return [*events, *self._end()] if self.request.status is Status.FINISHED else events

    def _end(self) -> list[Event]:
        answer = self._answer
        stats, reason = replace(answer.stats), answer.finish_reason or "cancelled"
        if self._session.cancelled:
            return [Finished(reason, stats)]
        gauges = asdict(answer.gauges())
        last = PieceDetails("", {"ended": reason, "stats": asdict(stats), "gauges": gauges})
        # The client stopped the answer; "cancelled" would mean that the server is stopping.
        return [last, Finished("stop" if reason == "cancelled" else reason, stats)]


AKUNU = Dialect(
    "own",
    (
        Endpoint("/akunu/model", ModelBody, prepare_model, "Describe the served model, for akunu."),
        Endpoint(
            "/akunu/complete", AkunuCompleteBody, prepare_complete, "Complete text, for akunu."
        ),
        Endpoint("/akunu/chat", AkunuChatBody, prepare_chat, "Answer a conversation, for akunu."),
        Endpoint("/akunu/end", RequestBody, prepare_end, "End a request early, for akunu."),
    ),
    error_body,
)
