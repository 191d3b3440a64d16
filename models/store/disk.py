"""The store's disk: a lock per model, free space, and the disk's errors as StoreError.

A lock file per model, `.lock-NAME`, is held with flock while a model is installed or removed. The
system releases it when a process dies, so no lock is ever stale. Lock files stay behind, empty:
removing one would race with a process that has just opened it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


class ModelBusy(StoreError):
    """Another process is at work on the model."""


@contextmanager
def lock_model(name: str, wait: bool = True) -> Iterator[None]:
    """Holds the lock of the model `name`; the store's directory must exist.

    Raises ModelBusy where another process holds it and `wait` is false, StoreError.
    """
    path = paths.models_dir() / f".lock-{name}"
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with store_errors(f"cannot lock model {name!r}"):
        descriptor = os.open(path, flags, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ModelBusy(
                f"another akunu is at work on model {name!r}; try again when it is done"
            ) from None
        yield
    finally:
        os.close(descriptor)


def open_own(path: Path) -> int:
    """Return a descriptor of `path`, a file that is ours alone, for reading and writing.

    Creates a missing file. Replaces a link, a FIFO and a file with further names: what they lead to
    is never written. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) and (
            not stat.S_ISREG(found.st_mode) or found.st_nlink > 1
        ):
            path.unlink()
    return os.open(path, flags, 0o666)


def sync(path: Path) -> None:
    """Write a file or directory through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_space(directory: Path, need_bytes: int, moved_by: str = "XDG_DATA_HOME") -> None:
    """Raises StoreError where `directory`, or what exists of its parents, has less space free."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < need_bytes:
        raise StoreError(
            f"not enough space in {there}: expected {need_bytes / 1e6:,.0f} MB free, found "
            f"{free / 1e6:,.0f} MB; free some, or set {moved_by} to a directory on another disk"
        )


@contextmanager
def store_errors(doing: str, moved_by: str = "XDG_DATA_HOME") -> Iterator[None]:
    """Turns OSError into a StoreError of one line that begins with `doing`.

    moved_by: the variable that puts what is written somewhere else.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in _FULL:
            hint = f"free some space, or set {moved_by} to a directory on another disk"
        elif error.errno == errno.ELOOP:
            hint = "a link is in the place of a file; see where it leads, and delete it"
        elif error.errno in _FORBIDDEN:
            hint = f"give yourself write access, or set {moved_by} to a directory of your own"
        else:
            hint = f"see `akunu info` for where the store is; {moved_by} moves it"
        raise StoreError(f"{doing}: {error.strerror or error}{where}; {hint}") from error
