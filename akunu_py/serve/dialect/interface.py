"""The interface between HTTP and the dialects of clients, such as Chat Completions.

A dialect turns bodies into jobs and events into bytes; it does no I/O. `http/asgi.py` lists the
dialects and parses requests; `http/request_handler.py` runs the jobs and sends the encoded events.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from akunu_py.engine import events
from akunu_py.engine.job import Job
from akunu_py.serve.dialect.bodies import Body
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.types import Stats, TokenLogprobs, ToolCall

DONE = b"data: [DONE]\n\n"


class Encoder(ABC):
    """Encodes one reply, streamed or whole; each request has a new one."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    names_events: ClassVar[bool] = False  # with `type` of the value

    def __init__(self, body: Any, name: str) -> None:
        """body: of the request. name: the model's. Raises RequestError."""
        self._model = name
        self._data = b""  # frames to send

    @abstractmethod
    def add(self, event: events.Event, choice: int) -> None:
        """Emit the frames of an event of job number `choice`; `Failed` goes to `fail`.

        Each job has one `Finished` event; the frames of the last `Finished` end the stream.
        """

    def emit(self, value: Mapping[str, Any]) -> None:
        """Add a JSON value to the stream."""
        self._data += self.frame(value)

    def take(self) -> bytes:
        """Return the frames since the last call."""
        data, self._data = self._data, b""
        return data

    def whole(self, answers: Sequence[CollectedAnswer]) -> Mapping[str, Any]:
        """Return the body of a reply that is not streamed, with an answer of each job."""
        return {}

    def heartbeat(self) -> None:
        """Emit a frame that keeps the connection alive: an SSE comment."""
        self._data += b": heartbeat\n\n"

    def frame(self, value: Mapping[str, Any]) -> bytes:
        """Return a JSON value as a server-sent event (WHATWG HTML, section 9.2)."""
        data = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        name = f"event: {value['type']}\n" if self.names_events else ""
        return f"{name}data: {data}\n\n".encode()

    def fail(self, error: RequestError, body: Mapping[str, Any]) -> None:
        """Emit the frames that end the stream after an error. body: the dialect's error."""
        self.emit(body)


@dataclass(slots=True)
class CollectedAnswer:
    """An answer collected from the events of one job, for a reply that is not streamed."""

    # In the order of their events.
    parts: list[events.ThinkingDelta | events.TextDelta | ToolCall] = field(default_factory=list)
    complete_calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finished: events.Finished = field(init=False)  # once the answer is complete

    def add(self, event: events.Event) -> None:
        """Add an event: join texts and calls, ignore others. The caller handles `Failed`."""
        match event:
            case events.Finished():
                self.finished = event
            case events.ThinkingDelta() | events.TextDelta():
                events.append_event(self.parts, event)
            case events.ToolCallStarted(id, name):
                self.parts.append(ToolCall(name, "", id))
            case events.ToolCallArguments(text):
                last = self.parts[-1]
                assert isinstance(last, ToolCall)
                self.parts[-1] = ToolCall(last.name, last.arguments + text, last.id)
            case events.ToolCallFinished():
                self.complete_calls += self.calls[-1:]
            case events.Logprobs():
                self.logprobs += event.tokens

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, events.TextDelta))

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, events.ThinkingDelta))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A parsed request, ready to run."""

    jobs: Sequence[Job]  # one for each choice
    # Sets what the encoder needs of the loaded model, before the first event.
    configure: Callable[[Any], None] = lambda encoder: None
    count_tokens: Callable[[str], int] = len  # of a part of an answer
    short: bool = False  # small prompt and few tokens; see `ModelHost.submit`
    idle: bool = False  # runs only while no other request does
    shows_thinking: bool = True  # the reply includes thinking


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path for POST requests."""

    path: str
    body: type[Body]
    # Raises RequestError or AkunuError. It runs in a worker thread, so it must not use arrays.
    # The first line of its docstring describes the path to clients.
    prepare: Callable[[Any, Any], PreparedRequest | Mapping[str, Any]]  # body, see `needs`
    # Encodes the reply; made before the model is loaded. None: `prepare` returns the reply.
    encoder: type[Encoder] | None = None
    # What `prepare` gets: the loaded model's `Service`, the `Embedder`, a description of the model,
    # loaded or not, or `ServedModel.ending` of all models.
    needs: Literal["service", "embedder", "description", "ending"] = "service"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of one kind of client."""

    endpoints: Sequence[Endpoint]
    error: Callable[[RequestError, str], Mapping[str, Any]]  # body for an error and request id


def statistics(*answers: events.Finished) -> dict[str, Any]:
    """Return the summed drafting statistics of the answers, an extension that clients ignore."""
    total = Stats()
    for answer in answers:
        total.include(answer.stats)
    decoded = sum(answer.stats.decoded_tokens for answer in answers)
    return {
        "target_passes": total.target_passes,
        "drafted": total.drafted,
        "accepted": total.accepted,
        "tokens_per_pass": round(decoded / total.target_passes, 4) if total.target_passes else 0.0,
        "tokens_per_s": round(decoded / total.decode_s, 4) if total.decode_s > 0 else 0.0,
        "prefill_s": round(total.prefill_s, 4),
        "decode_s": round(total.decode_s, 4),
    }
