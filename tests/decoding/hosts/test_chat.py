"""A chat with a model in two processes, in a real terminal: it continues after losing one."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.hosts import all_gone, below, ranks_below, write_talking
from tests.support.terminal import Terminal, needs_tmux
from tests.support.terminal import terminal as terminal  # a fixture


@pytest.fixture
def command(tmp_path: Path) -> str:
    model = tmp_path / "llama"
    model.mkdir()
    write_talking(model)
    keep = f"XDG_DATA_HOME={tmp_path}/home XDG_CONFIG_HOME={tmp_path}/home"
    chat = f"{sys.executable} -m akunu_py chat --temperature 0 --no-answer-cache"
    return f'clear; {keep} {chat} --max-tokens 4000 --hosts 2 {model}; echo "code=$?"'


@needs_tmux
def test_a_chat_continues_after_losing_a_host(terminal: Terminal, command: str) -> None:
    terminal.type(command, "Enter")
    terminal.wait_for("rank 1 on 127.0.0.1 holds 1/2 of each layer")
    terminal.type("1 2 3", "Enter")
    terminal.wait_for(r"1 2 3\n\s+[0-9]+")
    before = ranks_below(int(terminal.shell()))
    assert len(before) == 1
    os.kill(before[0], signal.SIGKILL)
    screen = terminal.wait_for("was killed by SIGKILL")
    assert re.search(r"[0-9]+[^╭]*interrupted", screen)  # the answer so far stays
    terminal.type("4 5", "Enter")
    terminal.wait_for("answering")
    after = ranks_below(int(terminal.shell()))
    assert len(after) == 1
    assert after != before
    terminal.type("Escape")
    terminal.wait_for("■ stopped")
    assert "[ring]" not in terminal.screen()
    terminal.type("C-q")
    assert "code=0\n" in terminal.wait_for("code=[0-9]+\n")
    assert all_gone(after, 2)


@needs_tmux
def test_a_killed_chat_leaves_no_processes(terminal: Terminal, command: str) -> None:
    terminal.type(command, "Enter")
    terminal.wait_for("rank 1 on 127.0.0.1 holds")
    terminal.type("1 2 3", "Enter")
    terminal.wait_for("answering")
    shell = int(terminal.shell())
    others = below(shell)
    assert len(others) >= 3
    os.kill(others[0], signal.SIGKILL)
    assert all_gone(others, 10)
