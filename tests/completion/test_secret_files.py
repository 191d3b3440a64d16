"""Files with secrets: not completed, not sent as context, and not prefilled in advance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import CompletionQueue, QueueOptions, Ticket
from akunu_py.completion.request import BufferEdit, CompletionRequest, SourceFile
from akunu_py.completion.secret_files import is_excluded
from akunu_py.decoding.model.engine import Engine
from akunu_py.settings import SECRET_FILES
from tests.support.command import assert_one_line_error, run_here
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
SECRET = [
    "/home/me/app/.env",
    "/home/me/app/.env.local",
    ".env",
    "/etc/ssl/server.pem",
    "/etc/ssl/Server.KEY",
    "/app/secrets.yaml",
    "/home/me/.ssh/id_ed25519",
    "/home/me/.netrc",
    "vscode-remote://ssh-remote%2Bhost/home/me/%2Eenv",
    "git:/home/me/app/.env?%7B%22ref%22%3A%22HEAD%22%7D",
    "untitled:.env.local",
]
OPEN = [
    "",
    "/home/me/app/environment.py",
    "/home/me/app/keys.py",
    "/home/me/.env/app.py",
    "/home/me/app/my_secrets.py",
    "git:/home/me/app/main.py?%7B%22ref%22%3A%22.env%22%7D",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([END]), end=END)


@pytest.mark.parametrize(
    ("path", "excluded"), [*((p, True) for p in SECRET), *((p, False) for p in OPEN)]
)
def test_only_files_with_secrets_are_excluded(path: str, excluded: bool) -> None:
    assert is_excluded(path, SECRET_FILES) == excluded


def test_a_pattern_with_a_slash_matches_the_end_of_a_path() -> None:
    assert is_excluded("/home/me/app/config/prod.toml", ["config/*.toml"])
    assert is_excluded("/home/me/app/Private/deep/a.py", ["private/*"])
    assert not is_excluded("/home/me/app/myconfig/prod.toml", ["config/*.toml"])


class Recorded:
    """A queue, and the requests that reached its completer."""

    def __init__(self, directory: Path, exclude: Sequence[str] = SECRET_FILES) -> None:
        self.requests: list[CompletionRequest] = []
        completer = Completer(Engine.load(directory))
        begin = completer.begin

        def record(session: Any, request: CompletionRequest, *more: Any) -> Any:
            self.requests.append(request)
            return begin(session, request, *more)

        completer.begin = record  # type: ignore[method-assign, assignment]
        self.queue = CompletionQueue(lambda: completer, QueueOptions(exclude=tuple(exclude)))
        self.queue.start()

    def prefill(self, request: CompletionRequest) -> None:
        done = threading.Event()
        self.queue.submit(Ticket(request, lambda _: done.set()))
        assert done.wait(60)


def test_a_buffer_with_secrets_never_reaches_the_model(directory: Path) -> None:
    recorded = Recorded(directory)
    for path in SECRET:
        request = CompletionRequest("KEY=", path=path, max_tokens=2)
        done = recorded.queue.complete(request)
        assert (done.text, done.finish_reason) == ("", "stop")
        recorded.prefill(CompletionRequest("KEY=", path=path, max_tokens=0))
    assert recorded.queue.close(60)
    assert recorded.requests == []


def test_files_and_edits_with_secrets_are_no_context(directory: Path) -> None:
    recorded = Recorded(directory)
    files = tuple(SourceFile(path, "TOKEN = 1\n") for path in [*SECRET, "/app/b.py"])
    edits = tuple(BufferEdit(path, "a", "b") for path in [*SECRET, "/app/b.py"])
    recorded.queue.complete(CompletionRequest("a = ", path="/app/a.py", max_tokens=1, files=files))
    recorded.prefill(CompletionRequest("b = ", path="/app/a.py", max_tokens=0, files=files))
    request = CompletionRequest("c = ", path="/app/a.py", files=files, edits=edits)
    recorded.queue.submit(Ticket(request))  # the model predicts no edits, so it fails
    assert recorded.queue.close(60, drain=True)
    assert recorded.requests
    assert {file.path for each in recorded.requests for file in each.files} == {"/app/b.py"}
    assert {edit.path for each in recorded.requests for edit in each.edits or ()} == {"/app/b.py"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "akunu").mkdir()
    return tmp_path / "akunu" / "settings.toml"


def test_the_filter_refuses_in_one_line_and_the_setting_allows(
    directory: Path, settings: Path
) -> None:
    options = ["--filter", "--offset", "4", "--path", "/app/.env", "--model", str(directory)]
    done = run_here("complete", *options, stdin="KEY=")
    assert_one_line_error(done, 2, "/app/.env", "completion_exclude")
    settings.write_text("completion_exclude = []\n")
    done = run_here("complete", *options, "--max-tokens", "2", stdin="KEY=")
    assert done.returncode == 0, done.stderr


def test_the_setting_reaches_json_lines(directory: Path, settings: Path) -> None:
    settings.write_text('completion_exclude = ["*.private"]\n')
    text = "".join(
        json.dumps({"id": path, "prefix": "x = [[[[", "path": path, "max_tokens": 2}) + "\n"
        for path in ("/app/a.private", "/app/.env")
    )
    done = run_here("complete", "--no-answer-cache", "--model", str(directory), stdin=text)
    replies = {reply["id"]: reply for reply in map(json.loads, done.stdout.splitlines())}
    assert replies["/app/a.private"]["stats"]["generated_tokens"] == 0
    assert replies["/app/.env"]["stats"]["generated_tokens"] == 2
