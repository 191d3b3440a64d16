"""Control codes in an answer are shown on a terminal, not obeyed; a pipe gets them as they are."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from tests.support.command import AKUNU
from tests.support.tiny_fim import byte_level, write_model

ESCAPE = "\x1b"


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Says ESC three times: that token is made the likeliest by far."""
    tokenizer = byte_level(["<|end|>"])
    (token,) = tokenizer.encode(ESCAPE).ids
    model = write_model(tmp_path / "model", tokenizer, end="<|end|>")
    return [*AKUNU, "run", "--raw", "--max-tokens", "3", "--no-answer-cache", "--model", str(model),
            "--logit-bias", f"{token}=1000", "Red:"]  # fmt: skip


@pytest.mark.long
def test_a_pipe_gets_them(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert done.stdout.decode() == 3 * ESCAPE + "\n"


@pytest.mark.long
def test_a_terminal_shows_them(command: list[str]) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL)
        assert process.wait(timeout=120) == 0
        shown = os.read(ours, 1000).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert shown == "␛␛␛\r\n"
