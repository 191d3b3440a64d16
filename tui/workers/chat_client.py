"""The chat's connection to its model, and the messages that it posts."""

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from textual.message import Message as TextualMessage

from akunu_py.engine import events
from akunu_py.engine.answer import ChatJob
from akunu_py.engine.host import ModelHost, State
from akunu_py.engine.job import JobHandle, ModelLoop
from akunu_py.errors import AkunuError, PromptTooLong, describe
from akunu_py.types import Constraint, FinishReason, Message, SamplingOptions, Stats, ToolCall

_INTERVAL_S = 1 / 16  # between two messages about one answer
_NEW_SHARE = 0.5  # /compact makes room for a prompt of up to this share of the context
_PARAGRAPH = events.TextDelta("\n\n")  # between a tool call and text
_NICENESS = 4  # of the model's thread on Linux, above that of the thread that draws
_TITLE_TOKENS = 40  # maximum; more than a title has in most languages


# One line without quotes, markdown and markers.
_TITLE = r"[\p{L}\p{N}][\p{L}\p{N}\p{M} ,:;.'’?!&+#/()_%-]{0,79}"


class AnswerMessage(TextualMessage):
    """A message about the model or an answer."""


@dataclass
class ModelLoaded(AnswerMessage):
    model: str
    context_length: int
    no_draft: str | None = None  # why the model cannot draft, None if it can
    note: str = ""  # a remark on memory for the user
    server: str = ""  # address of the server that runs the model, "" for this process
    shows_tools: bool = True  # The chat template describes tools.


@dataclass
class PrefillUpdate(AnswerMessage):
    """`done` of `total` prompt tokens are in the cache."""

    request: int
    done: int
    total: int


@dataclass
class PieceArrived(AnswerMessage):
    """More text of an answer, from one or more decode steps."""

    request: int
    delta: events.TextDelta
    thinking: str = ""
    calling: ToolCall | None = None  # with the arguments so far


@dataclass
class AnswerFinished(AnswerMessage):
    request: int
    reason: FinishReason
    stats: Stats
    calls: tuple[ToolCall, ...] = ()  # the tools that the model wants to call


@dataclass
class AnswerFailed(AnswerMessage):
    request: int | None  # None if the model could not be loaded
    error: str


@dataclass
class TitleWritten(AnswerMessage):
    conversation: str  # its id
    text: str


