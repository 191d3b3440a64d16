"""Everything that akunu raises on purpose.

    AkunuError
    ├── UsageError            an option or an input that cannot be honoured
    │   ├── PromptTooLong     the prompt does not fit the model's context
    │   ├── EmptyPrompt
    │   └── SchemaError       a JSON schema that no grammar can be made of
    │       └── Unsatisfiable no value can fit it
    ├── ModelError
    │   ├── UnknownModel      no such model in the store or on disk
    │   ├── DamagedModel      files missing, cut off or altered
    │   ├── UnsupportedModel  intact, but of a kind that we cannot load
    │   └── DoesNotFit        more memory than this machine can give it
    ├── DamagedCache          a saved session that is cut off, altered or something else
    ├── FetchError            a download failed: no network, or not what was expected
    │   └── Cancelled         whoever asked for it called it off
    ├── HostLost              another host of a model died, hangs or cannot be reached
    ├── ServerGone            a running server does not answer any more
    ├── StoreError            the disk refused: full, read-only, no permission
    └── ConversationError     conversations that cannot be kept, found or read

Each message says what was expected, what was found and what to run next, in one line.
Only the CLI turns these into exit codes.
"""

from __future__ import annotations

INTERRUPTED = 130  # the exit code where the user, not an error, ended it


_LONGEST = 1000  # characters of a message


class AkunuError(Exception):
    """The root. `exit_code` is what the CLI ends with. Where a message quotes something endless,
    its middle is left out."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 3 :]}"
        super().__init__(message)


class UsageError(AkunuError):
    exit_code = 2


class PromptTooLong(UsageError):
    """tokens: of the prompt. maximum: of those that may be."""

    exit_code = 1

    def __init__(self, message: str, tokens: int = 0, maximum: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.maximum = maximum


class EmptyPrompt(UsageError):
    pass


class SchemaError(UsageError):
    """A JSON schema that no grammar can be made of."""

    def __init__(self, reason: str, place: str = "#") -> None:
        super().__init__(reason)
        self.place = place  # a JSON pointer, as a fragment


class Unsatisfiable(SchemaError):
    """No value can fit the schema."""


class HostLost(AkunuError):
    pass


class ServerGone(AkunuError):
    pass


class ModelError(AkunuError):
    pass


class UnknownModel(ModelError):
    pass


class DamagedModel(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class DoesNotFit(ModelError):
    pass


class DamagedCache(AkunuError):
    pass


class FetchError(AkunuError):
    pass


class Cancelled(FetchError):
    exit_code = INTERRUPTED


class StoreError(AkunuError):
    pass


class ConversationError(AkunuError):
    pass


def one_line(error: object, longest: int = 200) -> str:
    """The text of somebody else's exception on one line; its class where it has none."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def describe(error: BaseException) -> str:
    """Any exception on one line: ours speak for themselves, others with the name of their class."""
    text = " ".join(str(error).split())
    if isinstance(error, AkunuError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
