"""Answers of a model that a running server has, as the chat shows them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from akunu_py.decoding.generate.chat_model import Gauges, ModelFacts, ShownPiece
from akunu_py.decoding.generate.events import Reading
from akunu_py.serve.own.client import END_S, LOOK_S, ServerClient
from akunu_py.types import FinishReason, GenerateOptions, Message, Piece, Stats, TextPiece


class ServedChat:
    """A model that a server has; see `ChatModel`. remember: whether answers may join its memory."""

    def __init__(self, client: ServerClient, facts: ModelFacts, *, remember: bool = True) -> None:
        self.facts = facts
        self._client, self._remember = client, remember

    def gauges(self) -> Gauges:
        """What a server takes, it tells with its answers."""
        return Gauges()

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> ServedAnswer:
        """See `ChatModel`."""
        options = replace(options, remember=options.remember and self._remember)
        return ServedAnswer(self._client, messages, options)

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """What was read, the server keeps."""
        return False


class ServedAnswer:
    """One answer of a server; see `ShownAnswer`."""

    def __init__(
        self, client: ServerClient, messages: Sequence[Message], options: GenerateOptions
    ) -> None:
        self._client = client
        self._id = secrets.token_hex(8)
        asked = [asdict(message) for message in messages]
        self.body = {"id": self._id, "messages": asked, "options": asdict(options)}
        self._cancelled = threading.Event()
        self._gauges = Gauges()
        self.stats = Stats()
        self.finish_reason: FinishReason | None = None

    def cancel(self) -> None:
        """See `ShownAnswer`."""
        self._cancelled.set()

    def gauges(self) -> Gauges:
        """See `ShownAnswer`."""
        return self._gauges

    def steps(self) -> Iterator[Reading | ShownPiece]:
        """See `ShownAnswer`."""
        late = 0.0
        with self._client.answer("/akunu/chat", self.body) as answer:
            while self.finish_reason is None:
                if self._cancelled.is_set() and not late:
                    late = time.monotonic() + END_S
                    self._client.end(self._id)
                if late and time.monotonic() > late:
                    self.finish_reason = "cancelled"
                    return
                frame = answer.next(LOOK_S) or {}
                if "reading" in frame:
                    yield Reading(*frame["reading"])
                if "stats" in frame:
                    self.stats = Stats(**frame["stats"])
                if "gauges" in frame:
                    self._gauges = Gauges(**frame["gauges"])
                if "piece" in frame:
                    yield _piece(frame["piece"])
                self.finish_reason = frame.get("ended")
            answer.finish()


def _piece(told: Mapping[str, Any]) -> ShownPiece:
    text = told["piece"]
    passed = text["piece"]
    piece = Piece(
        tuple(passed["tokens"]), passed["accepted"], tuple(passed["rejected"]), passed["seconds"]
    )
    drafted = tuple((start, end) for start, end in text["drafted"])
    return ShownPiece(
        TextPiece(text["text"], piece, drafted, text["thinking"]),
        told["rejected"],
        told["from_prefill"],
    )
