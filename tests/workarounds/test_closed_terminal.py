"""The beginning and end of a chat: keys typed before it started, and a terminal that is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.e2e
@pytest.mark.usefixtures("own_directories")
def test_chat_handles_keys_typed_before_the_start_and_ends_with_its_terminal() -> None:
    """It ends even if no parent passes SIGHUP on."""
    terminal, inside = os.openpty()
    os.write(terminal, b"/options\r")
    # Without a controlling terminal the kernel sends no signal either.
    chat = subprocess.Popen(
        [sys.executable, "-m", "akunu_py", "chat"],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    )
    os.close(inside)
    try:
        screen = b""
        while b"Options of this chat" not in screen:
            screen += os.read(terminal, 65536)
        os.close(terminal)
        assert chat.wait(30) == -signal.SIGHUP
    finally:
        with contextlib.suppress(ProcessLookupError):
            chat.kill()
        chat.wait()
