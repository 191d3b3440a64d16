"""Answers and completions of a running server, for the chat and for editors."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.request import (
    Change,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    EndCheck,
    check_request,
    time_limit,
)
from akunu_py.decoding.events import PrefillProgress
from akunu_py.decoding.generate.chat_model import Gauges, ServedModelFacts, ShownPiece
from akunu_py.serve.own.client import ServerClient
from akunu_py.types import FinishReason, GenerateOptions, Message, Piece, Stats, TextPiece


class ServedChat:
    """A `ChatModel` on a server. may_store: answers may join the server's answer cache."""

    def __init__(
        self, client: ServerClient, facts: ServedModelFacts, *, may_store: bool = True
    ) -> None:
        self.facts = facts
        self._client, self._may_store = client, may_store

    def gauges(self) -> Gauges:
        """Return nothing: the server sends gauges with its answers."""
        return Gauges()

    def answer(self, messages: Sequence[Message], options: GenerateOptions) -> ServedAnswer:
        options = replace(options, may_store=options.may_store and self._may_store)
        return ServedAnswer(self._client, messages, options)

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        """Do nothing: the server saves its prompt caches."""
        return False


class ServedAnswer:
    """A `ShownAnswer` that a server generates."""

    def __init__(
        self, client: ServerClient, messages: Sequence[Message], options: GenerateOptions
    ) -> None:
        self._client = client
        fields = [asdict(message) for message in messages]
        self.body = {"id": secrets.token_hex(8), "messages": fields, "options": asdict(options)}
        self._cancelled = threading.Event()
        self._gauges = Gauges()
        self.stats = Stats()
        self.finish_reason: FinishReason | None = None

    def cancel(self) -> None:
        self._cancelled.set()

    def gauges(self) -> Gauges:
        return self._gauges

    def steps(self) -> Iterator[PrefillProgress | ShownPiece]:
        frames = self._client.frames(
            "/akunu/chat", self.body, lambda: "time" if self._cancelled.is_set() else None
        )
        with contextlib.closing(frames):
            for frame in frames:
                if "reading" in frame:
                    yield PrefillProgress(*frame["reading"])
                if "stats" in frame:
                    self.stats = Stats(**frame["stats"])
                if "gauges" in frame:
                    self._gauges = Gauges(**frame["gauges"])
                if "piece" in frame:
                    yield _parse_piece(frame["piece"])
                self.finish_reason = frame.get("ended")
        self.finish_reason = self.finish_reason or "cancelled"


def _parse_piece(values: Mapping[str, Any]) -> ShownPiece:
    text = values["piece"]
    inner = text["piece"]
    piece = Piece(
        tuple(inner["tokens"]), inner["accepted"], tuple(inner["rejected"]), inner["seconds"]
    )
    drafted = tuple((start, end) for start, end in text["drafted"])
    return ShownPiece(
        TextPiece(text["text"], piece, drafted, text["thinking"]),
        values["rejected"],
        values["from_prefill"],
    )


class ServedCompleter:
    """Completes with a server, one request at a time, with a local cache; see `Completer`."""

    def __init__(self, client: ServerClient, name: str, options: CompleteOptions) -> None:
        self.name = name
        self._client = client
        self._options = asdict(options)
        self._cache = CompletionCache()

    def release_under_pressure(self) -> None:
        """Do nothing: the memory is the server's."""

    def close(self) -> None:
        """Do nothing: the server saves what it learned."""

    def find_cached(self, request: CompletionRequest) -> Completion | None:
        return self._cache.find(request)

    def complete(
        self,
        request: CompletionRequest,
        ended: EndCheck | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """Return the server's completion. Raises ServerGone, AkunuError."""
        check_request(request)
        ended = ended or time_limit(request.seconds)
        known = self.find_cached(request) if request.max_tokens else None
        if known is not None:
            if known.text:
                on_text(known.text)
            return known
        body = {
            "id": secrets.token_hex(8),
            "request": asdict(replace(request, seconds=None)),  # the time limit is `ended`'s
            "options": self._options,
        }
        completion = self._request_completion(body, ended, on_text)
        self._cache.add(request, completion)
        return completion

    def _request_completion(
        self, body: Mapping[str, Any], ended: EndCheck, on_text: Callable[[str], None]
    ) -> Completion:
        text = ""
        reason: CompletionReason | None = None

        def asked_to_end() -> CompletionReason | None:
            nonlocal reason
            reason = ended() or reason
            return reason

        frames = self._client.frames("/akunu/complete", body, asked_to_end)
        with contextlib.closing(frames):
            for frame in frames:
                if "text" in frame:
                    text += frame["text"]
                    on_text(frame["text"])
                if "completion" in frame:
                    return _completion(frame["completion"])
        return Completion(text, reason or "time", Stats())


def _completion(values: Mapping[str, Any]) -> Completion:
    change = values.get("change")
    change = change and Change(change["first"], change["last"], tuple(change["lines"]))
    return Completion(**{**values, "stats": Stats(**values["stats"]), "change": change})
