"""`textDocument/inlineCompletion` of LSP 3.18: from its terms to a completion request and back. The
other open documents are drafted from.

A document that is opened is read ahead, and so is the place where one was changed, once the typing
rests. A request is answered with a list of at most one item; one that the user made by hand, with
alternatives too. One that a newer request for the same
document supersedes ends with ContentModified, which clients do not show; one that the client
cancels, with RequestCancelled. A request of our own, `akunu/nextEdit`, is for the next change.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar, cast

from lsprotocol import types
from pygls.exceptions import JsonRpcContentModified, JsonRpcException, JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from akunu_py.completion.acceptance import Acceptance, Ghost
from akunu_py.completion.lsp_protocol import Document, StrictProtocol, serve
from akunu_py.completion.prompt.next_edit import RecentEdits
from akunu_py.completion.request import (
    Completion,
    CompletionMaker,
    CompletionRequest,
    SourceFile,
)
from akunu_py.completion.thread import CompletionThread, Failure, Ticket
from akunu_py.errors import INTERRUPTED, AkunuError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.version import __version__

_T = TypeVar("_T")

_REQUEST_FAILED = types.LSPErrorCodes.RequestFailed.value
_SECONDS = 3.0  # later, nobody waits for ghost text any more
_ACCEPTED = "akunu.accepted"  # a command: the number of an item, and how many characters of it
_GHOSTS = 64  # whose acceptance can be reported
_ALTERNATIVES = 2  # beside the completion, sampled
_TEMPERATURE = 0.8  # of them
_REST_S = 0.1  # of the keyboard, before a changed place is read ahead; clients ask at 0.2 or so
NEXT_EDIT = "akunu/nextEdit"  # a request, with the params of one for a position
_SHOWS_PARTS = "inlineCompletionParts"  # of initializationOptions
PART = "akunu/inlineCompletionPart"  # a notification: textDocument, position, text and command
_PART_S = 0.05  # of writing, after which what there is is told
_HEAD = 4096  # characters at the beginning of a document, that are read when it is opened


class InlineCompletions:
    """Answers from a completion thread of its own; `base` has the limits, which no client can set.
    The model loads when the client has its answer to initialize: importing MLX holds Python up."""

    def __init__(
        self,
        load: Callable[[], CompletionMaker],
        base: CompletionRequest,
        acceptance: Acceptance | None = None,
        unload_s: float | None = None,
    ) -> None:
        self.acceptance = acceptance or Acceptance()
        self.numbers = itertools.count(1)
        self.ghosts: OrderedDict[int, Ghost] = OrderedDict()  # the last ones by number
        self.base = replace(base, seconds=base.seconds or _SECONDS)
        self.loop = asyncio.get_running_loop()
        loads: asyncio.Queue[str | Failure | None] = asyncio.Queue()

        def loading(state: str | Failure | None) -> None:
            self._call_soon(lambda: loads.put_nowait(state))

        self.thread = CompletionThread(
            load,
            on_loading=lambda: loading(None),
            on_loaded=lambda completer: loading(completer.name),
            on_failed=loading,
            unload_s=unload_s,
        )
        self.reporting: asyncio.Task[None] | None = None  # kept: the event loop does not
        self.server = LanguageServer("akunu", __version__, protocol_cls=StrictProtocol)
        self.resting: asyncio.TimerHandle | None = None
        self._protocol.on_open, self._protocol.on_change = self.opened, self.changed
        self.edits = RecentEdits()
        self.shows_parts = False  # the client, of an answer that is being written
        self.growing: _Growing | None = None  # the last one
        self.tells_edits = False  # what is wanted is the next edit, not text at the cursor

        # pygls marks the functions that it is given, which methods do not allow.
        @self.server.feature(types.INITIALIZE)
        def initialize(params: types.InitializeParams) -> None:
            told = params.initialization_options
            self.shows_parts = isinstance(told, dict) and told.get(_SHOWS_PARTS) is True

        @self.server.feature(types.INITIALIZED)
        async def initialized(_: types.InitializedParams) -> None:
            self.thread.start()
            # A task of our own: one of pygls' that ends with the program leaves a traceback.
            self.reporting = asyncio.create_task(report_loading(self.server, loads))

        @self.server.command(_ACCEPTED)
        def accepted(number: int, characters: int) -> None:
            ghost = self.ghosts.get(number)
            if ghost is not None:
                self.acceptance.accepted(ghost, max(0, characters))

        # Announced with a value: where there is none, clients never ask.
        options = types.InlineCompletionOptions()

        @self.server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, options)
        async def inline_completion(
            params: types.InlineCompletionParams,
        ) -> types.InlineCompletionList:
            return await self.complete(params)

        @self.server.feature(NEXT_EDIT)
        async def next_edit(params: Any) -> dict[str, Any] | None:
            return await self.next_edit(params)

    def opened(self, document: Document) -> None:
        self.edits.opened(_path(document), document.text)
        if not self.tells_edits:
            self.read_beginning(document)

    def changed(self, document: Document, at: int | None) -> None:
        """at: where what was changed last ends, None where all of the document was replaced."""
        self.edits.changed(_path(document), document.text)
        if at is not None and not self.tells_edits:
            self.read_soon(document, at)

    def read_soon(self, document: Document, at: int) -> None:
        """Reads ahead where a document was changed, if nothing is typed for a moment."""
        if self.resting is not None:
            self.resting.cancel()
        before, after = document.text[:at], document.text[at:]
        self.resting = self.loop.call_later(_REST_S, self.read_ahead, document, before, after)

    def read_beginning(self, document: Document) -> None:
        """Reads ahead what many places in a document share that was just opened."""
        self.read_ahead(document, document.text[: document.text.rfind("\n", 0, _HEAD) + 1 or _HEAD])

    def read_ahead(self, document: Document, before: str, after: str = "") -> None:
        if before.strip():
            request = replace(self._request(document, before, after), max_tokens=0)
            self.thread.submit(Ticket(request, channel=document.uri))

    async def complete(self, params: types.InlineCompletionParams) -> types.InlineCompletionList:
        """Raises a JsonRpcException where there is no answer: see the top of this module."""
        request, chosen = self._requested(params)
        explicit = params.context.trigger_kind == types.InlineCompletionTriggerKind.Invoked
        if not explicit and self.acceptance.hides(request):
            return types.InlineCompletionList([])
        self.thread.start()  # for a client that never sends initialized
        uri = params.text_document.uri
        growing = _Growing(self, request, params) if self.shows_parts and chosen is None else None
        texts = [(await self._completion(request, uri, growing)).text]
        if explicit:
            sample = replace(request, temperature=request.temperature or _TEMPERATURE)
            texts += [(await self._completion(sample, uri)).text for _ in range(_ALTERNATIVES)]
        items = []
        for text in dict.fromkeys(texts):
            if text.strip():
                begun = growing.begun(text) if growing and text == texts[0] else None
                items.append(_item(text, params.position, chosen))
                items[-1].command = self.accept_command(request, text, begun)
        return types.InlineCompletionList(items)

    async def next_edit(self, params: Any) -> dict[str, Any] | None:
        """The next change, as lines that replace others, with what the client executes when it
        makes it; None where there is none. Raises a JsonRpcException as `complete` does."""
        try:
            uri, at = params.textDocument.uri, params.position
            line, character = int(at.line), int(at.character)
        except (AttributeError, TypeError, ValueError) as error:
            raise JsonRpcInvalidParams("expected a textDocument and a position") from error
        document = self._protocol.documents.use(uri)
        if document is None:
            raise JsonRpcInvalidParams(f"not open: {uri}")
        self.tells_edits = True
        self.thread.start()
        index = document.offset(line, character, self._encoding)
        asked = self._request(document, document.text[:index], document.text[index:])
        request = replace(asked, files=(), edits=tuple(self.edits))
        change = (await self._completion(request, uri)).change
        if change is None:
            return None
        command = self.accept_command(request, "\n".join(change.lines) + "\n")
        return {**asdict(change), "command": command}

    async def _completion(
        self, request: CompletionRequest, uri: str, growing: _Growing | None = None
    ) -> Completion:
        done: asyncio.Future[Completion | Failure] = self.loop.create_future()

        def on_text(text: str) -> None:
            if growing is not None:
                self._call_soon(lambda: growing.add(text))

        ticket = Ticket(request, lambda outcome: self._resolve(done, outcome), uri, on_text)
        self.thread.submit(ticket)
        try:
            outcome = await done
        except asyncio.CancelledError:
            ticket.cancel()
            raise
        finally:
            if growing is not None:
                growing.end()
        if isinstance(outcome, Failure):
            raise JsonRpcException(outcome.message, _REQUEST_FAILED)
        if outcome.finish_reason == "cancelled":
            raise JsonRpcContentModified("a newer request for the same document came")
        return outcome

    def accept_command(
        self, request: CompletionRequest, text: str, growing: Ghost | None = None
    ) -> types.Command:
        """What the client executes when it accepts a completion that is shown now. growing: a part
        of it that was shown before."""
        number = next(self.numbers)
        self.ghosts[number] = self.acceptance.shown(request, text, growing)
        while len(self.ghosts) > _GHOSTS:
            self.ghosts.popitem(last=False)
        return types.Command("Count as accepted", _ACCEPTED, arguments=[number, len(text)])

    def _requested(
        self, params: types.InlineCompletionParams
    ) -> tuple[CompletionRequest, types.SelectedCompletionInfo | None]:
        """The request, and the entry of a menu that is chosen and not yet inserted: its text counts
        as typed, as the protocol wants it."""
        document = self._protocol.documents.use(params.text_document.uri)
        if document is None:
            raise JsonRpcInvalidParams(f"not open: {params.text_document.uri}")
        chosen = params.context.selected_completion_info
        start, end = params.position, params.position
        if chosen is not None:
            start, end = chosen.range.start, chosen.range.end
        before = document.text[: document.offset(start.line, start.character, self._encoding)]
        after = document.text[document.offset(end.line, end.character, self._encoding) :]
        return self._request(document, before + chosen.text if chosen else before, after), chosen

    def _request(self, document: Document, before: str, after: str) -> CompletionRequest:
        files = tuple(
            SourceFile(_path(other), other.text)
            for other in self._protocol.documents
            if other is not document and other.text
        )
        return replace(
            self.base,
            prefix=before,
            suffix=after,
            path=_path(document),
            language=document.language,
            files=files,
            root=self.server.workspace.root_path or "",
        )

    @property
    def _protocol(self) -> StrictProtocol:
        return cast(StrictProtocol, self.server.protocol)

    @property
    def _encoding(self) -> str:
        return self._protocol.position_encoding()

    def _call_soon(self, call: Callable[[], object]) -> None:
        """Has it called in the thread of the event loop, from another one."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self.loop.call_soon_threadsafe(call)

    def _resolve(self, future: asyncio.Future[_T], value: _T) -> None:
        """Resolves `future` from another thread, unless nobody waits any more."""

        def resolve() -> None:
            if not future.done():
                future.set_result(value)

        self._call_soon(resolve)


