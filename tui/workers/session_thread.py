"""The thread that a session lives in for its whole life, and the messages that it posts.

MLX's streams are thread-local, so the thread loads and runs the model, and only values leave it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from textual.message import Message as TextualMessage

from akunu_py.decoding.events import Reading
from akunu_py.decoding.generate.chat_model import ChatModel, Gauges, ShownAnswer, ShownPiece
from akunu_py.decoding.generate.model_thread import Idle, ModelThread, release_memory
from akunu_py.errors import AkunuError, ServerGone, describe
from akunu_py.types import FinishReason, GenerateOptions, Message, Stats

Span = tuple[int, int]  # half-open range of characters
Rejected = tuple[int, str]  # the place of a rejected draft in a text, and the draft's text

_NOTHING = Gauges()  # was measured
_INTERVAL_S = 1 / 16  # between two messages about one answer
_LAST_SAVE_S = 0.5  # that what was read may take to be kept on disk at the end


class SessionMessage(TextualMessage):
    """What the thread posts."""


@dataclass
class Loaded(SessionMessage):
    """The model is ready. no_draft: why it cannot draft, None where it can. note: what the user
    should know of how it fits into memory, "" for nothing. server: the address of the one that has
    it, "" where it is loaded here."""

    model: str
    weights: str
    context_length: int
    no_draft: str | None = None
    note: str = ""
    gauges: Gauges = _NOTHING
    server: str = ""


@dataclass
class Prefilling(SessionMessage):
    """`done` of `total` prompt tokens are in the cache. request: its number, here and below."""

    request: int
    done: int
    total: int


@dataclass
class PieceArrived(SessionMessage):
    """More of the answer, over one or more passes.

    drafted: ranges into `text` of accepted drafts. rejected: texts of the other drafts, each with
    the place in `text` where it was proposed. thinking: what the model thought before its answer.
    passes: how many tokens each pass yielded. stats: of the answer so far.
    """

    request: int
    text: str
    drafted: tuple[Span, ...]
    stats: Stats
    thinking: str = ""
    rejected: tuple[Rejected, ...] = ()
    passes: tuple[int, ...] = ()
    gauges: Gauges = _NOTHING


@dataclass
class Finished(SessionMessage):
    """The answer ended."""

    request: int
    reason: FinishReason
    stats: Stats
    gauges: Gauges = _NOTHING


@dataclass
class AnswerFailed(SessionMessage):
    """Something went wrong; `request` is None where the model could not be loaded."""

    request: int | None
    error: str


class PieceBuffer:
    """Pieces that wait to be posted together.

    They may come at 200 a second, and drawing takes turns with decoding in Python's interpreter.
    """

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
        """The first piece goes at once, and so does every piece of a slow model."""
        text = self._text or self._thinking
        return bool(text) and time.monotonic() - self._posted >= _INTERVAL_S

    def flush(self, request: int, stats: Stats, gauges: Gauges) -> PieceArrived:
        """All pieces as one message; the buffer is empty then."""
        message = PieceArrived(
            request,
            self._text,
            tuple(self._spans),
            replace(stats),
            thinking=self._thinking,
            rejected=tuple(self._rejected),
            passes=tuple(self._passes),
            gauges=gauges,
        )
        self._posted = time.monotonic()
        self._clear()
        return message


@dataclass(slots=True)
class ChatRequest:
    """Answer the last of `messages`, or continue it where it is an answer."""

    number: int
    messages: Sequence[Message]
    options: GenerateOptions
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class SwitchRequest:
    """Load that model instead."""

    model: str


class SessionThread:
    """Loads `model`, then answers one request after the other.

    Every exception becomes an `AnswerFailed` message. The next request repeats a failed load. A
    model whose server has gone is loaded again if the request has no output yet.

    load: called in the thread with the name of a model. unload_s: after how many seconds without a
    request the model is unloaded, None for never. loading: whether a model is being loaded.
    """

    def __init__(
        self, model: str, load: Callable[[str], ChatModel], unload_s: float | None = None
    ) -> None:
        self._model = model
        self._load = load
        self._loads_first = True
        self.loading = False
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
        """Begins to load the model, unless it is to `switch` first. `post` is called from the
        thread."""
        self._post = post
        self._loads_first = load
        self._thread.start()

    def request(self, number: int, messages: Sequence[Message], options: GenerateOptions) -> None:
        """Queues a request; the messages about it carry `number`."""
        request = ChatRequest(number, messages, options)
        with self._lock:
            self._requests[number] = request
        self._thread.put(request)

    def switch(self, model: str) -> None:
        """Loads `model` after the requests before; the one that is loaded goes first, to make
        room. With the name of the model that is loaded, loads it and its learned state again."""
        self._thread.put(SwitchRequest(model))

    def stop(self, number: int) -> None:
        """Ends that answer after the pass that is running, or before it begins."""
        with self._lock:
            if number in self._requests:
                self._requests[number].stopped.set()
            if self._running and self._running[0] == number:
                self._running[1].cancel()

    def close(self, timeout: float) -> bool:
        """Stops everything; False where the thread is still busy after `timeout` seconds."""
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
        except Exception:  # noqa: BLE001 - what is kept for speed must not end an answer
            return False

    def _unload(self) -> None:
        """Drops the model, and gives its memory back before another one is loaded."""
        self._chat = None
        release_memory()

    def _try_to_load(self) -> bool:
        self.loading = True
        try:
            self._chat = self._load(self._model)
            facts, gauges = self._chat.facts, self._chat.gauges()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
            self._post(AnswerFailed(None, describe(error)))
            return False
        finally:
            self.loading = False
        self._post(
            Loaded(
                facts.name,
                facts.weights,
                facts.context_length,
                facts.no_draft,
                facts.note,
                gauges,
                facts.server,
            )
        )
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
        except AkunuError as error:
            self._post(AnswerFailed(request.number, describe(error)))
        except Exception as error:  # noqa: BLE001 - a bug must not leave a dead screen
            self._post(AnswerFailed(request.number, describe(error)))
        finally:
            self._running = None

    def _stream(self, request: int, answer: ShownAnswer) -> None:
        reported = 0.0
        buffer = PieceBuffer()
        for step in answer.steps():
            if isinstance(step, Reading):
                if time.monotonic() - reported >= _INTERVAL_S:
                    reported = time.monotonic()
                    self._post(Prefilling(request, step.done, step.total))
                continue
            buffer.add(step)
            if buffer.is_due():
                self._post(buffer.flush(request, answer.stats, answer.gauges()))
        gauges = answer.gauges()
        if buffer:
            self._post(buffer.flush(request, answer.stats, gauges))
        reason = answer.finish_reason or "cancelled"
        self._post(Finished(request, reason, replace(answer.stats), gauges))


def add_spans(spans: list[Span], drafted: tuple[Span, ...], offset: int) -> None:
    """Appends ranges, moved by `offset`, to `spans`; ranges that touch become one."""
    for start, end in drafted:
        if spans and spans[-1][1] == start + offset:
            spans[-1] = (spans[-1][0], end + offset)
        else:
            spans.append((start + offset, end + offset))
