"""Cache of the last completions, for a user who types the predicted text."""

import re
import threading
from collections import deque
from dataclasses import replace
from operator import attrgetter

from akunu_py.completion.completion_request import (
    Completion,
    CompletionRequest,
    has_crlf,
    with_crlf,
    with_unix_newlines,
)
from akunu_py.completion.stops import CompletionStops
from akunu_py.types import Stats

_ENTRIES = 16
# Text that an editor inserts after the cursor for an opening bracket, quote or block.
_CLOSED = re.compile(r"""[ \t\n]*[)\]}>"'`]{1,3}[ \t]*""")
_LONGEST_CLOSED = 200  # characters, mostly indentation
# Two requests must share these fields, the texts and max_tokens.
_SHARED = attrgetter("path", "language", "max_lines", "temperature")


class CompletionCache:
    """Finds the rest of an earlier completion of the same buffer. Thread-safe."""

    def __init__(self) -> None:
        self._entries: deque[tuple[CompletionRequest, Completion]] = deque(maxlen=_ENTRIES)
        self._lock = threading.Lock()

    def add(self, request: CompletionRequest, completion: Completion) -> None:
        """Add a completion, but not of a cancelled request or a prefill."""
        if completion.finish_reason != "cancelled" and request.max_tokens:
            if has_crlf(request):
                request = with_unix_newlines(request)
                completion = replace(completion, text=completion.text.replace("\r\n", "\n"))
            with self._lock:
                self._entries.append((request, completion))

    def find(self, request: CompletionRequest) -> Completion | None:
        """Return what remains of an earlier completion after the text typed since, or None.

        A repeated request is found only at temperature 0, if no time limit ended its completion.
        """
        if has_crlf(request):
            found = self.find(with_unix_newlines(request))
            return with_crlf(found) if found is not None else None
        with self._lock:
            entries = list(self._entries)
        for earlier, completion in reversed(entries):
            typed = typed_since(earlier, request)
            if typed is None or not completion.text.startswith(typed):
                continue
            rest = completion.text[len(typed) :]
            if len(request.suffix) > len(earlier.suffix):
                # The editor inserted closing brackets since; the rest must end before them.
                rest = CompletionStops(request).cut(rest, final=True).text
            # A second request at the same place wants another sample, or more text.
            repeatable = request.temperature == 0 and completion.finish_reason != "time"
            if (typed and rest) or (not typed and repeatable):
                return Completion(rest, completion.finish_reason, Stats(), reused=True)
        return None


def typed_since(earlier: CompletionRequest, request: CompletionRequest) -> str | None:
    """Return the text typed after the request `earlier`, None if anything else changed.

    Closing brackets that the editor inserted after the cursor do not count as a change.
    """
    if not request.prefix.startswith(earlier.prefix) or _SHARED(request) != _SHARED(earlier):
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
