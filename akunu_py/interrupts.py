"""Ctrl-C while nobody can answer it: before the command line is there, and after it is done.

Python's own answer is a traceback. In a process that is akunu the system's answer takes its place
then: the process ends at once. Refuses to change anything in other programs that import us.
"""

from __future__ import annotations

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
