"""Any bytes and any JSON from editors and imports: answered or refused, and no server ends."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.chats.export import as_markdown
from akunu_py.chats.json import as_json, read_json
from akunu_py.completion.completion_request import CompletionRequest
from akunu_py.completion.protocols.json_lines import Line, parse, request_of
from akunu_py.errors import UsageError
from tests.reliability.fuzz import TEXTS, changed, clear, explore, json_like, lengths
from tests.support.chats import branched
from tests.support.lsp_servers import ECHO, frame, talk

REQUESTED = {
    "id": 1, "prefix": "def f(", "suffix": ")", "path": "a.py", "language": "python",
    "channel": "a", "files": [{"path": "b.py", "text": "x = 1"}], "max_tokens": 8, "max_lines": 1,
    "time_ms": 250, "temperature": 0.5, "stream": True,
}  # fmt: skip


def check_line(line: bytes) -> None:
    """A line is understood, refused with words that JSON can carry, or empty."""
    try:
        requested = parse(line)
        if requested is not None:
            request = request_of(requested, CompletionRequest(""))
            assert math.isfinite(request.temperature)
    except UsageError as error:
        str(error).encode()
    else:
        assert requested is None or isinstance(requested, Line)


@lengths(60)
def test_json_lines(examples: int) -> None:
    explore(lambda value: check_line(json.dumps(value).encode()), examples, changed(REQUESTED))


URI = "file:///a.py"
POSITION = {"line": 0, "character": 1}
MESSAGES: list[dict[str, Any]] = [
    {"method": "textDocument/didOpen", "params": {"textDocument": {
        "uri": URI, "languageId": "python", "version": 1, "text": "print(1)\n"}}},
    {"method": "textDocument/didChange", "params": {
        "textDocument": {"uri": URI, "version": 2},
        "contentChanges": [{"range": {"start": POSITION, "end": POSITION}, "text": "x"}]}},
    {"method": "textDocument/didClose", "params": {"textDocument": {"uri": URI}}},
    {"method": "textDocument/inlineCompletion", "id": 5, "params": {
        "textDocument": {"uri": URI}, "position": POSITION, "context": {"triggerKind": 1}}},
    {"method": "workspace/executeCommand", "id": 6, "params": {"command": "x"}},
    {"method": "$/cancelRequest", "params": {"id": 5}},
    {"id": 7, "result": None},
]  # fmt: skip


@lengths(60)
def test_a_language_server_answers_every_request(examples: int) -> None:
    """One server is sent all of them; each request that has an id of its own is answered, and
    the server still shuts down in order."""
    sent: list[bytes] = []

    def note(message: Any) -> None:
        body = {"jsonrpc": "2.0"} | message if isinstance(message, dict) else message
        if isinstance(body, dict) and "id" in body:
            body["id"] = f"r{len(sent)}"
        if not isinstance(body, dict) or body.get("method") not in ("exit", "shutdown"):
            sent.append(json.dumps(body).encode())

    def encoded(message: dict[str, Any]) -> bytes:
        return json.dumps({"jsonrpc": "2.0"} | message).encode()

    shapes = st.one_of([changed(message) for message in MESSAGES])
    explore(note, examples, shapes | json_like(TEXTS))
    first = {"id": 1, "method": "initialize", "params": {"capabilities": {}}}
    last = {"id": "end", "method": "shutdown"}
    bodies = [encoded(first), encoded(MESSAGES[0]), *sent, encoded(last)]
    data = b"".join(map(frame, [*bodies, encoded({"method": "exit"})]))
    replies, code, stderr = talk(data, *ECHO)
    assert code == 0, stderr[-3000:]
    answered = [id for id, _ in replies]
    wanted = [
        each["id"]
        for each in map(json.loads, sent)
        if isinstance(each, dict) and isinstance(each.get("id"), str)
        and each.get("jsonrpc") == "2.0" and isinstance(each.get("method"), str)
    ]  # fmt: skip
    assert len(wanted) > examples // 16
    assert [id for id in wanted if answered.count(id) != 1] == []
    assert "end" in answered


# Imported conversations


def read_and_show(text: str, store: ConversationStore) -> None:
    """Import conversations, save them, load them again and show them in all forms."""
    for tree in read_json(text, "file"):
        store.save_tree(tree)
        again = store.load(tree.conversation)
        assert [message.id for message in again.messages]
        as_markdown(again)
        for message in again.messages:
            if message.stats:
                message.stats.as_dict()
        assert read_json(as_json([again]), "again")
        store.list()


@lengths(50)
def test_conversations(examples: int, tmp_path: Path) -> None:
    store = ConversationStore.open(tmp_path / "conversations.db")
    whole = json.loads(as_json([branched()]))

    def check(value: Any) -> None:
        with clear():
            read_and_show(json.dumps(value), store)

    explore(check, examples, changed(whole))
    store.close()