class _Growing:
    """What there is of an answer yet, as the client is told it."""

    def __init__(
        self,
        owner: InlineCompletions,
        request: CompletionRequest,
        asked: types.InlineCompletionParams,
    ) -> None:
        self._owner = owner
        self._request = request
        self._place = {"textDocument": asked.text_document, "position": asked.position}
        self._text = self._said = ""  # and what of it was told
        self._command: types.Command | None = None
        self._waiting: asyncio.TimerHandle | None = None
        self._ghost: Ghost | None = None  # once it was told
        before, owner.growing = owner.growing, self
        self._earlier = before.told if before else None

    def add(self, text: str) -> None:
        self._text += text.replace("\r\n", "\n")
        if self._waiting is None:
            self._waiting = self._owner.loop.call_later(_PART_S, self._tell)

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def begun(self, text: str) -> Ghost | None:
        """The ghost of which `text` is more, shown for this request or for the one before, of which
        a part was typed since."""
        if self._ghost is not None or self._earlier is None:
            return self._ghost
        path, before, whole, ghost = self._earlier
        now = self._request.prefix
        goes_on = (
            now.startswith(before) and len(now) < len(whole) and (now + text).startswith(whole)
        )
        return ghost if path == self._request.path and goes_on else None

    @property
    def told(self) -> tuple[str, str, str, Ghost] | None:
        """(Path, text before the cursor, that with what was told, the ghost) of the last one."""
        prefix = self._request.prefix
        if self._ghost is None:
            return self._earlier
        return self._request.path, prefix, prefix + self._said, self._ghost

    def _tell(self) -> None:
        self._waiting = None
        if not self._text.strip():
            return
        self._said = self._text
        if self._command is None:
            begun = self.begun(self._text)
            self._command = self._owner.accept_command(self._request, self._text, begun)
            self._ghost = next(reversed(self._owner.ghosts.values()))
        part = {**self._place, "text": self._text, "command": self._command}
        self._owner.server.protocol.notify(PART, part)


