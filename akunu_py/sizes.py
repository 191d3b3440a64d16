"""Sizes for people."""

from __future__ import annotations


def human_size(size: float) -> str:
    """Bytes in the largest decimal unit that keeps a digit before the point, as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
