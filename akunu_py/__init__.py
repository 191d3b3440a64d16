"""akunu-py: a local LLM app that drafts tokens with n-gram tables.

Importing the package loads OpenBLAS where MLX needs it. It must happen here, before any module
can import `mlx.core`, because MLX binds to the BLAS that the process already holds.
"""

from akunu_py.sigint import end_at_once

end_at_once()  # from the first moment; the rest takes some

from akunu_py.decoding.blas import load_openblas  # noqa: E402
from akunu_py.version import __version__  # noqa: E402

load_openblas()

__all__ = ["__version__"]
