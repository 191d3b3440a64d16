"""The command line's last resort, and foreign text: one line, without control codes."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
from hypothesis import strategies as st

from akunu_py import crashes, paths
from akunu_py.chats.json import as_json
from akunu_py.cli import main
from akunu_py.commands import chats, info, run
from akunu_py.errors import AkunuError
from akunu_py.text import displayable
from akunu_py.tui.app import ChatApp, ChatConfig
from akunu_py.types import GenerateOptions
from tests.reliability.fuzz import TEXTS, explore, lengths
from tests.support.chats import exchange_of
from tests.support.command import AKUNU, pseudo_terminal, run_here
from tests.support.tiny_fim import byte_level, write_model
from tests.support.tui_chat import broken_store, silent_client

Captured = pytest.CaptureFixture[str]


class Panic(BaseException):
    """As Rust's, which is no Exception."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, own_directories: None) -> Path:
    return tmp_path


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: object) -> NoReturn:
        raise error

    monkeypatch.setattr(info, "run", run)


def test_an_interrupted_import_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    error = ImportError("MLX's extension")
    error.__cause__ = ImportError("a part of it")
    error.__cause__.__cause__ = KeyboardInterrupt()
    failing(monkeypatch, error)
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        ZeroDivisionError("\x1b[2J\nmore"), Panic("a regex"), RecursionError("deep"),
        MemoryError(), KeyError("\ud800"), Unspeakable(), AssertionError("x" * 10**6),
        ExceptionGroup("many", [ValueError("one")]), UnicodeEncodeError("ascii", "é", 0, 1, "no"),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_any_exception_is_one_line_and_a_report(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    failing(monkeypatch, error)
    assert main(["info"]) == 1
    out = capsys.readouterr()
    assert out.out == ""
    (line,) = out.err.splitlines()
    assert line.startswith(f"akunu: this is a bug: {type(error).__name__}")
    assert len(line) < 600
    assert "\x1b" not in line
    (file,) = (paths.cache_dir() / "crashes").iterdir()
    assert str(file) in line
    assert "akunu info" in line
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size < 100_000
    assert "test_crashes.py" in file.read_text()


@pytest.mark.parametrize("arguments", [["--debug", "info"], ["info", "--debug"]])
def test_debug_shows_the_traceback(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for error in (ZeroDivisionError("\x1b[2J"), AkunuError("foreseen"), OSError(28, "full")):
        failing(monkeypatch, error)
        assert main(arguments) == 1
        shown = capsys.readouterr().err
        assert "Traceback" in shown
        assert "\x1b" not in shown
    monkeypatch.undo()
    assert main(["info", "--", "--debug"]) == 2


def test_few_reports_are_kept_and_none_is_needed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    failing(monkeypatch, ValueError("x"))
    for _ in range(crashes.MAX_REPORTS + 3):
        main(["info"])
    assert len(list((paths.cache_dir() / "crashes").iterdir())) == crashes.MAX_REPORTS
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    capsys.readouterr()
    assert main(["info"]) == 1
    assert "run it again with --debug" in capsys.readouterr().err


async def test_the_chat_keeps_its_exception_and_shows_no_variables(capsys: Captured) -> None:
    app = ChatApp(ChatConfig("starter", GenerateOptions(), silent_client(), broken_store()))

    def fail() -> None:
        raise ZeroDivisionError("in the chat")

    async def use() -> None:
        async with app.run_test() as pilot:
            app.call_later(fail)
            await pilot.pause()

    with pytest.raises(ZeroDivisionError):
        await use()
    assert isinstance(app.failure, ZeroDivisionError)
    assert app.return_code == 1
    assert "Traceback" not in "".join(capsys.readouterr())


@lengths(40)
def test_wrong_usage_is_one_line_without_controls(examples: int, capsys: Captured) -> None:
    def check(words: tuple[str, str]) -> None:
        command, word = words
        assert main([*command.split(), f"--{word}"]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1
        assert displayable(shown) == shown

    commands = st.sampled_from(["run hi", "models list", "chats list", "info", "bench", "complete"])
    words = TEXTS.filter(lambda word: word not in ("", "debug", "help"))
    explore(check, examples, st.tuples(commands, words))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a Mac has no /dev/full")
@pytest.mark.parametrize("command", ["--help", "chats --help", "bench --help", "--version"])
def test_unwritable_help_is_a_failure(command: str) -> None:
    shell = " ".join(AKUNU)
    done = subprocess.run(
        ["sh", "-c", f"{shell} {command} >/dev/full"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "akunu: No space left on device\n")


def test_an_output_that_takes_only_ascii() -> None:
    home = os.environ["XDG_DATA_HOME"]
    content = json.loads(as_json([exchange_of("a", "Hello", "ü \ud800", 1.0)]))
    (conversation,) = content["conversations"]
    conversation["title"] = "é \U0001f600 \ud800"
    conversation["messages"][1]["model"] = "\ud800"
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "XDG_DATA_HOME": home}
    done = subprocess.run(
        [*AKUNU, "chats", "import", "-"], input=json.dumps(content).encode(), env=env,
        capture_output=True,
    )  # fmt: skip
    assert (done.returncode, b"2 of 2 messages" in done.stdout) == (0, True), done.stderr
    done = subprocess.run([*AKUNU, "chats", "export", "--all"], env=env, capture_output=True)
    assert json.loads(done.stdout.decode("ascii"))["conversations"][0]["title"] == "é \U0001f600 ?"


@pytest.mark.parametrize("name", ["config/akunu/settings.toml", "chats.json"])
def test_foreign_files_are_read_within_bounds(name: str, home: Path) -> None:
    """`tests/test_files.py` has the other kinds of files."""
    file = home / name
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["run", "hi"] if "settings" in name else ["chats", "import", str(file)]
    file.symlink_to("/dev/zero")
    for _ in range(2):
        done = run_here(*command)
        assert done.returncode in (1, 2)
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert file.name in done.stderr
        file.unlink()
        file.write_text(("a = " if "settings" in name else "") + "[" * 100_000)


def test_input_on_stdin_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chats, "MAX_IMPORT", 1000)
    monkeypatch.setattr(run, "MAX_PROMPT", 1000)
    for words, name, code in (
        (("chats", "import", "-"), "-", 1),
        (("run", "-"), "the prompt on stdin", 2),
    ):
        done = run_here(*words, stdin="[" * 2000)
        expected = f"akunu: cannot read {name}: larger than 1,000 bytes\n"
        assert (done.returncode, done.stderr) == (code, expected)


def test_locks_and_exports_follow_no_link(home: Path, capsys: Captured) -> None:
    target = home / "precious"
    paths.data_dir().mkdir(parents=True)
    lock = paths.data_dir() / "conversations.db.lock"
    lock.symlink_to(target)
    assert main(["chats", "list"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not target.exists()
    lock.unlink()
    (home / "out.json").symlink_to(target)
    assert main(["chats", "export", "--all", "-o", str(home / "out.json")]) == 1
    assert not target.exists()


# Control codes in an answer


def test_control_codes_are_piped_as_they_are_and_shown_on_a_terminal(tmp_path: Path) -> None:
    """The token ESC has the highest logit."""
    tokenizer = byte_level(["<|end|>"])
    (token,) = tokenizer.encode("\x1b").ids
    model = write_model(tmp_path / "model", tokenizer, end="<|end|>")
    words = ("run", "--raw", "--max-tokens", "3", "--no-answer-cache", "--model", str(model))
    command = [*words, "--logit-bias", f"{token}=1000", "Red:"]
    assert run_here(*command).stdout == 3 * "\x1b" + "\n"
    with (
        pseudo_terminal() as (ours, theirs),
        open(theirs, closefd=False) as stdin,
        open(theirs, "w", closefd=False) as stdout,
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(sys, "stdout", stdout),
    ):
        assert main(command) == 0
        stdout.flush()
        with open(ours, encoding="utf-8", closefd=False) as screen:
            assert screen.readline() == "␛␛␛\n"
