"""Jobs of tests."""

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from akunu_py.engine.answer import chat_job, prompt_job
from akunu_py.engine.events import Event, Failed, Finished
from akunu_py.engine.host import ModelHost
from akunu_py.engine.job import BeginJob, Job, JobHandle
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.request import Request, Status, Step
from akunu_py.types import Answer, FinishReason, GenerateOptions, Message, Piece, Stats, TextPiece


class ScriptedAnswer:
    """An answer without a request: one of the events, or None, at each step."""

    request = None

    def __init__(self, events: Iterator[Event | None]) -> None:
        self._events = events

    def add(self, steps: Sequence[Step]) -> list[Event]:
        assert not steps
        event = next(self._events)
        return [] if event is None else [event]


def scripted(events: Callable[[StepLoop], Iterator[Event | None]]) -> BeginJob:
    """Return a job with these events."""
    return lambda loop: ScriptedAnswer(events(loop))


def text_job(prompt: Sequence[int], options: GenerateOptions) -> BeginJob:
    """Return a job that continues token ids."""
    return lambda loop: prompt_job(loop.engine, prompt, options)(loop)


Events = queue.SimpleQueue[Event]


def submit(host: ModelHost, job: Job, **options: Any) -> Events:
    """Submit a job and return the queue of its events."""
    events: Events = queue.SimpleQueue()
    host.submit(job, events.put, **options)
    return events


def all_of(events: Events) -> list[Event]:
    """Wait for the last event and return all."""
    found: list[Event] = []
    while not found or not isinstance(found[-1], Finished | Failed):
        found.append(events.get(timeout=60))
    return found


def end_of(events: Events) -> Event:
    return all_of(events)[-1]


def run_job(job: Job, loop: StepLoop) -> list[Event]:
    """Run a job alone and return its events."""
    handle = JobHandle(job, lambda event: None, "", lambda: None, short=False)
    events = list[Event]()
    while not events or not isinstance(events[-1], Finished):
        for _, more in loop.step([handle]):
            events += more
        if events and isinstance(events[-1], Failed):
            raise events[-1].error
    return events


def open_jobs(host: ModelHost) -> tuple[int, int]:
    """Return how many jobs wait, and how many run."""
    with host._lock:
        return len(host._waiting), len(host._running)


def chat_request(loop: StepLoop, messages: Sequence[Message], options: GenerateOptions) -> Request:
    """Return the request to answer a conversation."""
    request = chat_job(loop.engine, messages, options)(loop).request
    assert request is not None
    return request


def chat_answer(loop: StepLoop, messages: Sequence[Message], options: GenerateOptions) -> Answer:
    """Return the answer to a conversation."""
    request = chat_request(loop, messages, options)
    for _ in loop.stream(request):
        pass
    return request.answer


class ScriptedRequest:
    """A request that yields the given steps, one in each pass."""

    stop_sequence, thinking, stats, logprobs = "", "", Stats(), ()

    def __init__(self, steps: Sequence[Step], reason: FinishReason = "stop") -> None:
        self.steps, self.tokens, self._reason = list(steps), list[int](), reason
        self.status = Status.DECODING
        self.finish_reason: FinishReason | None = None

    def step(self) -> list[Step]:
        found = self.steps[:1]
        self.tokens += [0] * len(found)
        del self.steps[:1]
        self.thinking += "".join(each.thinking for each in found if isinstance(each, TextPiece))
        if not self.steps:
            self.status, self.finish_reason = Status.FINISHED, self._reason
        return found

    def cancel(self) -> None:
        self.steps.clear()

    def close(self) -> None:
        self.status = Status.FINISHED

    def drop(self, piece: Piece, used: int) -> None:
        """Do not count the tokens behind the end of the answer."""
