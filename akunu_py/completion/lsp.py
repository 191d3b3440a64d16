"""`textDocument/inlineCompletion` of LSP 3.18: from its terms to a completion request and back. The
other open documents are drafted from.

A request is answered with a list of at most one item. One that a newer request for the same
document supersedes ends with ContentModified, which clients do not show; one that the client
cancels, with RequestCancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from akunu_py.completion.lsp_protocol import Document, StrictProtocol, serve
from akunu_py.completion.thread import CompletionThread, Failure
from akunu_py.completion.types import Completion, CompletionRequest, SourceFile
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.version import __version__

if TYPE_CHECKING:
    from akunu_py.completion.completer import Completer

_T = TypeVar("_T")

_REQUEST_FAILED = types.LSPErrorCodes.RequestFailed.value
_SECONDS = 3.0  # later, nobody waits for ghost text any more
_LOADING = "akunu/loading"  # the token of the progress report


class InlineCompletions:
    """Answers from a completion thread of its own; `base` has the limits, which no client can set.
    The model loads when the client has its answer to initialize: importing MLX holds Python up."""

    def __init__(self, load: Callable[[], Completer], base: CompletionRequest) -> None:
        self.base = replace(base, seconds=base.seconds or _SECONDS)
        self.loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[str | Failure] = self.loop.create_future()
        self.thread = CompletionThread(
            load,
            on_loaded=lambda completer: self._resolve(self.loaded, completer.engine.name),
            on_failed=lambda failure: self._resolve(self.loaded, failure),
        )
        self.reporting: asyncio.Task[None] | None = None  # kept: the event loop does not
        self.server = LanguageServer("akunu", __version__, protocol_cls=StrictProtocol)

        # pygls marks the functions that it is given, which methods do not allow.
        @self.server.feature(types.INITIALIZED)
        async def initialized(_: types.InitializedParams) -> None:
            self.thread.start()
            # A task of our own: one of pygls' that ends with the program leaves a traceback.
            self.reporting = asyncio.create_task(self.report_loading())

        # Announced with a value: where there is none, clients never ask.
        options = types.InlineCompletionOptions()

        @self.server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, options)
        async def inline_completion(
            params: types.InlineCompletionParams,
        ) -> types.InlineCompletionList:
            return await self.complete(params)

    async def report_loading(self) -> None:
        """Progress while the model loads, where the client shows it; a message if it fails."""
        progress = self.server.work_done_progress
        window = self.server.client_capabilities.window
        shown = bool(window and window.work_done_progress) and not self.loaded.done()
        if shown:
            try:
                await progress.create_async(_LOADING)
            except JsonRpcException:  # the client declined
                shown = False
        if shown:
            progress.begin(_LOADING, types.WorkDoneProgressBegin("akunu", message="loading"))
        outcome = await asyncio.shield(self.loaded)
        failed = isinstance(outcome, Failure)
        if shown:
            message = "failed" if failed else f"{outcome} is ready"
            progress.end(_LOADING, types.WorkDoneProgressEnd(message=message))
        if isinstance(outcome, Failure):
            self.server.window_show_message(
                types.ShowMessageParams(types.MessageType.Error, f"akunu: {outcome.message}")
            )

    async def complete(self, params: types.InlineCompletionParams) -> types.InlineCompletionList:
        """Raises a JsonRpcException where there is no answer: see the top of this module."""
        request, chosen = self._request(params)
        self.thread.start()  # for a client that never sends initialized
        done: asyncio.Future[Completion | Failure] = self.loop.create_future()
        ticket = self.thread.submit(
            request,
            channel=params.text_document.uri,
            on_done=lambda outcome: self._resolve(done, outcome),
        )
        try:
            outcome = await done
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        if isinstance(outcome, Failure):
            raise JsonRpcException(outcome.message, _REQUEST_FAILED)
        if outcome.finish_reason == "cancelled":
            raise JsonRpcContentModified("a newer request for the same document came")
        return _items(outcome.text, params.position, chosen)

    def _request(
        self, params: types.InlineCompletionParams
    ) -> tuple[CompletionRequest, types.SelectedCompletionInfo | None]:
        """The request, and the entry of a menu that is chosen and not yet inserted: its text counts
        as typed, as the protocol wants it."""
        protocol = cast(StrictProtocol, self.server.protocol)
        document = protocol.documents.use(params.text_document.uri)
        if document is None:
            raise JsonRpcInvalidParams(f"not open: {params.text_document.uri}")
        chosen = params.context.selected_completion_info
        start, end = params.position, params.position
        if chosen is not None:
            start, end = chosen.range.start, chosen.range.end
        encoding = protocol.position_encoding()
        before = document.text[: document.offset(start.line, start.character, encoding)]
        after = document.text[document.offset(end.line, end.character, encoding) :]
        files = tuple(
            SourceFile(_path(other), other.text)
            for other in protocol.documents
            if other is not document and other.text
        )
        request = replace(
            self.base,
            prefix=before + chosen.text if chosen else before,
            suffix=after,
            path=_path(document),
            language=document.language,
            files=files,
        )
        return request, chosen

    def _resolve(self, future: asyncio.Future[_T], value: _T) -> None:
        """Resolves `future` from another thread, unless nobody waits any more."""

        def resolve() -> None:
            if not future.done():
                future.set_result(value)

        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(resolve)


def serve_lsp(load: Callable[[], Completer], base: CompletionRequest) -> None:
    """Speaks LSP on stdin and stdout until the client sends exit.

    `load` is called in the thread that the model lives in. `base` gives every request its limits, 3
    seconds where it has none.
    stdout carries the protocol alone: what a library prints there goes to stderr. Raises
    AkunuError where the client left without shutdown, for which the protocol wants exit code 1.
    """
    # Its warnings are about what the protocol allows (a cancel that comes late), its errors are
    # sent to the client.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    # Streams of our own: Python would abort at its end for sys.stdin, which a thread still reads.
    stdin = open(os.dup(sys.stdin.fileno()), "rb")  # noqa: SIM115 - for the rest of the run
    stdout = open(os.dup(sys.stdout.fileno()), "wb")  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def run() -> int:
        code = INTERRUPTED  # unless it comes to its end
        completions = InlineCompletions(load, base)
        try:
            code = 0 if await serve(completions.server, stdin, stdout) == 0 else 1
        finally:
            completions.thread.close_or_exit(code)
        return code

    if asyncio.run(run()) != 0:
        raise AkunuError("expected shutdown, then exit; the client left without")


def _items(
    text: str, position: types.Position, chosen: types.SelectedCompletionInfo | None
) -> types.InlineCompletionList:
    """At most one item: the editor turns \\n into the newline of its buffer."""
    if not text.strip():
        return types.InlineCompletionList([])
    text = text.replace("\r\n", "\n")
    if chosen is not None:
        item = types.InlineCompletionItem(chosen.text + text, range=chosen.range)
    else:
        # With a range, clients can go on showing it while its first letters are typed.
        item = types.InlineCompletionItem(text, range=types.Range(position, position))
    return types.InlineCompletionList([item])


def _path(document: Document) -> str:
    """The path of a file, the URI of anything else."""
    return to_fs_path(document.uri) or document.uri
