"""Foreign files, read within bounds; our own, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


@contextlib.contextmanager
def open_regular(path: Path, limit: int | None = None) -> Iterator[BinaryIO]:
    """`path` opened for reading: a regular file, or a link to one, of at most `limit` bytes.

    Never waits, as opening a FIFO does.

    Raises: OSError: EINVAL for other kinds of files, EISDIR for directories, EFBIG for larger ones.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit is not None and status.st_size > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
        yield file


def read_bounded(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes.

    Raises: OSError as `open_regular`, also where the file grows beyond the limit meanwhile.
    """
    with open_regular(path, limit) as file:
        return read_stream(file, limit, str(path))


def read_stream(file: BinaryIO, limit: int, name: str = "stdin") -> bytes:
    """All of an open file of at most `limit` bytes. Raises OSError, EFBIG where there are more."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", name)
    return data


def parse_json(data: bytes | str, *, infinity: bool = False) -> Any:
    """The value of a JSON text that somebody else wrote.

    infinity: NaN and Infinity are taken, as Python writes them into the settings of models.
    Raises: ValueError for everything that is not JSON: nesting that Python cannot follow, integers
    of thousands of digits, NaN and Infinity, text that is not UTF-8.
    """
    try:
        return json.loads(data, parse_constant=None if infinity else _refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, limit: int, *, infinity: bool = False) -> Any:
    """The value of a JSON file of at most `limit` bytes.

    Raises: OSError as `read_bounded`, ValueError as `parse_json`.
    """
    return parse_json(read_bounded(path, limit), infinity=infinity)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
