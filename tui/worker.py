"""The thread that a session lives in for its whole life.

MLX's streams are thread-local, so the model is loaded and run in one thread and everybody else
speaks to it by messages. Owns the queue of requests, stopping, and turning every exception into a
`Failed` message. Refuses to know the app: it is given a function to post messages with.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from textual.message import Message as Note

from akunu_py.errors import AkunuError
from akunu_py.tui.conversation import Span, add_spans
from akunu_py.tui.messages import Failed, Finished, Loaded, PieceArrived, Prefilling
from akunu_py.types import GenerateOptions, Message, Stats, TextPiece

if TYPE_CHECKING:  # importing the engine takes a second or two, which the thread spends, not we
    from akunu_py.engine import Engine
    from akunu_py.experience import Experience
    from akunu_py.session import Generation, Session

# Pieces may come at 200 a second, and drawing takes turns with decoding in Python's interpreter.
_INTERVAL_S = 1 / 16


@dataclass(slots=True)
class Ask:
    """One request: answer the last of `messages`."""

    turn: int
    messages: Sequence[Message]
    options: GenerateOptions
    stopped: threading.Event = field(default_factory=threading.Event)


class SessionThread:
    """Loads the engine, then answers one request after the other.

    `load` and `learned`, what earlier runs learned about the engine's model, are called in the
    thread. A failed load is tried again with the next request.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        learned: Callable[[Engine], Experience | None] = lambda engine: None,
    ) -> None:
        self._load = load
        self._learned = learned
        self._post: Callable[[Note], object] = lambda note: None
        self._requests: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._asked: dict[int, Ask] = {}
        self._running: tuple[int, Generation] | None = None
        self._closing = False
        self._engine: Engine | None = None
        self._experience: Experience | None = None
        self._session: Session | None = None
        # A daemon, because a model that is being loaded cannot be interrupted.
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)

    def start(self, post: Callable[[Note], object]) -> None:
        """Begins to load the model. `post` is called from the thread."""
        self._post = post
        self._thread.start()

    def ask(self, turn: int, messages: Sequence[Message], options: GenerateOptions) -> None:
        """Queues a request; its messages carry `turn`."""
        request = Ask(turn, messages, options)
        with self._lock:
            self._asked[turn] = request
        self._requests.put(request)

    def stop(self, turn: int) -> None:
        """Ends that answer after the pass that is running, or before it begins."""
        with self._lock:
            if turn in self._asked:
                self._asked[turn].stopped.set()
            if self._running and self._running[0] == turn:
                self._running[1].cancel()

    def close(self, timeout: float) -> bool:
        """Stops everything; False where the thread is still busy after `timeout` seconds."""
        with self._lock:
            self._closing = True
            if self._running:
                self._running[1].cancel()
        self._requests.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._try_to_load()
            while (request := self._requests.get()) is not None and not self._closing:
                if self._engine or self._try_to_load():
                    self._answer(request)
                with self._lock:
                    del self._asked[request.turn]
        finally:
            self._leave()

    def _leave(self) -> None:
        """Gives back what MLX keeps for this thread; without it the program may abort at its end
        (github.com/ml-explore/mlx/pull/4373)."""
        self._session = None
        if "mlx.core" in sys.modules:
            import mlx.core as mx

            mx.clear_streams()

    def _try_to_load(self) -> bool:
        try:
            engine = self._load()
            self._experience = self._learned(engine)
            self._engine = engine
        except Exception as error:  # noqa: BLE001 - whatever it is, the person must read it
            self._tell(Failed(None, describe(error)))
            return False
        self._tell(Loaded(engine.name, engine.weights, engine.context_length, engine.no_draft))
        return True

    def _answer(self, request: Ask) -> None:
        from akunu_py.session import Session

        assert self._engine is not None
        try:
            self._session = self._session or Session(self._engine, self._experience)
            generation = self._session.chat(request.messages, request.options)
            with self._lock:
                self._running = request.turn, generation
                if request.stopped.is_set() or self._closing:
                    generation.cancel()
            self._stream(request.turn, generation)
        except AkunuError as error:
            self._tell(Failed(request.turn, describe(error)))
        except Exception as error:  # noqa: BLE001 - a bug must not leave a dead screen
            self._session = None  # nobody knows what its cache holds now
            self._tell(Failed(request.turn, describe(error)))
        finally:
            self._running = None

    def _stream(self, turn: int, generation: Generation) -> None:
        generation.on_prefill = Pacer(
            lambda done, total: self._tell(Prefilling(turn, done, total))
        ).call
        held = Held()
        for piece in generation:
            held.add(piece)
            if held.is_due():
                self._tell(held.release(turn, generation.stats))
        if held.text:
            self._tell(held.release(turn, generation.stats))
        reason = generation.finish_reason or "cancelled"
        self._tell(Finished(turn, reason, replace(generation.stats)))

    def _tell(self, note: Note) -> None:
        # The app may have gone in the middle of an answer, and its event loop with it.
        with contextlib.suppress(RuntimeError):
            self._post(note)


class Held:
    """Pieces that wait to be posted together, so that drawing costs the decoding little."""

    def __init__(self) -> None:
        self.text = ""
        self._spans: list[Span] = []
        self._posted = 0.0

    def add(self, piece: TextPiece) -> None:
        add_spans(self._spans, piece.drafted, len(self.text))
        self.text += piece.text

    def is_due(self) -> bool:
        """The first piece goes at once, and so does every piece of a slow model."""
        return bool(self.text) and time.monotonic() - self._posted >= _INTERVAL_S

    def release(self, turn: int, stats: Stats) -> PieceArrived:
        note = PieceArrived(turn, self.text, tuple(self._spans), replace(stats))
        self.text, self._spans, self._posted = "", [], time.monotonic()
        return note


class Pacer:
    """Calls a function of (done, total) at most every `_INTERVAL_S`."""

    def __init__(self, function: Callable[[int, int], None]) -> None:
        self._function = function
        self._called = 0.0

    def call(self, done: int, total: int) -> None:
        if time.monotonic() - self._called >= _INTERVAL_S:
            self._called = time.monotonic()
            self._function(done, total)


def describe(error: Exception) -> str:
    """An error in one line; ours speak for themselves, others say what they are."""
    text = " ".join(str(error).split())
    if isinstance(error, AkunuError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
