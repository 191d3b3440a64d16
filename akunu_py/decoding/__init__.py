"""The engine: load, read prompts, draft, verify, roll back, sample, text."""

from __future__ import annotations

import resource
import sys
from typing import Any

import akunu_py.decoding.transformers_scan  # noqa: F401

_setrlimit = resource.setrlimit


def _set_own_limit(kind: int, limits: tuple[int, int]) -> None:
    """mlx-lm asks for (2048, 4096) open files when it is imported: an error where the hard limit is
    lower, as in containers and service units, and a loss where it is higher. It gets what there
    is, once; everybody else gets the real thing."""
    caller: Any = sys._getframe(1)
    if kind != resource.RLIMIT_NOFILE or caller.f_globals.get("__name__") != "mlx_lm.utils":
        _setrlimit(kind, limits)
        return
    resource.setrlimit = _setrlimit
    soft, hard = resource.getrlimit(kind)
    most = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
    if resource.RLIM_INFINITY != soft < most:
        _setrlimit(kind, (most, hard))


resource.setrlimit = _set_own_limit
