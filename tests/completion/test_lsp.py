"""The language server: a client's session, wrong messages, and documents."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.completion_queue import QueueOptions
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.protocols.lsp import CONTEXT, PART, LanguageServer, OpenDocument
from akunu_py.engine.job import ModelLoop
from akunu_py.errors import UsageError
from tests.support.lsp_servers import ECHO, STARTER, Echo, Ghost, frame, talk
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
Edit = tuple[int, int, int, int, str]
AUTOMATIC, INVOKED = (
    lsp.InlineCompletionTriggerKind.Automatic,
    lsp.InlineCompletionTriggerKind.Invoked,
)


def range_of(*at: int) -> lsp.Range:
    return lsp.Range(lsp.Position(*at[:2]), lsp.Position(*at[2:]))


# A client's session


class Editor:
    """A client, the server's process, and its notifications."""

    def __init__(self) -> None:
        self.client = LanguageClient("tests", "1")
        self.progress: list[Any] = []
        self.messages: list[str] = []
        self.parts: asyncio.Queue[Any] = asyncio.Queue()
        self.serving: asyncio.Task[bool] | None = None  # a server in this process
        features: dict[str, Any] = {
            lsp.WINDOW_WORK_DONE_PROGRESS_CREATE: lambda _: self.progress.append("create"),
            lsp.PROGRESS: lambda params: self.progress.append(params.value),
            PART: lambda params: self.parts.put_nowait(params),
            lsp.WINDOW_SHOW_MESSAGE: lambda params: self.messages.append(params.message),
        }
        for name, handler in features.items():
            self.client.feature(name)(handler)

    async def serve(self, load: Callable[[], ModelLoop], **more: Any) -> lsp.ServerCapabilities:
        """Start a server in this process."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await self.client.start_tcp(*listener.getsockname())
            self.connection, _ = listener.accept()
        base = CompletionRequest("", max_lines=7, seconds=200)
        self.server = LanguageServer(load, base, QueueOptions())
        streams: Any = self.connection.makefile("rb"), self.connection.makefile("wb")
        self.serving = asyncio.create_task(self.server.serve(*streams))
        return await self.initialize(**more)

    async def initialize(
        self, encodings: list[lsp.PositionEncodingKind | str] | None = None, options: Any = None
    ) -> lsp.ServerCapabilities:
        capabilities = lsp.ClientCapabilities(
            general=lsp.GeneralClientCapabilities(position_encodings=encodings),
            window=lsp.WindowClientCapabilities(work_done_progress=True),
        )
        params = lsp.InitializeParams(capabilities, initialization_options=options)
        result = await self.client.initialize_async(params)
        self.client.initialized(lsp.InitializedParams())
        return result.capabilities

    def open(self, uri: str, text: str) -> None:
        document = lsp.TextDocumentItem(uri, "python", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(document))

    def change(self, uri: str, *changes: Edit | str) -> None:
        """Replace the text between two positions, or all of it."""
        document = lsp.VersionedTextDocumentIdentifier(2, uri)
        events: list[lsp.TextDocumentContentChangeEvent] = [
            lsp.TextDocumentContentChangeWholeDocument(change)
            if isinstance(change, str)
            else lsp.TextDocumentContentChangePartial(range_of(*change[:4]), change[4])
            for change in changes
        ]
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, events))

    async def complete(
        self, uri: str, line: int, character: int, chosen: lsp.SelectedCompletionInfo | None = None,
        kind: lsp.InlineCompletionTriggerKind = AUTOMATIC,
    ) -> list[Any]:  # fmt: skip
        context = lsp.InlineCompletionContext(kind, chosen)
        document, position = lsp.TextDocumentIdentifier(uri), lsp.Position(line, character)
        found = await self.client.text_document_inline_completion_async(
            lsp.InlineCompletionParams(context, document, position)
        )
        assert isinstance(found, lsp.InlineCompletionList)
        return list(found.items)

    async def request(self, uri: str, line: int, character: int) -> dict[str, Any]:
        """Return the request that the echo server sends to its model."""
        (item,) = await self.complete(uri, line, character)
        request: dict[str, Any] = json.loads(item.insert_text)
        return request

    async def accept(self, command: lsp.Command) -> None:
        params = lsp.ExecuteCommandParams(command.command)
        await self.client.workspace_execute_command_async(params)

    async def leave(self) -> int | None:
        """Shut the server down and return its exit code."""
        await self.client.shutdown_async(None)
        self.client.exit(None)
        if self.serving is None:
            assert self.client._server
            return await asyncio.wait_for(self.client._server.wait(), 60)
        return 0 if await asyncio.wait_for(self.serving, 60) else 1

    async def close(self) -> None:
        if self.serving is not None:
            self.connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait_for(self.serving, 60)
            assert self.server.queue.close(60)
            self.connection.close()
        elif self.client._server and self.client._server.returncode is None:
            self.client._server.kill()


@pytest.fixture
async def editor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Editor]:
    monkeypatch.setattr(CompletionCache, "find", lambda self, request: None)
    editor = Editor()
    yield editor
    await editor.close()


@pytest.mark.long
async def test_a_session_on_a_model(editor: Editor, tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny", sentence_piece([END]), end=END)
    await editor.client.start_io(*STARTER[:-1], str(model))
    offered = await editor.initialize()
    assert offered.position_encoding == lsp.PositionEncodingKind.Utf16
    assert isinstance(offered.text_document_sync, lsp.TextDocumentSyncOptions)
    assert offered.text_document_sync.change == lsp.TextDocumentSyncKind.Incremental
    assert offered.inline_completion_provider == lsp.InlineCompletionOptions()

    editor.open("file:///tmp/a.py", "x = [[[[")  # while the model loads
    (item,) = await editor.complete("file:///tmp/a.py", 0, 8)
    assert item.range == range_of(0, 8, 0, 8)
    while len(editor.progress) < 3:  # its end follows the editor's reply to "create"
        await asyncio.sleep(0.01)
    create, begin, end = editor.progress
    assert (create, begin["kind"], end["kind"]) == ("create", "begin", "end")
    assert end["message"] == "tiny is ready"

    text = item.insert_text
    editor.change("file:///tmp/a.py", (0, 8, 0, 8, text[0]))
    (item,) = await editor.complete("file:///tmp/a.py", 0, 9)
    assert item.insert_text == text[1:]
    assert editor.messages == []
    assert await editor.leave() == 0


async def test_requests_follow_the_changes_of_documents(editor: Editor) -> None:
    """In UTF-16; other documents are the other files, the one used last first."""
    await editor.serve(Echo().load)
    uri = "file:///tmp/%C3%A9.py"
    editor.open(uri, "s = '😀漢'\r\n\x0cend\n")
    sent = await editor.request(uri, 0, 7)
    assert (sent["prefix"], sent["suffix"]) == ("s = '😀", "漢'\r\n\x0cend\n")
    assert (sent["path"], sent["language"]) == ("/tmp/é.py", "python")
    assert (sent["max_lines"], sent["seconds"]) == (7, 200)
    editor.change(uri, (0, 7, 0, 8, "字字"), (1, 1, 1, 4, "fin"), (0, 5, 0, 7, ""))
    sent = await editor.request(uri, 1, 99)
    assert sent["prefix"] + "|" + sent["suffix"] == "s = '字字'\r\n\x0cfin|\n"
    editor.change(uri, "all new\n")
    assert (await editor.request(uri, 99, 0))["prefix"] == "all new\n"

    def close(uri: str) -> None:
        document = lsp.TextDocumentIdentifier(uri)
        editor.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))

    close(uri)
    for name in "abcd":
        editor.open(f"file:///{name}", name)
    editor.open("untitled:Untitled-1", "")  # empty
    close("file:///d")
    for name, others in (("c", "ba"), ("a", "cb"), ("c", "ab")):
        files = (await editor.request(f"file:///{name}", 0, 0))["files"]
        assert [file["text"] for file in files] == list(others)
    editor.change("file:///b", (0, 0, 0, 0, "B"))
    sent = await editor.request("file:///c", 0, 0)
    assert sent["files"] == [{"path": "/b", "text": "Bb"}, {"path": "/a", "text": "a"}]

    with pytest.raises(JsonRpcException, match="not open: file:///d") as refused:
        await editor.complete("file:///d", 0, 0)
    assert refused.value.code == lsp.ErrorCodes.InvalidParams.value
    editor.change("file:///d", "x")  # a notification, because no client waits for an answer
    await editor.request("file:///c", 0, 0)
    assert ["not open: file:///d" in message for message in editor.messages] == [True]
    assert await editor.leave() == 0


@pytest.mark.parametrize(("offered", "chosen", "width"), [
    (["utf-8"], "utf-8", 4),
    (["ucs-2", "utf-32", "utf-16"], "utf-32", 1),
    (["ucs-2"], "utf-16", 2),
])  # fmt: skip
async def test_the_position_encoding_is_negotiated(
    editor: Editor, offered: list[lsp.PositionEncodingKind | str], chosen: str, width: int
) -> None:
    capabilities = await editor.serve(Echo().load, encodings=offered)
    assert capabilities.position_encoding == chosen
    editor.open("file:///a", "x = 😀\r\ny\n")
    assert (await editor.request("file:///a", 0, 4 + width))["prefix"] == "x = 😀"
    (item,) = await editor.complete("file:///a", 0, 4 + width)
    assert item.range == range_of(0, 4 + width, 0, 4 + width)


async def test_documents_are_prefilled_when_opened_and_where_they_changed(editor: Editor) -> None:
    echo = Echo()

    async def prefilled(number: int) -> str:
        """Wait for the prefix with this number."""
        while len(echo.prefilled) < number:
            await asyncio.sleep(0.02)
        assert len(echo.prefilled) == number
        return echo.prefilled[-1]

    await editor.serve(echo.load)
    text = "".join(f"line {number} 😀\n" for number in range(2000))
    editor.open("file:///a", text)
    first = await prefilled(1)
    assert text.startswith(first)
    assert first.endswith("\n")
    assert 4000 < len(first) <= 4096
    edits: list[Edit] = [(1, at, 1, at, letter) for at, letter in ((7, "x"), (8, "y"), (9, "z"))]
    editor.change("file:///a", *edits)
    assert await prefilled(2) == "line 0 😀\nline 1 xyz"
    editor.open("file:///c", "")
    editor.change("file:///a", "all new")  # the place of the cursor is unknown
    editor.change("file:///b", "not open")
    editor.change("file:///a", (0, 3, 0, 4, "\n\u2028\r\n"))
    assert await prefilled(3) == "all\n\u2028\r\n"


async def test_a_client_can_show_and_accept_parts_of_an_answer(
    editor: Editor, tmp_path: Path
) -> None:
    """Nothing comes after the answer. An acceptance prepares the next completion."""
    (tmp_path / "model").touch()
    options = {"inlineCompletionParts": True}
    await editor.serve(Ghost(tmp_path).load, options=options)
    accepted = editor.server.queue.accepted = Mock()  # type: ignore[method-assign]
    editor.open("file:///a.py", "é slow")
    requested = asyncio.create_task(editor.complete("file:///a.py", 0, 6))
    for number, text in enumerate(("one", "one two", "one two three"), start=1):
        (tmp_path / f"word{number}").touch()
        part = await asyncio.wait_for(editor.parts.get(), 60)
        assert (part.text, part.position.character) == (text, 6)
    (tmp_path / "word4").touch()
    (item,) = await requested
    assert item.insert_text == "one two three\nfour"
    while not editor.parts.empty():  # the last one, which came before the answer
        editor.parts.get_nowait()
    await editor.accept(part.command)
    await editor.accept(item.command)
    assert accepted.call_count >= 2  # a pause in typing calls it, too
    assert await editor.leave() == 0
    assert editor.parts.empty()


async def test_context_of_the_client_is_in_requests(editor: Editor, tmp_path: Path) -> None:
    """Files are read from disk, unless they are open or unreadable."""
    (tmp_path / "model").touch()
    await editor.serve(Ghost(tmp_path).load)
    closed = tmp_path / "closed.py"
    closed.write_text("old")
    (tmp_path / "binary").write_bytes(b"\0\xff")
    editor.open("file:///a.py", "\n")
    paths = [str(closed), "/a.py", str(tmp_path / "none"), str(tmp_path / "binary"), "\0"]
    editor.client.protocol.notify(CONTEXT, {"recent": ["r"], "files": paths})
    await editor.complete("file:///a.py", 0, 0)
    seen = json.loads((tmp_path / "requests").read_text().splitlines()[-1])
    assert seen == [[[str(closed), "old"]], ["r"]]
    assert await editor.leave() == 0


@pytest.mark.long
async def test_a_manual_request_has_alternatives_and_an_entry_of_a_menu_counts_as_typed(
    editor: Editor,
) -> None:
    await editor.client.start_io(*ECHO)
    await editor.initialize()
    editor.open("file:///a", "x = ")
    for expected in ([(0.0, 0), (0.8, 1)], [(0.0, 1), (0.8, 2)]):  # each once
        items = await editor.complete("file:///a", 0, 4, kind=INVOKED)
        texts = [json.loads(item.insert_text) for item in items]
        assert [(text["temperature"], text["sample"]) for text in texts] == expected
        assert (texts[0]["max_lines"], texts[0]["seconds"]) == (7, 3.0)
    editor.open("file:///b", "os.pa\n")
    word = range_of(0, 3, 0, 5)
    (item,) = await editor.complete("file:///b", 0, 5, lsp.SelectedCompletionInfo(word, "path"))
    assert item.range == word
    sent = json.loads(item.insert_text.removeprefix("path"))
    assert (sent["prefix"], sent["suffix"]) == ("os.path", "\n")
    editor.open("file:///c", "print")  # which the model's thread prints to stdout
    for _ in range(2):
        assert (await editor.request("file:///c", 0, 5))["prefix"] == "print"


async def test_cancelled_and_superseded_requests(editor: Editor) -> None:
    await editor.serve(Echo().load)
    editor.open("file:///a", "wait")
    editor.open("file:///b", "wait")
    waiting = [asyncio.ensure_future(editor.complete("file:///a", 0, 4)) for _ in range(20)]
    other = asyncio.ensure_future(editor.complete("file:///b", 0, 4))
    await asyncio.sleep(0)
    last = next(reversed(editor.client.protocol._request_futures))
    editor.client.cancel_request(lsp.CancelParams(last))
    with pytest.raises(JsonRpcException) as cancelled:
        await other
    assert cancelled.value.code == lsp.LSPErrorCodes.RequestCancelled.value
    editor.change("file:///a", (0, 0, 0, 0, "x"), (0, 5, 0, 5, "!"))
    assert (await editor.request("file:///a", 0, 6))["prefix"] == "xwait!"
    for request in waiting:
        with pytest.raises(JsonRpcException) as superseded:
            await request
        assert superseded.value.code == lsp.LSPErrorCodes.ContentModified.value
    editor.client.cancel_request(lsp.CancelParams(last))  # late, and harmless
    assert await editor.leave() == 0
    assert editor.messages == []


async def test_a_model_that_does_not_load_is_named_once(editor: Editor) -> None:
    def refuse() -> ModelLoop:
        raise UsageError("no model called 'x'")

    await editor.serve(refuse)
    editor.open("file:///a", "x")
    with pytest.raises(JsonRpcException, match="no model called 'x'"):
        await editor.complete("file:///a", 0, 1)
    assert ["no model called 'x'" in message for message in editor.messages] == [True]
    assert await editor.leave() == 0


# Messages byte by byte


def request(id: int | None, method: str, params: object = None) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return frame(message if id is None else message | {"id": id})


INITIALIZE: dict[str, Any] = {"capabilities": {}, "processId": None, "rootUri": None}


@pytest.mark.long
def test_every_wrong_message_is_answered() -> None:
    position = {"textDocument": {"uri": "file:///a"}, "context": {"triggerKind": 1}}
    inline = "textDocument/inlineCompletion"
    document = {"uri": "file:///a", "languageId": "x", "version": 1, "text": ""}
    errors, code, _ = talk(
        b"some garbage\ncontent-LENGTH:2\nContent-Type: x; charset=utf-8\n\n[]"
        + frame(b'{"jsonrpc": "2.0", ')
        + frame(b"\xff")
        + frame(b"[" * 100_000)
        + request(4, "initialize", INITIALIZE)
        + request(None, "textDocument/didOpen", {"textDocument": document})
        + request(6, "textDocument/nonesuch", position)
        + request(7, inline, position | {"position": {"line": "x", "character": 0}})
        + request(8, inline, position | {"position": None})
        + request(9, "workspace/executeCommand", {"command": "x"})
        + request(None, "workspace/didSomething", {})
        + frame({"jsonrpc": "2.0", "id": "unknown", "result": None}),
        *ECHO,
    )
    assert errors == [(4, None), (6, -32601), (7, -32602), (8, -32602), (9, -32602)]
    assert code == 1


@pytest.mark.long
def test_initialize_waits_for_no_model_and_no_import() -> None:
    """No library that runs models is imported before the client has its answer."""
    data = request(1, "initialize", INITIALIZE) + request(2, "shutdown") + request(None, "exit")
    codes, code, stderr = talk(data, sys.executable, "-X", "importtime", *STARTER[1:])
    assert (codes, code) == ([(1, None), (2, None)], 0)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in stderr.splitlines()}
    assert not imported & {"mlx", "mlx_lm", "transformers", "tokenizers", "numpy"}


# Open documents


TEXT = st.text(st.sampled_from("ab \t\r\n\x0c\u2028é漢😀👩‍🚀"), max_size=12)
ENCODING = st.sampled_from(["utf-8", "utf-16", "utf-32"])


def units(text: str, encoding: str) -> int:
    codec = encoding if encoding == "utf-8" else f"{encoding}-le"
    return len(text.encode(codec)) // {"utf-8": 1, "utf-16": 2, "utf-32": 4}[encoding]


def positions(text: str, encoding: str) -> list[dict[str, int]]:
    """Count the line and column of every index of `text` and of its end."""
    found = []
    line = column = 0
    for index, character in enumerate(text):
        found.append({"line": line, "character": column})
        column += units(character, encoding)
        if character == "\n" or (character == "\r" and text[index + 1 : index + 2] != "\n"):
            line, column = line + 1, 0
    return [*found, {"line": line, "character": column}]


def indices(text: str) -> list[int]:
    """Return the indices with a position; CR LF has none inside."""
    return [at for at in range(len(text) + 1) if text[max(0, at - 1) : at + 1] != "\r\n"]


@given(TEXT, TEXT, ENCODING, st.data())
@example("x = '😀漢' + y\x0c\nz", "a", "utf-16", None)
def test_positions_and_changes_agree_with_counting(
    text: str, inserted: str, encoding: str, data: st.DataObject | None
) -> None:
    where, good = positions(text, encoding), indices(text)
    changed = OpenDocument("file:///a.py", text, "python", encoding)
    for index in good:
        assert changed.offset(where[index]) == index
    first = data.draw(st.sampled_from(good)) if data else 0
    last = data.draw(st.sampled_from([i for i in good if i >= first])) if data else good[-1]
    changed.apply({"range": {"start": where[first], "end": where[last]}, "text": inserted})
    assert changed.text == text[:first] + inserted + text[last:]


def test_positions_outside_the_text_and_lone_surrogates() -> None:
    """Past the end of a line or of the text: that end. Inside a character: its beginning."""
    outside = {(0, 99): 3, (0, 4): 3, (2, 9): 8, (7, 0): 8, (1e308, 0): 8, (1, 1): 5, (1, 2): 6}
    for place, index in outside.items():
        position = dict(zip(("line", "character"), place, strict=True))
        assert OpenDocument("file:///a.py", "abc\r\n😀\na").offset(position) == index
    document = OpenDocument("file:///a.py", "a\ud83d\U0001f600b\ude00")
    assert document.text == "a\ufffd\U0001f600b\ufffd"
    document.apply({"text": "\ud83d"})
    assert document.text == "\ufffd"
