"""The thread that runs the chat session, and the messages that it posts.

MLX streams are thread-local: the thread loads and runs the model, and only values leave it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from textual.message import Message as TextualMessage

from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate.chat_model import ChatModel, Gauges, ShownAnswer, ShownPiece
from akunu_py.decoding.generate.model_thread import Idle, ModelThread, release_memory
from akunu_py.errors import ServerGone, describe
from akunu_py.types import FinishReason, GenerateOptions, Message, Stats

Span = tuple[int, int]  # half-open range of characters
Rejected = tuple[int, str]  # the position of a rejected draft in a text, and the draft's text

_NO_GAUGES = Gauges()
_INTERVAL_S = 1 / 16  # between two messages about one answer
_LAST_SAVE_S = 0.5  # time limit for saving the prompt cache on exit


class SessionMessage(TextualMessage):
    """A message of the session thread."""


@dataclass
class ModelLoaded(SessionMessage):
    """The model is ready."""

    model: str
    weights: str
    context_length: int
    no_draft: str | None = None  # why the model cannot draft, None if it can
    note: str = ""  # a remark on memory for the user
    gauges: Gauges = _NO_GAUGES
    server: str = ""  # address of the server that runs the model, "" for this process


@dataclass
class PrefillUpdate(SessionMessage):
    """`done` of `total` prompt tokens are in the cache."""

    request: int
    done: int
    total: int


@dataclass
class PieceArrived(SessionMessage):
    """More text of an answer, from one or more decode steps."""

    request: int
    text: str
    drafted: tuple[Span, ...]  # accepted drafts, as ranges of `text`
    stats: Stats  # of the answer so far
    thinking: str = ""
    rejected: tuple[Rejected, ...] = ()  # rejected drafts, by position in `text`
    passes: tuple[int, ...] = ()  # tokens per decode step
    gauges: Gauges = _NO_GAUGES


@dataclass
class AnswerFinished(SessionMessage):
    """The answer ended."""

    request: int
    reason: FinishReason
    stats: Stats
    gauges: Gauges = _NO_GAUGES


@dataclass
class AnswerFailed(SessionMessage):
    """An error ended a request."""

    request: int | None  # None if the model could not be loaded
    error: str


class PieceBuffer:
    """Collects pieces of an answer: drawing 200 a second would slow decoding through the GIL."""

    def __init__(self) -> None:
        self._posted = 0.0
        self._clear()

    def _clear(self) -> None:
        self._text = ""
        self._thinking = ""
        self._spans: list[Span] = []
        self._rejected: list[Rejected] = []
        self._passes: list[int] = []

    def add(self, shown: ShownPiece) -> None:
        piece, rejected = shown.piece, shown.rejected
        offset = len(self._text)
        add_spans(self._spans, piece.drafted, offset)
        if rejected and (piece.text or not piece.thinking):
            accepted = piece.drafted[-1][1] if piece.drafted else 0
            self._rejected.append((offset + accepted, rejected))
        if piece.piece.tokens and not shown.from_prefill:
            self._passes.append(len(piece.piece.tokens))
        self._text += piece.text
        self._thinking += piece.thinking

    def __bool__(self) -> bool:
        return bool(self._text or self._thinking or self._passes)

    def is_due(self) -> bool:
        """Whether to flush: immediately for the first piece and for every piece of a slow model."""
        text = self._text or self._thinking
        return bool(text) and time.monotonic() - self._posted >= _INTERVAL_S

    def flush(self, request: int, stats: Stats, gauges: Gauges) -> PieceArrived:
        """Return all pieces as one message, and empty the buffer."""
        message = PieceArrived(
            request,
            self._text,
            tuple(self._spans),
            replace(stats),
            self._thinking,
            tuple(self._rejected),
            tuple(self._passes),
            gauges,
        )
        self._posted = time.monotonic()
        self._clear()
        return message


@dataclass(slots=True)
class ChatRequest:
    """Answer the last of `messages`, or continue it if it is an answer."""

    number: int
    messages: Sequence[Message]
    options: GenerateOptions
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """Load another model."""

    model: str


class SessionThread:
    """Loads a model, then answers requests one by one.

    Every exception becomes an `AnswerFailed` message. The next request retries a failed load. If
    the model's server is gone and the request has no output yet, the model is loaded again.
    """

    def __init__(
        self, model: str, load: Callable[[str], ChatModel], unload_s: float | None = None
    ) -> None:
        self._model = model
        self._load = load  # called in the thread with a model's name
        self._loads_first = True
        self.loading = False  # A model is being loaded.
        self._post: Callable[[SessionMessage], object] = lambda message: None
        self._lock = threading.Lock()
        self._requests: dict[int, ChatRequest] = {}  # queued or running, by number
        self._running: tuple[int, ShownAnswer] | None = None
        self._chat: ChatModel | None = None
        idle = Idle(lambda: self._save(lambda: self._thread.wanted), self._unload, unload_s)
        self._thread = ModelThread[ChatRequest | SwitchRequest](
            "session", load=self._begin, serve=self._serve, unload=self._end, idle=idle
        )

    def start(self, post: Callable[[SessionMessage], object], *, load: bool = True) -> None:
        """Start the thread and load the model, unless `switch` comes first (`load` False)."""
        self._post = post
        self._loads_first = load
        self._thread.start()

    def request(self, number: int, messages: Sequence[Message], options: GenerateOptions) -> None:
        """Queue a request; messages about it carry `number`."""
        request = ChatRequest(number, messages, options)
        with self._lock:
            self._requests[number] = request
        self._thread.put(request)

    def switch(self, model: str) -> None:
        """Load `model`, or reload the current one, after the queued requests; unload first."""
        self._thread.put(SwitchRequest(model))

    def stop(self, number: int) -> None:
        """Cancel a request after the current decode step, or before it starts."""
        with self._lock:
            if number in self._requests:
                self._requests[number].stopped.set()
            if self._running and self._running[0] == number:
                self._running[1].cancel()

    def close(self, timeout: float) -> bool:
        """Cancel everything. Return False if the thread is busy after `timeout` seconds."""
        with self._lock:
            self._thread.closing.set()
            if self._running:
                self._running[1].cancel()
        return self._thread.close(timeout)

    def _begin(self) -> None:
        if self._loads_first:
            self._try_to_load()

    def _serve(self, request: ChatRequest | SwitchRequest) -> None:
        if self._thread.closing.is_set():
            return
        if isinstance(request, SwitchRequest):
            self._unload()
            self._model = request.model
            self._try_to_load()
            return
        if self._chat or self._try_to_load():
            self._answer(request)
        with self._lock:
            del self._requests[request.number]

    def _end(self) -> None:
        self._save(lambda: False, _LAST_SAVE_S)
        self._chat = None

    def _save(self, stopped: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            return self._chat is not None and self._chat.save_idle(stopped, seconds)
        except Exception:  # noqa: BLE001 - a failed cache save must not end an answer
            return False

    def _unload(self) -> None:
        """Unload the model and release its memory."""
        self._chat = None
        release_memory()

    def _try_to_load(self) -> bool:
        self.loading = True
        try:
            self._chat = self._load(self._model)
            facts, gauges = self._chat.facts, self._chat.gauges()
        except Exception as error:  # noqa: BLE001 - the user must see every error
            self._post(AnswerFailed(None, describe(error)))
            return False
        finally:
            self.loading = False
        loaded = (facts.name, facts.weights, facts.context_length, facts.no_draft, facts.note)
        self._post(ModelLoaded(*loaded, gauges, facts.server))
        return True

    def _answer(self, request: ChatRequest, *, again: bool = False) -> None:
        assert self._chat is not None
        try:
            answer = self._chat.answer(request.messages, request.options)
            with self._lock:
                self._running = request.number, answer
                if request.stopped.is_set() or self._thread.closing.is_set():
                    answer.cancel()
            self._stream(request.number, answer)
        except ServerGone as error:
            self._unload()
            if answer.stats.generated_tokens or again or self._thread.closing.is_set():
                self._post(AnswerFailed(request.number, describe(error)))
            elif self._try_to_load():
                self._answer(request, again=True)
        except Exception as error:  # noqa: BLE001 - a bug must not leave a dead screen
            self._post(AnswerFailed(request.number, describe(error)))
        finally:
            self._running = None

    def _stream(self, request: int, answer: ShownAnswer) -> None:
        reported = 0.0
        buffer = PieceBuffer()
        for step in answer.steps():
            if isinstance(step, PrefillProgress):
                if time.monotonic() - reported >= _INTERVAL_S:
                    reported = time.monotonic()
                    self._post(PrefillUpdate(request, step.done, step.total))
                continue
            buffer.add(step)
            if buffer.is_due():
                self._post(buffer.flush(request, answer.stats, answer.gauges()))
        gauges = answer.gauges()
        if buffer:
            self._post(buffer.flush(request, answer.stats, gauges))
        reason = answer.finish_reason or "cancelled"
        self._post(AnswerFinished(request, reason, replace(answer.stats), gauges))


def add_spans(spans: list[Span], drafted: tuple[Span, ...], offset: int) -> None:
    """Append ranges, shifted by `offset`, to `spans`; adjacent ranges are merged."""
    for start, end in drafted:
        if spans and spans[-1][1] == start + offset:
            spans[-1] = (spans[-1][0], end + offset)
        else:
            spans.append((start + offset, end + offset))
