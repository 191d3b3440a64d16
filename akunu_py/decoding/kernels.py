"""Where MLX keeps the kernels that it compiles for a processor: a folder of this user's alone.

MLX's CPU backend puts shared libraries into `mlx` below the folder for temporary files, and loads
the ones that it finds there. That folder is often everybody's, and then so would be the choice of
what runs here. Refuses nothing: on a Mac, and where the folder is private already, all stays.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from pathlib import Path


def keep_kernels_private() -> None:
    """Points MLX (and the compiler that it starts) to a private folder. Call before it compiles."""
    base = Path(tempfile.gettempdir())  # which tempfile keeps to, whatever the variable says later
    if sys.platform != "linux" or not _is_open(base):
        return
    own = base / f"akunu-{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        if not _is_mine(own):
            own = Path(tempfile.mkdtemp(prefix="akunu-"))
    except OSError:  # nothing can be written, so MLX finds nothing either
        return
    os.environ["TMPDIR"] = str(own)


def _is_open(folder: Path) -> bool:
    """Whether others may write into it."""
    try:
        return bool(folder.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    except OSError:
        return False


def _is_mine(folder: Path) -> bool:
    """Whether it is a folder, no link to one, that nobody else made or may write into."""
    found = folder.lstat()
    closed = stat.S_IMODE(found.st_mode) & 0o077 == 0
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and closed
