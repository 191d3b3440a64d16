"""How the process ends where Python's own way is a traceback or a crash.

Ctrl-C before the command line is there and after it is done ends a process that is akunu at once;
nothing changes in other programs that import us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from akunu_py.errors import INTERRUPTED


def end_at_once() -> None:
    """An interrupt ends the process from here on, if it is ours and interrupts are not ignored."""
    # While Python looks for the module that `python -m` names, that is what the program is called.
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name in ("akunu", "-m", "__main__.py"):
        _replace(signal.default_int_handler, signal.SIG_DFL)


def raise_again() -> None:
    """An interrupt is a KeyboardInterrupt again."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


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


def _replace(handler: object, by: object) -> None:
    if signal.getsignal(signal.SIGINT) == handler:
        signal.signal(signal.SIGINT, by)  # type: ignore[arg-type]
