"""An app that shows one screen of the chat by itself, for tests that need no conversation."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import Protocol

from textual.app import App
from textual.pilot import Pilot

from akunu_py import paths
from akunu_py.errors import Cancelled
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import Progress


class Compare(Protocol):
    """The fixture `snap_compare`."""

    def __call__(
        self,
        app: App[None],
        *,
        terminal_size: tuple[int, int],
        run_before: Callable[[Pilot[None]], Awaitable[None]],
    ) -> bool: ...


class Pulled:
    """A replacement for `pull` that waits for `proceed`."""

    def __init__(self, *steps: Progress) -> None:
        self.requested: list[str] = []
        self.steps = [*steps]
        self.error: Exception | None = None
        self.proceed = threading.Event()

    def __call__(
        self, name: str, report: Callable[[Progress], None], cancelled: Callable[[], bool]
    ) -> StoredModel:
        self.requested.append(name)
        for step in self.steps:
            report(step)
        while not self.proceed.wait(0.01):
            if cancelled():
                raise Cancelled("cancelled")
        if self.error:
            raise self.error
        return StoredModel(name.rpartition("/")[2], paths.models_dir())
