"""The seam between HTTP and the dialects that clients speak: Chat Completions, Messages, ...

A dialect is a module that makes one `Dialect`, and `dialects.py` names them all. For each path that
is posted to it has an `Endpoint`: the pydantic model of the body, and a function that turns such a
body into what the engine shall do, a `Prepared` request, or into a reply that needs no engine. The
rest is the same for all: `app.py` checks and parses what comes in, `answering.py` runs the jobs,
sends what the encoder makes of their events, keeps the connection alive, and cancels what nobody
waits for.

All that is particular to a dialect is pure: bodies in, jobs out; events in, bytes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from akunu_py.decoding.generate.events import (
    Begun,
    CallArguments,
    CallBegun,
    CallEnded,
    Ended,
    Event,
    Failed,
    Logprobs,
    Reading,
    Text,
    Thinking,
    Told,
)
from akunu_py.decoding.scheduling.job import Job
from akunu_py.serve import sse
from akunu_py.serve.bodies import Body
from akunu_py.serve.errors import RequestError
from akunu_py.serve.service import Service
from akunu_py.types import TokenLogprobs, ToolCall


class Encoder(Protocol):
    """Writes down a streamed answer: a new one for each request."""

    def encode(self, event: Event, choice: int) -> list[bytes]:
        """The frames for an event of the job of that number. Never gets Failed. `Ended` comes once
        for each job; the frames for the last of them end the stream."""

    def heartbeat(self) -> bytes:
        """What tells a client that waits that there is nothing yet."""

    def fail(self, error: RequestError) -> list[bytes]:
        """The frames that end the stream where there will be no more of the answer."""


@dataclass(slots=True)
class WholeAnswer:
    """The events of one job, put together. parts: in the order in which they came, with neighbours
    of a kind joined."""

    parts: list[Thinking | Text | ToolCall] = field(default_factory=list)
    begun: Begun | None = None
    ended: Ended | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, event: Event) -> None:
        last = self.parts[-1] if self.parts else None
        match event:
            case Begun():
                self.begun = event
            case Ended():
                self.ended = event
            case Thinking() if isinstance(last, Thinking):
                self.parts[-1] = Thinking(last.text + event.text)
            case Text() if isinstance(last, Text):
                self.parts[-1] = Text(last.text + event.text)
            case Thinking() | Text():
                self.parts.append(event)
            case CallBegun(id, name):
                self.parts.append(ToolCall(name, "", id))
            case CallArguments(text):
                assert isinstance(last, ToolCall)
                self.parts[-1] = ToolCall(last.name, last.arguments + text, last.id)
            case Logprobs():
                self.logprobs += event.tokens
            case Reading() | CallEnded() | Told() | Failed():
                pass

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Text))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was understood.

    jobs: what the engine is to do, one for each choice, one after the other. whole: makes the body
    of the reply of the answers to all jobs. encoder: where the answer is streamed; None where not.
    short: little to read and few tokens to write, so others may wait for it.
    """

    jobs: Sequence[Job]
    whole: Callable[[Sequence[WholeAnswer]], Mapping[str, Any]]
    encoder: Encoder | None = None
    short: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What is posted to `path`.

    prepare: raises RequestError or AkunuError for what cannot be honoured. It runs in a thread of
    its own, so it may render templates, tokenize and compile, but not touch arrays.
    summary: for the OpenAPI description.
    """

    path: str
    body: type[Body]
    prepare: Callable[[Any, Service], Prepared | Mapping[str, Any]]
    summary: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """endpoints: with the aliases of their paths as further ones. error: the body of a reply that
    refuses, with the id of the request."""

    name: str
    endpoints: Sequence[Endpoint]
    error: Callable[[RequestError, str], Mapping[str, Any]]


class CommentHeartbeat:
    """The heartbeat of dialects that have none of their own: a comment."""

    def heartbeat(self) -> bytes:
        return sse.COMMENT
