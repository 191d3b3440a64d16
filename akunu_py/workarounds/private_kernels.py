"""Compile MLX's CPU kernels in a private directory.

Works around: MLX's CPU backend compiles shared libraries into `mlx` below the directory for
    temporary files, and loads those that it finds there. Other users may often write into that
    directory, and could make this process run their code.
Upstream: no issue found; seen with mlx 0.32.4.
Remove when: MLX has a private directory, or a setting, for its CPU kernels.
"""

import os
import stat
import sys
import tempfile
from pathlib import Path


def keep_kernels_private() -> None:
    """Point MLX, and the compiler that it starts, to a directory of this user alone.

    Call before MLX compiles. Nothing changes on a Mac, or where the directory is private already.
    """
    base = Path(tempfile.gettempdir())  # cached by tempfile before the variable changes
    if sys.platform != "linux" or not _is_open(base):
        return
    private = base / f"akunu-{os.getuid()}"
    try:
        private.mkdir(mode=0o700, exist_ok=True)
        if not _is_mine(private):
            private = Path(tempfile.mkdtemp(prefix="akunu-"))
    except OSError:  # MLX cannot write or find libraries there either
        return
    os.environ["TMPDIR"] = str(private)


def _is_open(directory: Path) -> bool:
    try:
        return bool(directory.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


def _is_mine(directory: Path) -> bool:
    """Return True if this user alone made the directory and may use it; links do not count."""
    found = directory.lstat()
    closed = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and closed
