"""The API of akunu's own clients, with all data that the chat and completions show."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from akunu_py.completion.completer import Completer
from akunu_py.completion.request import (
    FINISH_REASONS,
    CompleteOptions,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.events import Event, Finished, PieceDetails, PrefillProgress
from akunu_py.decoding.generate.chat_model import LoadedAnswer, facts_of
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.scheduling.job import Job
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
from akunu_py.serve.dialect.service import Service, completion_events
from akunu_py.types import GenerateOptions, Message

Value = TypeVar("Value")


class ModelBody(Body):
    """Empty."""


class EndBody(Body):
    id: str = Field(max_length=64)  # of a request, to end it with the text so far


class AkunuCompleteBody(EndBody):
    request: dict[str, Any]  # fields of a CompletionRequest
    options: dict[str, Any]  # fields of CompleteOptions


class AkunuChatBody(EndBody):
    messages: list[dict[str, Any]] = Field(min_length=1)  # fields of Messages
    options: dict[str, Any]  # fields of GenerateOptions


def prepare_model(body: ModelBody, service: Service) -> Mapping[str, Any]:
    """Return the facts of the model."""
    facts = asdict(facts_of(service.engine))
    del facts["server"]  # set by the client
    return {"model": facts, "fills_in": service.infill.family is not None}


def prepare_complete(body: AkunuCompleteBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    request = _value(CompletionRequest, body.request, "request")
    options = _value(CompleteOptions, body.options, "options")
    job = akunu_completion_job(
        lambda session: service.completer(session, options),
        request,
        lambda: body.id in service.ending,
    )
    return PreparedRequest([job], _whole, AkunuEncoder(), short=True)


def prepare_chat(body: AkunuChatBody, service: Service) -> PreparedRequest:
    """Return the job and the encoder. Raises RequestError."""
    messages = _value(list[Message], body.messages, "messages")
    options = _value(GenerateOptions, body.options, "options")
    job = akunu_chat_job(messages, options, lambda: body.id in service.ending)
    return PreparedRequest([job], _whole, AkunuEncoder())


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


def _whole(answers: Sequence[CollectedAnswer]) -> Mapping[str, Any]:
    raise NotImplementedError  # every answer is streamed


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """Return an error. gone: the server is stopping."""
    gone = isinstance(error, ServerStopping)
    return {"error": {"message": error.message, "kind": error.kind, "gone": gone}}


class AkunuEncoder(CommentEncoder):
    """Encodes prefill progress, then the events of the job."""

    error_body = staticmethod(error_body)

    def encode(self, event: Event, choice: int) -> list[bytes]:
        if isinstance(event, PrefillProgress):
            return [frame({"reading": [event.done, event.total]})]
        return [frame(event.value)] if isinstance(event, PieceDetails) else []


_GAUGES_S = 1 / 16  # between two updates


def akunu_completion_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    ending: Callable[[], bool],
) -> Job:
    """Return the job of a completion: its pieces, then all of it.

    completer: called in the session's thread. ending: returns True to stop the completion.
    """

    def events(session: Session) -> Iterator[Event | None]:
        def ended() -> CompletionReason | None:
            if session.turn.cancelled:
                return "cancelled"
            return "time" if ending() else None

        def drain(step: Event | None) -> list[Event]:
            text = "".join(new)
            new.clear()
            return [PieceDetails(text, {"text": text})] if text else []

        made, new = completer(session), list[str]()
        steps = made.steps(made.share(session), request, ended, new.append)
        completion = yield from completion_events(steps, drain)
        if completion.finish_reason != "cancelled":
            yield PieceDetails("", {"completion": asdict(completion)})
        yield Finished(FINISH_REASONS[completion.finish_reason], completion.stats)

    return events


def akunu_chat_job(
    messages: Sequence[Message], options: GenerateOptions, ending: Callable[[], bool]
) -> Job:
    """Return the job of an answer: pieces with statistics, and gauges from time to time.

    ending: returns True to stop the answer.
    """

    def events(session: Session) -> Iterator[Event | None]:
        answer, measured = LoadedAnswer(session, messages, options), 0.0
        for step in answer.steps():
            if ending():
                answer.cancel()
            if isinstance(step, PrefillProgress):
                yield step
                continue
            shown = {"piece": asdict(step), "stats": asdict(answer.stats)}
            if time.monotonic() - measured >= _GAUGES_S:
                measured = time.monotonic()
                shown["gauges"] = asdict(answer.gauges())
            yield PieceDetails(step.piece.thinking + step.piece.text, shown)
        stats, reason = replace(answer.stats), answer.finish_reason or "cancelled"
        if not session.turn.cancelled:
            gauges = asdict(answer.gauges())
            yield PieceDetails("", {"ended": reason, "stats": asdict(stats), "gauges": gauges})
            # The client ended it, not the server.
            reason = "stop" if reason == "cancelled" else reason
        yield Finished(reason, stats)

    return events


AKUNU = Dialect(
    "own",
    (
        Endpoint("/akunu/model", ModelBody, prepare_model, "What is served, for akunu's clients."),
        Endpoint(
            "/akunu/complete", AkunuCompleteBody, prepare_complete, "Completes, for akunu's own."
        ),
        Endpoint("/akunu/chat", AkunuChatBody, prepare_chat, "Answers, for akunu's own chat."),
        Endpoint("/akunu/end", EndBody, prepare_end, "Ends a request of akunu's own clients."),
    ),
    error_body,
)
