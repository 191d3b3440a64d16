"""The last completions, for when the letters that they predicted are typed.

Owns when an earlier completion still holds. Then it is answered from here, without a pass.
"""

from __future__ import annotations

import hashlib
from collections import deque

from akunu_py.completion.types import Completion, CompletionRequest
from akunu_py.types import Stats

_KEPT = 16


class Recall:
    """What was said last, and where."""

    def __init__(self) -> None:
        self._said: deque[tuple[bytes, str, Completion]] = deque(maxlen=_KEPT)

    def remember(self, request: CompletionRequest, done: Completion) -> None:
        """Keeps a completion, unless it was given up."""
        if done.finish_reason != "cancelled":
            self._said.append((_surroundings(request), request.prefix, done))

    def find(self, request: CompletionRequest) -> Completion | None:
        """The rest of an earlier completion, where what was typed since is how it began."""
        surroundings = _surroundings(request)
        for place, prefix, said in reversed(self._said):
            typed = request.prefix[len(prefix) :]
            if (
                place != surroundings
                or not request.prefix.startswith(prefix)
                or not said.text.startswith(typed)
            ):
                continue
            rest = said.text[len(typed) :]
            # Asked at the same place again: another sample is wanted, or more than there was.
            again = request.temperature == 0 and said.finish_reason != "time"
            if (typed and rest) or (not typed and again):
                return Completion(rest, said.finish_reason, Stats(), reused=True)
        return None


def _surroundings(request: CompletionRequest) -> bytes:
    """A digest of what must be the same for an earlier completion to hold, the prefix apart."""
    limits = f"{request.max_tokens} {request.max_lines} {request.temperature}"
    texts = [request.suffix, request.path, request.language, limits]
    texts += [text for file in request.files for text in (file.path, file.text)]
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()
