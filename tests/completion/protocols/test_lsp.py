"""The language server in a process of its own, with a real client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException
from pygls.lsp.client import LanguageClient

from akunu_py.completion.acceptance import read_counts
from akunu_py.completion.protocols.lsp import CONTEXT, NEXT_EDIT, PART
from akunu_py.models.store.model_store import StoredModel
from tests.support.lsp_echo import ECHO, STARTER
from tests.support.lsp_ghost import GHOST

CODE = "def add(a, b):\n    return a + b\n\ndef subtract(a, b):\n"


class Editor:
    """A client, what the server sent it, and the process."""

    def __init__(self) -> None:
        self.client = LanguageClient("tests", "1")
        self.progress: list[Any] = []
        self.messages: list[str] = []
        self.parts: asyncio.Queue[Any] = asyncio.Queue()

        def create(_: lsp.WorkDoneProgressCreateParams) -> None:
            self.progress.append("create")

        def progress(params: lsp.ProgressParams) -> None:
            self.progress.append(params.value)

        def message(params: lsp.ShowMessageParams) -> None:
            self.messages.append(params.message)

        self.client.feature(lsp.WINDOW_WORK_DONE_PROGRESS_CREATE)(create)
        self.client.feature(lsp.PROGRESS)(progress)
        self.client.feature(PART)(lambda params: self.parts.put_nowait(params))
        self.client.feature(lsp.WINDOW_SHOW_MESSAGE)(message)

    async def start(
        self,
        command: list[str],
        encodings: list[lsp.PositionEncodingKind | str] | None = None,
        **told: Any,
    ) -> lsp.ServerCapabilities:
        """told: initializationOptions."""
        await self.client.start_io(*command)
        capabilities = lsp.ClientCapabilities(
            general=lsp.GeneralClientCapabilities(position_encodings=encodings),
            window=lsp.WindowClientCapabilities(work_done_progress=True),
        )
        result = await self.client.initialize_async(
            lsp.InitializeParams(capabilities, initialization_options=told or None)
        )
        self.client.initialized(lsp.InitializedParams())
        return result.capabilities

    def open(self, uri: str, text: str) -> None:
        document = lsp.TextDocumentItem(uri, "python", 1, text)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(document))

    def close(self, uri: str) -> None:
        document = lsp.TextDocumentIdentifier(uri)
        self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(document))

    def change(self, uri: str, *changes: tuple[int, int, int, int, str] | str) -> None:
        """Each change replaces the text between two positions, or all of it."""
        self.client.text_document_did_change(
            lsp.DidChangeTextDocumentParams(
                lsp.VersionedTextDocumentIdentifier(2, uri),
                [
                    lsp.TextDocumentContentChangeWholeDocument(change)
                    if isinstance(change, str)
                    else lsp.TextDocumentContentChangePartial(
                        text=change[4],
                        range=lsp.Range(lsp.Position(*change[:2]), lsp.Position(*change[2:4])),
                    )
                    for change in changes
                ],
            )
        )

    async def complete(
        self,
        uri: str,
        line: int,
        character: int,
        chosen: lsp.SelectedCompletionInfo | None = None,
        kind: lsp.InlineCompletionTriggerKind = lsp.InlineCompletionTriggerKind.Automatic,
    ) -> list[lsp.InlineCompletionItem]:
        found = await self.client.text_document_inline_completion_async(
            lsp.InlineCompletionParams(
                lsp.InlineCompletionContext(kind, chosen),
                lsp.TextDocumentIdentifier(uri),
                lsp.Position(line, character),
            )
        )
        assert isinstance(found, lsp.InlineCompletionList)
        return list(found.items)

    async def asked(self, uri: str, line: int, character: int) -> dict[str, Any]:
        """What the echo server would have asked the model."""
        (item,) = await self.complete(uri, line, character)
        assert isinstance(item.insert_text, str)
        request: dict[str, Any] = json.loads(item.insert_text)
        return request

    async def leave(self) -> int | None:
        """Ends the server by the book; its exit code."""
        await self.client.shutdown_async(None)
        self.client.exit(None)
        return await asyncio.wait_for(self.process.wait(), 60)

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self.client._server is not None
        return self.client._server


@pytest.fixture
async def editor() -> AsyncIterator[Editor]:
    editor = Editor()
    yield editor
    if editor.process.returncode is None:
        editor.process.kill()
        await editor.process.wait()


async def test_a_session_on_the_starter(editor: Editor, starter: StoredModel) -> None:
    offered = await editor.start(STARTER)
    assert offered.position_encoding == lsp.PositionEncodingKind.Utf16
    assert isinstance(offered.text_document_sync, lsp.TextDocumentSyncOptions)
    assert offered.text_document_sync.change == lsp.TextDocumentSyncKind.Incremental
    assert offered.inline_completion_provider == lsp.InlineCompletionOptions()

    editor.open("file:///tmp/a.py", CODE)  # while the model loads
    items = await editor.complete("file:///tmp/a.py", 4, 0)
    assert [item.insert_text for item in items] == ["    return a - b"]
    assert items[0].range == lsp.Range(lsp.Position(4, 0), lsp.Position(4, 0))
    create, begin, end = editor.progress
    assert (create, begin["kind"], end["kind"]) == ("create", "begin", "end")
    assert end["message"] == "starter is ready"

    editor.change("file:///tmp/a.py", (4, 0, 4, 0, "    return "))
    (item,) = await editor.complete("file:///tmp/a.py", 4, 11)
    assert item.insert_text == "a - b"
    assert editor.messages == []
    assert await editor.leave() == 0


@pytest.mark.long
async def test_edits_are_understood_in_utf_16(editor: Editor) -> None:
    await editor.start(ECHO)
    uri = "file:///tmp/%C3%A9.py"
    editor.open(uri, "s = '😀漢'\r\n\x0cend\n")
    asked = await editor.asked(uri, 0, 7)
    assert (asked["prefix"], asked["suffix"]) == ("s = '😀", "漢'\r\n\x0cend\n")
    assert (asked["path"], asked["language"]) == ("/tmp/é.py", "python")
    assert (asked["max_lines"], asked["seconds"]) == (7, 3.0)

    editor.change(uri, (0, 7, 0, 8, "字字"), (1, 1, 1, 4, "fin"), (0, 5, 0, 7, ""))
    asked = await editor.asked(uri, 1, 99)
    assert asked["prefix"] + "|" + asked["suffix"] == "s = '字字'\r\n\x0cfin|\n"
    editor.change(uri, "all new\n")
    assert (await editor.asked(uri, 99, 0))["prefix"] == "all new\n"
    assert await editor.leave() == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("offered", "chosen", "column"),
    [
        (["utf-8"], "utf-8", 4),
        (["ucs-2", "utf-32", "utf-16"], "utf-32", 1),
        (["ucs-2"], "utf-16", 2),
    ],
)
async def test_the_position_encoding_is_negotiated(
    editor: Editor, offered: list[lsp.PositionEncodingKind | str], chosen: str, column: int
) -> None:
    capabilities = await editor.start(ECHO, offered)
    assert capabilities.position_encoding == chosen
    editor.open("file:///a", "😀x")
    assert (await editor.asked("file:///a", 0, column))["prefix"] == "😀"


@pytest.mark.long
async def test_stdout_carries_nothing_but_the_protocol(editor: Editor) -> None:
    await editor.start(ECHO)
    editor.open("file:///a", "print")
    for _ in range(2):
        assert (await editor.asked("file:///a", 0, 5))["prefix"] == "print"


@pytest.mark.long
async def test_open_documents_are_the_other_files(editor: Editor) -> None:
    await editor.start(ECHO)
    for name in "abc":
        editor.open(f"file:///{name}", f"text of {name}")
    editor.open("untitled:Untitled-1", "")  # empty
    editor.change("file:///a", (0, 0, 0, 4, "TEXT"))
    editor.close("file:///b")
    asked = await editor.asked("file:///c", 0, 0)
    assert asked["files"] == [{"path": "/a", "text": "TEXT of a"}]
    with pytest.raises(JsonRpcException, match="not open: file:///b") as refused:
        await editor.complete("file:///b", 0, 0)
    assert refused.value.code == lsp.ErrorCodes.InvalidParams.value
    editor.change("file:///b", "x")  # a notification, because nobody waits for an answer
    await editor.asked("file:///c", 0, 0)
    assert ["not open: file:///b" in message for message in editor.messages] == [True]


@pytest.mark.long
async def test_the_document_used_last_comes_first(editor: Editor) -> None:
    await editor.start(ECHO)
    for name in "abc":
        editor.open(f"file:///{name}", name)
    for name, others in (("c", "ba"), ("a", "cb"), ("c", "ab")):
        files = (await editor.asked(f"file:///{name}", 0, 0))["files"]
        assert [file["text"] for file in files] == list(others)
    editor.change("file:///b", "b")
    assert (await editor.asked("file:///c", 0, 0))["files"][0]["path"] == "/b"


@pytest.mark.long
async def test_what_is_opened_and_where_something_is_changed_is_read_ahead(
    editor: Editor, tmp_path: Path
) -> None:
    log = tmp_path / "read"

    async def read(number: int) -> str:
        """What was read ahead as soon as it is the `number`th."""
        for _ in range(500):
            lines = log.read_text().splitlines() if log.exists() else []
            if len(lines) >= number:
                break
            await asyncio.sleep(0.02)
        assert len(lines) == number
        text: str = json.loads(lines[-1])
        return text

    await editor.start([*ECHO, str(log)])
    text = "".join(f"line {number} 😀\n" for number in range(2000))
    editor.open("file:///a", text)
    first = await read(1)
    assert text.startswith(first)
    assert first.endswith("\n")
    assert 4000 < len(first) <= 4096
    for column in (7, 8, 9):  # a word is typed; the place where the typing rests is read
        editor.change("file:///a", (1, column, 1, column, "xyz"[column - 7]))
    assert await read(2) == "line 0 😀\nline 1 xyz"
    editor.open("file:///c", "")
    editor.change("file:///a", "all new")  # nobody knows where the cursor is
    editor.change("file:///b", "not open")
    editor.change("file:///a", (0, 3, 0, 4, "\n\u2028\r\n"))
    assert await read(3) == "all\n\u2028\r\n"


@pytest.mark.long
async def test_what_is_accepted_is_reported_by_the_command_of_an_item(
    editor: Editor, tmp_path: Path
) -> None:
    await editor.start([*ECHO, str(tmp_path / "read")])
    editor.open("file:///a.py", "x = \n")
    taken = 0
    for column, parts in ((4, 1), (5, 2), (6, 0)):  # whole, in two parts, not at all
        (item,) = await editor.complete("file:///a.py", 0, column)
        editor.change("file:///a.py", (0, 0, 0, 0, "y"))
        assert item.command is not None
        assert item.command.arguments is not None
        assert isinstance(item.insert_text, str)
        number, whole = item.command.arguments
        assert whole == len(item.insert_text)
        for _ in range(parts):
            params = lsp.ExecuteCommandParams(item.command.command, [number, whole // parts])
            await editor.client.workspace_execute_command_async(params)
            taken += whole // parts
    unknown = lsp.ExecuteCommandParams("akunu.accepted", [99, 1])
    await editor.client.workspace_execute_command_async(unknown)
    assert await editor.leave() == 0
    (counts,) = read_counts(tmp_path / "read.counts").values()
    assert counts == {"shown": 3, "accepted": 2, "characters": taken}


@pytest.mark.long
async def test_parts_of_an_answer_for_those_who_show_them(editor: Editor, tmp_path: Path) -> None:
    """A client that says so is told what there is of an answer, and can accept that; one ghost is
    counted, whatever of it was accepted. Nothing comes after the answer."""
    (tmp_path / "model").touch()
    await editor.start([*GHOST, str(tmp_path)], inlineCompletionParts=True)
    editor.open("file:///a.py", "é slow")
    asked = asyncio.create_task(editor.complete("file:///a.py", 0, 6))
    for number, text in enumerate(("one", "one two", "one two three"), start=1):
        (tmp_path / f"word{number}").touch()
        part = await asyncio.wait_for(editor.parts.get(), 60)
        assert (part.text, part.position.character) == (text, 6)
    (tmp_path / "word4").touch()
    (item,) = await asked
    assert item.insert_text == "one two three\nfour"
    commands: list[Any] = [part.command, item.command]
    for command, characters in zip(commands, (4, 9), strict=True):
        await editor.client.workspace_execute_command_async(
            lsp.ExecuteCommandParams(command.command, [command.arguments[0], characters])
        )
    await editor.complete("file:///a.py", 0, 6)  # is known
    assert await editor.leave() == 0
    (counts,) = read_counts(tmp_path / "counts").values()
    assert counts == {"shown": 1, "accepted": 1, "characters": 13}
    assert editor.parts.empty()


@pytest.mark.long
async def test_the_next_edit_follows_from_what_was_changed(editor: Editor, tmp_path: Path) -> None:
    """The server gathers it; nothing is wanted before, and bad params are named."""
    (tmp_path / "model").touch()
    await editor.start([*GHOST, str(tmp_path)])
    editor.open("file:///a.py", "😀 old\nb\nold = 1\n")

    async def ask(**params: Any) -> Any:
        sent = {"textDocument": {"uri": "file:///a.py"}, "position": lsp.Position(0, 1)}
        return await editor.client.protocol.send_request_async(NEXT_EDIT, sent | params)

    assert await ask() is None
    editor.change("file:///a.py", (0, 3, 0, 6, "new"))
    edit = await ask()
    assert (edit.first, edit.last, edit.lines) == (2, 3, ["new = 1"])
    taken = lsp.ExecuteCommandParams(edit.command.command, edit.command.arguments)
    await editor.client.workspace_execute_command_async(taken)
    editor.change("file:///a.py", (2, 0, 3, 0, "new = 1\n"))
    assert await ask() is None
    for line, character in ((-1, 0), (0, -1), (-7, -7), (2**31, 0), (0, 2**40), ("x", 0), (1.5, 0)):
        with pytest.raises(
            JsonRpcException, match="expected a textDocument, and a position"
        ) as refused:
            await ask(position={"line": line, "character": character})
        assert "Traceback" not in str(refused.value.to_response_error())
    for wrong in ({"textDocument": None}, {"textDocument": {"uri": "file:///b"}}, {"position": 3}):
        with pytest.raises(JsonRpcException, match=r"expected a textDocument|not open"):
            await ask(**wrong)
    assert await editor.leave() == 0
    counts = read_counts(tmp_path / "counts")["python", "next edit"]
    assert counts == {"shown": 1, "accepted": 1, "characters": len("new = 1\n")}


async def test_context_of_the_client_is_in_requests(editor: Editor, tmp_path: Path) -> None:
    """Files are read from disk, unless they are open or unreadable; garbage is ignored."""
    (tmp_path / "model").touch()
    await editor.start([*GHOST, str(tmp_path)])
    closed = tmp_path / "closed.py"
    closed.write_text("old")
    (tmp_path / "binary").write_bytes(b"\0\xff")
    editor.open("file:///a.py", "\n")
    paths = [str(closed), "/a.py", str(tmp_path / "none"), str(tmp_path / "binary"), "\0", 3]
    seen = []
    for sent in (None, {"recent": 3}, {"recent": ["r", 1], "files": paths}):
        editor.client.protocol.notify(CONTEXT, sent)
        await editor.complete("file:///a.py", 0, 0)
        seen.append(json.loads((tmp_path / "requests").read_text().splitlines()[-1]))
    assert seen == [[[], []], [[], []], [[[str(closed), "old"]], ["r"]]]
    assert await editor.leave() == 0


@pytest.mark.long
async def test_a_request_by_hand_has_alternatives(editor: Editor) -> None:
    await editor.start(ECHO)
    editor.open("file:///a", "x = ")
    for expected in ([(0.0, 0), (0.8, 1)], [(0.0, 1), (0.8, 2)]):  # each once
        items = await editor.complete(
            "file:///a", 0, 4, kind=lsp.InlineCompletionTriggerKind.Invoked
        )
        texts = [
            json.loads(item.insert_text) for item in items if isinstance(item.insert_text, str)
        ]
        assert [(text["temperature"], text["sample"]) for text in texts] == expected
        assert len({str(item.command) for item in items}) == len(items)


@pytest.mark.long
async def test_an_entry_chosen_in_a_menu_counts_as_typed(editor: Editor) -> None:
    await editor.start(ECHO)
    editor.open("file:///a", "os.pa\n")
    word = lsp.Range(lsp.Position(0, 3), lsp.Position(0, 5))
    chosen = lsp.SelectedCompletionInfo(word, "path")
    (item,) = await editor.complete("file:///a", 0, 5, chosen)
    assert item.range == word
    assert isinstance(item.insert_text, str)
    asked = json.loads(item.insert_text.removeprefix("path"))
    assert (asked["prefix"], asked["suffix"]) == ("os.path", "\n")


@pytest.mark.rotating
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
async def test_a_range_ends_with_its_line(editor: Editor, encoding: str) -> None:
    kind = lsp.PositionEncodingKind(encoding)
    await editor.start(ECHO, [kind])
    editor.open("file:///a", "x = 😀\r\ny\n")
    width = {"utf-8": 8, "utf-16": 6, "utf-32": 5}[encoding]
    for line, character, end in (
        (0, 2, (0, 2)),
        (0, 99, (0, width)),
        (1, 5, (1, 1)),
        (9, 9, (2, 0)),
    ):
        (item,) = await editor.complete("file:///a", line, character)
        assert item.range == lsp.Range(lsp.Position(*end), lsp.Position(*end))


@pytest.mark.long
async def test_cancelled_and_superseded_requests(editor: Editor) -> None:
    await editor.start(ECHO)
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
    assert (await editor.asked("file:///a", 0, 6))["prefix"] == "xwait!"
    for request in waiting:
        with pytest.raises(JsonRpcException) as superseded:
            await request
        assert superseded.value.code == lsp.LSPErrorCodes.ContentModified.value
    editor.client.cancel_request(lsp.CancelParams(last))  # late, and harmless
    assert await editor.leave() == 0
    assert editor.messages == []


@pytest.mark.long
async def test_a_model_that_cannot_be_loaded_is_told(editor: Editor) -> None:
    await editor.start([*STARTER[:-1], "no-such-model"])
    editor.open("file:///a", "x")
    with pytest.raises(JsonRpcException, match="no model called 'no-such-model'"):
        await editor.complete("file:///a", 0, 1)
    assert ["no model called 'no-such-model'" in message for message in editor.messages] == [True]
    assert await editor.leave() == 0
