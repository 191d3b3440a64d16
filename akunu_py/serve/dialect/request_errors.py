"""Errors of requests, before a dialect encodes them."""

import asyncio

from akunu_py import crashes
from akunu_py.errors import AkunuError, PromptTooLong, UnknownModel, UnsupportedModel, UsageError

STATUSES = (400, 401, 403, 404, 405, 413, 415, 500, 503)  # of HTTP, for errors
_IGNORED = "SubmissionsIgnored"  # the end of the name of Metal's error


class RequestError(Exception):
    """A request that cannot be served."""

    def __init__(self, message: str, status: int = 400, *, param: str = "", code: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status  # of HTTP
        self.param = param  # the invalid parameter, or ""
        self.code = code  # for clients, such as "model_not_found", or ""


def invalid(param: str, reason: str) -> RequestError:
    """Return the error of one parameter."""
    return RequestError(f"{param}: {reason}", param=param)


class ServerStopping(RequestError):
    """The server is stopping and cancels the request."""

    def __init__(self) -> None:
        super().__init__("the server is stopping", 503)


def request_error(error: BaseException) -> RequestError:
    """Return the error for clients; details of an unexpected one go to a crash report only."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, asyncio.CancelledError):  # only the end of the server cancels requests
        return ServerStopping()
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.maximum} maximum"
        return RequestError(message, code="context_length_exceeded")
    if isinstance(error, UnknownModel):
        return RequestError(str(error), 404, param="model", code="model_not_found")
    if isinstance(error, UsageError | UnsupportedModel):
        return RequestError(str(error))
    if isinstance(error, AkunuError):  # such as a failed load
        return RequestError(str(error), 503)
    crashes.report(error)
    return RequestError("internal error; see the server's terminal for details", 500)


def gpu_is_lost(error: BaseException) -> bool:
    """Return True if macOS ignores all further GPU work of this process."""
    return any(_IGNORED in str(each) for each in (error, error.__cause__))
