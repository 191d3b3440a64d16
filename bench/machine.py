"""What a figure depends on: the model as it runs, the machine, the versions, the day."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from akunu_py.decoding import device
from akunu_py.decoding.engine import Engine
from akunu_py.version import __version__

_VERSIONS = ("mlx", "mlx-lm", "numpy")


def describe_model(engine: Engine) -> dict[str, Any]:
    """size_bytes: of the weights as they lie in memory."""
    arrays = [value for _, value in tree_flatten(engine.model.parameters())]
    return {
        "name": engine.name,
        "weights": engine.weights,
        "params": int(get_total_parameters(engine.model)),
        "size_bytes": sum(value.nbytes for value in arrays if isinstance(value, mx.array)),
        "kv_bits": engine.kv_bits,
    }


def describe_machine() -> dict[str, Any]:
    """Hardware, system and versions."""
    return {
        "device": device.device_name(),
        "backend": "Metal" if device.on_metal() else f"CPU, {device.blas_name()}",
        "cores": os.cpu_count(),
        "memory_bytes": device.total_memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"akunu": __version__} | {name: version(name) for name in _VERSIONS},
    }


def today() -> str:
    """The day, as ISO 8601 has it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
