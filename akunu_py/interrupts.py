"""How the process ends while a thread is deep in MLX, where Python would wait for it, or crash."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from akunu_py.errors import INTERRUPTED


def exit_without_teardown(code: int) -> NoReturn:
    """Ends the process while a thread is deep in MLX: Python would tear itself down under it, which
    may crash."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """An interrupt that has not ended the block after `seconds` ends the process.

    Python calls its handler between two of its own instructions, and a pass over hundreds of tokens
    is one: on a loaded machine that was 67 seconds. Call in the main thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGINT and not ended.wait(seconds):
                os._exit(INTERRUPTED)  # nothing is flushed: who reads it may be what is waited for
        os.close(read)

    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(write)
