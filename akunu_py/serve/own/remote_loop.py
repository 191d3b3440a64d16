"""A `ModelLoop` that sends its jobs to a running server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.completion_request import (
    CompleteOptions,
    Completion,
    CompletionReason,
    finished,
)
from akunu_py.engine import events
from akunu_py.engine.answer import ChatJob
from akunu_py.engine.job import JobHandle
from akunu_py.serve.own.client import ServerClient
from akunu_py.types import Stats

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class RemoteLoop:
    """Runs answers and completions on a server, one at a time; see `ModelLoop`."""

    engine = None
    shared = events.SharedPasses()
    slots = 1

    def __init__(
        self,
        client: ServerClient,
        facts: events.LoadedModelFacts,
        options: CompleteOptions | None = None,
        *,
        may_store: bool = True,
    ) -> None:
        """options: of completions. may_store: answers may join the server's answer cache."""
        self.facts = facts
        self._client = client
        self._options = options or CompleteOptions()
        self._may_store = may_store
        self._events: Generator[events.Event | None] | None = None  # of the running job

    def step(self, jobs: Sequence[JobHandle]) -> list[tuple[JobHandle, list[events.Event]]]:
        """Wait a moment for the next event."""
        handle = jobs[0]
        if self._events is None:
            if isinstance(job := handle.job, CompletionJob):
                self._events = self._complete(job, handle)
            else:
                assert isinstance(job, ChatJob)
                self._events = self._answer(job, handle)
        try:
            event = next(self._events)
        except Exception as error:  # noqa: BLE001 - it ends the request
            event = events.Failed(error)
        if isinstance(event, events.Finished | events.Failed):
            self._events.close()
            self._events = None
        return [(handle, [event] if event is not None else [])]

    def idle_step(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """Do nothing: the server does its own idle work."""
        return False

    def close(self) -> None:
        """Do nothing: the server saves what it learned."""

    def _answer(self, job: ChatJob, handle: JobHandle) -> Generator[events.Event | None]:
        """Yield the events of an answer that the server generates; None while there is none."""
        options = replace(job.options, may_store=job.options.may_store and self._may_store)
        messages = [asdict(message) for message in job.messages]
        tools = [asdict(tool) for tool in job.tools]
        body = {"messages": messages, "options": asdict(options), "tools": tools}
        stats = Stats()
        frames = self._client.frames(
            "/akunu/chat", body, lambda: "cancelled" if handle.cancelled else None
        )
        with contextlib.closing(frames):
            for frame in frames:
                event = _decode(frame)
                if isinstance(event, events.TextDelta):
                    stats = event.stats or stats
                yield event
        yield events.Finished("cancelled", stats)

    def _complete(self, job: CompletionJob, handle: JobHandle) -> Generator[events.Event | None]:
        """Yield the events of a completion that the server makes; None while there is none."""
        text = ""
        reason: CompletionReason | None = None

        def end_reason() -> CompletionReason | None:
            nonlocal reason
            reason = "cancelled" if handle.cancelled else job.ended() or reason
            return reason

        if end_reason() == "cancelled":
            yield finished(Completion("", "cancelled", Stats()))
        request = replace(job.request, seconds=None)  # the time limit is in `job.ended`
        body = {"request": asdict(request), "options": asdict(self._options)}
        frames = self._client.frames("/akunu/complete", body, end_reason)
        with contextlib.closing(frames):
            for frame in frames:
                event = _decode(frame)
                if isinstance(event, events.TextDelta):
                    text += event.text
                    job.on_text(event.text)
                yield finished(event) if isinstance(event, Completion) else event
        yield finished(Completion(text, reason or "time", Stats()))


# The events that a server sends; the last one of a completion is the `Completion`.
SENT = (
    *(events.PrefillProgress, events.ThinkingDelta, events.TextDelta, events.Finished, Completion),
    *(events.ToolCallStarted, events.ToolCallArguments, events.ToolCallFinished),
)


def _decode(frame: Mapping[str, Any]) -> Any:
    """Decode what `AkunuEncoder` wrote; None for an unknown event."""
    found = next((kind for kind in SENT if kind.__name__ in frame), None)
    return found and _adapter(found).validate_python(frame[found.__name__])


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # at the first event, when the request is already under way

    return TypeAdapter(kind)
