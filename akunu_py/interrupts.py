"""How the process ends where Python's own way is a traceback or a crash.

Ctrl-C before the command line is there and after it is done ends a process that is akunu at once;
nothing changes in other programs that import us.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import NoReturn


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


def _replace(handler: object, by: object) -> None:
    if signal.getsignal(signal.SIGINT) == handler:
        signal.signal(signal.SIGINT, by)  # type: ignore[arg-type]
