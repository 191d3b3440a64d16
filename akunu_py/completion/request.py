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
    """A change that was made: in the file `path`, from the line number `line` (from 0) on, `before`
    became `after`. Some lines around it may be in both."""

    path: str
    before: str
    after: str
    line: int = 0


@dataclass(frozen=True, slots=True)
class Change:
    """A change to be made: the lines of the buffer from number `first` (from 0) up to `last`, which
    is not among them, become `lines`, without their ends."""

    first: int
    last: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What is around the cursor.

    prefix, suffix: the buffer before and after it. path: of the buffer, empty where unknown;
    language stands in for it then. files: other open files, the nearest first. root: the directory
    of the project, empty where unknown. recent: texts that were copied, changed or jumped to, the
    last one first: what of other files has their names is read first. max_tokens: 0 for
    the model to read what it would complete from, and no more. max_lines: 0 leaves it to the place
    of the cursor. seconds: the time after which the best text so far is returned, None for as long
    as it takes. temperature: 0 is greedy. edits: what was changed lately, the last one last, where
    the next change is wanted and no text at the cursor; else None.
    """

    prefix: str
    suffix: str = ""
    path: str = ""
    language: str = ""
    files: tuple[SourceFile, ...] = ()
    root: str = ""
    recent: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_COMPLETION_TOKENS
    max_lines: int = 0
    seconds: float | None = None
    temperature: float = 0.0
    edits: tuple[BufferEdit, ...] | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """What belongs at the cursor, maybe nothing; or the next change, where that was asked for.

    finish_reason: "stop" (it is whole), "length" (max_tokens or max_lines), "time" or "cancelled";
    after the last two it is what there was until then.
    draft_context_tokens: of the buffer and other files, drafted from but never read by the model.
    reused: whether it is the rest of an earlier completion, and cost no pass.
    """

    text: str
    finish_reason: CompletionReason
    stats: Stats
    draft_context_tokens: int = 0
    reused: bool = False
    change: Change | None = None


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """How to complete, the same for all requests of a completer.

    fim: the name of a fill-in-the-middle family or of a format of next edits, "none" for plain
    continuation, "auto" to recognise it. prefix_tokens, suffix_tokens, file_tokens: what the model
    reads of each at most; less where its context is short. fresh_tokens: what it reads at once of
    other files while someone waits.
    """

    fim: str = "auto"
    prefix_tokens: int = 1536
    suffix_tokens: int = 512
    file_tokens: int = 3072
    fresh_tokens: int = 512
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS


class CompletionMaker(Protocol):
    """What makes completions in one thread: a model, or a server that has one."""

    @property
    def name(self) -> str:
        """Of the model."""

    def complete(
        self,
        request: CompletionRequest,
        ended: Ended | None = None,
        on_text: Callable[[str], None] = lambda text: None,
    ) -> Completion:
        """See `Completer.steps`. Raises ServerGone where there will be no more from it."""

    def recall(self, request: CompletionRequest) -> Completion | None:
        """See `Completer.recall`."""

    def relieve(self) -> None:
        """Gives memory back where the system is short of it; called while nobody asks."""

    def close(self) -> None:
        """Keeps what was learned."""


def check_request(request: CompletionRequest) -> None:
    """Raises UsageError for limits that cannot be honoured."""
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