class ChatClient:
    """Sends the chat's requests to its model, and posts messages about their answers.

    Every exception becomes an `AnswerFailed` message. The next request retries a failed load.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[str], ModelLoop],  # called in the model's thread with a model's name
        unload_s: float | None = None,
    ) -> None:
        self._model = model
        self._load = load
        self._post: Callable[[AnswerMessage], object] = lambda message: None
        self._handles: dict[int, JobHandle] = {}  # by request
        self._host = ModelHost(
            self._load_model, idle_s=unload_s, retry_s=(0.0, 0.0), on_state=self._on_state
        )

    def start(self, post: Callable[[AnswerMessage], object], *, load: bool = True) -> None:
        """Load the model, unless `switch` comes first (`load` False)."""
        self._post = post
        if load:
            self._host.start()

    @property
    def is_loading(self) -> bool:
        return self._host.state == "loading"

    def request(self, number: int, job: ChatJob) -> None:
        """Queue a request; messages about it carry `number`."""
        poster = _AnswerPoster(number, lambda message: self._post(message), job.messages)
        handle = self._host.submit(job, poster.add)
        unfinished = {key: each for key, each in self._handles.items() if not each.ended}
        self._handles = unfinished | {number: handle}

    def request_title(self, conversation: str, job: ChatJob) -> None:
        """Let the model write a title once it is idle; the next request cancels that."""
        options = replace(
            job.options,
            max_tokens=_TITLE_TOKENS,
            thinking="off",
            thinking_budget=0,
            sampling=SamplingOptions(constraint=Constraint("regex", _TITLE)),
        )
        parts: list[str] = []

        def collect(event: events.Event) -> None:
            if isinstance(event, events.TextDelta):
                parts.append(event.text)
            elif isinstance(event, events.Finished) and event.reason == "stop":
                self._post(TitleWritten(conversation, "".join(parts)))

        self._host.submit(replace(job, options=options), collect, idle=True)

    async def count_tokens(self, text: str) -> int | None:
        """Return the tokens of a text, None if no model is loaded here."""
        if self._host.engine is not None:
            with contextlib.suppress(AkunuError):  # It has just been unloaded.
                counts = self._host.call(lambda engine: len(engine.tokens.encode_text(text)))
                return await asyncio.wrap_future(counts)
        return None

    def _load_model(self) -> ModelLoop:
        if sys.platform == "linux":  # also for threads that it starts, to answer keys first
            niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        return self._load(self._model)

    def switch(self, model: str) -> None:
        """Unload, then load `model` or the current one again, after the queued requests."""
        self._model = model
        self._host.reload()

    def stop(self, number: int) -> None:
        """Cancel a request after the current decode step, or before it starts."""
        if number in self._handles:
            self._handles[number].cancel()

    def close(self, timeout: float) -> bool:
        """Cancel everything. Return False if the thread is busy after `timeout` seconds."""
        return self._host.close(cancel_s=timeout)

    def _on_state(self, state: State) -> None:
        facts = self._host.facts
        if state == "failed":
            self._post(AnswerFailed(None, describe(self._host.error)))
        elif state == "ready" and facts is not None:
            loaded = (facts.name, facts.context_length, facts.no_draft, facts.note)
            self._post(ModelLoaded(*loaded, facts.server, facts.shows_tools))


class _AnswerPoster:
    """Posts the events of one answer, and joins pieces of text into fewer messages."""

    def __init__(
        self, request: int, post: Callable[[AnswerMessage], object], messages: Sequence[Message]
    ) -> None:
        self._request, self._post = request, post
        self._messages = messages
        self._posted = self._progress_posted = 0.0
        # Not posted yet. Drawing 200 pieces a second would slow decoding through the GIL.
        self._text, self._thinking = events.TextDelta(""), ""
        self._calls: list[ToolCall] = []  # complete ones
        self._calling: ToolCall | None = None
        self._after_call = False

    def add(self, event: events.Event) -> None:
        """Post a message to the app for an event of the request, or collect the text."""
        match event:
            case events.PrefillProgress(done, total):
                if time.monotonic() - self._progress_posted >= _INTERVAL_S:
                    self._progress_posted = time.monotonic()
                    self._post(PrefillUpdate(self._request, done, total))
            case events.ThinkingDelta(text):
                self._thinking += text
            case events.TextDelta():
                self._add_text(event)
            case events.ToolCallStarted(id, name):
                self._calling = ToolCall(name, "", id)
            case events.ToolCallArguments(text) if self._calling:
                arguments = self._calling.arguments + text
                self._calling = replace(self._calling, arguments=arguments)
            case events.ToolCallFinished() if self._calling:
                self._calls.append(self._calling)
                self._calling, self._after_call = None, True
            case events.Finished(reason, stats):
                self._flush()
                self._post(AnswerFinished(self._request, reason, stats, tuple(self._calls)))
            case events.Failed(error):
                self._flush()
                hint = ", or /compact" if self._can_compact(error) else ""
                self._post(AnswerFailed(self._request, describe(error) + hint))

    def _add_text(self, delta: events.TextDelta) -> None:
        """Collect text; post it at once if it is the first, or the model is slow."""
        if delta.text and self._after_call:
            delta, self._after_call = _PARAGRAPH + delta, False
        self._text += delta
        has_news = self._calling or self._text.text or self._thinking
        if delta.stats and has_news and time.monotonic() - self._posted >= _INTERVAL_S:
            self._flush()

    def _can_compact(self, error: Exception) -> bool:
        """Return whether the prompt is too long because of the messages before it."""
        if not isinstance(error, PromptTooLong) or len(self._messages) < 3:
            return False
        sizes = [len(message.content) for message in self._messages]
        return error.tokens * sizes[-1] / sum(sizes) < error.maximum * _NEW_SHARE

    def _flush(self) -> None:
        delta, thinking = self._text, self._thinking
        if delta.text or thinking or delta.passes or delta.speedup:
            self._text, self._thinking = events.TextDelta(""), ""
            self._posted = time.monotonic()
            self._post(PieceArrived(self._request, delta, thinking, self._calling))
