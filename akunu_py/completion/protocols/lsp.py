"""The Language Server Protocol on stdin and stdout: `textDocument/inlineCompletion` of LSP 3.18.

Other open documents are draft context. A document is prefilled when it opens, and around the last
change when typing pauses. The answer has at most one item; an explicit request gets alternatives
too. A superseded request ends with ContentModified, a cancelled one with RequestCancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from akunu_py.completion.completion_queue import (
    CompletionQueue,
    LoadModel,
    QueueOptions,
    submit_with_alternatives,
)
from akunu_py.completion.completion_request import Completion, CompletionRequest, SourceFile
from akunu_py.completion.prompt.project_imports import head_of_file
from akunu_py.completion.tickets import Ticket
from akunu_py.engine.events import Failed
from akunu_py.engine.host import State
from akunu_py.errors import INTERRUPTED, AkunuError, describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.version import __version__

_SECONDS = 3.0  # time limit of a completion
_ALTERNATIVES = 2  # samples for an explicit request
_PAUSE_S = 0.1  # of typing, before the prefill; clients send requests after about 0.2
CONTEXT = "akunu/context"  # a notification: recent texts, paths of files that are not open
_MAX_FILES = 8  # of these paths
_MAX_FILE = 1 << 20  # characters of such a file
PART = "akunu/inlineCompletionPart"  # a notification: textDocument, position, text and command
_PART_S = 0.05  # between two notifications
_HEAD = 4096  # characters at the start of a document for the prefill when it opens
_ACCEPTED = {"title": "Accepted", "command": "akunu.accepted"}  # of each item

METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
REQUEST_CANCELLED = -32800
CONTENT_MODIFIED = -32801
REQUEST_FAILED = -32803

_LENGTH = re.compile(rb"(?i)content-length:\s*(\d+)\s*$")
_CODE_UNITS = {"utf-8": ("utf-8", 1), "utf-16": ("utf-16-le", 2), "utf-32": ("utf-32-le", 4)}


class RpcError(AkunuError):
    """The error reply to a request."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # of JSON-RPC or LSP


class OpenDocument:
    """The text of a document in the editor, whose positions count code units of `encoding`."""

    def __init__(self, uri: str, text: str, language: str = "", encoding: str = "utf-16") -> None:
        parts = urlsplit(uri)
        self.uri = uri
        self.path = unquote(parts.path) if parts.scheme == "file" else uri
        self.text = _well_formed(text)
        self.language = language
        self._codec, self._size = _CODE_UNITS[encoding]

    def offset(self, position: dict[str, Any]) -> int:
        """Return the index of a position, clamped to its line and to the start of a character.

        Lines end only at LF, CRLF or CR; `str.splitlines` ends them at a form feed, too.
        """
        text = self.text.replace("\r\n", " \n").replace("\r", "\n")  # of the same length
        *above, below = text.split("\n", min(position["line"], len(text)))
        if len(above) < position["line"]:
            return len(text)
        start = len(text) - len(below)
        line = self.text[start : start + len(below.partition("\n")[0])].rstrip("\r")
        units = line.encode(self._codec)[: self._size * position["character"]]
        return start + len(units.decode(self._codec, "ignore"))

    def split(self, start: dict[str, Any], end: dict[str, Any]) -> tuple[str, str]:
        """Return the text before `start` and the text after `end`."""
        return self.text[: self.offset(start)], self.text[self.offset(end) :]

    def apply(self, change: dict[str, Any]) -> None:
        """Replace a range of the text, or all of it."""
        before, after = "", ""
        if place := change.get("range"):
            before, after = self.split(place["start"], place["end"])
        self.text = before + _well_formed(change["text"]) + after


