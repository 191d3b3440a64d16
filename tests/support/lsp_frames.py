"""Frames of the Language Server Protocol as the server reads them."""

from __future__ import annotations

import io
from collections.abc import Iterator

from akunu_py.completion.protocols.lsp import FrameStream


def read_frames(data: bytes) -> Iterator[bytes | str]:
    """Yield the bodies of the frames in `data`, and a message for each piece of garbage."""
    garbage: list[str] = []
    stream = FrameStream(io.BytesIO(data), garbage.append)
    while header := stream.readline():
        yield from garbage
        garbage.clear()
        assert stream.readline() == b"\r\n"
        yield stream.read(int(header.removeprefix(b"Content-Length: ")))
    yield from garbage
