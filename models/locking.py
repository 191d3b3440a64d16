"""Locks of the store, and the disk's refusals as StoreError.

One lock file per model, `.lock-NAME`, held with flock while a model is brought in or removed. The
system releases it when a process dies, so nobody has to judge whether a lock is stale. Lock files
stay behind, empty: removing one would race with a process that has just opened it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def lock_model(name: str, wait: bool = True) -> Iterator[None]:
    """Holds the lock of the model `name`; the store's directory must exist.

    Raises StoreError where another process holds it and `wait` is false.
    """
    path = lock_path(name)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise StoreError(
                f"another akunu is at work on model {name!r}; try again when it is done"
            ) from None
        yield
    finally:
        os.close(descriptor)


def lock_path(name: str) -> Path:
    """The lock file of the model `name`."""
    return paths.models_dir() / f".lock-{name}"


@contextmanager
def store_errors(doing: str, moved_by: str = "XDG_DATA_HOME") -> Iterator[None]:
    """Turns OSError into a StoreError of one line that begins with `doing`.

    moved_by: the variable that puts what is written somewhere else.
    """
    try:
        yield
    except OSError as error:
        raise store_error(doing, error, moved_by) from error


def store_error(doing: str, error: OSError, moved_by: str = "XDG_DATA_HOME") -> StoreError:
    """The StoreError for what the disk said."""
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in _FULL:
        hint = f"free some space, or set {moved_by} to a directory on another disk"
    elif error.errno in _FORBIDDEN:
        hint = f"give yourself write access, or set {moved_by} to a directory of your own"
    else:
        hint = f"see `akunu info` for where the store is; {moved_by} moves it"
    return StoreError(f"{doing}: {error.strerror or error}{where}; {hint}")
