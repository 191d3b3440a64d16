"""The thread that a session lives in for its whole life.

It answers requests by messages, every exception being a `Failed` message. It knows nothing of the
app but a function to post them with.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from textual.message import Message as Note

from akunu_py.decoding.thread import ModelThread
from akunu_py.errors import AkunuError, describe
from akunu_py.tui.session.messages import Failed, Finished, Gauges, Loaded, Prefilling
from akunu_py.tui.session.pacing import Held, Pacer
from akunu_py.types import GenerateOptions, Message, Stats, TextPiece

if TYPE_CHECKING:  # importing the engine takes a second or two, which the thread spends, not we
    from akunu_py.decoding.engine import Engine
    from akunu_py.decoding.learned import LearnedState
    from akunu_py.decoding.session import Generation, Session


@dataclass(slots=True)
class Ask:
    """One request: answer the last of `messages`, or go on where it is an answer."""

    turn: int
    messages: Sequence[Message]
    options: GenerateOptions
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, slots=True)
class Switch:
    """One request: load that model instead."""

    model: str


class SessionThread:
    """Loads the engine of `model`, then answers one request after the other.

    `load`, given the name of a model, `learned`, what earlier runs learned about it, and
    `answered`, told of every answer that ended, are called in the thread. A failed load is tried
    again with the next request.
    """

    def __init__(
        self,
        model: str,
        load: Callable[[str], Engine],
        learned: Callable[[Engine], LearnedState | None] = lambda engine: None,
        answered: Callable[[Engine, Generation], None] = lambda engine, generation: None,
    ) -> None:
        self._model = model
        self._load = load
        self._learned = learned
        self._answered = answered
        self._loads_first = True
        self._post: Callable[[Note], object] = lambda note: None
        self._lock = threading.Lock()
        self._asked: dict[int, Ask] = {}
        self._running: tuple[int, Generation] | None = None
        self._engine: Engine | None = None
        self._learned_state: LearnedState | None = None
        self._session: Session | None = None
        self._thread = ModelThread[Ask | Switch](
            "session", load=self._begin, serve=self._serve, unload=self._end
        )

    def start(self, post: Callable[[Note], object], *, load: bool = True) -> None:
        """Begins to load the model, unless it is to `switch` first. `post` is called from the
        thread."""
        self._post = post
        self._loads_first = load
        self._thread.start()

    def ask(self, turn: int, messages: Sequence[Message], options: GenerateOptions) -> None:
        """Queues a request; its messages carry `turn`."""
        request = Ask(turn, messages, options)
        with self._lock:
            self._asked[turn] = request
        self._thread.put(request)

    def switch(self, model: str) -> None:
        """Loads `model` after the requests before; the one that is loaded goes first, to make
        room. With the name of the model that is loaded, loads it and what was learned anew."""
        self._thread.put(Switch(model))

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
            self._thread.closing.set()
            if self._running:
                self._running[1].cancel()
        return self._thread.close(timeout)

    def _begin(self) -> None:
        if self._loads_first:
            self._try_to_load()

    def _serve(self, request: Ask | Switch) -> None:
        if self._thread.closing.is_set():
            return
        if isinstance(request, Switch):
            self._unload()
            self._model = request.model
            self._try_to_load()
            return
        if self._engine or self._try_to_load():
            self._answer(request)
        with self._lock:
            del self._asked[request.turn]

    def _end(self) -> None:
        self._session = None

    def _unload(self) -> None:
        """Drops the model, and gives its memory back before another one is loaded."""
        self._session = self._learned_state = self._engine = None
        gc.collect()
        if "mlx.core" in sys.modules:
            import mlx.core as mx

            mx.clear_cache()

    def _try_to_load(self) -> bool:
        try:
            engine = self._load(self._model)
            self._learned_state = self._learned(engine)
            self._engine = engine
        except Exception as error:  # noqa: BLE001 - whatever it is, the person must read it
            self._tell(Failed(None, describe(error)))
            return False
        self._tell(
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

    def _answer(self, request: Ask) -> None:
        from akunu_py.decoding.session import Session

        assert self._engine is not None
        try:
            self._session = self._session or Session(self._engine, self._learned_state)
            generation = self._session.chat(request.messages, request.options)
            with self._lock:
                self._running = request.turn, generation
                if request.stopped.is_set() or self._thread.closing.is_set():
                    generation.cancel()
            self._stream(request.turn, generation)
            self._answered(self._engine, generation)
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
        rows: Counter[int] = Counter()  # passes by the rows that they ran over
        stats = generation.stats
        for number, piece in enumerate(generation):
            held.add(piece, self._rejected_text(generation, piece), from_prefill=number == 0)
            if number > 0 and piece.piece.tokens:
                rows[1 + piece.piece.accepted + len(piece.piece.rejected)] += 1
            if held.is_due():
                self._tell(held.release(turn, stats, self._gauges(stats, rows)))
        gauges = self._gauges(stats, rows)
        if held:
            self._tell(held.release(turn, stats, gauges))
        reason = generation.finish_reason or "cancelled"
        self._tell(Finished(turn, reason, replace(stats), gauges))

    def _rejected_text(self, generation: Generation, piece: TextPiece) -> str:
        """What the pass drafted in vain, as text that follows what it accepted."""
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

    def _tell(self, note: Note) -> None:
        # The app may have gone in the middle of an answer, and its event loop with it.
        with contextlib.suppress(RuntimeError):
            self._post(note)


def _memory() -> int:
    """Bytes that MLX holds."""
    import mlx.core as mx

    return int(mx.get_active_memory())
