"""Completions of a model that a running server has, as a completer makes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.request import (
    Change,
    CompleteOptions,
    Completion,
    CompletionReason,
    CompletionRequest,
    Ended,
    check_request,
    time_limit,
)
from akunu_py.serve.own.client import END_S, LOOK_S, Answer, ServerClient
from akunu_py.types import Stats


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
        self, answer: Answer, number: str, ended: Ended, on_text: Callable[[str], None]
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
