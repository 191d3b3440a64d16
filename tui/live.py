"""Which conversations are being answered by any akunu on this machine: a lock file each, which the
system releases when a process dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class LiveMarks:
    """Lock files in `directory`, of this process's own answers; None marks nothing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._held: tuple[str, int] | None = None  # the conversation, and its file

    def hold(self, conversation: str) -> None:
        """Marks the conversation that is answered now, and no other. A disk that refuses leaves it
        without a mark."""
        if self._directory is None or (self._held and self._held[0] == conversation):
            return
        self.release()
        path = self._directory / conversation
        with contextlib.suppress(OSError):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._held = conversation, file
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Nothing is answered."""
        if self._directory is None or self._held is None:
            return
        conversation, file = self._held
        self._held = None
        with contextlib.suppress(OSError):
            (self._directory / conversation).unlink(missing_ok=True)
        os.close(file)

    def is_elsewhere(self, conversation: str) -> bool:
        """Whether another process is answering that conversation."""
        if self._directory is None or (self._held and self._held[0] == conversation):
            return False
        try:
            file = os.open(self._directory / conversation, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False
