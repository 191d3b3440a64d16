"""Workarounds for other libraries: one module each, with its reason and when it can go."""

from __future__ import annotations

import sys
from typing import Any

from akunu_py.workarounds import open_files, transformers_scan
from akunu_py.workarounds.openblas import load_openblas


class _LoadOpenblas:
    """A finder that loads OpenBLAS when `mlx.core` is imported, then removes itself.

    Until Python 3.12, finders run under the global import lock. So this one must import nothing:
    another thread may be importing the same module, and wait for that lock.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> None:
        if name == "mlx.core":
            sys.meta_path.remove(cls)
            load_openblas()


def install() -> None:
    """Install what must precede `mlx.core`, mlx-lm and transformers."""
    open_files.install()
    transformers_scan.install()
    sys.meta_path.insert(0, _LoadOpenblas)
