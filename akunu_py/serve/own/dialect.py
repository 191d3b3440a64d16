"""The dialect of our own clients: all that the chat and the completion helper show of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from akunu_py.completion.completer import Completer
from akunu_py.completion.types import (
    FINISH_REASONS,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
)
from akunu_py.decoding.chat_model import LoadedAnswer, facts_of
from akunu_py.decoding.events import Ended, Event, Reading, Told
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.session import Session
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.errors import RequestError, Stopping
from akunu_py.serve.dialect.interface import (
    CommentHeartbeat,
    Dialect,
    Endpoint,
    Prepared,
    WholeAnswer,
    frame,
)
from akunu_py.serve.dialect.service import Service
from akunu_py.types import GenerateOptions, Message

Value = TypeVar("Value")


class ModelBody(Body):
    """Nothing."""


class OwnCompleteBody(Body):
    """id: by which it can be ended. request, options: the fields of a CompletionRequest and of
    CompleteOptions."""

    id: str = Field(max_length=64)
    request: dict[str, Any]
    options: dict[str, Any]


class OwnChatBody(Body):
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


def prepare_complete(body: OwnCompleteBody, service: Service) -> Prepared:
    """Raises RequestError for what cannot be honoured."""
    request = _value(CompletionRequest, body.request, "request")
    options = _value(CompleteOptions, body.options, "options")
    job = complete_job(
        lambda session: service.completer(session, options),
        request,
        lambda: body.id in service.ending,
    )
    return Prepared([job], _whole, OwnEncoder(), short=True)


def prepare_chat(body: OwnChatBody, service: Service) -> Prepared:
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
            return [frame({"reading": [event.done, event.total]})]
        return [frame(event.value)] if isinstance(event, Told) else []

    def fail(self, error: RequestError) -> list[bytes]:
        """See `Encoder`."""
        return [frame(error_body(error))]


def error_body(error: RequestError, request_id: str = "") -> dict[str, Any]:
    """gone: whether the server is about to be."""
    gone = isinstance(error, Stopping)
    return {"error": {"message": error.message, "kind": error.kind, "gone": gone}}


_GAUGES_S = 1 / 16  # a chat shows them no oftener


def complete_job(
    completer: Callable[[Session], Completer],
    request: CompletionRequest,
    ending: Callable[[], bool],
) -> Job:
    """A completion; in the end all of it is told again. completer: for a session, called in its
    thread. ending: whether it shall end as if its time was over."""

    def events(session: Session) -> Iterator[Event | None]:
        def ended() -> CompletionReason | None:
            if session.turn.cancelled:
                return "cancelled"
            return "time" if ending() else None

        made, new = completer(session), list[str]()
        steps = made.steps(made.share(session), request, ended, new.append)
        completion: Completion | None = None
        while completion is None:
            try:
                yield next(steps)
            except StopIteration as last:
                completion = last.value
            if new:
                text = "".join(new)
                new.clear()
                yield Told(text, {"text": text})
        if completion.finish_reason != "cancelled":
            yield Told("", {"completion": asdict(completion)})
        yield Ended(FINISH_REASONS[completion.finish_reason], completion.stats)

    return events


def chat_job(
    messages: Sequence[Message], options: GenerateOptions, ending: Callable[[], bool]
) -> Job:
    """The answer to a conversation: its pieces, each with the counts until then, and from time to
    time the gauges. ending: whether it shall end with what it has."""

    def events(session: Session) -> Iterator[Event | None]:
        answer, measured = LoadedAnswer(session, messages, options), 0.0
        for step in answer.steps():
            if ending():
                answer.cancel()
            if isinstance(step, Reading):
                yield step
                continue
            told = {"piece": asdict(step), "stats": asdict(answer.stats)}
            if time.monotonic() - measured >= _GAUGES_S:
                measured = time.monotonic()
                told["gauges"] = asdict(answer.gauges())
            yield Told(step.piece.thinking + step.piece.text, told)
        stats, reason = replace(answer.stats), answer.finish_reason or "cancelled"
        if not session.turn.cancelled:
            gauges = asdict(answer.gauges())
            yield Told("", {"ended": reason, "stats": asdict(stats), "gauges": gauges})
            # It was not the server that gave it up.
            reason = "stop" if reason == "cancelled" else reason
        yield Ended(reason, stats)

    return events


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
