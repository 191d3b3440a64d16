"""Workarounds for other libraries: one module each, with its reason and when it can go."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from akunu_py.workarounds import open_files, transformers_scan


class _ImportHook:
    """A finder that adapts the loader of one module, then removes itself.

    Until Python 3.12, finders run under the global import lock. So this one must import nothing:
    another thread may be importing the same module, and wait for that lock. The loader may.
    """

    def __init__(self, module: str, adapt: Callable[[Any], None]) -> None:
        """adapt: changes the methods of the module's loader."""
        self._module, self._adapt = module, adapt

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._adapt(spec.loader)
        return spec


def _load_openblas_first(loader: Any) -> None:
    create_module = loader.create_module

    def create(spec: ModuleSpec) -> ModuleType | None:
        from akunu_py.workarounds.openblas import load_openblas

        load_openblas()
        module: ModuleType | None = create_module(spec)
        return module

    loader.create_module = create


def install() -> None:
    """Install what must precede `mlx.core`, mlx-lm and transformers."""
    open_files.install()
    sys.meta_path.insert(0, _ImportHook(transformers_scan.SCANNER, transformers_scan.adapt))
    sys.meta_path.insert(0, _ImportHook("mlx.core", _load_openblas_first))
