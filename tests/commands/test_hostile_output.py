"""Control codes in an answer are shown on a terminal, not obeyed; a pipe gets them as they are."""

from __future__ import annotations

import os
import pty
import subprocess

from akunu_py.decoding.engine import Engine
from tests.support.command import AKUNU

ESCAPE = "\x1b"


def command(engine: Engine) -> list[str]:
    """Says ESC three times: that token is made the likeliest by far."""
    (token,) = engine.tokenizer.encode(ESCAPE, add_special_tokens=False)
    return [*AKUNU, "run", "--raw", "--max-tokens", "3", "--no-memory",
            "--logit-bias", f"{token}=1000", "Red:"]  # fmt: skip


def test_a_pipe_gets_them(starter_engine: Engine) -> None:
    done = subprocess.run(command(starter_engine), capture_output=True, timeout=120, check=True)
    assert done.stdout.decode() == 3 * ESCAPE + "\n"


def test_a_terminal_shows_them(starter_engine: Engine) -> None:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            command(starter_engine), stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL
        )
        assert process.wait(timeout=120) == 0
        shown = os.read(ours, 1000).decode()
    finally:
        os.close(theirs)
        os.close(ours)
    assert shown == "␛␛␛\r\n"
