"""Exits and interrupts where Python would wait or crash: in passes of MLX, and in reads."""

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO, NoReturn

from akunu_py.errors import INTERRUPTED


def exit_without_teardown(code: int) -> NoReturn:
    """Exit without Python's teardown, which may crash while a thread runs in MLX."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def cancel_on_interrupt(cancel: Callable[[], object], seconds: float) -> Iterator[None]:
    """Call `cancel` on the first interrupt; exit if the block does not end within `seconds` of it.

    For the main thread. The second interrupt raises. Python calls handlers only between its own
    instructions: a forward pass over hundreds of tokens is one, which took 67 seconds once.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    ended = threading.Event()

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGINT and not ended.wait(seconds):
                os._exit(INTERRUPTED)  # without flushing, which may block
        os.close(read)

    def on_interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, handler)
        cancel()

    handler = signal.getsignal(signal.SIGINT)
    threading.Thread(target=watch, name="interrupts", daemon=True).start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        signal.signal(signal.SIGINT, on_interrupt)
        yield
    finally:
        ended.set()
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(before)
        os.close(write)


@contextlib.contextmanager
def interruptible(file: BinaryIO) -> Iterator[BinaryIO]:
    """Yield a reader of `file` in which an interrupt always raises; use it in the main thread.

    Another thread may receive the signal. A plain read of the main thread would then keep waiting.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield io.BufferedReader(_WokenReader(file.fileno(), read))
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


class _WokenReader(io.RawIOBase):
    """Reads one file descriptor; a byte in another one lets Python call its signal handlers."""

    def __init__(self, file: int, wakeup: int) -> None:
        self._file, self._wakeup = file, wakeup

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while self._file not in select.select([self._file, self._wakeup], [], [])[0]:
            os.read(self._wakeup, 1)
        return os.readv(self._file, [buffer])
