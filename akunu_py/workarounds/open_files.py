"""Keep the limit of open files when mlx-lm is imported.

Works around: `mlx_lm.utils` sets RLIMIT_NOFILE to (2048, 4096) when it is imported. That fails
    where the hard limit is lower, as in containers and service units, and lowers a higher hard
    limit for good.
Upstream: https://github.com/ml-explore/mlx-lm/issues/1589, with mlx-lm 0.32.2.
Remove when: the issue is fixed in the oldest mlx-lm that pyproject.toml allows.
"""

import resource
import sys
from typing import Any

_setrlimit = resource.setrlimit


def install() -> None:
    """Replace `resource.setrlimit` until mlx-lm has called it."""
    resource.setrlimit = _raise_soft_limit


def _raise_soft_limit(kind: int, limits: tuple[int, int]) -> None:
    """Raise the soft limit only, and only for mlx-lm; other callers get the real function."""
    caller: Any = sys._getframe(1)
    if kind != resource.RLIMIT_NOFILE or caller.f_globals.get("__name__") != "mlx_lm.utils":
        _setrlimit(kind, limits)
        return
    resource.setrlimit = _setrlimit
    soft, hard = resource.getrlimit(kind)
    limit = limits[0] if hard == resource.RLIM_INFINITY else min(limits[0], hard)
    if resource.RLIM_INFINITY != soft < limit:
        _setrlimit(kind, (limit, hard))
