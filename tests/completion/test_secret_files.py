"""Files with secrets: not completed, not sent as context, and not prefilled in advance."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completion_queue import CompletionQueue, is_excluded
from akunu_py.completion.completion_request import (
    Completion,
    CompletionRequest,
    EndCheck,
    SourceFile,
)
from akunu_py.completion.tickets import Ticket
from akunu_py.engine.events import Failed
from akunu_py.settings import SECRET_FILES
from akunu_py.types import Stats
from tests.support.command import assert_one_line_error, run_here, until
from tests.support.scripted_loop import ScriptedLoop
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
SECRET = [
    "/home/me/app/.env", "/home/me/app/.env.local", ".env", "/etc/ssl/server.pem",
    "/etc/ssl/Server.KEY", "/app/secrets.yaml", "/home/me/.ssh/id_ed25519", "/home/me/.netrc",
    "/app/prod.env", "/app/secret.yaml", "/home/me/.npmrc", "/home/me/.pypirc",
    "/app/credentials.json", "/app/prod.tfvars", "/app/terraform.tfstate", "/home/me/kubeconfig",
    "/app/AuthKey.p8", "/app/release.keystore", "/home/me/.aws/config", "/home/me/.ssh/config",
    "vscode-remote://ssh-remote%2Bhost/home/me/%2Eenv",
    "git:/home/me/app/.env?%7B%22ref%22%3A%22HEAD%22%7D", "untitled:.env.local",
]  # fmt: skip
OPEN = [
    "", "/home/me/app/environment.py", "/home/me/app/keys.py", "/home/me/.env/app.py",
    "/home/me/app/my_secrets.py", "git:/home/me/app/main.py?%7B%22ref%22%3A%22.env%22%7D",
]  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([END]), end=END)


def test_only_files_with_secrets_are_excluded() -> None:
    assert [path for path in SECRET + OPEN if is_excluded(path, SECRET_FILES)] == SECRET


def test_a_pattern_with_a_slash_matches_the_end_of_a_path() -> None:
    assert is_excluded("/home/me/app/config/prod.toml", ["config/*.toml"])
    assert is_excluded("/home/me/app/Private/deep/a.py", ["private/*"])
    assert not is_excluded("/home/me/app/myconfig/prod.toml", ["config/*.toml"])


def test_secrets_never_reach_the_model() -> None:
    """Neither in the buffer, which is not prefilled either, nor as other files."""
    reached: list[CompletionRequest] = []

    def complete(request: CompletionRequest, *_: Any) -> Completion:
        reached.append(request)
        return Completion("text", "stop", Stats())

    queue = CompletionQueue(lambda: ScriptedLoop("x", complete))
    queue.start()
    for path in SECRET:
        for tokens in (2, 0):
            done = queue.complete(CompletionRequest("KEY=", path=path, max_tokens=tokens))
            assert (done.text, done.finish_reason, done.excluded) == ("", "stop", True)
    files = tuple(SourceFile(path, "TOKEN = 1\n") for path in [*SECRET, "/app/b.py"])
    request = CompletionRequest("a = ", path="/app/a.py", files=files)
    for each in (replace(request, max_tokens=0), request):
        queue.complete(each)
    assert queue.close(60, drain=True)
    assert [request.path for request in reached] == ["/app/a.py"] * 2
    assert [[file.path for file in request.files] for request in reached] == [["/app/b.py"]] * 2


def test_a_request_in_an_excluded_file_cancels_the_older_one_of_its_channel() -> None:
    done: dict[str, Completion | Failed] = {}

    def complete(request: CompletionRequest, ended: EndCheck, _: Any) -> Completion:
        until(ended)
        return Completion("", ended() or "stop", Stats())

    queue = CompletionQueue(lambda: ScriptedLoop("x", complete))
    queue.start()
    for path in ("a.py", ".env"):
        ticket = Ticket(
            CompletionRequest("x", path=path), partial(done.__setitem__, path), "buffer"
        )
        queue.submit(ticket)
    until(lambda: len(done) == 2)
    assert queue.close(60)
    reasons = {path: getattr(each, "finish_reason", "") for path, each in done.items()}
    assert reasons == {"a.py": "cancelled", ".env": "stop"}


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
    lines = map(json.loads, done.stdout.splitlines())
    replies = {reply["id"]: reply for reply in lines if "hello" not in reply}
    assert replies["/app/a.private"]["stats"]["generated_tokens"] == 0
    assert replies["/app/.env"]["stats"]["generated_tokens"] == 2
