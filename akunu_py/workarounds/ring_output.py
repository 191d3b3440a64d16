"""Drop the messages of mx.distributed's ring from stderr.

Works around: MLX's ring backend writes several lines to stderr from C++ when a peer is gone, and
    has no setting for that. We report a lost host ourselves, once.
Upstream: no issue found; seen with mlx 0.32.4.
Remove when: the ring reports errors to its caller only, or its output can be switched off.
"""

import io
import os
import sys
import threading

_direct: list[int] = []  # the descriptor of the real stderr, while lines are dropped
_MARK = b"[ring]"


def drop_ring_lines() -> None:
    """Filter descriptor 2. Python's stderr bypasses the filter, so that exiting loses nothing."""
    ours = sys.stderr
    if not isinstance(ours, io.TextIOWrapper) or ours.fileno() != 2:
        return  # replaced already, by a test for example
    direct = os.dup(2)
    read, write = os.pipe()
    ours.flush()
    sys.stderr = os.fdopen(direct, "w", buffering=1, errors=ours.errors)
    os.dup2(write, 2)
    os.close(write)
    _direct.append(direct)
    threading.Thread(target=_pass_on, args=(read, direct), name="stderr", daemon=True).start()


def restore_stderr() -> None:
    """Undo the filter; call before `exec`."""
    while _direct:
        os.dup2(_direct.pop(), 2)


def _pass_on(read: int, direct: int) -> None:
    """Copy the output, except from the ring's mark to the line's end; lines come in pieces."""
    inside = False
    while data := os.read(read, 1 << 16):
        output = b""
        while data:
            if inside:
                _, ended, data = data.partition(b"\n")
                inside = not ended
            else:
                before, mark, data = data.partition(_MARK)
                output, inside = output + before, bool(mark)
        if output:
            os.write(direct, output)
