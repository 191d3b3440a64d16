"""The one way to the hub and back: a request, its errors in our words, and when to give up.

A server can keep an HTTP client waiting in every phase of a request (a name's look-up, header
lines, chunks) without any of the client's timeouts running out. So each request runs in a thread of
its own, and what it brings is waited for here, in ticks. Whatever the server, the HTTP client and
huggingface-hub make raise there comes out as a FetchError or UnknownModel. Answers are asked for
uncompressed, and compressed ones refused, so none is larger than what came over the wire; the
bodies of errors and redirects are never read.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from akunu_py.errors import AkunuError, Cancelled, FetchError, UnknownModel, describe
from akunu_py.models.store.progress import ProgressCallback
from akunu_py.text import on_one_line

_BUSY = (408, 429, 500, 502, 503, 504)
_REDIRECTS = 10
_ATTEMPTS = 5  # in a row, without _ENOUGH new bytes
_ENOUGH = 1 << 20
_FIRST_WAIT_S = 0.5  # doubled with each failure
_LONGEST_WAIT_S = 60.0  # what a Retry-After may ask for
_STALLED_S = 20.0  # a connection that brings less than _SLOWEST in this time is given up
_SLOWEST = 64 << 10
_TICK_S = 0.2
_QUEUED = 16  # chunks of at most 64 KiB that wait to be written


class TransientError(FetchError):
    """A failure that may pass. why: in two words. retry_after_s: the wait that the server asks for.
    part: it answers requests for a part of the file, but not as it should."""

    def __init__(
        self, message: str, why: str = "connection lost", *, after_s: float = 0, part: bool = False
    ) -> None:
        super().__init__(message)
        self.why, self.retry_after_s, self.part = why, after_s, part


@dataclass(frozen=True, slots=True)
class Answer:
    """200 or 206; `chunks` is the body, as it comes."""

    status: int
    headers: Mapping[str, str]
    chunks: Iterator[bytes]


@contextlib.contextmanager
def request(
    url: str,
    repository: str,
    retries: Retries,
    *,
    revision: str | None = None,
    headers: Mapping[str, str] | None = None,
    idle: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
    """The hub's answer to a GET of `url`, redirects followed; the token goes to the hub alone.

    idle: called now and then while nothing comes.
    Raises, here and while the chunks are read: TransientError, FetchError, UnknownModel, Cancelled.
    """
    asked = _Request(url, dict(headers or {}))
    items = _items(asked, repository, revision, retries, idle)
    asked.start()
    try:
        status, found = next(items)
        _check(status, found, repository, bool(headers and "Range" in headers))
        yield Answer(status, found, items)
    finally:
        asked.abandon()


def offline_error(repository: str) -> FetchError:
    """For a repository that would have to be fetched."""
    return FetchError(
        f"{repository} is not whole in the hub's cache, and HF_HUB_OFFLINE forbids to fetch it; "
        "unset it and pull again"
    )


class Retries:
    """Retries with exponential back-off while the hub is busy, stalls or the connection breaks.

    Gives up after five failures in a row that brought less than 1 MiB of new bytes together.
    cancelled: polled during every wait; Cancelled is raised where it is true. progress: called with
    why there is a wait.
    """

    def __init__(self, cancelled: Callable[[], bool], progress: ProgressCallback) -> None:
        self._cancelled, self._progress = cancelled, progress
        self._failures = self._new = 0

    def raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("cancelled; what was fetched is kept, pull again to go on")

    def gained(self, new_bytes: int) -> None:
        """Forgets the failures so far where enough bytes came that were not here before."""
        self._new += new_bytes
        if self._new >= _ENOUGH:
            self.reset()

    def reset(self) -> None:
        """Forgets the failures so far: a file is complete, and right."""
        self._failures = self._new = 0

    def call(self, attempt: Callable[[], Any]) -> Any:
        """The result of `attempt`, called again where it fails for a reason that may pass."""
        while True:
            with self.attempt():
                return attempt()

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """Suppresses a failure that may pass, after a wait; raises others, and one too many."""
        self.raise_if_cancelled()
        try:
            yield
        except TransientError as error:
            self._failures += 1
            if self._failures >= _ATTEMPTS:
                tries = f"{_ATTEMPTS} tries brought less than {_ENOUGH >> 20} MiB"
                raise FetchError(f"{error} ({tries})") from error
            self._wait(error)

    def _wait(self, error: TransientError) -> None:
        until = time.monotonic() + max(
            _FIRST_WAIT_S * 2 ** (self._failures - 1), min(error.retry_after_s, _LONGEST_WAIT_S)
        )
        while (left := until - time.monotonic()) > 0:
            self._progress(f"waiting: {error.why}", 0, 0)
            self.raise_if_cancelled()
            time.sleep(min(left, 0.1))


class _Request(threading.Thread):
    """A request under way: status and headers come into `items`, then chunks, then None, or the
    exception that ended it. It has connections of its own, so that `abandon` can end it whatever
    it waits for, and it never holds up the end of the process."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        super().__init__(daemon=True, name="request to the hub")
        self._url, self._headers = url, headers
        self.items: queue.Queue[Any] = queue.Queue(_QUEUED)
        self._abandoned = threading.Event()
        self._sockets: list[socket.socket] = []

    def abandon(self) -> None:
        """Ends the thread soon: nobody waits for it any more."""
        self._abandoned.set()
        for connection in list(self._sockets):
            with contextlib.suppress(OSError, ValueError):  # it is closed already
                connection.shutdown(socket.SHUT_RDWR)

    def _traced(self, event: str, found: dict[str, Any]) -> None:
        """Called by the HTTP client at each of its steps."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._sockets.append(found["return_value"].get_extra_info("socket"))
            if self._abandoned.is_set():
                self.abandon()

    def run(self) -> None:
        try:
            with contextlib.closing(self._received()) as received:
                for item in received:
                    self._put(item)
                    if self._abandoned.is_set():
                        return
            self._put(None)
        except BaseException as error:  # noqa: BLE001  (whoever waits for the answer raises it)
            self._put(error)

    def _received(self) -> Generator[Any, None, None]:
        import httpx2
        from huggingface_hub import constants, get_session
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            hf_raise_for_status,
        )

        client = get_session()
        ours = {"Accept-Encoding": "identity", "Connection": "close"}
        next_request = client.build_request(
            "GET",
            self._url,
            headers=build_hf_headers() | ours | self._headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            extensions={"trace": self._traced},
        )
        for _ in range(_REDIRECTS):
            response = client.send(next_request, stream=True, follow_redirects=False)
            with contextlib.closing(response):
                if response.next_request is None:
                    telling = ("X-Error-Code", "X-Error-Message", "Retry-After")
                    known = {
                        key: response.headers[key] for key in telling if key in response.headers
                    }
                    # Without its body, which nobody knows the size of and the library would read.
                    hf_raise_for_status(
                        httpx2.Response(response.status_code, headers=known, request=next_request)
                    )
                    yield response.status_code, response.headers
                    yield from response.iter_raw()
                    return
                next_request = response.next_request
        raise httpx2.TooManyRedirects(f"more than {_REDIRECTS} redirects")

    def _put(self, item: Any) -> None:
        while not self._abandoned.is_set():
            with contextlib.suppress(queue.Full):
                self.items.put(item, timeout=_TICK_S)
                return


def _items(
    asked: _Request,
    repository: str,
    revision: str | None,
    retries: Retries,
    idle: Callable[[], None],
) -> Iterator[Any]:
    """Status and headers, then the chunks. The time that our own disk takes does not count."""
    from huggingface_hub import constants

    longest = max(_STALLED_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    waited, came = 0.0, 0
    while True:
        retries.raise_if_cancelled()
        since = time.monotonic()
        try:
            item = asked.items.get(timeout=_TICK_S)
        except queue.Empty:
            item = b""
        waited += time.monotonic() - since
        if item is None:
            return
        if isinstance(item, BaseException):
            raise _explained(item, repository, revision) from item
        came += len(item) if isinstance(item, bytes) else 0
        if came >= _SLOWEST:
            waited, came = 0.0, 0
        elif waited > longest:
            raise TransientError(
                f"cannot fetch {repository}: {constants.ENDPOINT} stalled, less than "
                f"{_SLOWEST >> 10} KiB in {longest:.0f} s; what came is kept, pull again later",
                "stalled",
            )
        if item:
            yield item
        else:
            idle()


def _check(status: int, headers: Mapping[str, str], repository: str, ranged: bool) -> None:
    from huggingface_hub import constants

    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if status != 200 and not (ranged and status == 206):
        wrong = f"answers {repository} with status {status}, expected 200"
    elif encoding not in ("", "identity"):
        wrong = f"answers {repository} compressed ({on_one_line(encoding)[:20]}), unasked"
    else:
        return
    raise FetchError(
        f"{constants.ENDPOINT} {wrong}; is it the hub? check the network, the proxy and HF_ENDPOINT"
    )


def _explained(error: BaseException, repository: str, revision: str | None) -> AkunuError:
    """What a request raised, in our words and with what to do."""
    import httpx2
    from huggingface_hub import constants, errors

    host = constants.ENDPOINT
    match error:
        case errors.GatedRepoError():
            return FetchError(
                f"{repository} is gated: its owner wants you to accept terms first; open "
                f"{host}/{repository} in a browser, accept them, then run `hf auth login` or set "
                "HF_TOKEN, and pull again"
            )
        case errors.RevisionNotFoundError():
            return UnknownModel(
                f"{repository} has no revision {revision!r}; leave it out, or see "
                f"{host}/{repository}"
            )
        case errors.RepositoryNotFoundError():
            return UnknownModel(
                f"{host} knows no {repository}, or does not show it to you; check the spelling, "
                "and for a private or gated one run `hf auth login` or set HF_TOKEN"
            )
        case errors.OfflineModeIsEnabled():
            return offline_error(repository)
        case errors.HfHubHTTPError():
            return _http_error(repository, host, error.response)
        case ImportError() | ValueError() if "proxy" in str(error).lower():
            return FetchError(
                f"cannot use the proxy of ALL_PROXY, HTTPS_PROXY or HTTP_PROXY: {_told(error)}; "
                "correct or unset it, or `pip install socksio` for a SOCKS proxy"
            )
        case httpx2.LocalProtocolError():  # its text may hold the token
            return FetchError(
                f"cannot ask {host} for {repository}: HF_TOKEN or HF_ENDPOINT holds characters "
                "that no request can; correct it and pull again"
            )
        case httpx2.TransportError() if not isinstance(error, httpx2.UnsupportedProtocol):
            return TransientError(
                f"cannot fetch {repository}: {host} does not answer ({_told(error)}); check the "
                "network, HTTPS_PROXY and HF_ENDPOINT, then pull again",
                "no connection" if isinstance(error, httpx2.ConnectError) else "connection lost",
            )
        case _:
            return FetchError(
                f"cannot fetch {repository} from {host}: {_told(error)}; check the network, "
                "HTTPS_PROXY and HF_ENDPOINT, then pull again"
            )


def _told(error: BaseException) -> str:
    """The foreign part of a message: harmless in a terminal, and not long."""
    return on_one_line(describe(error))[:200]


def _http_error(repository: str, host: str, response: Any) -> FetchError:
    status = response.status_code
    if status in (401, 403):
        return FetchError(
            f"{host} refuses {repository} ({status}): the token in HF_TOKEN or of `hf auth login` "
            "is wrong, or may not read it; get another one, and pull again"
        )
    if status == 404:
        return FetchError(f"{host} has no longer what it listed for {repository} (404); pull again")
    message = f"{host} fails on {repository} ({status}); pull again later, what is here is kept"
    if status == 429:
        message = f"{host} has had too many requests from here (429); wait a while, then pull again"
    if status == 416:
        return TransientError(message, "no such part", part=True)
    if status not in _BUSY:
        return FetchError(message)
    return TransientError(message, f"busy ({status})", after_s=_retry_after(response.headers))


def _retry_after(headers: Mapping[str, str]) -> float:
    value = headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdigit() else 0.0
