"""The last completions, for when the letters that they predicted are typed."""

from __future__ import annotations

import re
import threading
from collections import deque

from akunu_py.completion.request import Completion, CompletionRequest
from akunu_py.completion.stops import CompletionStops
from akunu_py.types import Stats

_ENTRIES = 16
# What an editor puts behind the cursor by itself when a bracket, a quote or a block is begun.
_CLOSED = re.compile(r"""[ \t\n]*[)\]}>"'`]{1,3}[ \t]*""")
_LONGEST_CLOSED = 200  # characters, indentation most of them


class CompletionCache:
    """Finds the rest of an earlier completion. May be used from any thread.

    It holds while the buffer does, but for what was typed of it; whatever happened in other files.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[CompletionRequest, Completion]] = deque(maxlen=_ENTRIES)
        self._lock = threading.Lock()

    def add(self, request: CompletionRequest, completion: Completion) -> None:
        """Keeps a completion, unless it was cancelled or is none: only read, or a change."""
        kept = request.max_tokens and request.edits is None
        if completion.finish_reason != "cancelled" and kept:
            with self._lock:
                self._entries.append((request, completion))

    def find(self, request: CompletionRequest) -> Completion | None:
        """The rest of an earlier completion, where what was typed since is how it began."""
        if request.edits is not None:
            return None
        with self._lock:
            entries = list(self._entries)
        for earlier, completion in reversed(entries):
            typed = typed_since(earlier, request)
            if typed is None or not completion.text.startswith(typed):
                continue
            rest = completion.text[len(typed) :]
            if len(request.suffix) > len(earlier.suffix):
                # As if the model had said it in front of what the editor closed meanwhile.
                stops = CompletionStops(request.prefix, request.suffix, request.max_lines)
                rest = stops.cut(rest, final=True).text
            # Asked at the same place again: another sample is wanted, or more than there was.
            again = request.temperature == 0 and completion.finish_reason != "time"
            if (typed and rest) or (not typed and again):
                return Completion(rest, completion.finish_reason, Stats(), reused=True)
        return None


def typed_since(earlier: CompletionRequest, request: CompletionRequest) -> str | None:
    """What was typed after `earlier` was asked, maybe nothing; None where something else changed.

    What an editor closed by itself behind the cursor meanwhile is no change, if there is any.
    """
    if not request.prefix.startswith(earlier.prefix) or _limits(request) != _limits(earlier):
        return None
    if request.max_tokens not in (0, earlier.max_tokens):
        return None
    typed = request.prefix[len(earlier.prefix) :]
    if request.suffix == earlier.suffix:
        return typed
    closed = len(request.suffix) - len(earlier.suffix)
    if not (typed and 0 < closed <= _LONGEST_CLOSED and request.suffix.endswith(earlier.suffix)):
        return None
    return typed if _CLOSED.fullmatch(request.suffix[:closed]) else None


def _limits(request: CompletionRequest) -> tuple[object, ...]:
    """What must be the same for an earlier completion to hold, the texts and max_tokens apart."""
    return request.path, request.language, request.max_lines, request.temperature
