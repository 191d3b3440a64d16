"""The real `akunu chat` on the starter, in a real terminal."""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.support.command import akunu, until
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture

# Greedy and without memory: the same answers every time.
GREEDY_CHAT = f"{sys.executable} -m akunu_py chat --temperature 0 --no-answer-cache"


@pytest.fixture
def home(tmp_path: Path, shallow_store: None) -> Path:
    """Where the chat keeps its files: empty, but for a starter that is loaded soon."""
    return tmp_path / "data"


@pytest.fixture
def talking_home(home: Path, starter: StoredModel) -> Path:
    """With the real starter, for tests of its words."""
    model = home / "akunu" / "models" / "starter"
    model.unlink()
    model.symlink_to(starter.path)
    return home


def start(terminal: Terminal, home: Path, then: str = ":", options: str = "") -> None:
    """The chat, which keeps its files in `home`; when it ended, its exit code is shown."""
    keep = f"XDG_DATA_HOME={home} XDG_CONFIG_HOME={home}"
    command = f'clear; A=$(stty -g); {keep} {GREEDY_CHAT} {options}; echo "code=$?"; {then}'
    terminal.type(command, "Enter")
    terminal.wait_for("Ask something")


def children(process: str) -> list[str]:
    """The ids of the processes that a process started."""
    found = subprocess.run(["pgrep", "-P", process], check=True, capture_output=True, text=True)
    return found.stdout.split()


@needs_tmux
def test_a_conversation(terminal: Terminal, talking_home: Path) -> None:
    start(terminal, talking_home, then='[ "$A" = "$(stty -g)" ] && echo terminal=same')
    terminal.type("Say hello.", "Enter")  # the model may still be loading
    screen = terminal.wait_for(r"● ready .* [1-9][0-9.]* tokens/s", seconds=150)
    words = screen.partition("Say hello.")[2].partition("╭")[0]
    assert len(words.split()) >= 1, screen

    terminal.type("Write a very long story about a walrus.", "Enter")
    terminal.wait_for(r"answering .* [1-9][0-9.]* tokens/s")
    terminal.type("Escape")
    terminal.wait_for("■ stopped")

    terminal.type("F6")
    terminal.wait_for("editing an earlier prompt")
    terminal.type(" Begin with a song.", "Enter")
    terminal.wait_for(r"a walrus. Begin with a song.(.*\n)*.*‹ 2/2 ›(.*\n)*.*answering")
    terminal.type("Escape")
    terminal.wait_for("■ stopped")

    terminal.type("Write another one.", "Enter")
    terminal.wait_for("answering")
    terminal.type("C-q")
    screen = terminal.wait_for("code=[0-9]+\n")
    assert "code=0\n" in screen
    assert re.search(r"to continue this chat: (\S*/)?akunu --resume [0-9a-f]{8}\n", screen)
    assert "terminal=same" in terminal.wait_for("terminal=|[$] $")
    assert "Traceback" not in screen


EDITOR = """\
#!/bin/sh
trap '' INT
echo EDITING
until [ -e done ]; do sleep 0.1; done
printf ' and more' >> "$1"
"""


@needs_tmux
def test_an_answer_continues_while_the_editor_is_open(
    terminal: Terminal, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "editor").write_text(EDITOR)
    (tmp_path / "editor").chmod(0o700)
    terminal.type(f"cd {tmp_path}; export EDITOR=./editor VISUAL=", "Enter")
    start(terminal, home, '[ "$A" = "$(stty -g)" ] && echo terminal=same', "--max-tokens 40")
    terminal.type("Say something.", "Enter", "my words", "C-x", "C-e")
    terminal.wait_for("EDITING")
    database = sqlite3.connect(home / "akunu" / "conversations.db")
    ended = "SELECT count(*) FROM messages WHERE role = 'assistant' AND finish_reason IS NOT NULL"
    until(lambda: database.execute(ended).fetchone()[0], seconds=150)
    assert "╭" not in terminal.screen(), "the terminal is the editor's"
    terminal.type("C-c")  # the editor's too: it ends nothing
    terminal.wait_for(r"\^C")
    (tmp_path / "done").touch()
    terminal.wait_for(r"my words and more(.*\n)*.*● ready")
    terminal.type("C-q")
    terminal.wait_for("code=0\n(.*\n)*terminal=same")


@needs_tmux
def test_a_signal_while_loading_restores_the_terminal(terminal: Terminal, home: Path) -> None:
    start(terminal, home, then='[ "$A" = "$(stty -g)" ] && echo terminal=same')
    subprocess.run(["kill", "-TERM", *children(terminal.shell())], check=True)
    screen = terminal.wait_for("code=0\n(.*\n)*terminal=same")
    assert "Traceback" not in screen


def test_without_a_terminal() -> None:
    done = akunu("chat", "--max-tokens", "5")
    expected = "akunu: chat needs a terminal; for scripts use: akunu run\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
