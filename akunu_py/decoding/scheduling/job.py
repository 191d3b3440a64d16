"""A job: what makes one answer, and who wants it.

It is called with a session and gives the events of its request, at most one pass or one chunk of a
prompt from one to the next, so that another job can be given a turn there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from akunu_py.decoding.events import Ended, Event, Failed

if TYPE_CHECKING:
    from akunu_py.decoding.session import Session

# The events of an answer, Ended the last of them; None where a step has nothing to tell.
Job = Callable[["Session"], Iterator[Event | None]]


class JobHandle:
    """One job on its way."""

    def __init__(
        self,
        job: Job,
        on_event: Callable[[Event], None],
        client: str,
        wake: Callable[[], None],
        *,
        short: bool,
    ) -> None:
        self.job = job
        self.client = client
        self.short = short
        self._on_event = on_event
        self._wake = wake
        self._cancelled = threading.Event()
        self.ended = False

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Ends it after the step that is running, or before it begins: with Ended, the reason
        "cancelled". May be called from any thread, at any time."""
        self._cancelled.set()
        self._wake()

    def tell(self, event: Event) -> None:
        """Hands on an event, but none after the last. A reader that fails wants no more."""
        if self.ended:
            return
        self.ended = isinstance(event, Ended | Failed)
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - whoever it was: the other jobs go on
            self._cancelled.set()
