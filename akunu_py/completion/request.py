"""The request for a completion and the completion: plain values."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DraftMode, FinishReason, Stats

CompletionReason = Literal["stop", "length", "time", "cancelled"]
Ended = Callable[[], CompletionReason | None]  # why a completion is to end now, None if it is not

# What those are called of any answer.
FINISH_REASONS: dict[CompletionReason, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "time": "length",
    "cancelled": "cancelled",
}

DEFAULT_COMPLETION_TOKENS = 128
MAX_COMPLETION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Another file of the project, as it is in the editor."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class BufferEdit:
    """A change that was made to a file: `before` became `after`, both with some context."""

    path: str
    before: str
    after: str
    line: int = 0  # number of the first line, from 0


@dataclass(frozen=True, slots=True)
class Change:
    """A change to make: `lines` replace the lines first:last of the buffer, counted from 0."""

    first: int
    last: int
    lines: tuple[str, ...]  # without their ends


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The buffer around the cursor, its project and the limits."""

    prefix: str  # the buffer before the cursor
    suffix: str = ""  # the buffer after it
    path: str = ""  # empty if unknown
    language: str = ""  # stands in for an unknown path
    files: tuple[SourceFile, ...] = ()  # other open files, the nearest first
    root: str = ""  # directory of the project, empty if unknown
    recent: tuple[str, ...] = ()  # texts copied, changed or jumped to, the last one first
    max_tokens: int = DEFAULT_COMPLETION_TOKENS  # 0 only prefills the prompt
    max_lines: int = 0  # 0: inferred from the cursor position
    seconds: float | None = None  # until the best text so far is returned
    temperature: float = 0.0  # 0 is greedy
    edits: tuple[BufferEdit, ...] | None = None  # to request the next change; the last one last


@dataclass(frozen=True, slots=True)
class Completion:
    """The text that belongs at the cursor, maybe empty, or the next change."""

    text: str
    finish_reason: CompletionReason  # "length": max_tokens, max_lines or the context ended it
    stats: Stats
    draft_context_tokens: int = 0  # of the buffer and other files, drafted from only
    reused: bool = False  # the rest of an earlier completion, without a pass
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """Options that all requests of a completer share; budgets shrink with a short context."""

    fim: str = "auto"  # a fill-in-the-middle family or edit format; "none": plain continuation
    prefix_tokens: int = 1536  # prompt tokens before the cursor at most
    suffix_tokens: int = 512  # behind it
    file_tokens: int = 3072  # of other files
    fresh_tokens: int = 512  # of other files, newly prefilled while a request waits
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS


class CompletionMaker(Protocol):
    """Makes completions in one thread: a model, or a client of a server."""

    @property
    def name(self) -> str:
        """Of the model."""

    def complete(
        self,
        request: CompletionRequest,
        ended: Ended | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """See `Completer.steps`. Raises ServerGone if the server has ended."""

    def recall(self, request: CompletionRequest) -> Completion | None:
        """See `Completer.recall`."""

    def relieve(self) -> None:
        """Release memory under pressure; called when idle."""

    def close(self) -> None:
        """Save what was learned."""


def check_request(request: CompletionRequest) -> None:
    """Raise UsageError for limits that cannot be honored."""
    if not 0 <= request.max_tokens <= MAX_COMPLETION_TOKENS:
        raise UsageError(
            f"max_tokens must be from 0 to {MAX_COMPLETION_TOKENS}, got {request.max_tokens}"
        )
    if request.max_lines < 0:
        raise UsageError(f"max_lines must be 0 or more, got {request.max_lines}")
    if request.seconds is not None and not request.seconds > 0:
        raise UsageError(f"the time must be above 0 seconds, got {request.seconds}")


def time_limit(seconds: float | None) -> Ended:
    """Ends a completion so long after now."""
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: "time" if end is not None and time.monotonic() >= end else None


def has_crlf(request: CompletionRequest) -> bool:
    """Whether the lines of the buffer end as on Windows."""
    return "\r\n" in request.prefix or "\r\n" in request.suffix


def with_unix_newlines(request: CompletionRequest) -> CompletionRequest:
    """The request as models know text. A cursor between the two characters is before both."""
    prefix, suffix = request.prefix, request.suffix
    if prefix.endswith("\r") and suffix.startswith("\n"):
        prefix = prefix[:-1]
    return replace(
        request, prefix=prefix.replace("\r\n", "\n"), suffix=suffix.replace("\r\n", "\n")
    )


def with_crlf(completion: Completion) -> Completion:
    """The completion with the newlines of such a buffer."""
    return replace(completion, text=completion.text.replace("\n", "\r\n"))
