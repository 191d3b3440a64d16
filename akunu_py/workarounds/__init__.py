"""Workarounds for other libraries: one module each, with its reason and when it can go."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from akunu_py.workarounds import open_files, transformers_scan

_Method = Callable[[Any], Any]


class _ImportHook:
    """A finder that wraps one method of a module's loader, then removes itself.

    Until Python 3.12, finders run under the global import lock. So this one must import nothing:
    another thread may be importing the same module, and wait for that lock. The loader may.
    """

    def __init__(self, module: str, method: str, wrap: Callable[[_Method], _Method]) -> None:
        self._module, self._method, self._wrap = module, method, wrap

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            setattr(spec.loader, self._method, self._wrap(getattr(spec.loader, self._method)))
        return spec


def _load_openblas_first(create_module: _Method) -> _Method:
    def create(spec: ModuleSpec) -> Any:
        from akunu_py.workarounds.openblas import load_openblas

        load_openblas()
        return create_module(spec)

    return create


def install() -> None:
    """Install what must precede `mlx.core`, mlx-lm and transformers."""
    open_files.install()
    scanner = transformers_scan.SCANNER
    sys.meta_path.insert(0, _ImportHook(scanner, "exec_module", transformers_scan.patch_after))
    sys.meta_path.insert(0, _ImportHook("mlx.core", "create_module", _load_openblas_first))
