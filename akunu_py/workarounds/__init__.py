"""Workarounds for other libraries: one module each, with its reason and when it can go."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from akunu_py.workarounds import open_files, transformers_scan


class _LoadOpenblas:
    """A finder that loads OpenBLAS when `mlx.core` is imported, then removes itself.

    Until Python 3.12, finders run under the global import lock. So this one must import nothing:
    another thread may be importing the same module, and wait for that lock. The loader may.
    """

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "mlx.core":
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            create_module = spec.loader.create_module

            def load_openblas_first(spec: ModuleSpec) -> ModuleType | None:
                from akunu_py.workarounds.openblas import load_openblas

                load_openblas()
                return create_module(spec)

            spec.loader.create_module = load_openblas_first  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Install what must precede `mlx.core`, mlx-lm and transformers."""
    open_files.install()
    transformers_scan.install()
    sys.meta_path.insert(0, _LoadOpenblas)
