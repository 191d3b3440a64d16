"""Access control: checks the headers of every request.

Web pages can reach loopback, too. A page whose name resolves to 127.0.0.1 (DNS rebinding) sends its
name in the Host header; a page that connects to 127.0.0.1 sends its Origin. Both are refused unless
--cors allows them.
"""

import hmac
import ipaddress
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from akunu_py.serve.dialect.interface import Dialect
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.request_handler import send_json

IGNORED_HEADER = "x-akunu-ignored"  # fields of the request without effect
_MAX_NAMED = 20  # such fields in the header
_PUBLIC_PATHS = ("/", "/health")  # need no key; the page sends it with its requests


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may send requests."""

    host: str = "127.0.0.1"  # bound by the server
    key: str = ""  # required API key, if any
    origins: tuple[str, ...] = ()  # allowed web pages, "*" for all
    token: str = ""  # second API key, for akunu's own clients on this machine

    def refusal(self, headers: Headers, path: str) -> RequestError | None:
        """Return why a request is refused, or None."""
        if not self._allows_host(headers.get("host", "")):
            message = f"wrong Host header {headers.get('host', '')[:100]!r}; use {self.host}"
            return RequestError(message, 403)
        origin = headers.get("origin", "")
        if origin and not self._allows_origin(origin, headers.get("host", "")):
            message = f"origin {origin[:100]!r} is not allowed; start the server with --cors ORIGIN"
            return RequestError(message, 403)
        if self.key and path not in _PUBLIC_PATHS and not self._has_key(headers):
            return RequestError(
                "the API key is missing or wrong; send it as bearer token or x-api-key",
                401,
                code="invalid_api_key",
            )
        return None

    def _allows_host(self, host: str) -> bool:
        """Check the Host header of a loopback server; other servers rely on their API key."""
        return not is_loopback(self.host) or is_loopback(_host_name(host))

    def _allows_origin(self, origin: str, host: str) -> bool:
        same_origin = origin.partition("://")[2].lower() == host.lower()
        return same_origin or "*" in self.origins or origin in self.origins

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        sent = headers.get("x-api-key", ""), bearer  # one may be the key of another server
        keys = filter(None, (self.key, self.token))
        return any(
            hmac.compare_digest(each.encode(), key.encode()) for key in keys for each in sent
        )


def is_loopback(name: str) -> bool:
    """Return True if a host name or address is loopback."""
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Return the name in a Host header without its port, or ""."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _header_value(names: Sequence[str]) -> str:
    """Return a list of names that clients choose, safe and short enough for a header."""
    shown = ", ".join(quote(name[:100], safe=".*[]_-/=") for name in names[:_MAX_NAMED])
    more = len(names) - _MAX_NAMED
    return f"{shown}, and {more} more" if more > 0 else shown


class Guard:
    """ASGI middleware: enforces `AccessRules`, and adds headers to every reply.

    The headers are a request id, and the fields of the request that have no effect.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: AccessRules,
        dialect_for_path: Callable[[str], Dialect],
        log: Callable[[str, RequestError], None],
    ) -> None:
        """log: called with the path of a refused request, and the reason."""
        self._app, self._access, self._dialect_of, self._log = app, access, dialect_for_path, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id
                if "record" in scope and scope["record"].ignored:
                    headers[IGNORED_HEADER] = _header_value(scope["record"].ignored)
            await send(message)

        if error := self._access.refusal(Headers(scope=scope), scope["path"]):
            self._log(scope["path"], error)
            body = self._dialect_of(scope["path"]).error(error, request_id)
            await send_json(send_with_id, error.status, body)
            return
        await self._app(scope, receive, send_with_id)
