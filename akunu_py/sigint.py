"""Let Ctrl-C end the akunu process without a traceback before and after the command line runs.

Imported first, so it imports little. Other programs that import akunu_py are unaffected.
"""

import os
import signal
import sys


def exit_on_interrupt() -> None:
    """Let an interrupt end the akunu process silently from now on.

    Does nothing in other programs, or if SIGINT is ignored or has another handler.
    """
    # argv[0] is "-m" while Python looks for the module.
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name in ("akunu", "-m", "__main__.py"):
        _replace(signal.default_int_handler, signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt on an interrupt."""
    _replace(signal.SIG_DFL, signal.default_int_handler)


def _replace(old: object, new: object) -> None:
    if signal.getsignal(signal.SIGINT) == old:
        signal.signal(signal.SIGINT, new)  # type: ignore[arg-type]
