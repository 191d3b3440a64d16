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
from tests.support.command import assert_one_line_error, printed, run_here

Out = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def two_conversations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    store = ConversationStore.open(paths.conversations_file())
    store.save_tree(branched())
    store.save_tree(exchange_of("escape", "Say \x1b[31mred", "No.", T0 + 1000))
    store.close()


def ids() -> list[str]:
    return [each["id"] for each in json.loads(printed("chats", "list", "--format", "json"))]


def test_list() -> None:
    head, first, second = printed("chats", "list").splitlines()
    assert head.split() == ["ID", "LAST", "USED", "MESSAGES", "MODEL", "TITLE"]
    assert first.endswith("2  starter  Say ␛[31mred")
    assert second.startswith("queue ")
    assert second.endswith("6  starter  What is a queue?")


def test_search() -> None:
    _, row, snippet = printed("chats", "search", "first", "welc").splitlines()
    assert "What is a queue?" in row
    assert snippet.strip() in ("First in, first *out*.", "You are welcome.")
    (found,) = json.loads(printed("chats", "search", "first in", "--format", "json"))
    assert (found["id"], found["found"]) == ("queue", "First in, first *out*.")
    assert printed("chats", "search", "in welc", "--format", "json") == "[]\n"
    done = run_here("chats", "search", '"out first"')
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"no chats found in {paths.conversations_file()}\n"


def test_export_and_import(tmp_path: Path) -> None:
    everything = printed("chats", "export", "--all")
    deleted = printed("chats", "rm", "que", "escape", "queue", "--yes")
    assert deleted.startswith("deleted queue  What is a queue?\n")
    assert ids() == []
    imported = printed("chats", "import", "-", stdin=everything)
    assert "6 of 6 messages are new  What is a queue?" in imported
    (tmp_path / "all.json").write_text(everything, "utf-8")
    imported = printed("chats", "import", str(tmp_path / "all.json"))
    assert "0 of 6 messages are new" in imported
    assert ids() == ["escape", "queue"]
    store = ConversationStore.open(paths.conversations_file())
    assert store.load("queue").active_branch() == branched().active_branch()
    store.close()


@pytest.mark.parametrize(
    ("name", "begins"), [("a.md", "# What"), ("a.json", "{\n"), ("a", "# What")]
)
def test_the_file_name_decides_the_format(tmp_path: Path, name: str, begins: str) -> None:
    file = tmp_path / name
    done = run_here("chats", "export", "queue", "-o", str(file))
    assert (done.returncode, done.stderr) == (0, f"exported to {file}\n")
    assert file.read_text("utf-8").startswith(begins)
    exported = printed("chats", "export", "queue", "--format", "markdown")
    assert exported.startswith("# What is a queue?\n")


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
def test_errors(arguments: list[str], code: int, error: str) -> None:
    assert_one_line_error(run_here("chats", *arguments), code, "akunu: ", error)
    assert ids() == ["escape", "queue"]


def test_rm_needs_a_confirmation(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["chats", "rm", "queue"]) == 2
    assert "akunu chats rm queue --yes" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for reply, left in (("n", ["escape", "queue"]), ("y", ["escape"])):
        monkeypatch.setattr("builtins.input", lambda question, reply=reply: reply)
        assert main(["chats", "rm", "queue"]) == 0
        assert ids() == left


def test_a_damaged_database_is_set_aside_with_a_notice() -> None:
    paths.conversations_file().write_bytes(b"garbage" * 1000)
    done = run_here("chats", "list")
    assert (done.returncode, done.stdout) == (0, "")
    assert "was set aside as conversations.db.damaged-1" in done.stderr
