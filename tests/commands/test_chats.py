"""`akunu chats`, through the command line."""

import io
import json
import sys
from pathlib import Path

import pytest

from akunu_py import paths
from akunu_py.chats.conversation_store import ConversationStore
from akunu_py.cli import main
from tests.support.chats import T0, branched, exchange_of

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def two_conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store = ConversationStore.open(paths.conversations_file())
    store.save_tree(branched())
    store.save_tree(exchange_of("escape", "Say \x1b[31mred", "No.", T0 + 1000))
    store.close()


def ids(out: Out) -> list[str]:
    assert main(["chats", "list", "--format", "json"]) == 0
    return [each["id"] for each in json.loads(out.readouterr().out)]


def test_list(capsys: Out) -> None:
    assert main(["chats", "list"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["ID", "LAST", "USED", "MESSAGES", "MODEL", "TITLE"]
    assert first.endswith("2  starter  Say ␛[31mred")
    assert second.startswith("queue ")
    assert second.endswith("6  starter  What is a queue?")


def test_search(capsys: Out) -> None:
    assert main(["chats", "search", "first", "welc"]) == 0
    _, row, snippet = capsys.readouterr().out.splitlines()
    assert "What is a queue?" in row
    assert snippet.strip() in ("First in, first *out*.", "You are welcome.")
    assert main(["chats", "search", "first in", "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["id"], found["found"]) == ("queue", "First in, first *out*.")
    assert main(["chats", "search", "first first"]) == 0
    out = capsys.readouterr()
    assert (out.out, out.err) == ("", f"no chats found in {paths.conversations_file()}\n")


def test_export_and_import(capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["chats", "export", "--all"]) == 0
    everything = capsys.readouterr().out
    assert main(["chats", "rm", "que", "escape", "--yes"]) == 0
    assert capsys.readouterr().out.startswith("deleted queue  What is a queue?\n")
    assert ids(capsys) == []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(everything.encode())))
    assert main(["chats", "import", "-"]) == 0
    assert "6 of 6 messages are new  What is a queue?" in capsys.readouterr().out
    (tmp_path / "all.json").write_text(everything, "utf-8")
    assert main(["chats", "import", str(tmp_path / "all.json")]) == 0
    assert "0 of 6 messages are new" in capsys.readouterr().out
    assert ids(capsys) == ["escape", "queue"]
    store = ConversationStore.open(paths.conversations_file())
    assert store.load("queue").active_branch() == branched().active_branch()
    store.close()


@pytest.mark.parametrize(
    ("name", "begins"), [("a.md", "# What"), ("a.json", "{\n"), ("a", "# What")]
)
def test_the_file_name_decides_the_format(
    tmp_path: Path, capsys: Out, name: str, begins: str
) -> None:
    file = tmp_path / name
    assert main(["chats", "export", "queue", "-o", str(file)]) == 0
    assert file.read_text("utf-8").startswith(begins)
    assert capsys.readouterr().err == f"exported to {file}\n"
    assert main(["chats", "export", "queue", "--format", "markdown"]) == 0
    assert capsys.readouterr().out.startswith("# What is a queue?\n")


@pytest.mark.parametrize(("arguments", "code", "error"), [
    (["export"], 2, "expected an ID or --all"),
    (["export", "queue", "--all"], 2, "expected an ID or --all"),
    (["export", "--all", "--format", "markdown"], 2, "--all exports only JSON"),
    (["export", "nowhere"], 1, "no conversation with id 'nowhere'"),
    (["export", "queue", "-o", "/"], 1, "/ exists; name another file"),
    (["import", "nowhere.json"], 1, "cannot read nowhere.json: No such file"),
    (["import", __file__], 1, "expected JSON"),
    (["import", sys.executable], 1, "not UTF-8"),
    (["rm", "queue", "nowhere", "--yes"], 1, "no conversation"),
])  # fmt: skip
def test_errors(capsys: Out, arguments: list[str], code: int, error: str) -> None:
    assert main(["chats", *arguments]) == code
    stderr = capsys.readouterr().err
    assert stderr.startswith("akunu: ")
    assert error in stderr
    assert stderr.count("\n") == 1
    assert ids(capsys) == ["escape", "queue"]


def test_rm_needs_a_confirmation(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["chats", "rm", "queue"]) == 2
    assert "akunu chats rm ID --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for reply, left in (("n", ["escape", "queue"]), ("y", ["escape"])):
        monkeypatch.setattr("builtins.input", lambda question, reply=reply: reply)
        assert main(["chats", "rm", "queue"]) == 0
        capsys.readouterr()
        assert ids(capsys) == left


def test_a_damaged_database_is_set_aside_with_a_notice(capsys: Out) -> None:
    paths.conversations_file().write_bytes(b"garbage" * 1000)
    assert main(["chats", "list"]) == 0
    out = capsys.readouterr()
    assert out.out == ""
    assert "was set aside as conversations.db.damaged-1" in out.err
