"""Writing files so that a crash leaves the old content or the new, never a part of it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path`, for its owner alone (mode 0600), that replaces `path` where the
    block ends without an error, and is removed where it does not."""
    descriptor, name = tempfile.mkstemp(
        dir=path.parent, prefix=temporary_prefix(path), suffix=path.suffix
    )
    os.close(descriptor)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Writes `path` whole or not at all, readable by its owner alone.

    durable: it survives a power cut too, and keeps the permissions that the file had.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, path.stat().st_mode & 0o777)


def temporary_prefix(path: Path) -> str:
    """How the names of the temporary files of `path` begin, those of killed writers too."""
    return f".{path.name}-"