def _well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON allows and tokenizers reject, with U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def read_frames(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the bodies of the frames in `stream` until it ends."""
    length = 0
    while line := stream.readline():
        if found := _LENGTH.match(line):
            length = int(found[1])
        elif not line.strip() and length:
            yield stream.read(length)
            length = 0


class LanguageServer:
    """Answers requests with a queue of completions. Methods run in the event loop's thread.

    The model loads after the answer to initialize, because importing MLX blocks Python.
    """

    def __init__(self, load: LoadModel, base: CompletionRequest, options: QueueOptions) -> None:
        """base: the limits of all requests."""
        self.loop = asyncio.get_running_loop()
        self._stdout: BinaryIO
        self._answers: dict[str | int, asyncio.Task[None]] = {}  # in progress, by id
        self._ids = itertools.count(1)  # of requests to the client
        self._replies: dict[int, asyncio.Future[bool]] = {}  # of the client, by id
        self._is_shut_down = False
        self.base = replace(base, seconds=base.seconds or _SECONDS)
        self.queue = CompletionQueue(load, options, on_state=self._on_state)
        self._states: asyncio.Queue[tuple[State, str]] = asyncio.Queue()
        self._reporting: asyncio.Task[None] | None = None  # the event loop keeps no reference
        self._documents: dict[str, OpenDocument] = {}  # by URI, the one used last at the end
        self._encoding = "utf-16"
        self._root = ""  # directory of the project
        self._pause: asyncio.TimerHandle | None = None
        self._recent: tuple[str, ...] = ()  # texts that the client sent
        self._paths: tuple[str, ...] = ()  # of files to read from disk
        self._shows_parts = False  # the client shows parts of an unfinished answer
        self._shows_progress = False
        # Coroutine functions by method.
        self.requests: dict[str, Callable[[Any], Any]] = {
            "shutdown": self._shut_down,
            "initialize": self._initialize,
            "textDocument/inlineCompletion": self._complete,
            "workspace/executeCommand": self._execute,
        }
        self.notifications: dict[str, Callable[[Any], None]] = {
            "initialized": self._initialized,
            "textDocument/didOpen": self._opened,
            "textDocument/didChange": self._changed,
            "textDocument/didClose": self._closed,
            CONTEXT: self._set_context,
        }

    async def serve(self, stdin: BinaryIO, stdout: BinaryIO) -> bool:
        """Serve until exit or the end of stdin; return True after shutdown and exit."""
        self._stdout = stdout
        frames: asyncio.Queue[bytes] = asyncio.Queue()

        def read() -> None:
            for frame in itertools.chain(read_frames(stdin), [b""]):
                self.call_soon(frames.put_nowait, frame)

        # A daemon thread, because a read cannot be interrupted.
        threading.Thread(target=read, name="frames", daemon=True).start()
        while frame := await frames.get():
            try:
                message = json.loads(frame)
                if message.get("method") == "exit":
                    return self._is_shut_down
                self._handle(message)
            except Exception as error:  # noqa: BLE001 - of one message; the next may be valid
                self.show(describe(error))
            await asyncio.sleep(0)  # a request begins before the next message changes documents
        return False

    def _handle(self, message: Any) -> None:
        method, id, params = (message.get(name) for name in ("method", "id", "params"))
        if method is None:
            if reply := self._replies.pop(id, None):
                reply.set_result("error" not in message)
        elif "id" in message:
            self._answers[id] = self.loop.create_task(self._answer(id, method, params))
        elif method == "$/cancelRequest":
            if answer := self._answers.get(params["id"]):
                answer.cancel()
        elif method in self.notifications:
            self.notifications[method](params)

    async def _answer(self, id: str | int, method: str, params: Any) -> None:
        try:
            if method not in self.requests:
                raise RpcError(f"unknown method: {method}", METHOD_NOT_FOUND)
            reply: dict[str, Any] = {"result": await self.requests[method](params)}
        except asyncio.CancelledError:
            reply = {"error": {"code": REQUEST_CANCELLED, "message": "cancelled"}}
        except RpcError as error:
            reply = {"error": {"code": error.code, "message": str(error)}}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            message = f"invalid params: {describe(error)}"
            reply = {"error": {"code": INVALID_PARAMS, "message": message}}
        self._answers.pop(id, None)
        self._send({"id": id} | reply)

    async def _shut_down(self, _: Any) -> None:
        self._is_shut_down = True

    async def request(self, method: str, params: dict[str, Any]) -> bool:
        """Send a request; return False if the client refuses it."""
        id = next(self._ids)
        self._replies[id] = self.loop.create_future()
        self._send({"id": id, "method": method, "params": params})
        return await self._replies[id]

    def notify(self, method: str, params: dict[str, Any]) -> None:
        self._send({"method": method, "params": params})

    def show(self, text: str) -> None:
        """Show an error message."""
        self.notify("window/showMessage", {"type": 1, "message": f"akunu: {text}"})

    def _send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0"} | message).encode()
        with contextlib.suppress(OSError):  # the client has left, and stdin ends, too
            self._stdout.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            self._stdout.flush()

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        """Run `call` in the thread of the event loop. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(call, *arguments)

    async def _initialize(self, params: Any) -> dict[str, Any]:
        capabilities = params.get("capabilities") or {}
        offered = (capabilities.get("general") or {}).get("positionEncodings") or ()
        self._encoding = next((each for each in offered if each in _CODE_UNITS), "utf-16")
        window = capabilities.get("window") or {}
        self._shows_progress = window.get("workDoneProgress") is True
        options = params.get("initializationOptions") or {}
        self._shows_parts = options.get("inlineCompletionParts") is True
        uri = params.get("rootUri")
        self._root = unquote(urlsplit(uri).path) if uri else params.get("rootPath") or ""
        provided = {
            "positionEncoding": self._encoding,
            "textDocumentSync": {"openClose": True, "change": 2},  # incremental
            "inlineCompletionProvider": {},
            "executeCommandProvider": {"commands": [_ACCEPTED["command"]]},
        }
        return {"capabilities": provided, "serverInfo": {"name": "akunu", "version": __version__}}

    def _initialized(self, _: Any) -> None:
        self.queue.start()
        self._reporting = self.loop.create_task(self._report_loading())

    def _opened(self, params: Any) -> None:
        opened = params["textDocument"]
        uri, text = opened["uri"], opened["text"]
        document = OpenDocument(uri, text, opened.get("languageId") or "", self._encoding)
        self._documents.pop(uri, None)
        self._documents[uri] = document
        # Requests share the start of the document.
        self._prefill(document, document.text[: document.text.rfind("\n", 0, _HEAD) + 1 or _HEAD])

    def _changed(self, params: Any) -> None:
        document = self._document(params)
        changes: Sequence[dict[str, Any]] = params["contentChanges"]
        for change in changes:
            document.apply(change)
        place = changes[-1].get("range") if changes else None
        if place is None:
            return
        at = document.offset(place["start"]) + len(changes[-1]["text"])
        before, after = document.text[:at], document.text[at:]
        if self._pause is not None:
            self._pause.cancel()
        self._pause = self.loop.call_later(_PAUSE_S, self._prefill, document, before, after)

    def _closed(self, params: Any) -> None:
        self._documents.pop(params["textDocument"]["uri"], None)

    def _set_context(self, params: Any) -> None:
        self._recent, self._paths = tuple(params["recent"]), tuple(params["files"][:_MAX_FILES])

    async def _execute(self, params: Any) -> None:
        if params["command"] != _ACCEPTED["command"]:
            raise RpcError(f"unknown command: {params['command']}", INVALID_PARAMS)
        self.queue.accepted()

    async def _complete(self, params: Any) -> dict[str, Any]:
        """Return the completions. Raises RpcError for no answer: see this module's top."""
        context, position = params.get("context") or {}, params["position"]
        chosen = context.get("selectedCompletionInfo")  # of a menu; its text counts as typed
        document = self._document(params)
        # With a range, clients keep showing the item while its first letters are typed.
        place = chosen["range"] if chosen else {"start": position, "end": position}
        before, after = document.split(place["start"], place["end"])
        typed = chosen["text"] if chosen else ""
        shown = {name: params[name] for name in ("textDocument", "position")}
        parts = shown if self._shows_parts and not chosen else None
        explicit = context.get("triggerKind") == 1
        request = self._request(document, before + typed, after)
        done = await self._completion(request, document, parts, _ALTERNATIVES if explicit else 0)
        items = [
            # LF newlines, which editors convert.
            {"insertText": typed + text.replace("\r\n", "\n"), "range": place, "command": _ACCEPTED}
            for text in (done.text, *done.alternatives)
            if text.strip()
        ]
        return {"items": items}

    async def _completion(
        self,
        request: CompletionRequest,
        document: OpenDocument,
        parts: dict[str, Any] | None,
        alternatives: int,
    ) -> Completion:
        """Wait for the completion. Raises RpcError if it failed or was superseded.

        parts: the place for notifications with the text so far, None to send none.
        """
        future: asyncio.Future[Completion | Failed] = self.loop.create_future()
        shown = ""
        timer: asyncio.TimerHandle | None = None

        def on_done(done: Completion | Failed) -> None:
            self.call_soon(lambda: None if future.done() else future.set_result(done))

        def on_text(text: str) -> None:
            nonlocal shown
            shown += text.replace("\r\n", "\n")
            if parts is not None:
                self.call_soon(start_timer)

        def start_timer() -> None:
            nonlocal timer
            timer = timer or self.loop.call_later(_PART_S, send_part)

        def send_part() -> None:
            nonlocal timer
            timer = None
            if parts is not None and shown.strip() and not future.done():
                self.notify(PART, {**parts, "text": shown, "command": _ACCEPTED})

        self.queue.start()  # for a client that never sends initialized
        ticket = Ticket(request, on_done, document.uri, on_text)
        submit_with_alternatives(self.queue, ticket, alternatives)
        try:
            done = await future
        except asyncio.CancelledError:
            self.queue.cancel(ticket)
            raise
        if isinstance(done, Failed):
            raise RpcError(describe(done.error), REQUEST_FAILED)
        if done.finish_reason == "cancelled":
            words = "superseded by a newer request for the same document"
            raise RpcError(words, CONTENT_MODIFIED)
        return done

    def _prefill(self, document: OpenDocument, before: str, after: str = "") -> None:
        if before.strip():
            request = replace(self._request(document, before, after), max_tokens=0)
            self.queue.submit(Ticket(request, channel=document.uri))

    def _document(self, params: Any) -> OpenDocument:
        """Return the open document of a message, and mark it as the last document in use."""
        uri = params["textDocument"]["uri"]
        if uri not in self._documents:
            raise RpcError(f"document is not open: {uri}", INVALID_PARAMS)
        self._documents[uri] = document = self._documents.pop(uri)
        return document

    def _request(self, document: OpenDocument, before: str, after: str) -> CompletionRequest:
        files = tuple(
            SourceFile(other.path, other.text)
            for other in reversed(self._documents.values())
            if other is not document and other.text
        )
        known = {file.path for file in files} | {document.path}
        for path in self._paths:
            if path not in known and (text := head_of_file(path, _MAX_FILE)):
                files += (SourceFile(path, text),)
        return replace(
            self.base,
            prefix=before,
            suffix=after,
            path=document.path,
            language=document.language,
            files=files,
            root=self._root,
            recent=self._recent,
        )

    def _on_state(self, state: State) -> None:
        """Note a state of the model, in the model's thread."""
        host = self.queue.host
        text = host.facts.name if host.facts else ""
        text = describe(host.error) if state == "failed" else text
        self.call_soon(self._states.put_nowait, (state, text))

    async def _report_loading(self) -> None:
        last = ""
        for number in itertools.count():
            while (await self._states.get())[0] != "loading":
                pass
            token = f"akunu/loading/{number}"
            beginning = self.loop.create_task(self._begin_progress(token))
            state, text = await self._states.get()
            if state == "failed" and text != last:
                self.show(text)
            last = text
            if await beginning:
                message = "failed" if state == "failed" else f"{text} is ready"
                value = {"kind": "end", "message": message}
                self.notify("$/progress", {"token": token, "value": value})

    async def _begin_progress(self, token: str) -> bool:
        """Start to report progress; return False if the client does not show it."""
        create = "window/workDoneProgress/create"
        if not (self._shows_progress and await self.request(create, {"token": token})):
            return False
        value = {"kind": "begin", "title": "akunu", "message": "loading"}
        self.notify("$/progress", {"token": token, "value": value})
        return True


def serve_lsp(load: LoadModel, base: CompletionRequest, options: QueueOptions) -> None:
    """Speak LSP on stdin and stdout until the client sends exit.

    base: the limits (default: 3 seconds). Output of libraries goes to stderr. Raises AkunuError if
    the client exits without shutdown.
    """
    # Duplicates, because Python aborts at its end if a thread still reads sys.stdin.
    stdin = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115 - open until the end
    stdout = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def run() -> tuple[int, bool]:
        code = INTERRUPTED  # unless it comes to its end
        server = LanguageServer(load, base, options)
        try:
            code = 0 if await server.serve(stdin, stdout) else 1
        finally:
            loading = server.queue.close_or_exit(code)
        return code, loading

    code, loading = asyncio.run(run())  # sends the last replies
    if loading:
        exit_without_teardown(code)
    if code != 0:
        raise AkunuError("expected shutdown before exit from the client")
