"""What a request is refused with, before a dialect writes it down in its own shape."""

from __future__ import annotations

from typing import Literal

from akunu_py import crashes
from akunu_py.errors import AkunuError, PromptTooLong, UnknownModel, UnsupportedModel, UsageError

ErrorKind = Literal[
    "invalid",
    "unauthorized",
    "forbidden",
    "not_found",
    "method",
    "too_large",
    "unavailable",
    "internal",
]

STATUS: dict[ErrorKind, int] = {
    "invalid": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "too_large": 413,
    "unavailable": 503,
    "internal": 500,
}


class RequestError(Exception):
    """A request that cannot be honoured. param: the parameter at fault, "" where none is. code: the
    name that clients know the error by, where it has one: "context_length_exceeded",
    "model_not_found"."""

    def __init__(
        self, message: str, kind: ErrorKind = "invalid", *, param: str = "", code: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind: ErrorKind = kind
        self.param = param
        self.code = code

    @property
    def status(self) -> int:
        """Of HTTP."""
        return STATUS[self.kind]


class Stopping(RequestError):
    """An answer that the end of the server cuts off."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", "unavailable")


def request_error(error: Exception) -> RequestError:
    """What a client is told of an exception. One that nobody foresaw is kept as a crash is, and its
    details are not told."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.maximum} maximum"
        return RequestError(message, code="context_length_exceeded")
    if isinstance(error, UnknownModel):
        return RequestError(str(error), "not_found", param="model", code="model_not_found")
    if isinstance(error, UsageError | UnsupportedModel):
        return RequestError(str(error))
    if isinstance(error, AkunuError):  # no model, no memory, or the end of the server
        return RequestError(str(error), "unavailable")
    crashes.report(error)
    return RequestError("the server failed to answer; its terminal has the details", "internal")
