"""akunu-py: a local LLM app with fast, exact decoding.

The import installs workarounds that must precede `mlx.core`, mlx-lm and transformers.
"""

from akunu_py.sigint import exit_on_interrupt

exit_on_interrupt()  # first, because the other imports take a while

from akunu_py import workarounds  # noqa: E402
from akunu_py.version import __version__  # noqa: E402

workarounds.install()

__all__ = ["__version__"]
