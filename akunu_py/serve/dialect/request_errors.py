"""Errors of requests, before a dialect encodes them."""

from typing import Literal

from akunu_py import crashes
from akunu_py.errors import AkunuError, PromptTooLong, UnknownModel, UnsupportedModel, UsageError

ErrorKind = Literal[
    "invalid", "unauthorized", "forbidden", "not_found", "method", "too_large", "encoding",
    "unavailable", "internal",
]  # fmt: skip
STATUS: dict[ErrorKind, int] = {
    "invalid": 400, "unauthorized": 401, "forbidden": 403, "not_found": 404, "method": 405,
    "too_large": 413, "encoding": 415, "unavailable": 503, "internal": 500,
}  # fmt: skip


_IGNORED = "SubmissionsIgnored"  # the end of the name of Metal's error


class RequestError(Exception):
    """A request that cannot be served."""

    def __init__(
        self, message: str, kind: ErrorKind = "invalid", *, param: str = "", code: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind: ErrorKind = kind
        self.param = param  # the invalid parameter, or ""
        self.code = code  # for clients, such as "model_not_found", or ""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]


def invalid(param: str, reason: str) -> RequestError:
    """Return the error of one parameter."""
    return RequestError(f"{param}: {reason}", param=param)


class ServerStopping(RequestError):
    """The server is stopping and cancels the request."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", "unavailable")


def request_error(error: Exception) -> RequestError:
    """Return the error for clients; details of an unexpected one go to a crash report only."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.maximum} maximum"
        return RequestError(message, code="context_length_exceeded")
    if isinstance(error, UnknownModel):
        return RequestError(str(error), "not_found", param="model", code="model_not_found")
    if isinstance(error, UsageError | UnsupportedModel):
        return RequestError(str(error))
    if isinstance(error, AkunuError):  # such as a failed load
        return RequestError(str(error), "unavailable")
    crashes.report(error)
    return RequestError("internal error; see the server's terminal for details", "internal")


def gpu_is_lost(error: Exception | None) -> bool:
    """Return True if macOS ignores all further GPU work of this process."""
    return error is not None and any(_IGNORED in str(each) for each in (error, error.__cause__))
