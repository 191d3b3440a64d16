"""The real `akunu chat` on the starter, in a real terminal."""

import os
import re
import signal
import sqlite3
import subprocess
import termios
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from akunu_py.models.store.model_store import StoredModel
from tests.reliability.faults import RAW, Chat
from tests.support.command import until
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture


@pytest.fixture
def home(tmp_path: Path, tiny_store: None) -> Path:
    """Where the chat keeps its files: empty, but for a starter that is loaded soon."""
    return tmp_path / "data"


def start(terminal: Terminal, home: Path, tokens: int = 2000) -> Chat:
    """Start the chat, which keeps its files in `home`. tokens: most tokens of an answer."""
    directories = dict.fromkeys(("XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(home))
    return Chat(directories, terminal, f"--no-answer-cache --max-tokens {tokens}", "-m")


@needs_tmux
def test_a_conversation(terminal: Terminal, home: Path, starter: StoredModel) -> None:
    model = home / "akunu" / "models" / "starter"
    model.unlink()
    model.symlink_to(starter.path)
    chat = start(terminal, home)
    terminal.type("Say hello.", "Enter")  # the model may still be loading
    screen = terminal.wait_for(r"● ready .* [1-9][0-9.]* tokens/s", seconds=150)
    assert screen.partition("Say hello.")[2].partition("╭")[0].split(), screen

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
    screen = chat.quit()
    assert "code=0\n" in screen
    assert re.search(r"to continue this chat: (\S*/)?akunu --resume [0-9a-f]{8}\n", screen)
    assert RAW not in screen
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
    chat = start(terminal, home, tokens=40)
    terminal.type("Say something.", "Enter", "my words", "C-x", "C-e")
    terminal.wait_for("EDITING")
    database = sqlite3.connect(home / "akunu" / "conversations.db")
    ended = "SELECT 1 FROM messages WHERE role = 'assistant' AND finish_reason IS NOT NULL"
    for query in ("SELECT 1 FROM sqlite_master WHERE name = 'messages'", ended):
        until(lambda query=query: database.execute(query).fetchone(), seconds=150)  # type: ignore[misc]
    assert "╭" not in terminal.screen(), "the terminal is the editor's"
    terminal.type("C-c")  # the editor's too: it ends nothing
    terminal.wait_for(r"\^C")
    (tmp_path / "done").touch()
    terminal.wait_for(r"my words and more(.*\n)*.*● ready")
    screen = chat.quit()
    assert ("code=0" in screen, RAW in screen) == (True, False)


@needs_tmux
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.3])
def test_a_signal_at_the_start_restores_the_terminal(
    seconds: float, terminal: Terminal, home: Path
) -> None:
    """From the moment when keys are no longer echoed."""
    device = os.open(terminal.device(), os.O_RDWR | os.O_NOCTTY)

    def find() -> str:
        command = ["pgrep", "-P", terminal.shell(), "-f", "akunu_py"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def kill() -> None:
        until(find)
        until(lambda: not termios.tcgetattr(device)[3] & termios.ECHO)
        time.sleep(seconds)
        os.kill(int(find()), signal.SIGTERM)

    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill)
        start(terminal, home)
        killed.result()
    screen = terminal.wait_for("code=[0-9]+\n")
    os.close(device)
    assert re.search("code=(0|143)\n", screen)
    assert (RAW in screen, "Traceback" in screen) == (False, False)
