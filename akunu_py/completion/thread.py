"""The thread that a completer lives in: superseding, cancelling, and failures as values.

All callbacks come from this thread, so a caller needs no order of its own, only a lock around what
it writes to from elsewhere too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from akunu_py.completion.types import Completion, CompletionRequest
from akunu_py.decoding.thread import ModelThread
from akunu_py.errors import AkunuError, describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.types import Stats

if TYPE_CHECKING:  # a second or two, which `load` spends in the thread, not who starts it
    from akunu_py.completion.completer import Completer


_CLOSE_S = 2.0  # for a pass that is running; a model that is being loaded takes longer


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no completion, in one line."""

    message: str


@dataclass(slots=True)
class Ticket:
    """One request on its way. `cancel` may be called from any thread, at any time."""

    request: CompletionRequest
    channel: str
    on_text: Callable[[str], None]
    on_done: Callable[[Completion | Failure], None]
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ends it after the pass that is running, or before it begins; `on_done` is called all
        the same, with the reason "cancelled" unless the completion was ready before."""
        self.cancelled.set()


class CompletionThread:
    """Loads a completer, then serves one request after the other.

    `load` is called in the thread. Where it fails, every request fails with its message.
    """

    def __init__(
        self,
        load: Callable[[], Completer],
        *,
        on_loaded: Callable[[Completer], None] = lambda completer: None,
        on_failed: Callable[[Failure], None] = lambda failure: None,
    ) -> None:
        self._load = load
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._completer: Completer | Failure = Failure("not loaded")
        self._lock = threading.Lock()
        self._latest: dict[str, Ticket] = {}  # by channel
        self._thread = ModelThread[Ticket](
            "completions", load=self._try_to_load, serve=self._serve, unload=self._unload
        )

    def start(self) -> None:
        """Begins to load, unless it has. Requests may be submitted before."""
        self._thread.start()

    def submit(
        self,
        request: CompletionRequest,
        *,
        channel: str = "",
        on_text: Callable[[str], None] = lambda text: None,
        on_done: Callable[[Completion | Failure], None],
    ) -> Ticket:
        """Queues a request. One that is queued or running on the same `channel` is cancelled; on
        the empty channel none is."""
        ticket = Ticket(request, channel, on_text, on_done)
        with self._lock:
            if channel:
                if channel in self._latest:
                    self._latest[channel].cancel()
                self._latest[channel] = ticket
        self._thread.put(ticket)
        return ticket

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """Ends the thread: at once, every request cancelled, or with `drain` when all are served.

        False where it is still busy after `timeout` seconds (None: waits for ever).
        """
        return self._thread.close(timeout, drain=drain)

    def close_or_exit(self, code: int) -> None:
        """Ends the thread at once, and the program with `code` where a load keeps it busy."""
        if not self.close(_CLOSE_S):
            exit_without_teardown(code)

    def _try_to_load(self) -> None:
        try:
            self._completer = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
            self._completer = Failure(describe(error))
            self._on_failed(self._completer)
        else:
            self._on_loaded(self._completer)

    def _unload(self) -> None:
        if not isinstance(self._completer, Failure):
            self._completer.close()
        self._completer = Failure("closed")

    def _serve(self, ticket: Ticket) -> None:
        def cancelled() -> bool:
            return ticket.cancelled.is_set() or self._thread.closing.is_set()

        completer = self._completer
        done: Completion | Failure
        if isinstance(completer, Failure):
            done = completer
        elif cancelled():
            done = Completion("", "cancelled", Stats())
        else:
            try:
                done = completer.complete(ticket.request, cancelled, ticket.on_text)
            except AkunuError as error:
                done = Failure(describe(error))
            except Exception as error:  # noqa: BLE001 - one bad request must not end the helper
                done = Failure(describe(error))
        with self._lock:
            if self._latest.get(ticket.channel) is ticket:
                del self._latest[ticket.channel]
        ticket.on_done(done)
