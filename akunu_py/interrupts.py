"""Exit while a thread runs in MLX, where Python would wait or crash."""

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
    """Exit without Python's teardown, which may crash while a thread runs in MLX."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def exit_after_interrupt(seconds: float) -> Iterator[None]:
    """Exit if the block does not end within `seconds` of an interrupt; call in the main thread.

    Python calls its handler only between its own instructions. A forward pass over hundreds of
    tokens is one instruction; on a loaded machine it took 67 seconds.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGINT and not ended.wait(seconds):
                os._exit(INTERRUPTED)  # without flushing, which may block
        os.close(read)

    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        signal.set_wakeup_fd(before)
        os.close(write)
