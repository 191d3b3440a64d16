"""akunu-py: a local LLM app with fast, exact decoding.

The import installs workarounds that must precede `mlx.core`, mlx-lm and transformers. In the akunu
process, Ctrl-C ends it without a traceback before and after the command line runs.
"""

# Built in. `signal` is a file, and an interrupt while Python reads it would print a traceback.
import _signal  # type: ignore[import-not-found]
import os
import sys


def exit_on_interrupt() -> None:
    """Let an interrupt end the akunu process silently, unless it handles SIGINT itself."""
    # argv[0] is "-m" while Python looks for the module.
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name in ("akunu", "-m", "__main__.py"):
        _replace(_signal.default_int_handler, _signal.SIG_DFL)


def raise_on_interrupt() -> None:
    """Raise KeyboardInterrupt on an interrupt."""
    _replace(_signal.SIG_DFL, _signal.default_int_handler)


def _replace(old: object, new: object) -> None:
    if _signal.getsignal(_signal.SIGINT) == old:
        _signal.signal(_signal.SIGINT, new)


exit_on_interrupt()  # first, because the other imports take a while

from akunu_py import workarounds  # noqa: E402
from akunu_py.version import __version__  # noqa: E402

workarounds.install()

__all__ = ["__version__"]
