"""A pull on behalf of another host: `python -m akunu_py.models.pull.remote JSON`.

Exits when stdin closes. Each line on stdout is LINE_PREFIX and an object with `progress` (phase,
bytes done, bytes in total), `error`, or `files` (SHA-256 by name, at the end).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from akunu_py.errors import describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.pull.pull import find_installed, pull
from akunu_py.models.store import model_store
from akunu_py.models.store.progress import Progress

LINE_PREFIX = "@akunu "  # prefix of our lines; a login shell may print others
_INTERVAL_S = 0.2


class _ProgressSender:
    """Sends progress at a limited rate."""

    def __init__(self) -> None:
        self._phase, self._sent = "", 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase or now - self._sent >= _INTERVAL_S:
            self._phase, self._sent = progress.phase, now
            _send(progress=[progress.phase, progress.done, progress.total])


def main() -> None:
    """Pull the model in JSON: the `reference` and the `name` of `pull`."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        _send(files=_pull(**json.loads(sys.argv[1])))
    except BaseException as error:  # noqa: BLE001 - reported to the other host
        _send(error=describe(error))
    exit_without_teardown(0)  # a thread is blocked on stdin


def _pull(reference: str, name: str | None) -> dict[str, str]:
    send_progress = _ProgressSender()
    was_installed = find_installed(reference, name) is not None
    model = pull(reference, send_progress, name=name)
    if was_installed:  # a download is hashed anyway
        model_store.verify(model, lambda done, total: send_progress(Progress("check", done, total)))
    assert model.manifest is not None
    return {file: record.sha256 for file, record in model.manifest.files.items()}


def _end_with_input() -> None:
    while os.read(0, 4096):
        pass
    exit_without_teardown(1)


def _send(**what: Any) -> None:
    print(f"{LINE_PREFIX}{json.dumps(what)}", flush=True)


if __name__ == "__main__":
    main()
