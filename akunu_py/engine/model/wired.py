"""Wired memory and unused buffers on Metal.

macOS evicts unwired buffers within seconds; the next pass then waits for 0.25 s. But freeing wired
buffers while others compute can panic its kernel (mlx issue 3186). So wire only
long-lived buffers (by default the weights), and stay below the GPU's limit.
"""

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from akunu_py.engine.model import device
from akunu_py.types import WireMode

_PAGE = 16 << 10  # Metal allocates whole pages
_HEAP = 1 << 20  # MLX's heap of small buffers is wired first
_STEP = 256 << 20  # granularity of wired KV cache bytes
MIN_UNUSED = 64 << 20  # bytes of buffers that MLX may keep unused


@dataclass(slots=True)
class _Model:
    mode: WireMode
    weights: int  # bytes
    caches: int = 0  # bytes, in whole steps


_lock = threading.RLock()  # a model may be collected while another one loads
_models: dict[int, _Model] = {}  # by id
_limit = 0  # bytes; 0: none was set


def wire(model: nn.Module, mode: WireMode, parts: Sequence[Any], unused: int) -> None:
    """Wire the loaded weights of `parts` for the lifetime of `model`, on Metal.

    Also limits MLX's cache of free buffers to `unused` bytes, which a prefill chunk allocates and
    frees. Without a limit it grows with every new prompt length.
    """
    if not device.on_cpu():
        mx.set_cache_limit(max(MIN_UNUSED, unused))
    if not device.on_metal():
        return
    arrays = {id(each): each for _, each in tree_flatten([part.parameters() for part in parts])}
    # Each array once, as a head shares some with its model.
    weights = sum(-(-each.nbytes // _PAGE) * _PAGE for each in arrays.values())
    with _lock:
        _models[id(model)] = _Model(mode, weights)
        _apply()
    weakref.finalize(model, _unwire, id(model))


def adjust(model: nn.Module, caches: int) -> None:
    """Wire KV caches of `caches` bytes with the mode "all". Call only while idle."""
    with _lock:
        if (known := _models.get(id(model))) is not None:
            known.caches = -(-caches // _STEP) * _STEP if known.mode == "all" else 0
            _apply()


def _apply() -> None:
    """Set the limit if it changed, unless several models are loaded: one may be running."""
    global _limit
    if len(_models) != 1:
        return
    (only,) = _models.values()
    limit = min(device.working_set(), _HEAP + only.weights + only.caches)
    if only.mode == "off" or limit == _limit:
        return
    mx.synchronize()  # the limit must not change during a computation
    mx.clear_cache()  # unused buffers would be wired, and freed later
    mx.set_wired_limit(limit)
    _limit = limit


def _unwire(key: int) -> None:
    global _limit
    with _lock:
        _models.pop(key, None)
        if not _models and _limit:
            mx.synchronize()
            mx.set_wired_limit(0)
            _limit = 0
