"""Ctrl-C before the command line is there and after it is done: it ends a process that is akunu at
once, without a traceback; nothing changes in other programs that import us.

Imported before all else, so it imports hardly anything: until then an interrupt is Python's.
"""

import os
import signal
import sys


def end_at_once() -> None:
    """An interrupt ends the process from here on, if it is ours and interrupts are not ignored."""
    # While Python looks for the module that `python -m` names, that is what the program is called.
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name in ("akunu", "-m", "__main__.py"):
        _replace(signal.default_int_handler, signal.SIG_DFL)


def raise_again() -> None:
    """An interrupt is a KeyboardInterrupt again."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


def _replace(handler: object, by: object) -> None:
    if signal.getsignal(signal.SIGINT) == handler:
        signal.signal(signal.SIGINT, by)  # type: ignore[arg-type]
