"""The Language Server Protocol on two streams, strictly.

pygls does the dispatch, the types and the capabilities; this module does what it leaves open:
reading frames from among garbage, an error reply to everything that is refused (a client waits for
ever for one that never comes), the order of initialize, shutdown and exit, the exit code, and
positions in the open documents. A line ends at LF, CRLF or CR and nowhere else: str.splitlines
knows more, and a form feed in a source would shift everything after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, cast

from lsprotocol import types
from pygls.exceptions import (
    JsonRpcException,
    JsonRpcInvalidParams,
    JsonRpcInvalidRequest,
    JsonRpcParseError,
    JsonRpcServerNotInitialized,
)
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

MAX_FRAME_BYTES = 64 << 20  # a document may be large; more than this is a broken header

_LENGTH = re.compile(rb"(?i)content-length[ \t]*:[ \t]*(\d{1,19})[ \t]*\r?\n$")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_HEADER = re.compile(rb"[\w-]+[ \t]*:.*\r?\n")


class BadFrame(str):
    """What was wrong with a stretch of bytes that is no frame."""


def read_frames(stream: BinaryIO) -> Iterator[bytes | BadFrame]:
    """The bodies of the frames in `stream` until it ends.

    Where no frame begins, everything up to the next Content-Length is skipped, and reported once.
    """
    length: int | None = None
    lost = False
    while line := stream.readline(4096):
        found = _LENGTH.search(line)
        if not (lost or (found and found.start() == 0) or _HEADER.fullmatch(line) or _ends(line)):
            lost, length = True, None
            yield BadFrame("expected a header line with Content-Length")
        if found:
            lost, length = False, int(found[1])
        elif _ends(line) and length is not None:
            if length > MAX_FRAME_BYTES:
                yield BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are taken")
            else:
                body = stream.read(length)
                if len(body) < length:
                    return
                yield body
            length = None


def _ends(line: bytes) -> bool:
    """Whether the line ends the header."""
    return line in (b"\r\n", b"\n")


@dataclass(frozen=True, slots=True)
class Document:
    """One open document. `language` is the editor's name for it, such as "python"."""

    uri: str
    language: str
    text: str

    def offset(self, line: int, character: int, encoding: str) -> int:
        """The index in `text` of a position in units of `encoding` ("utf-8", "utf-16", "utf-32").

        Past the last line it is the end of the text, past the end of a line that line's end, and
        in the middle of a character that character's beginning.
        """
        start = 0
        ends = _NEWLINE.finditer(self.text)
        if line:
            before = next(islice(ends, line - 1, None), None)
            if before is None:
                return len(self.text)
            start = before.end()
        end = next(ends, None)
        content = self.text[start : end.start() if end else len(self.text)]
        return start + _characters(content, character, encoding)

    def changed(
        self, text: str, start: tuple[int, int], end: tuple[int, int], encoding: str
    ) -> Document:
        """The document with what is between two positions replaced by `text`."""
        first, last = self.offset(*start, encoding), self.offset(*end, encoding)
        return self.with_text(self.text[:first] + text + self.text[max(first, last) :])

    def with_text(self, text: str) -> Document:
        return Document(self.uri, self.language, well_formed(text))


class Documents:
    """The open documents by URI; the one that was used last comes first."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}

    def put(self, document: Document) -> None:
        """Adds or replaces a document, as the one used last."""
        self._documents.pop(document.uri, None)
        self._documents[document.uri] = document

    def remove(self, uri: str) -> None:
        self._documents.pop(uri, None)

    def use(self, uri: str) -> Document | None:
        """The document, now the one used last, or None where it is not open."""
        document = self._documents.get(uri)
        if document is not None:
            self.put(document)
        return document

    def __iter__(self) -> Iterator[Document]:
        return reversed(self._documents.values())


def well_formed(text: str) -> str:
    """`text` with surrogates that stand alone (JSON can escape them) replaced by U+FFFD, which
    takes as many code units; no tokenizer could read them."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _characters(line: str, units: int, encoding: str) -> int:
    """How many characters of `line` lie wholly within its first `units` code units."""
    if encoding == "utf-32" or line.isascii():
        return min(units, len(line))
    if encoding == "utf-8":
        return len(line.encode()[:units].decode(errors="ignore"))
    return len(line.encode("utf-16-le")[: 2 * units].decode("utf-16-le", errors="ignore"))


