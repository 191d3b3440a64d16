"""Answers of a model that a running server has, as the chat shows them."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from akunu_py.completion.recall import CompletionCache
from akunu_py.completion.types import (
    Change,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    Ended,
    check_request,
    time_limit,
)
from akunu_py.decoding.chat_model import Gauges, ModelFacts, ShownPiece
from akunu_py.decoding.events import Reading
from akunu_py.serve.own.client import END_S, LOOK_S, AnswerStream, ServerClient
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


class ServedCompleter:
    """Makes completions with a server, one at a time; see `Completer`. What was completed is
    remembered here, so that recalling it asks nobody."""

    def __init__(self, client: ServerClient, name: str, options: CompleteOptions) -> None:
        self.name = name
        self._client = client
        self._options = asdict(options)
        self._cache = CompletionCache()

    def relieve(self) -> None:
        """The server's memory is the server's."""

    def close(self) -> None:
        """What is learned, the server learns."""

    def recall(self, request: CompletionRequest) -> Completion | None:
        """See `Completer.recall`."""
        return self._cache.find(request)

    def complete(
        self,
        request: CompletionRequest,
        ended: Ended | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """See `Completer.steps`. Raises ServerGone, and AkunuError for what the server refuses."""
        check_request(request)
        ended = ended or time_limit(request.seconds)
        known = self.recall(request) if request.max_tokens else None
        if known is not None:
            if known.text:
                on_text(known.text)
            return known
        number = secrets.token_hex(8)
        asked = asdict(replace(request, seconds=None))  # whose time it is, we know
        body = {"id": number, "request": asked, "options": self._options}
        with self._client.answer("/akunu/complete", body) as answer:
            completion = self._read(answer, number, ended, on_text)
        self._cache.add(request, completion)
        return completion

    def _read(
        self, answer: AnswerStream, number: str, ended: Ended, on_text: Callable[[str], None]
    ) -> Completion:
        text, late = "", 0.0
        reason: CompletionReason | None = None
        while True:
            reason = ended() or reason
            if reason == "cancelled" or (late and time.monotonic() > late):
                return Completion(text, reason or "time", Stats())
            if reason and not late:
                late = time.monotonic() + END_S
                self._client.end(number)
            frame = answer.next(LOOK_S) or {}
            if "text" in frame:
                text += frame["text"]
                on_text(frame["text"])
            if "completion" in frame:
                answer.finish()
                return _completion(frame["completion"])


def _completion(told: Mapping[str, Any]) -> Completion:
    change = told.get("change")
    values = {
        "stats": Stats(**told["stats"]),
        "change": change and Change(change["first"], change["last"], tuple(change["lines"])),
    }
    return Completion(**{**told, **values})