async def report_loading(
    server: LanguageServer, loads: asyncio.Queue[str | Failure | None]
) -> None:
    """Progress whenever a model loads, where the client shows it; a message if it fails.

    loads: None when loading begins, then the name of the model or why it failed.
    """
    window = server.client_capabilities.window
    shows = bool(window and window.work_done_progress)
    told: str | Failure | None = None
    for number in itertools.count():
        await loads.get()
        token = f"akunu/loading/{number}"
        beginning = asyncio.create_task(_begin_progress(server, token)) if shows else None
        outcome = await loads.get()
        if isinstance(outcome, Failure) and outcome != told:
            server.window_show_message(
                types.ShowMessageParams(types.MessageType.Error, f"akunu: {outcome.message}")
            )
        told = outcome
        if beginning is not None and await beginning:
            message = "failed" if isinstance(outcome, Failure) else f"{outcome} is ready"
            server.work_done_progress.end(token, types.WorkDoneProgressEnd(message=message))


async def _begin_progress(server: LanguageServer, token: str) -> bool:
    """False where the client declines."""
    try:
        await server.work_done_progress.create_async(token)
    except JsonRpcException:
        return False
    server.work_done_progress.begin(token, types.WorkDoneProgressBegin("akunu", message="loading"))
    return True


def serve_lsp(
    load: Callable[[], CompletionMaker],
    base: CompletionRequest,
    acceptance: Acceptance | None = None,
    unload_s: float | None = None,
) -> None:
    """Speaks LSP on stdin and stdout until the client sends exit.

    `load` is called in the thread that the model lives in. `base` gives every request its limits, 3
    seconds where it has none. unload_s: see `CompletionThread`.
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

    async def run() -> tuple[int, bool]:
        code = INTERRUPTED  # unless it comes to its end
        completions = InlineCompletions(load, base, acceptance, unload_s)
        try:
            code = 0 if await serve(completions.server, stdin, stdout) == 0 else 1
        finally:
            completions.acceptance.save()
            loading = completions.thread.close_or_exit(code)
        return code, loading

    code, loading = asyncio.run(run())  # at its end the last replies go out
    if loading:
        exit_without_teardown(code)
    if code != 0:
        raise AkunuError("expected shutdown, then exit; the client left without")


def _item(
    text: str, position: types.Position, chosen: types.SelectedCompletionInfo | None
) -> types.InlineCompletionItem:
    """The editor turns \\n into the newline of its buffer."""
    text = text.replace("\r\n", "\n")
    if chosen is not None:
        return types.InlineCompletionItem(chosen.text + text, range=chosen.range)
    # With a range, clients can go on showing it while its first letters are typed.
    return types.InlineCompletionItem(text, range=types.Range(position, position))


def _path(document: Document) -> str:
    """The path of a file, the URI of anything else."""
    return to_fs_path(document.uri) or document.uri
