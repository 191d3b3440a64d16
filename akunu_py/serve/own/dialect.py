"""The API of akunu's own clients, with all data that the chat and completions show."""

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
    CommentEncoder,
    Dialect,
    Endpoint,
    PreparedRequest,
    WholeAnswer,
    frame,
)
from akunu_py.serve.dialect.request_errors import RequestError, ServerStopping
from akunu_py.serve.dialect.service import CompletionEvents, Service
from akunu_py.types import GenerateOptions, Message

Value = TypeVar("Value")


class ModelBody(Body):
    """Empty."""


class EndBody(Body):
    id: str = Field(max_length=64)  # of a request, to end it with the text so far


class OwnCompleteBody(EndBody):
    request: dict[str, Any]  # fields of a CompletionRequest
    options: dict[str, Any]  # fields of CompleteOptions


class OwnChatBody(EndBody):
    messages: list[dict[str, Any]] = Field(min_length=1)  # fields of Messages
    options: dict[str, Any]  # fields of GenerateOptions


def prepare_model(body: ModelBody, service: Service) -> Mapping[str, Any]:
    """Return the facts of the model."""
    facts = asdict(facts_of(service.engine))
    del facts["server"]  # set by the client
    return {"model": facts, "fills_in": service.infill.family is not None}


def prepare_complete(body: OwnCompleteBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    request = _value(CompletionRequest, body.request, "request")
    options = _value(CompleteOptions, body.options, "options")
    job = complete_job(
        lambda session: service.completer(session, options),
        request,
        lambda: body.id in service.ending,
    )
    return PreparedRequest([job], _whole, OwnEncoder(), short=True)


def prepare_chat(body: OwnChatBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    messages = _value(list[Message], body.messages, "messages")
    options = _value(GenerateOptions, body.options, "options")
    job = chat_job(messages, options, lambda: body.id in service.ending)
    return PreparedRequest([job], _whole, OwnEncoder())


def prepare_end(body: EndBody, service: Service) -> Mapping[str, Any]:
    """End a request soon, even if it has not begun."""
    service.ending.append(body.id)
    return {}


def _value(kind: type[Value], given: Any, name: str) -> Value:
    """Return a dataclass from its fields. Raises RequestError."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(given), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([name, *map(str, first["loc"])])
        raise RequestError(f"{place}: {first['msg']}", param=place) from error


def _whole(answers: Sequence[WholeAnswer]) -> Mapping[str, Any]:
    raise NotImplementedError  # every answer is streamed


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """Return an error. gone: the server is stopping."""
    gone = isinstance(error, ServerStopping)
    return {"error": {"message": error.message, "kind": error.kind, "gone": gone}}


class OwnEncoder(CommentEncoder):
    """Encodes prefill progress, then the events of the job."""

    error_body = staticmethod(error_body)

    def encode(self, event: Event, choice: int) -> list[bytes]:
        if isinstance(event, PrefillProgress):
            return [frame({"reading": [event.done, event.total]})]
        return [frame(event.value)] if isinstance(event, PieceDetails) else []


_GAUGES_S = 1 / 16  # between two updates


def complete_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    ending: Callable[[], bool],
) -> Job:
    """Return the job of a completion: its pieces, then all of it.

    completer: called in the session's thread. ending: returns True to stop the completion.
    """

    def begin(session: Session) -> CompletionEvents:
        def ended() -> CompletionReason | None:
            if session.cancelled:
                return "cancelled"
            return "time" if ending() else None

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
        run = completer(session).begin(session, request, ended, new.append)
        return CompletionEvents(run, drain, end)

    return begin


def chat_job(
    messages: Sequence[Message], options: GenerateOptions, ending: Callable[[], bool]
) -> Job:
    """Return the job of an answer: pieces with statistics, and gauges from time to time.

    ending: returns True to stop the answer.
    """

    def begin(session: Session) -> ChatEvents:
        return ChatEvents(session, LoadedAnswer(session, messages, options), ending)

    return begin


class ChatEvents:
    """The events of an answer for akunu's chat, as an `Answering`."""

    def __init__(self, session: Session, answer: LoadedAnswer, ending: Callable[[], bool]) -> None:
        self._session = session
        self._answer = answer
        self._ending = ending
        self._measured = 0.0
        self.request = answer.request

    def add(self, steps: Sequence[Step]) -> list[Event]:
        answer = self._answer
        if self._ending():
            answer.cancel()
        events: list[Event] = []
        for step in answer.show(steps):
            if isinstance(step, PrefillProgress):
                events.append(step)
                continue
            shown = {"piece": asdict(step), "stats": asdict(answer.stats)}
            if time.monotonic() - self._measured >= _GAUGES_S:
                self._measured = time.monotonic()
                shown["gauges"] = asdict(answer.gauges())
            events.append(PieceDetails(step.piece.thinking + step.piece.text, shown))
        return [*events, *self._end()] if self.request.status is Status.FINISHED else events

    def _end(self) -> list[Event]:
        answer = self._answer
        stats, reason = replace(answer.stats), answer.finish_reason or "cancelled"
        if self._session.cancelled:
            return [Finished(reason, stats)]
        gauges = asdict(answer.gauges())
        last = PieceDetails("", {"ended": reason, "stats": asdict(stats), "gauges": gauges})
        # The client ended it, not the server.
        return [last, Finished("stop" if reason == "cancelled" else reason, stats)]


OWN = Dialect(
    "own",
    (
        Endpoint("/akunu/model", ModelBody, prepare_model, "What is served, for akunu's clients."),
        Endpoint(
            "/akunu/complete", OwnCompleteBody, prepare_complete, "Completes, for akunu's own."
        ),
        Endpoint("/akunu/chat", OwnChatBody, prepare_chat, "Answers, for akunu's own chat."),
        Endpoint("/akunu/end", EndBody, prepare_end, "Ends a request of akunu's own clients."),
    ),
    error_body,
)
