"""The thread that a session lives in for its whole life, and the messages that it posts.

MLX's streams are thread-local, so the thread loads and runs the model, and only values leave it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from textual.message import Message as TextualMessage

from akunu_py.decoding.events import Reading
from akunu_py.decoding.thread import Idle, ModelThread, release_memory
from akunu_py.errors import AkunuError, describe
from akunu_py.tui.conversation import Rejected, Span, add_spans
from akunu_py.types import FinishReason, GenerateOptions, Message, Stats, TextPiece

if TYPE_CHECKING:  # importing the engine takes a second or two, which the thread spends, not we
    from akunu_py.decoding.engine import Engine
    from akunu_py.decoding.learned import LearnedState
    from akunu_py.decoding.session import Generation, Session

_INTERVAL_S = 1 / 16  # between two messages about one answer
_LAST_SAVE_S = 0.5  # that what was read may take to be kept on disk at the end


@dataclass(frozen=True, slots=True)
class Gauges:
    """What was measured besides the counts of one answer.

    memory: bytes that the model, its cache and the work on them take. speedup: times faster than
    plain decoding, by the planner's estimate of what passes cost; None before it knows.
    """

    memory: int = 0
    speedup: float | None = None


class SessionMessage(TextualMessage):
    """What the thread posts."""


@dataclass
class Loaded(SessionMessage):
    """The model is ready. no_draft: why it cannot draft, None where it can. note: what the user
    should know of how it fits into memory, "" for nothing."""

    model: str
    weights: str
    context_length: int
    no_draft: str | None = None
    note: str = ""
    gauges: Gauges = Gauges()


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
    gauges: Gauges = Gauges()


@dataclass
class Finished(SessionMessage):
    """The answer ended."""

    request: int
    reason: FinishReason
    stats: Stats
    gauges: Gauges = Gauges()


@dataclass
class Failed(SessionMessage):
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

    def add(self, piece: TextPiece, rejected: str = "", *, from_prefill: bool = False) -> None:
        """`rejected`: the text of the drafted tokens that the target did not accept."""
        offset = len(self._text)
        add_spans(self._spans, piece.drafted, offset)
        if rejected and (piece.text or not piece.thinking):
            accepted = piece.drafted[-1][1] if piece.drafted else 0
            self._rejected.append((offset + accepted, rejected))
        if piece.piece.tokens and not from_prefill:
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
    """Loads the engine of `model`, then answers one request after the other; every exception
    becomes a `Failed` message. A failed load is tried again with the next request.

    Called in the thread: `load` with the name of a model; `load_learned`, which gives what earlier
    runs learned about it; `on_answered` after every answer that ended.
    unload_s: after how many seconds without a request the model is unloaded, None for never.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[str], Engine],
        load_learned: Callable[[Engine], LearnedState | None] = lambda engine: None,
        on_answered: Callable[[Engine, Generation], None] = lambda engine, generation: None,
        unload_s: float | None = None,
    ) -> None:
        self._model = model
        self._load = load
        self._load_learned = load_learned
        self._on_answered = on_answered
        self._loads_first = True
        self._post: Callable[[SessionMessage], object] = lambda message: None
        self._lock = threading.Lock()
        self._requests: dict[int, ChatRequest] = {}  # queued or running, by number
        self._running: tuple[int, Generation] | None = None
        self._engine: Engine | None = None
        self._learned_state: LearnedState | None = None
        self._session: Session | None = None
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
        if self._engine or self._try_to_load():
            self._answer(request)
        with self._lock:
            del self._requests[request.number]

    def _end(self) -> None:
        self._save(lambda: False, _LAST_SAVE_S)
        self._session = None

    def _save(self, stopped: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            return self._session is not None and self._session.save_idle(stopped, seconds)
        except Exception:  # noqa: BLE001 - what is kept for speed must not end an answer
            return False

    def _unload(self) -> None:
        """Drops the model, and gives its memory back before another one is loaded."""
        self._session = self._learned_state = self._engine = None
        release_memory()

    def _try_to_load(self) -> bool:
        try:
            engine = self._load(self._model)
            self._learned_state = self._load_learned(engine)
            self._engine = engine
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
            self._post(Failed(None, describe(error)))
            return False
        self._post(
            Loaded(
                engine.name,
                engine.weights,
                engine.context_length,
                engine.no_draft,
                engine.fit.note,
                Gauges(_memory()),
            )
        )
        return True

    def _answer(self, request: ChatRequest) -> None:
        from akunu_py.decoding.session import Session

        assert self._engine is not None
        try:
            self._session = self._session or Session(self._engine, self._learned_state)
            generation = self._session.chat(request.messages, request.options)
            with self._lock:
                self._running = request.number, generation
                if request.stopped.is_set() or self._thread.closing.is_set():
                    generation.cancel()
            self._stream(request.number, generation)
            self._on_answered(self._engine, generation)
        except AkunuError as error:
            self._post(Failed(request.number, describe(error)))
        except Exception as error:  # noqa: BLE001 - a bug must not leave a dead screen
            self._post(Failed(request.number, describe(error)))
        finally:
            self._running = None

    def _stream(self, request: int, generation: Generation) -> None:
        reported = 0.0
        buffer = PieceBuffer()
        rows: Counter[int] = Counter()  # passes by the rows that they ran over
        stats = generation.stats
        for step in generation.steps():
            if isinstance(step, Reading):
                if time.monotonic() - reported >= _INTERVAL_S:
                    reported = time.monotonic()
                    self._post(Prefilling(request, step.done, step.total))
                continue
            first = not stats.target_passes
            buffer.add(step, self._rejected_text(generation, step), from_prefill=first)
            if step.piece.tokens and not first:
                rows[1 + step.piece.accepted + len(step.piece.rejected)] += 1
            if buffer.is_due():
                self._post(buffer.flush(request, stats, self._gauges(stats, rows)))
        gauges = self._gauges(stats, rows)
        if buffer:
            self._post(buffer.flush(request, stats, gauges))
        reason = generation.finish_reason or "cancelled"
        self._post(Finished(request, reason, replace(stats), gauges))

    def _rejected_text(self, generation: Generation, piece: TextPiece) -> str:
        """The rejected draft of a pass, as text that follows what was accepted."""
        drafted = piece.piece.rejected
        if not drafted or self._engine is None:
            return ""
        decode = self._engine.tokenizer.decode
        before = len(generation.tokens) - len(piece.piece.tokens) + piece.piece.accepted
        anchor = generation.tokens[before - 1 : before]
        return str(decode([*anchor, *drafted]))[len(decode(anchor)) :]

    def _gauges(self, stats: Stats, rows: Mapping[int, int]) -> Gauges:
        """rows: how many passes ran over how many rows. The speed-up is what as many tokens cost
        without drafting, over what these passes cost."""
        assert self._session is not None
        costs = self._session.drafting.costs(stats.prompt_tokens + stats.generated_tokens)
        speedup = None
        if costs is not None and stats.drafted:
            spent = sum(costs[min(each, len(costs)) - 1] * count for each, count in rows.items())
            speedup = stats.decoded_tokens * costs[0] / spent
        return Gauges(_memory(), speedup)


def _memory() -> int:
    """Bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
