"""`akunu info`: what one would paste into a bug report."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version

from akunu_py import paths
from akunu_py.commands.sizes import human_size
from akunu_py.models import store
from akunu_py.version import __version__

_PACKAGES = ("mlx", "mlx-lm", "numpy", "textual", "tokenizers", "transformers", "huggingface-hub")


def run(args: argparse.Namespace) -> int:
    from akunu_py import backend

    models = store.list_models()
    size = human_size(sum(model.size for model in models))
    rows = [
        ("akunu", __version__),
        ("system", platform.platform()),
        ("python", platform.python_version()),
        ("device", backend.device_name()),
        (
            "memory",
            f"{human_size(backend.total_memory())}, "
            f"{human_size(backend.available_memory())} for models",
        ),
        ("blas", backend.blas_name()),
        *((package, _version(package)) for package in _PACKAGES),
        ("store", f"{paths.models_dir()} ({len(models)} models, {size})"),
        ("cache", str(paths.cache_dir())),
        ("settings", str(paths.config_dir())),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
