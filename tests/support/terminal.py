"""A real terminal to drive programs in, by tmux; import `terminal` to have the fixture."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(
    not all(map(shutil.which, ("tmux", "pgrep", "ps"))), reason="tmux or procps is not installed"
)


class Terminal:
    """A terminal in a tmux server of its own, with a shell in it."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        environment = {**os.environ, "PS1": "$ ", "TERM": "screen-256color"}
        # Workers of pytest-xdist have a size in their environment, which programs would believe.
        for size in ("COLUMNS", "LINES"):
            environment.pop(size, None)
        environment["PYTHONFAULTHANDLER"] = "1"  # see _stacks
        subprocess.run(
            [*self._tmux, "new-session", "-d", "-x", "90", "-y", "30", "/bin/sh"],
            check=True,
            env=environment,
        )

    def type(self, *keys: str, shows: str = "", seconds: float = 60) -> None:
        """Type keys, and wait until the pattern `shows` is on the screen."""
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)
        if shows:
            self.wait_for(shows, seconds)

    def screen(self) -> str:
        shown = subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True)
        return shown.stdout.decode()

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """The screen, as soon as `pattern` is on it."""
        end = time.monotonic() + seconds
        while not re.search(pattern, screen := self.screen()):
            if time.monotonic() > end:
                raise AssertionError(f"no {pattern!r} on the screen:\n{screen}\n{self._stacks()}")
            time.sleep(0.1)
        return screen

    def _stacks(self) -> str:
        """What the programs in the terminal were doing. They do not survive it."""
        subprocess.run([*self._tmux, "resize-window", "-x", "110", "-y", "150"], check=True)
        time.sleep(1)
        subprocess.run(["pkill", "-ABRT", "-P", self.shell()], check=False)
        time.sleep(1)
        return self.screen().strip()

    def shell(self) -> str:
        """The process id of the shell."""
        return self._format("#{pane_pid}")

    def device(self) -> str:
        """The path of the terminal's device."""
        return self._format("#{pane_tty}")

    def _format(self, name: str) -> str:
        command = [*self._tmux, "list-panes", "-F", name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def write_and_quit(self) -> None:
        """Leaves insert mode and the Vim or Neovim that was started with `; echo code=$?`."""
        self.type("Escape", shows=r"\n(?!.*-- INSERT --)[^\n]*$")
        self.type(":wq", "Enter", shows="code=0")

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path / "tmux")
    yield terminal
    terminal.close()
