"""The real `akunu chat` on the starter, in a real terminal."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from akunu_py.models.store import StoredModel

needs_tmux = pytest.mark.skipif(
    not all(map(shutil.which, ("tmux", "pgrep", "ps"))), reason="tmux or procps is not installed"
)

# Greedy and without memory: the same answers every time.
GREEDY_CHAT = f"{sys.executable} -m akunu_py chat --temperature 0 --no-memory"


class Terminal:
    """A terminal in a tmux server of its own, with a shell in it."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        environment = {**os.environ, "PS1": "$ ", "TERM": "screen-256color"}
        subprocess.run(
            [*self._tmux, "new-session", "-d", "-x", "90", "-y", "30", "/bin/sh"],
            check=True,
            env=environment,
        )

    def type(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> str:
        shown = subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True)
        return shown.stdout.decode()

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """The screen, as soon as `pattern` is on it."""
        end = time.monotonic() + seconds
        while not re.search(pattern, screen := self.screen()):
            assert time.monotonic() < end, f"no {pattern!r} on the screen:\n{screen}"
            time.sleep(0.1)
        return screen

    def shell(self) -> str:
        """The process id of the shell."""
        command = [*self._tmux, "list-panes", "-F", "#{pane_pid}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "tmux")
    yield terminal
    terminal.close()


def children(process: str) -> list[str]:
    """The ids of the processes that a process started."""
    found = subprocess.run(["pgrep", "-P", process], check=True, capture_output=True, text=True)
    return found.stdout.split()


def is_running(process: str) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", process], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


@needs_tmux
def test_a_conversation(terminal: Terminal, starter: StoredModel) -> None:
    terminal.type(
        f'A=$(stty -g); {GREEDY_CHAT}; echo "code=$?"; '
        '[ "$A" = "$(stty -g)" ] && echo terminal=same',
        "Enter",
    )
    terminal.wait_for("Ask something")
    terminal.type("Say hello.", "Enter")  # the model may still be loading
    screen = terminal.wait_for(r"● ready .* [1-9][0-9.]* tokens/s", seconds=150)
    said = screen.partition("Say hello.")[2].partition("╭")[0]
    assert len(said.split()) >= 1, screen

    terminal.type("Write a very long story about a ship.", "Enter")
    terminal.wait_for(r"▶ answering .* [1-9][0-9.]* tokens/s .*tokens/pass")
    terminal.type("Escape")
    screen = terminal.wait_for("■ stopped", seconds=5)
    assert "a ship." in screen

    terminal.type("Write another one.", "Enter")
    terminal.wait_for("▶ answering")
    terminal.type("C-q")
    screen = terminal.wait_for("code=[0-9]+\n", seconds=10)
    assert "code=0\n" in screen
    assert "terminal=same" in terminal.wait_for("terminal=|[$] $")
    assert "Traceback" not in screen


@needs_tmux
@pytest.mark.parametrize("signal", ["TERM", "INT"])
def test_a_signal_while_loading_restores_the_terminal(
    terminal: Terminal, starter: StoredModel, signal: str
) -> None:
    terminal.type(
        f'A=$(stty -g); {GREEDY_CHAT}; echo "code=$?"; '
        '[ "$A" = "$(stty -g)" ] && echo terminal=same',
        "Enter",
    )
    terminal.wait_for("Ask something")
    subprocess.run(["kill", f"-{signal}", *children(terminal.shell())], check=True)
    screen = terminal.wait_for("code=0\n(.*\n)*terminal=same", seconds=10)
    assert "Traceback" not in screen


@needs_tmux
def test_a_closed_window_ends_it(terminal: Terminal, starter: StoredModel) -> None:
    terminal.type(f"{sys.executable} -m akunu_py chat", "Enter")
    terminal.wait_for("Ask something")
    terminal.type("Tell me a long story.", "Enter")
    terminal.wait_for("▶ answering")
    (chat,) = children(terminal.shell())
    terminal.close()
    end = time.monotonic() + 20
    while is_running(chat):
        assert time.monotonic() < end, "it runs on without a terminal"
        time.sleep(0.1)


@needs_tmux
def test_an_unknown_model_fails_before_the_screen_opens(terminal: Terminal) -> None:
    terminal.type(f'{sys.executable} -m akunu_py chat no-such-model; echo "code=$?"', "Enter")
    screen = terminal.wait_for("code=[0-9]+\n")
    assert "akunu: no model called 'no-such-model'" in screen.replace("\n", " ")
    assert "code=1\n" in screen


@pytest.mark.parametrize("options", [[], ["--max-tokens", "5"]])
def test_without_a_terminal(options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "akunu_py", "chat", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    expected = "akunu: chat needs a terminal; for scripts use: akunu run\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
