"""Bounded reads of untrusted files, and atomic writes of our own files."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from akunu_py.errors import AkunuError, StoreError

_BLOCK_BYTES = 1 << 20


@contextlib.contextmanager
def disk_errors(what: str, kind: type[AkunuError] = StoreError) -> Iterator[None]:
    """Turn an OSError into an error of this kind that starts with `what`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of the file `path` against other processes; create what is missing.

    Raises OSError; without `wait`, BlockingIOError if another process holds the lock.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock = os.open(path, flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def open_regular(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, of at most `limit` bytes; never blocks on a FIFO.

    Raises: OSError: EINVAL for other kinds of files, EISDIR for directories, EFBIG for larger ones.
    """
    with open(str(path), "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
        yield file


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the data of a regular file of at most `limit` bytes; raises like `open_regular`."""
    with open_regular(path, limit) as file:
        return read_stream(file, limit, str(path))


def read_stream(file: BinaryIO, limit: int, name: str = "stdin") -> bytes:
    """Return the data of an open file. Raises OSError, EFBIG above `limit` bytes."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", name)
    return data


def read_blocks(file: IO[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the data of an open file in blocks; `progress` gets the length of each block."""
    while block := file.read(_BLOCK_BYTES):
        yield block
        progress(len(block))


def parse_json(data: bytes | str, *, infinity: bool = False) -> Any:
    """Return the value of an untrusted JSON text.

    infinity: accept NaN and Infinity, which Python writes into the configs of models.
    Raises: ValueError, also for deep nesting, integers of thousands of digits and invalid UTF-8.
    """
    try:
        return json.loads(data, parse_constant=None if infinity else _refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, limit: int, *, infinity: bool = False) -> Any:
    """Return the value of a JSON file; raises like `read_bounded` and `parse_json`."""
    return parse_json(read_bounded(path, limit), infinity=infinity)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new private file (mode 0600) that replaces `path` unless the block raises."""
    prefix = _temporary_prefix(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=prefix, suffix=path.suffix)
    os.close(descriptor)
    try:
        yield Path(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_atomically(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a private file completely or not at all.

    durable: survive a power failure, and keep the permissions of the existing file.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        if durable:
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, path.stat().st_mode & 0o777)


def remove_unfinished(path: Path) -> None:
    """Delete what killed writers of `path` left. The caller must be the only writer."""
    for unfinished in path.parent.glob(f"{_temporary_prefix(path)}*"):
        unfinished.unlink()


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}-"
