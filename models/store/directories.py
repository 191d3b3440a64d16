"""The store's disk: names, a lock per model, free space, and OSError as StoreError.

The lock is flock on `.lock-NAME`, which the system releases when a process dies. Empty lock files
stay: removing one would race with a process that has just opened it.
"""

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from akunu_py import paths
from akunu_py.errors import StoreError
from akunu_py.files import locked
from akunu_py.text import human_size

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,95}")
PARTIAL = ".partial-"
_POLL_S = 0.1


def is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


@contextmanager
def lock_model(
    name: str, waiting: Callable[[], None] | None = None, *, training: bool = False
) -> Iterator[None]:
    """Hold the exclusive lock of the model `name`. Raises StoreError.

    waiting: called again and again while another process holds the lock; None: raise instead.
    training: of the training of its drafter, during which the model can be used.
    """
    path = paths.models_dir() / f".lock-{name}{'-training' if training else ''}"
    doing = "training a drafter of" if training else "changing"
    with ExitStack() as stack:
        while True:
            with store_errors(f"cannot lock model {name!r}", "XDG_DATA_HOME" if waiting else ""):
                try:
                    stack.enter_context(locked(path, wait=False))
                    break
                except BlockingIOError:
                    if waiting is None:
                        raise StoreError(
                            f"another akunu process is {doing} model {name!r}; try again later"
                        ) from None
            waiting()
            time.sleep(_POLL_S)
        yield


def partial_directory(name: str) -> Path:
    """Return the directory where this process creates or removes the model `name`."""
    return paths.models_dir() / f"{PARTIAL}{name}-{os.getpid()}"


def remove_directory(name: str) -> int:
    """Remove the directory of the model `name`, or the link in its place, if there is one.

    One rename hides it; `akunu models gc` finds leftovers. Returns the bytes freed. Raises OSError.
    """
    path = paths.models_dir() / name
    if path.is_symlink():
        path.unlink()
    if not path.is_dir():
        return 0
    freed = directory_size(path)
    removed = partial_directory(name)
    path.rename(removed)
    shutil.rmtree(removed)
    return freed


def directory_size(path: Path) -> int:
    """Return the bytes of the files below a directory, without those behind links."""
    return sum(
        file.lstat().st_size for file in path.rglob("*") if not (file.is_symlink() or file.is_dir())
    )


def open_writable(path: Path) -> int:
    """Return a read-write descriptor of `path`, creating a missing file. Raises OSError.

    Replaces links, FIFOs and files with several names, so that it never writes to their targets.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with suppress(FileNotFoundError):
        found = path.lstat()
        plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not plain and not stat.S_ISDIR(found.st_mode):
            path.unlink()
    return os.open(path, flags, 0o666)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_space(directory: Path) -> tuple[Path, int]:
    """Return `directory`, or the first of its parents that exists, and the bytes free there."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return existing, shutil.disk_usage(existing).free


def check_space(directory: Path, need_bytes: int, env_variable: str = "XDG_DATA_HOME") -> None:
    """Raise StoreError if the disk of `directory` has less than `need_bytes` free."""
    existing, free = free_space(directory)
    if free < need_bytes:
        raise StoreError(
            f"not enough space in {existing}: expected {human_size(need_bytes)} free, found "
            f"{human_size(free)}; {_space_hint(env_variable)}"
        )


def _space_hint(env_variable: str) -> str:
    """Return what to do about a full disk. In another data directory, no model is installed."""
    elsewhere = f", or set {env_variable} to a directory on another disk"
    return "free some space" + elsewhere * (env_variable not in ("", "XDG_DATA_HOME"))


@contextmanager
def store_errors(doing: str, env_variable: str = "XDG_DATA_HOME") -> Iterator[None]:
    """Turn OSError into a StoreError of one line that begins with `doing`.

    env_variable: moves the written files to another directory; "" for removals.
    """
    try:
        yield
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = _space_hint(env_variable)
        elif error.errno == errno.ELOOP:
            hint = "expected a file, found a link; check where it leads, and delete it"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            elsewhere = f", or set {env_variable} to a directory of your own"
            hint = f"give yourself write access{elsewhere if env_variable else ''}"
        else:
            moves = f"; {env_variable} moves it" if env_variable else ""
            hint = f"run `akunu info` to see the store's directory{moves}"
        raise StoreError(f"{doing}: {error.strerror or error}{where}; {hint}") from error
