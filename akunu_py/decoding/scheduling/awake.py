"""Keeps a Mac from falling asleep while a model works."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

_MOMENT_S = 5.0  # of work that need not be known to the system: it waits a minute at least


class Awake:
    """macOS's own `caffeinate`, run while there is work: its assertion against idle sleep ends with
    it, and with this process at the latest. Elsewhere it does nothing."""

    def __init__(
        self,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if command is None:
            mac = sys.platform == "darwin"
            command = ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())) if mac else ()
        self._command = command
        self._clock = clock
        self._since: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether the system was told."""
        return self._process is not None

    def work(self) -> None:
        """There is work; to be called again and again while there is."""
        now = self._clock()
        self._since = self._since if self._since is not None else now
        if self._command and not self.held and now - self._since >= _MOMENT_S:
            try:
                self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL)
            except OSError:
                self._command = ()

    def rest(self) -> None:
        """There is no more work."""
        self._since = None
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
