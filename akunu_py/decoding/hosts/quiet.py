"""mx.distributed says on stderr, several times, that a peer is gone. So do we, once."""

from __future__ import annotations

import io
import os
import sys
import threading

_direct: list[int] = []  # stderr as it was
_SIGN = b"[ring]"


def drop_its_lines() -> None:
    """From here on. Python's own stderr goes the direct way, as it may not be lost when we end."""
    ours = sys.stderr
    if not isinstance(ours, io.TextIOWrapper) or ours.fileno() != 2:
        return  # somebody else looks after it
    direct = os.dup(2)
    read, write = os.pipe()
    ours.flush()
    sys.stderr = os.fdopen(direct, "w", buffering=1, errors=ours.errors)
    os.dup2(write, 2)
    os.close(write)
    _direct.append(direct)
    threading.Thread(target=_pass_on, args=(read, direct), name="stderr", daemon=True).start()


def undo() -> None:
    """For a program that takes the place of this one."""
    while _direct:
        os.dup2(_direct.pop(), 2)


def _pass_on(read: int, direct: int) -> None:
    """All but what is behind its sign in a line, which comes in pieces."""
    inside = False
    while said := os.read(read, 1 << 16):
        kept = b""
        while said:
            if inside:
                _, ended, said = said.partition(b"\n")
                inside = not ended
            else:
                before, sign, said = said.partition(_SIGN)
                kept, inside = kept + before, bool(sign)
        if kept:
            os.write(direct, kept)
