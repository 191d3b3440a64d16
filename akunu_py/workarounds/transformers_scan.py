"""Halve the time of `import mlx_lm`.

Works around: transformers reads each of its 1,600 source files line by line when it is imported, to
    find what they export. mlx-lm makes it do so twice: the cache takes one directory for two when
    it is named as a Path and as text. With the patch every file is read once, and only from its
    last `__all__` on. The outcome is the same.
Upstream: https://github.com/huggingface/transformers/issues/44246, with transformers 5.23.
Remove when: `import transformers` takes less than 0.2 s without the patch.
"""

import os
from collections.abc import Callable
from typing import Any

SCANNER = "transformers.utils.import_utils"


def patch_after(execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return `execute`, a loader's `exec_module` of SCANNER, followed by the patch."""

    def execute_and_patch(module: Any) -> None:
        execute(module)
        _patch(module)

    return execute_and_patch


def _patch(module: Any) -> None:
    """Patch the scanner; a version of transformers without its functions stays as it is."""
    fetch = getattr(module, "fetch__all__", None)
    scan = getattr(module, "create_import_structure_from_path", None)
    if fetch is None or scan is None:
        return

    def fetch_last(content: str) -> Any:
        """Parse from the last `__all__` on."""
        return fetch(content[max(0, content.rfind("\n__all__") + 1) :])

    def scan_once(path: Any) -> Any:
        path = os.fspath(path)
        return scan(os.path.dirname(path) if path.endswith(".py") else path)

    fetch_last.__wrapped__ = fetch  # type: ignore[attr-defined]
    module.fetch__all__ = fetch_last
    module.create_import_structure_from_path = scan_once
