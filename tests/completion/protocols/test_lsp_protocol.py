"""The language server byte by byte: garbage, wrong messages, wrong order, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest

from akunu_py.completion.protocols.lsp import read_frames
from akunu_py.models.store.model_store import StoredModel
from tests.support.lsp_echo import ECHO, STARTER


def frame(message: object) -> bytes:
    body = message if isinstance(message, bytes) else json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


def request(id: int | None, method: str, params: object = None) -> bytes:
    message = {"jsonrpc": "2.0", "method": method, "params": params}
    return frame(message if id is None else message | {"id": id})


INITIALIZE: dict[str, Any] = {"capabilities": {}, "processId": None, "rootUri": None}


def talk(data: bytes, command: list[str]) -> tuple[list[dict[str, Any]], int, str]:
    """All that the server replies to `data`, its exit code and its stderr."""
    done = subprocess.run(command, input=data, capture_output=True, timeout=60)
    replies = [json.loads(body) for body in read_frames(io.BytesIO(done.stdout))]
    return replies, done.returncode, done.stderr.decode()


def codes(replies: list[dict[str, Any]]) -> list[tuple[int | None, int | None]]:
    """The id and the error code of each reply."""
    return [(reply["id"], reply.get("error", {}).get("code")) for reply in replies if "id" in reply]


@pytest.mark.long
def test_everything_that_is_wrong_is_answered() -> None:
    position = {"textDocument": {"uri": "file:///a"}, "context": {"triggerKind": 1}}
    inline = "textDocument/inlineCompletion"
    document = {"uri": "file:///a", "languageId": "x", "version": 1, "text": ""}
    replies, code, _ = talk(
        request(1, inline, position)  # before initialize
        + request(None, "textDocument/didOpen", {"textDocument": document})  # ignored
        + b"\xff\x00 some garbage\nmore of it\n"
        + frame(b'{"jsonrpc": "2.0", ')
        + frame(b"\xff")
        + frame(b"[" * 100_000)
        + frame([])
        + frame({"id": 2, "method": "x"})
        + frame({"jsonrpc": "2.0", "id": 3})
        + request(4, "initialize", INITIALIZE)
        + request(5, "initialize", INITIALIZE)
        + request(6, "textDocument/nonesuch", position)
        + request(7, inline, position | {"position": {"line": "x", "character": 0}})
        + request(8, inline, position | {"position": {"line": -1, "character": 0}})
        + request(None, "workspace/didSomething", {})
        + frame({"jsonrpc": "2.0", "id": "unknown", "result": None}),
        ECHO,
    )
    errors = codes(replies)
    assert errors[:7] == [(1, -32002), *[(None, -32700)] * 4, *[(None, -32600)] * 2]
    assert errors[7:] == [
        (None, -32600),
        (4, None),
        (5, -32600),
        (6, -32601),
        (7, -32602),
        (8, -32602),
    ]
    assert code == 1


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        (["initialize", "initialized", "shutdown", "exit"], 0),
        (["initialize", "initialized", "exit"], 1),
        (["initialize", "shutdown"], 1),  # and then the end of the stream
        ([], 1),
    ],
)
def test_exit_codes_also_while_the_model_loads(
    messages: list[str], expected: int, starter: StoredModel
) -> None:
    parameters = {"initialize": INITIALIZE, "initialized": {}}
    notifications = ("initialized", "exit")
    data = b"".join(
        request(None if method in notifications else id, method, parameters.get(method))
        for id, method in enumerate(messages)
    )
    replies, code, stderr = talk(data, STARTER)
    answered = [(id, None) for id, method in enumerate(messages) if method not in notifications]
    assert codes(replies) == answered
    assert code == expected
    # Where the load had to be broken off, nothing is printed any more.
    assert stderr in ("", "akunu: expected shutdown before exit from the client\n")
    assert stderr == "" or code == 1


@pytest.mark.long
def test_initialize_waits_for_no_model() -> None:
    """Nothing of what runs models is imported until the client has its answer."""
    command = [sys.executable, "-X", "importtime", *STARTER[1:]]
    data = request(1, "initialize", INITIALIZE) + request(2, "shutdown") + request(None, "exit")
    replies, code, stderr = talk(data, command)
    assert (codes(replies), code) == ([(1, None), (2, None)], 0)
    imported = {line.split("|")[-1].strip().split(".")[0] for line in stderr.splitlines()}
    assert "pygls" in imported
    assert not imported & {"mlx", "mlx_lm", "transformers", "tokenizers", "numpy"}


@pytest.mark.long
def test_after_shutdown_only_exit_is_served() -> None:
    replies, code, _ = talk(
        request(1, "initialize", INITIALIZE)
        + request(2, "shutdown")
        + request(3, "shutdown")
        + request(None, "exit"),
        ECHO,
    )
    assert codes(replies) == [(1, None), (2, None), (3, -32600)]
    assert code == 0
