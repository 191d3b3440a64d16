"""A chat whose terminal is closed ends, even if no parent passes SIGHUP on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest


@pytest.mark.e2e
@pytest.mark.usefixtures("own_directories")
def test_chat_ends_with_its_terminal() -> None:
    terminal, inside = os.openpty()
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
        while b"F1" not in screen:  # of the key hints
            screen += os.read(terminal, 65536)
        os.close(terminal)
        assert chat.wait(30) == -signal.SIGHUP
    finally:
        with contextlib.suppress(ProcessLookupError):
            chat.kill()
        chat.wait()
