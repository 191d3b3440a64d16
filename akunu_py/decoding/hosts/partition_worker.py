"""The program of a worker rank: `python -m akunu_py.decoding.hosts.partition_worker JSON`.

It runs until its stdin ends, reads rank 0's messages there, and sends a heartbeat every second.
Only rank 0 handles interrupts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from akunu_py.errors import describe
from akunu_py.interrupts import exit_without_teardown

_BEAT = 1.0  # seconds


class _Connection:
    """The connection to rank 0."""

    def __init__(self) -> None:
        self._told: SimpleQueue[dict[str, Any]] = SimpleQueue()
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def say(self, **what: Any) -> None:
        _write(f"@akunu {json.dumps(what)}")

    def wait_for(self, key: str) -> Any:
        while key not in (told := self._told.get()):
            pass
        return told[key]

    def _listen(self) -> None:
        try:
            with open(0, "rb", closefd=False) as stream:
                for line in stream:
                    self._told.put(json.loads(line))
        finally:
            exit_without_teardown(0)

    def _beat(self) -> None:
        while True:
            _write(".")
            time.sleep(_BEAT)


def _write(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())  # one call, so that lines of two threads stay whole
    except OSError:
        exit_without_teardown(0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not os.isatty(0):  # not over ssh: rank 0 handles signals to the process group
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    line = _Connection()
    try:
        _follow(line, json.loads(sys.argv[1]))
    except BaseException as error:  # noqa: BLE001 - reported before exiting
        print(describe(error), file=sys.stderr, flush=True)
        exit_without_teardown(1)


def _follow(line: _Connection, given: dict[str, Any]) -> None:
    # Import before the first message, so that all ranks connect at the same time.
    from akunu_py.decoding.hosts.partition import connect, load_partition
    from akunu_py.decoding.hosts.process import likeness
    from akunu_py.models.store import model_store

    found = model_store.resolve(given["model"])
    line.say(likeness=likeness(found.path))
    line.wait_for("connect")
    group = connect(given["backend"], [os.getppid()])
    for name in given["files"]:  # made by mlx.launch for this process
        Path(os.environ[name]).unlink(missing_ok=True)
    share = load_partition(found, group, given)
    line.say(holds=share.holds, context=share.context)
    line.wait_for("read")
    mirror = share.read()
    line.say(ready=True)
    while True:
        line.wait_for("wake")
        mirror.follow()
        line.say(counts=mirror.counts.as_dict(), held=mirror.held)


if __name__ == "__main__":
    main()
