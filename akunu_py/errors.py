"""The exceptions that akunu raises on purpose; the CLI maps them to exit codes.

Each message is one line that says what was expected, what was found and what to do.
"""

INTERRUPTED = 130  # the exit code after an interrupt
_LONGEST = 1000  # characters of a message


class AkunuError(Exception):
    """The base class; shortens long messages in the middle."""

    exit_code = 1  # of the CLI

    def __init__(self, message: str = "") -> None:
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST * 2 // 3]} ... {message[-_LONGEST // 3 :]}"
        super().__init__(message)


class UsageError(AkunuError):
    """An invalid option or input."""

    exit_code = 2


class PromptTooLong(UsageError):
    """The prompt exceeds the context length."""

    exit_code = 1

    def __init__(self, message: str, tokens: int = 0, maximum: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens  # of the prompt
        self.maximum = maximum  # tokens that fit


class SchemaError(UsageError):
    """A JSON schema that cannot become a grammar."""

    def __init__(self, reason: str, place: str = "#") -> None:
        super().__init__(reason)
        self.place = place  # a JSON pointer in a fragment


class Unsatisfiable(SchemaError):
    """No value can match the schema."""


class HostLost(AkunuError):
    """Another host of a split model failed or is unreachable."""


class ServerGone(AkunuError):
    """A running server does not respond any more."""


class NotAkunu(AkunuError):
    """Another program answers at the address of a server."""


class ModelError(AkunuError):
    """A model cannot be used."""


class UnknownModel(ModelError):
    """The model is not installed."""


class DamagedModel(ModelError):
    """Files of the model are missing or altered."""


class UnsupportedModel(ModelError):
    """The model is intact, but its kind is not supported."""


class DoesNotFit(ModelError):
    """The model needs more memory than the limit."""


class MemoryInUse(DoesNotFit):
    """A model fits into memory, but not next to the models that are loaded."""


class DamagedCache(AkunuError):
    """A saved prompt cache is damaged or is another file."""


class FetchError(AkunuError):
    """A download failed."""


class Cancelled(FetchError):
    """The user cancelled a download."""


class StoreError(AkunuError):
    """The disk is full, read-only or lacks permission."""


class ConversationError(AkunuError):
    """Conversations cannot be saved, found or read."""


def one_line(error: object, longest: int = 200) -> str:
    """Return the text of a foreign exception on one line, or its class if it has no text."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


def describe(error: BaseException) -> str:
    """Return any exception on one line; foreign exceptions with the name of their class."""
    text, kind = " ".join(str(error).split()), type(error).__name__
    return text if isinstance(error, AkunuError) else f"{kind}: {text}" if text else kind
