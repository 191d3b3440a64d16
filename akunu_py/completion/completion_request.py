"""Completion requests and completions, as plain values."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from akunu_py.engine.events import Finished
from akunu_py.errors import UsageError
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DraftMode, Stats

CompletionReason = Literal["stop", "length", "time", "cancelled"]
EndCheck = Callable[[], CompletionReason | None]  # returns the reason to end, None to continue

DEFAULT_COMPLETION_TOKENS = 128
MAX_COMPLETION_TOKENS = 1024
MAX_ALTERNATIVES = 4
_COMPLETION_RESERVE = 1024  # tokens of the context for the completion
_FORMAT_TOKENS = 256  # of the context for markers and paths


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Another file of the project, as it is in the editor."""

    # Unknown fields in a line of the protocol are ignored.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "ignore", "strict": True}

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """The buffer around the cursor, its project and the limits; a bad limit is a UsageError."""

    prefix: str  # the buffer before the cursor
    suffix: str = ""  # the buffer after it
    path: str = ""  # empty if unknown
    language: str = ""  # stands in for an unknown path
    files: tuple[SourceFile, ...] = ()  # other open files, the nearest first
    root: str = ""  # directory of the project, empty if unknown
    recent: tuple[str, ...] = ()  # copied, changed or visited texts, the last one first
    max_tokens: int = DEFAULT_COMPLETION_TOKENS  # 0 only prefills the prompt
    max_lines: int = 0  # 0: inferred from the cursor position
    seconds: float | None = None  # time limit from the first text on; returns the text so far
    temperature: float = 0.0  # 0 is greedy

    def __post_init__(self) -> None:
        most = MAX_COMPLETION_TOKENS
        if not 0 <= self.max_tokens <= most:
            raise UsageError(f"max_tokens must be from 0 to {most}, got {self.max_tokens}")
        if self.max_lines < 0:
            raise UsageError(f"max_lines must be 0 or more, got {self.max_lines}")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError(f"the time limit must be above 0 seconds, got {self.seconds}")


@dataclass(frozen=True, slots=True)
class Completion:
    """The text that belongs at the cursor, maybe empty."""

    text: str
    finish_reason: CompletionReason  # "length": max_tokens, max_lines or the context ended it
    stats: Stats
    draft_context_tokens: int = 0  # of the buffer and other files, drafted from only
    reused: bool = False  # the rest of an earlier completion, without a pass
    excluded: bool = False  # the settings exclude the file
    alternatives: tuple[str, ...] = ()  # other samples, without repeated and empty ones


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """Options that all requests of a completer share; budgets shrink with a short context."""

    fim: str = "auto"  # a fill-in-the-middle family; "none": plain continuation
    prefix_tokens: int = 1536  # prompt tokens before the cursor at most
    suffix_tokens: int = 512  # after it
    file_tokens: int = 3072  # of other files
    fresh_tokens: int = 512  # of other files without a cached prefix, while a client waits
    draft: DraftMode = "auto"
    draft_tokens: int = DEFAULT_DRAFT_TOKENS

    def fitting(self, context: int) -> Self:
        """Return the options with budgets that fit into `context` tokens, with a completion."""
        wanted, room = (self.prefix_tokens, self.suffix_tokens), room_for_text(context)
        share = min(1.0, room / sum(wanted))
        prefix, suffix = (int(tokens * share) for tokens in wanted)
        files = min(self.file_tokens, max(0, room - prefix - suffix))
        return replace(self, prefix_tokens=prefix, suffix_tokens=suffix, file_tokens=files)


def room_for_text(context: int) -> int:
    """Return the tokens that `context` leaves for text around the cursor."""
    return max(16, context - min(_COMPLETION_RESERVE, context // 4) - _FORMAT_TOKENS)


def finished(completion: Completion) -> Finished:
    """Return the last event of a completion."""
    reason = completion.finish_reason
    return Finished("length" if reason == "time" else reason, completion.stats, details=completion)


def has_crlf(request: CompletionRequest) -> bool:
    """Return True if the buffer has CRLF newlines."""
    return "\r\n" in request.prefix or "\r\n" in request.suffix


def with_unix_newlines(request: CompletionRequest) -> CompletionRequest:
    """Return the request with LF newlines; a cursor within CRLF moves before it."""
    prefix, suffix = request.prefix, request.suffix
    if prefix.endswith("\r") and suffix.startswith("\n"):
        prefix = prefix[:-1]
    return replace(
        request, prefix=prefix.replace("\r\n", "\n"), suffix=suffix.replace("\r\n", "\n")
    )


def with_crlf(completion: Completion) -> Completion:
    """Return the completion with CRLF newlines."""
    return replace(completion, text=completion.text.replace("\n", "\r\n"))
