"""What every thread owes that has run MLX."""

from __future__ import annotations

import sys


def release_streams() -> None:
    """Gives back what MLX keeps for this thread, before it ends; without it the program may abort
    at its end (github.com/ml-explore/mlx/pull/4373)."""
    if "mlx.core" in sys.modules:
        import mlx.core as mx

        mx.clear_streams()
