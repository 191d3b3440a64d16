"""The Language Server Protocol on stdin and stdout: `textDocument/inlineCompletion` of LSP 3.18.

Other open documents are draft context. A document is prefilled when it opens, and around the last
change when typing pauses. The answer has at most one item; an explicit request gets alternatives
too. A superseded request ends with ContentModified, a cancelled one with RequestCancelled.
`akunu/nextEdit` is our own request for the next edit.

pygls does framing, dispatch, documents and capabilities. The classes at the end of this module
correct it: garbage between frames loses no frame, every rejected request gets an error reply, and
lines end as the protocol says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import unquote

from lsprotocol import types
from pygls.exceptions import (
    JsonRpcContentModified,
    JsonRpcException,
    JsonRpcInvalidParams,
    JsonRpcInvalidRequest,
    JsonRpcParseError,
    JsonRpcServerNotInitialized,
)
from pygls.io_ import StdoutWriter, run_async
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method
from pygls.uris import to_fs_path
from pygls.workspace import PositionCodec, ServerTextPosition, TextDocument

from akunu_py.completion.alternatives import submit_with_alternatives
from akunu_py.completion.completion_queue import (
    DEFAULT_QUEUE_OPTIONS,
    CompletionFailure,
    CompletionQueue,
    QueueOptions,
    Ticket,
)
from akunu_py.completion.prompt.next_edit import RecentEdits
from akunu_py.completion.prompt.project_imports import head_of_file
from akunu_py.completion.request import (
    Completion,
    CompletionRequest,
    SourceFile,
)
from akunu_py.decoding.generate.model_host import ModelLoop, State
from akunu_py.errors import INTERRUPTED, AkunuError, describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.version import __version__

if TYPE_CHECKING:
    from akunu_py.completion.completer import Completer

_REQUEST_FAILED = types.LSPErrorCodes.RequestFailed.value
_SECONDS = 3.0  # time limit of a completion; later ghost text is useless
_ACCEPTED = types.Command("Accepted", "akunu.accepted")  # of each item
_ALTERNATIVES = 2  # samples for an explicit request
_PAUSE_S = 0.1  # of typing, before the prefill; clients send requests after about 0.2
CONTEXT = "akunu/context"  # a notification: recent texts, paths of files that are not open
_MAX_FILES = 8  # of these paths
_MAX_FILE = 1 << 20  # characters of such a file
NEXT_EDIT = "akunu/nextEdit"  # a request, with the params of a position request
_SHOWS_PARTS = "inlineCompletionParts"  # of initializationOptions
PART = "akunu/inlineCompletionPart"  # a notification: textDocument, position, text and command
_PART_S = 0.05  # between two notifications
_HEAD = 4096  # characters at the start of a document for the prefill when it opens

MAX_FRAME_BYTES = 64 << 20  # a longer frame has an invalid header
_LENGTH = re.compile(rb"(?i)content-length[ \t]*:[ \t]*(\d{1,19})[ \t]*\r?\n$")
_HEADER = re.compile(rb"[\w-]+[ \t]*:.*\r?\n")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_CODE_UNITS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


class InlineCompletions:
    """Answers requests with a queue of completions.

    The model loads after the answer to initialize, because importing MLX blocks Python.
    """

    def __init__(
        self,
        load: Callable[[], Completer | ModelLoop],
        base: CompletionRequest,
        options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
    ) -> None:
        """base: the limits of all requests."""
        self.base = replace(base, seconds=base.seconds or _SECONDS)
        self.loop = asyncio.get_running_loop()
        loads: asyncio.Queue[str | CompletionFailure | None] = asyncio.Queue()

        def on_state(state: State) -> None:
            host = self.queue.host
            load: str | CompletionFailure | None = None
            if state == "ready" and host.facts is not None:
                load = host.facts.name
            elif state == "failed":
                load = CompletionFailure(describe(host.error))
            if state != "unloaded":
                self._call_soon(lambda: loads.put_nowait(load))

        self.queue = CompletionQueue(load, options, on_state=on_state)
        self.reporting: asyncio.Task[None] | None = None  # the event loop keeps no reference
        self.server = LanguageServer("akunu", __version__, protocol_cls=StrictProtocol)
        self.protocol = cast(StrictProtocol, self.server.protocol)
        self.pause: asyncio.TimerHandle | None = None
        self.edits = RecentEdits()
        self.recent: tuple[str, ...] = ()  # texts that the client sent
        self.head_of_files: tuple[str, ...] = ()  # paths of files to read from disk
        self.wants_edits = False  # the client requests next edits, not text at the cursor
        self.shows_parts = False  # the client shows parts of an unfinished answer
        self._add_features(loads)

    def _add_features(self, loads: asyncio.Queue[str | CompletionFailure | None]) -> None:
        """Register the handlers. They are functions because pygls cannot mark bound methods."""
        feature = self.server.feature

        @feature(types.INITIALIZE)
        def initialize(params: types.InitializeParams) -> None:
            options = params.initialization_options
            self.shows_parts = isinstance(options, dict) and options.get(_SHOWS_PARTS) is True

        @feature(types.INITIALIZED)
        async def initialized(_: types.InitializedParams) -> None:
            self.queue.start()
            # Not a task of pygls, which would print a traceback at the end of the program.
            self.reporting = asyncio.create_task(report_loading(self.server, loads))

        @feature(types.TEXT_DOCUMENT_DID_OPEN)
        def opened(params: types.DidOpenTextDocumentParams) -> None:
            self.opened(self.protocol.document(params.text_document.uri))

        @feature(types.TEXT_DOCUMENT_DID_CHANGE)
        def changed(params: types.DidChangeTextDocumentParams) -> None:
            document = self.protocol.document(params.text_document.uri)
            self.changed(document, params.content_changes)

        @self.server.command(_ACCEPTED.command)
        def accepted() -> None:
            self.queue.accepted()

        # Registered with options, because clients send no requests without them.
        @feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
        async def inline_completion(
            params: types.InlineCompletionParams,
        ) -> types.InlineCompletionList:
            return await self.complete(params)

        @feature(CONTEXT)
        def context(params: Any) -> None:
            self.recent = _texts(params, "recent")
            self.head_of_files = _texts(params, "files")[:_MAX_FILES]

        @feature(NEXT_EDIT)
        async def next_edit(params: Any) -> dict[str, Any] | None:
            return await self.next_edit(params)

    def opened(self, document: OpenDocument) -> None:
        text = document.source
        self.edits.opened(_path(document), text)
        if not self.wants_edits:  # requests share the start of the document
            self.prefill(document, text[: text.rfind("\n", 0, _HEAD) + 1 or _HEAD])

    def changed(
        self, document: OpenDocument, changes: Sequence[types.TextDocumentContentChangeEvent]
    ) -> None:
        self.edits.changed(_path(document), document.source)
        last = changes[-1] if changes else None
        if self.wants_edits or not isinstance(last, types.TextDocumentContentChangePartial):
            return
        at = document.offset_at_position(last.range.start) + len(last.text)
        before, after = document.source[:at], document.source[at:]
        if self.pause is not None:
            self.pause.cancel()
        self.pause = self.loop.call_later(_PAUSE_S, self.prefill, document, before, after)

    def prefill(self, document: OpenDocument, before: str, after: str = "") -> None:
        """Prefill the prompt of a completion between `before` and `after`."""
        if before.strip():
            request = replace(self._request(document, before, after), max_tokens=0)
            self.queue.submit(Ticket(request, channel=document.uri))

    async def complete(self, params: types.InlineCompletionParams) -> types.InlineCompletionList:
        """Return the completions. Raises JsonRpcException for no answer: see this module's top."""
        request, chosen = self._requested(params)
        explicit = params.context.trigger_kind == types.InlineCompletionTriggerKind.Invoked
        alternatives = _ALTERNATIVES if explicit else 0
        self.queue.start()  # for a client that never sends initialized
        uri = params.text_document.uri
        position = self.protocol.document(uri).clamped(params.position)
        shows_parts = self.shows_parts and chosen is None
        partial = _PartialAnswer(self, params) if shows_parts else None
        done = await self._completion(request, uri, partial, alternatives)
        texts = [text for text in (done.text, *done.alternatives) if text.strip()]
        return types.InlineCompletionList([_item(text, position, chosen) for text in texts])

    async def next_edit(self, params: Any) -> dict[str, Any] | None:
        """Return the next change, None if there is none. Raises JsonRpcException as `complete`."""
        try:
            uri, at = params.textDocument.uri, params.position
            position = types.Position(at.line, at.character)
        except (AttributeError, TypeError, ValueError):
            raise JsonRpcInvalidParams(
                "expected a textDocument, and a position with a line and a character from 0"
            ) from None
        document = self.protocol.document(uri)
        self.wants_edits = True
        self.queue.start()
        request = replace(
            self._request(document, *document.split(position, position)),
            files=(),
            edits=tuple(self.edits),
        )
        change = (await self._completion(request, uri)).change
        return None if change is None else {**asdict(change), "command": _ACCEPTED}

    async def _completion(
        self,
        request: CompletionRequest,
        uri: str,
        partial: _PartialAnswer | None = None,
        alternatives: int = 0,
    ) -> Completion:
        """Wait for the completion. Raises JsonRpcException if it failed or was superseded."""
        done = Future[Completion | CompletionFailure]()
        done.set_running_or_notify_cancel()  # a cancelled task cannot cancel it: the queue sets it

        def on_text(text: str) -> None:
            if partial is not None:
                self._call_soon(lambda: partial.add(text))

        ticket = Ticket(request, done.set_result, uri, on_text)
        submit_with_alternatives(self.queue, ticket, alternatives)
        try:
            outcome = await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            if partial is not None:
                partial.end()
        if isinstance(outcome, CompletionFailure):
            raise JsonRpcException(outcome.message, _REQUEST_FAILED)
        if outcome.finish_reason == "cancelled":
            raise JsonRpcContentModified("superseded by a newer request for the same document")
        return outcome

    def _requested(
        self, params: types.InlineCompletionParams
    ) -> tuple[CompletionRequest, types.SelectedCompletionInfo | None]:
        """Return the request and the selected menu entry, whose text counts as typed."""
        document = self.protocol.document(params.text_document.uri)
        chosen = params.context.selected_completion_info
        if chosen is None:
            return self._request(document, *document.split(params.position, params.position)), None
        before, after = document.split(chosen.range.start, chosen.range.end)
        return self._request(document, before + chosen.text, after), chosen

    def _request(self, document: OpenDocument, before: str, after: str) -> CompletionRequest:
        """Return the request for a document split at the cursor, with the other open files."""
        files = tuple(
            SourceFile(_path(other), other.source)
            for other in reversed(self.server.workspace.text_documents.values())
            if other is not document and other.source
        )
        known = {file.path for file in files} | {_path(document)}
        for path in self.head_of_files:
            if path not in known and (text := head_of_file(path, _MAX_FILE)):
                files += (SourceFile(path, text),)
        return replace(
            self.base,
            prefix=before,
            suffix=after,
            path=_path(document),
            language=document.language_id or "",
            files=files,
            root=self.server.workspace.root_path or "",
            recent=self.recent,
        )

    def _call_soon(self, call: Callable[[], object]) -> None:
        """Run `call` in the thread of the event loop. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(call)


class _PartialAnswer:
    """The parts of an unfinished answer that the client shows."""

    def __init__(self, owner: InlineCompletions, params: types.InlineCompletionParams) -> None:
        self._owner = owner
        self._place = {"textDocument": params.text_document, "position": params.position}
        self._text = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, text: str) -> None:
        self._text += text.replace("\r\n", "\n")
        if self._timer is None:
            self._timer = self._owner.loop.call_later(_PART_S, self._send)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self) -> None:
        self._timer = None
        if not self._text.strip():
            return
        part = {**self._place, "text": self._text, "command": _ACCEPTED}
        self._owner.server.protocol.notify(PART, part)


async def report_loading(
    server: LanguageServer, loads: asyncio.Queue[str | CompletionFailure | None]
) -> None:
    """Report progress while a model loads, and a failure as a message.

    loads: None when loading starts, then the name of the model or the failure.
    """
    window = server.client_capabilities.window
    shows = bool(window and window.work_done_progress)
    last: str | CompletionFailure | None = None
    for number in itertools.count():
        await loads.get()
        token = f"akunu/loading/{number}"
        beginning = asyncio.create_task(_begin_progress(server, token)) if shows else None
        outcome = await loads.get()
        if isinstance(outcome, CompletionFailure) and outcome != last:
            server.window_show_message(
                types.ShowMessageParams(types.MessageType.Error, f"akunu: {outcome.message}")
            )
        last = outcome
        if beginning is not None and await beginning:
            message = "failed" if isinstance(outcome, CompletionFailure) else f"{outcome} is ready"
            server.work_done_progress.end(token, types.WorkDoneProgressEnd(message=message))


async def _begin_progress(server: LanguageServer, token: str) -> bool:
    """Start to report progress; return False if the client declines."""
    try:
        await server.work_done_progress.create_async(token)
    except JsonRpcException:
        return False
    server.work_done_progress.begin(token, types.WorkDoneProgressBegin("akunu", message="loading"))
    return True


def serve_lsp(
    load: Callable[[], Completer | ModelLoop],
    base: CompletionRequest,
    options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
) -> None:
    """Speak LSP on stdin and stdout until the client sends exit.

    load: runs in the thread that owns the model. base: the limits (default: 3 seconds). Output of
    libraries goes to stderr. Raises AkunuError if the client exits without shutdown.
    """
    # Its warnings are about valid messages, and its errors go to the client.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    # Duplicates, because Python aborts at its end if a thread still reads sys.stdin.
    stdin = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115 - open until the end
    stdout = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def run() -> tuple[int, bool]:
        code = INTERRUPTED  # unless it comes to its end
        completions = InlineCompletions(load, base, options)
        try:
            code = 0 if await completions.protocol.serve(stdin, stdout) else 1
        finally:
            loading = completions.queue.close_or_exit(code)
        return code, loading

    code, loading = asyncio.run(run())  # sends the last replies
    if loading:
        exit_without_teardown(code)
    if code != 0:
        raise AkunuError("expected shutdown before exit from the client")


def _item(
    text: str, position: types.Position, chosen: types.SelectedCompletionInfo | None
) -> types.InlineCompletionItem:
    """Return an item with LF newlines, which editors convert."""
    text = text.replace("\r\n", "\n")
    # With a range, clients keep showing the item while its first letters are typed.
    place = types.Range(position, position)
    if chosen is not None:
        text, place = chosen.text + text, chosen.range
    return types.InlineCompletionItem(text, range=place, command=_ACCEPTED)


def _texts(params: Any, name: str) -> tuple[str, ...]:
    """Return the texts of a list in a notification, without invalid ones."""
    found = getattr(params, name, None)
    return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else ()


def _path(document: TextDocument) -> str:
    """Return the path of a file, or the URI of any other document."""
    return to_fs_path(document.uri) or document.uri


class StrictCodec(PositionCodec):
    """Clamps positions to the end of the line and to the start of a character.

    pygls miscounts both in the last line and before CRLF.
    """

    def position_from_client_units(
        self, lines: Sequence[str], position: types.Position
    ) -> ServerTextPosition:
        if position.line >= len(lines):
            return ServerTextPosition(len(lines), 0)
        codec, size = _CODE_UNITS[self.encoding or "utf-16"]
        line = lines[position.line].rstrip("\r\n").encode(codec)
        before = line[: size * position.character].decode(codec, "ignore")
        return ServerTextPosition(position.line, len(before))


class OpenDocument(TextDocument):
    """A document whose lines end only at LF, CRLF or CR.

    pygls uses str.splitlines, where a form feed shifts all later positions.
    """

    @property
    def lines(self) -> Sequence[str]:
        return _LINE.findall(self.source)

    def apply_change(self, change: types.TextDocumentContentChangeEvent) -> None:
        change.text = well_formed(change.text)
        super().apply_change(change)

    def clamped(self, position: types.Position) -> types.Position:
        """Return the position, or the end of its line if the line is shorter."""
        lines = _LINE.findall(self.source[: self.offset_at_position(position)])
        line = "" if not lines or lines[-1][-1] in "\r\n" else lines.pop()
        codec, size = _CODE_UNITS[self.position_codec.encoding or "utf-16"]
        return types.Position(len(lines), len(line.encode(codec)) // size)

    def split(self, start: types.Position, end: types.Position) -> tuple[str, str]:
        """Return the text before `start` and the text after `end`."""
        first, last = self.offset_at_position(start), self.offset_at_position(end)
        return self.source[:first], self.source[last:]


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON allows and tokenizers reject, with U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class BadFrame(str):
    """The reason why a stretch of bytes is no frame."""


def read_frames(stream: BinaryIO) -> Iterator[bytes | BadFrame]:
    """Yield the bodies of the frames in `stream` until it ends.

    From a place where no frame begins, everything up to the next Content-Length is skipped.
    """
    length: int | None = None
    lost = False
    while line := stream.readline(4096):
        found, ends = _LENGTH.search(line), line in (b"\r\n", b"\n")
        if not (lost or (found and found.start() == 0) or _HEADER.fullmatch(line) or ends):
            lost, length = True, None
            yield BadFrame("expected a header line with Content-Length")
        if found:
            lost, length = False, int(found[1])
        elif ends and length is not None:
            if 0 < length <= MAX_FRAME_BYTES:
                body = stream.read(length)
                if len(body) < length:
                    return
                yield body
            else:
                yield BadFrame(f"expected 1 to {MAX_FRAME_BYTES} bytes, got {length}")
            length = None


class FrameReader:
    """Gives pygls' message loop the frames of a stream, and reports garbage in between.

    A daemon thread reads, because a read cannot be interrupted; a message is one thread switch.
    """

    def __init__(self, stream: BinaryIO, on_garbage: Callable[[BadFrame], object]) -> None:
        self._on_garbage = on_garbage
        self._frames: asyncio.Queue[bytes | BadFrame | None] = asyncio.Queue()
        self._header: list[bytes] = []  # the next lines, the last one first
        self._body = b""
        loop = asyncio.get_running_loop()

        def read() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                for frame in read_frames(stream):
                    loop.call_soon_threadsafe(self._frames.put_nowait, frame)
                loop.call_soon_threadsafe(self._frames.put_nowait, None)

        threading.Thread(target=read, name="frames", daemon=True).start()

    async def readline(self) -> bytes:
        """Return the next line of a header, empty at the end."""
        if not self._header:
            while isinstance(frame := await self._frames.get(), BadFrame):
                self._on_garbage(frame)
            if frame is None:
                return b""
            self._header = [b"\r\n", b"Content-Length: %d\r\n" % len(frame)]
            self._body = frame
        return self._header.pop()

    async def readexactly(self, length: int) -> bytes:
        return self._body


class StrictProtocol(LanguageServerProtocol):
    """Replies to every rejected request, and checks the order of the messages."""

    def __init__(self, server: LanguageServer, converter: Any) -> None:
        super().__init__(server, converter)
        self._initialized = False
        self._left = threading.Event()  # the client sent exit

    async def serve(self, stdin: BinaryIO, stdout: BinaryIO) -> bool:
        """Serve until exit or the end of stdin; return True after shutdown and exit."""
        self.set_writer(StdoutWriter(stdout))
        reader = FrameReader(stdin, lambda bad: self._refuse(None, JsonRpcParseError(bad)))
        await run_async(self._left, reader, self, error_handler=self._refuse_frame)
        return self._left.is_set() and self._shutdown

    def document(self, uri: str) -> OpenDocument:
        """Return an open document, and mark it as the last document in use."""
        documents, key = self.workspace.text_documents, unquote(uri)
        if key not in documents:
            raise JsonRpcInvalidParams(f"document is not open: {uri}")
        documents[key] = documents.pop(key)
        return cast(OpenDocument, documents[key])

    def structure_message(self, data: Any) -> Any:
        """Do nothing; pygls calls this for every object, and `handle_message` does the work."""
        return data

    def handle_message(self, message: Any) -> None:
        """Handle one message; a rejected request gets an error reply."""
        _check_shape(message)
        method = message.get("method")
        try:
            self._check_order(method)
            structured = super().structure_message(message)
        except JsonRpcException as error:
            if "method" in message and "id" in message:
                self._refuse(message["id"], error)
            return
        self._initialized |= method == types.INITIALIZE
        super().handle_message(structured)

    def _check_order(self, method: object) -> None:
        """Raise an error for a request before `initialize` or after `shutdown`."""
        if method == types.INITIALIZE:
            if self._initialized:
                raise JsonRpcInvalidRequest("initialize was sent twice")
        elif self._shutdown and method != types.EXIT:
            raise JsonRpcInvalidRequest("after shutdown only exit is expected")
        elif not self._initialized and method not in (None, types.EXIT):
            raise JsonRpcServerNotInitialized("expected initialize first")

    def _refuse(self, message_id: object, error: JsonRpcException) -> None:
        known = message_id if isinstance(message_id, (str, int)) else None
        # pygls omits fields that are None, but an error reply needs its id.
        self._send_data({"jsonrpc": "2.0", "id": known, "error": error.to_response_error()})

    def _refuse_frame(self, error: Exception, source: object) -> None:
        """Report a frame without a valid message."""
        if isinstance(error, OSError):  # stdout is closed
            raise error
        if not isinstance(error, JsonRpcException):
            error = JsonRpcParseError(f"not JSON: {error}")
        self._refuse(None, error)

    @lsp_method(types.EXIT)
    def lsp_exit(self, *args: object) -> None:  # type: ignore[override]
        """End `serve`; pygls would end the process and lose the exit code."""
        self._left.set()

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(
        self, params: types.DidOpenTextDocumentParams
    ) -> Generator[Any, Any, None]:
        opened = params.text_document
        self.workspace.remove_text_document(opened.uri)
        self.workspace.text_documents[unquote(opened.uri)] = OpenDocument(
            opened.uri,
            well_formed(opened.text),
            opened.version,
            str(getattr(opened.language_id, "value", opened.language_id)),  # an open enumeration
            position_codec=StrictCodec(self.workspace.position_encoding),
        )
        yield self.fm.features[types.TEXT_DOCUMENT_DID_OPEN], (params,), None

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(
        self, params: types.DidChangeTextDocumentParams
    ) -> Generator[Any, Any, None]:
        self.document(params.text_document.uri)  # raises if it is not open
        yield from super().lsp_text_document__did_change(params)


def _check_shape(message: Any) -> None:
    """Raise JsonRpcInvalidRequest unless `message` is a message of JSON-RPC 2.0."""
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise JsonRpcInvalidRequest('expected an object with "jsonrpc": "2.0"')
    if "method" not in message and not {"id", "result"} <= set(message) and "error" not in message:
        raise JsonRpcInvalidRequest('expected a "method", or an "id" with a "result" or an "error"')
    # pygls uses ids as keys, including the id of a cancelled request.
    params = message.get("params")
    ids = [message.get("id")]
    if message.get("method") == types.CANCEL_REQUEST and isinstance(params, dict):
        ids.append(params.get("id"))
    if not all(id is None or isinstance(id, str | int) for id in ids):
        raise JsonRpcInvalidRequest('expected a string or an integer as "id"')
