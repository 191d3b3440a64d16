"""Receive and decompress the body of a request."""

from __future__ import annotations

import asyncio
import contextlib
import zlib

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import Receive

from akunu_py.serve.dialect.bodies import MAX_BYTES
from akunu_py.serve.dialect.request_errors import RequestError
from akunu_py.serve.http.request_handler import Disconnected

_TIMEOUT_S = 60.0
_MAX_DROPPED = 1 << 30  # bytes of a body that is too large
# Encodings of a body: the formats that zlib tries, as its window sizes.
_ENCODINGS: dict[str, tuple[int, ...]] = {
    "": (),
    "identity": (),
    "gzip": (zlib.MAX_WBITS | 16,),
    "x-gzip": (zlib.MAX_WBITS | 16,),
    "deflate": (zlib.MAX_WBITS, -zlib.MAX_WBITS),
}


async def read_body(headers: Headers, receive: Receive) -> bytes:
    """Return the body. Raises Disconnected; RequestError if it is too large, slow or damaged.

    The rest of a large body is received and dropped: clients that cannot send it see no reply.
    """
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _ENCODINGS:
        raise RequestError(
            f"Content-Encoding {encoding[:100]!r} is not supported; use gzip or deflate", "encoding"
        )
    length = headers.get("content-length", "")
    declared = int(length[:20]) if length.isdigit() else 0
    if declared > _MAX_DROPPED or (declared > MAX_BYTES and "expect" in headers):
        raise _too_large()
    data, received, more = bytearray(), 0, True
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Disconnected
                part = message.get("body", b"")
                received += len(part)
                if received <= MAX_BYTES:
                    data += part
                more = message.get("more_body", False)
                if received > _MAX_DROPPED:
                    raise _too_large()
    except TimeoutError:
        raise RequestError(f"request body did not arrive within {_TIMEOUT_S:g} seconds") from None
    if received > MAX_BYTES:
        raise _too_large()
    whole = bytes(data)
    return await run_in_threadpool(_decompress, whole, encoding) if _ENCODINGS[encoding] else whole


def _decompress(data: bytes, encoding: str) -> bytes:
    """Return a compressed body. Raises RequestError if it is damaged or too large.

    Some clients send `deflate` without zlib's header (RFC 9110, section 8.4.1.2).
    """
    for window in _ENCODINGS[encoding]:
        stream = zlib.decompressobj(window)
        with contextlib.suppress(zlib.error):
            found = stream.decompress(data, MAX_BYTES + 1)
            if len(found) > MAX_BYTES:
                raise _too_large(" after decompression")
            if stream.eof and not stream.unused_data:
                return found
    raise RequestError(f"request body is not valid {encoding} data")


def _too_large(when: str = "") -> RequestError:
    return RequestError(f"request body exceeds {MAX_BYTES >> 20} MiB{when}", "too_large")
