"""mx.distributed says on stderr, several times, that a peer is gone. So do we, once."""

from __future__ import annotations

import io
import os
import re
import sys
import threading

_ITS_LINES = re.compile(rb"^\[ring\][^\n]*\n?", re.MULTILINE)


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
    threading.Thread(target=_pass_on, args=(read, direct), name="stderr", daemon=True).start()


def _pass_on(read: int, direct: int) -> None:
    while said := os.read(read, 1 << 16):
        if rest := _ITS_LINES.sub(b"", said):
            os.write(direct, rest)
