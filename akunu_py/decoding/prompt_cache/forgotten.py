"""Which conversations were deleted, so that what programs still have of them is not written again.

`forgotten` in the directory of the prompt caches has a line for each: when that was, and which. One
that is brought back and asked for again is written again.
"""

from __future__ import annotations

import os
import time

from akunu_py import paths
from akunu_py.files import read_bounded, write_atomically

_MOST = 1 << 17  # bytes; half of the lines go then
_OPEN = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def note_forgotten(conversation: str) -> None:
    """Raises OSError."""
    path = paths.prompt_caches_dir() / "forgotten"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    lines = _lines()
    if sum(map(len, lines)) > _MOST:
        write_atomically(path, b"\n".join(lines[len(lines) // 2 :]) + b"\n")
    file = os.open(path, _OPEN, 0o600)
    try:
        os.write(file, f"{time.time()} {conversation}\n".encode())  # whole, whoever writes too
    finally:
        os.close(file)


def is_forgotten(conversation: str, asked: float) -> bool:
    """Whether it was deleted since a turn of it was asked for at that time (`time.time`)."""
    if not conversation:
        return False
    for line in _lines():
        at, _, which = line.partition(b" ")
        try:
            if which == conversation.encode() and float(at) >= asked:
                return True
        except ValueError:  # damaged
            continue
    return False


def _lines() -> list[bytes]:
    try:
        return read_bounded(paths.prompt_caches_dir() / "forgotten", 2 * _MOST).splitlines()
    except OSError:
        return []