class StrictProtocol(LanguageServerProtocol):
    """What a server does with each message. `exit_code` is None until the client sent exit."""

    exit_code: int | None = None

    def __init__(self, server: LanguageServer, converter: Any) -> None:
        super().__init__(server, converter)
        self.documents = Documents()
        self.on_open: Callable[[Document], None] = lambda document: None
        # What was changed last ends at the index; None where all was replaced.
        self.on_change: Callable[[Document, int | None], None] = lambda document, index: None
        self._initialized = False

    def position_encoding(self) -> str:
        """The code units that columns are counted in, as agreed on."""
        return _plain(self.server_capabilities.position_encoding)

    def receive(self, frame: bytes | BadFrame) -> None:
        """Handles one frame. Whatever is wrong with it is reported to the client."""
        try:
            if isinstance(frame, BadFrame):
                raise JsonRpcParseError(frame)
            data = _parse(frame)
        except JsonRpcException as error:
            self._refuse(None, error)
            return
        is_request = "method" in data and "id" in data
        try:
            self._check_order(data.get("method"))
            message = self.structure_message(data)
            self._initialized |= data.get("method") == types.INITIALIZE
        except JsonRpcException as error:
            if is_request:
                self._refuse(data["id"], error)
            return
        self.handle_message(message)

    def _check_order(self, method: object) -> None:
        if method == types.INITIALIZE:
            if self._initialized:
                raise JsonRpcInvalidRequest("initialize came a second time")
        elif self._shutdown and method != types.EXIT:
            raise JsonRpcInvalidRequest("after shutdown only exit is expected")
        elif not self._initialized and method not in (None, types.EXIT):
            raise JsonRpcServerNotInitialized("expected initialize first")

    def _refuse(self, message_id: object, error: JsonRpcException) -> None:
        known = message_id if isinstance(message_id, (str, int)) else None
        # pygls leaves out what is None, but a reply without an id is none.
        self._send_data({"jsonrpc": "2.0", "id": known, "error": error.to_response_error()})

    @lsp_method(types.EXIT)
    def lsp_exit(self, *args: object) -> None:  # type: ignore[override]
        """pygls would end the process from inside, and lose the exit code on the way."""
        self.exit_code = 0 if self._shutdown else 1

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> None:
        opened = params.text_document
        document = Document(opened.uri, _plain(opened.language_id), "")
        document = document.with_text(opened.text)
        self.documents.put(document)
        self.on_open(document)

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self.documents.use(params.text_document.uri)
        if document is None:
            raise JsonRpcInvalidParams(f"not open: {params.text_document.uri}")
        at = None
        for change in params.content_changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start, end = change.range.start, change.range.end
                document = document.changed(
                    change.text,
                    (start.line, start.character),
                    (end.line, end.character),
                    self.position_encoding(),
                )
                at = document.offset(start.line, start.character, self.position_encoding())
                at += len(well_formed(change.text))
            else:
                document, at = document.with_text(change.text), None
        self.documents.put(document)
        self.on_change(document, at)

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> None:
        self.documents.remove(params.text_document.uri)


def _parse(body: bytes) -> dict[str, Any]:
    """The message in a frame, or raises a JsonRpcException that names what it is instead."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JsonRpcParseError(f"not JSON: {error}") from error
    if not isinstance(data, dict) or data.get("jsonrpc") != "2.0":
        raise JsonRpcInvalidRequest('expected an object with "jsonrpc": "2.0"')
    if "method" not in data and not {"id", "result"} <= set(data) and "error" not in data:
        raise JsonRpcInvalidRequest('expected a "method", or an "id" with a "result" or an "error"')
    # pygls looks requests up by their ids, also by the one that a client cancels.
    params = data.get("params")
    named = [data.get("id"), params.get("id") if isinstance(params, dict) else None]
    cancels = data.get("method") == types.CANCEL_REQUEST
    if not all(id is None or isinstance(id, str | int) for id in named[: 1 + cancels]):
        raise JsonRpcInvalidRequest('expected a string or an integer as "id"')
    return data


def _plain(value: object) -> str:
    """The string of an open enumeration: one of its members, or any other string."""
    return str(value.value if isinstance(value, enum.Enum) else value)


class FrameWriter:
    """Writes frames; every one comes from the thread of the event loop."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


async def serve(server: LanguageServer, stdin: BinaryIO, stdout: BinaryIO) -> int | None:
    """Serves until the client sends exit, or its end closes. The exit code, None without an exit.

    Frames are read in a daemon thread, because a read cannot be interrupted.
    """
    protocol = cast(StrictProtocol, server.protocol)
    protocol.set_writer(FrameWriter(stdout))
    loop = asyncio.get_running_loop()
    frames: asyncio.Queue[bytes | BadFrame | None] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            for frame in read_frames(stdin):
                loop.call_soon_threadsafe(frames.put_nowait, frame)
            loop.call_soon_threadsafe(frames.put_nowait, None)

    threading.Thread(target=read, name="frames", daemon=True).start()
    while protocol.exit_code is None and (frame := await frames.get()) is not None:
        protocol.receive(frame)
    return protocol.exit_code
