"""The thread that a completer lives in: superseding, cancelling, making ahead, failures as values.

A request whose answer is remembered is answered where it is submitted; all other callbacks come
from this thread. What is made ahead (reading, for a request with `max_tokens` 0, and what follows a
completion that was given) is made while nobody waits, and ends within one pass when somebody does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from akunu_py.completion.recall import typed_since
from akunu_py.completion.types import (
    Completion,
    CompletionMaker,
    CompletionReason,
    CompletionRequest,
    check_request,
    time_limit,
)
from akunu_py.decoding.generate.events import Idle, ModelThread, release_memory
from akunu_py.errors import ServerGone, UsageError, describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.types import Stats

_CLOSE_S = 2.0  # for a pass that is running; a model that is being loaded takes longer
_RETRY_S = 1.0, 60.0  # until a model that did not load is tried again, doubled each time, at most


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no completion, in one line."""

    message: str


@dataclass(slots=True, eq=False)
class Ticket:
    """One request on its way. `cancel` may be called from any thread, at any time.

    on_text: is given parts of the completion as they become certain; on_done, once, what came of
    it. Of requests on the same `channel` only the last one is wanted; on the empty channel all are.
    """

    request: CompletionRequest
    on_done: Callable[[Completion | Failure], None] = lambda done: None
    channel: str = ""
    on_text: Callable[[str], None] = lambda text: None
    ahead: bool = False  # nobody waits for it
    given: int = 0  # characters that on_text was given
    done: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Ends it after the pass that is running, or before it begins; `on_done` is called all
        the same, with the reason "cancelled" unless the completion was ready before."""
        self.cancelled.set()

    def give(self, text: str) -> None:
        """Calls `on_text` with what is new of `text`, all that is certain of the completion."""
        new = text[self.given :]
        if new:
            self.given = len(text)
            self.on_text(new)


class CompletionThread:
    """Loads a completer, then serves one request after the other.

    `load` is called in the thread. Where it fails, requests fail with its message, and those that
    come some seconds later have it tried again. unload_s: after how many seconds without a request
    it is unloaded, None for never.
    """

    def __init__(
        self,
        load: Callable[[], CompletionMaker],
        *,
        on_loading: Callable[[], None] = lambda: None,
        on_loaded: Callable[[CompletionMaker], None] = lambda completer: None,
        on_failed: Callable[[Failure], None] = lambda failure: None,
        clock: Callable[[], float] = time.monotonic,
        unload_s: float | None = None,
    ) -> None:
        self._load = load
        self._on_loading = on_loading
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._clock = clock
        self._failures = 0
        self._retry_at = 0.0
        self._completer: CompletionMaker | Failure | None = None  # None: it is being loaded
        self._lock = threading.Lock()
        self._latest: dict[str, Ticket] = {}  # by channel
        self._waiting: set[Ticket] = set()  # somebody waits for each
        self._ahead: Ticket | None = None  # the only one that is worth making
        self._draining = False
        self._thread = ModelThread[Ticket](
            "completions",
            load=self._try_to_load,
            serve=self._serve,
            unload=self._unload,
            idle=Idle(self._relieve, self._rest, unload_s),
        )

    @property
    def state(self) -> Literal["loading", "ready", "failed"]:
        completer = self._completer
        if completer is None:
            return "loading"
        return "failed" if isinstance(completer, Failure) else "ready"

    def start(self) -> None:
        """Begins to load, unless it has. Requests may be submitted before."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queues a request, or answers it at once where its answer is remembered.

        One that is queued or running on its channel is superseded: it ends as if it was cancelled,
        unless the new one asks for the rest of what it makes. A request that is only read
        supersedes no other, and is done when nobody waits.
        """
        try:
            check_request(ticket.request)
        except UsageError as error:
            self._finish(ticket, Failure(describe(error)))
            return
        if not ticket.request.max_tokens:
            ticket.ahead = True
            self._submit_ahead(ticket)
            return
        recalled = self._recall(ticket.request)
        with self._lock:
            previous = self._latest.pop(ticket.channel, None) if ticket.channel else None
            if recalled is None:
                self._waiting.add(ticket)
                if ticket.channel:
                    self._latest[ticket.channel] = ticket
        if previous is not None:
            previous.cancel()
        if recalled is None:
            self._thread.put(ticket)
        else:
            ticket.give(recalled.text)
            self._finish(ticket, recalled)
            self._make_next(ticket, recalled)

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """Ends the thread: at once, every request cancelled, or with `drain` when all that somebody
        waits for are served.

        False where it is still busy after `timeout` seconds (None: waits for ever).
        """
        self._draining = True
        return self._thread.close(timeout, drain=drain)

    def close_or_exit(self, code: int) -> bool:
        """Ends the thread at once, and the program with `code` where a load keeps it busy.

        Whether a load has just ended: MLX's own threads may still be at it, and abort where Python
        ends under them, so the program is to end by `exit_without_teardown`.
        """
        loading = self.state == "loading"
        if not self.close(_CLOSE_S):
            exit_without_teardown(code)
        return loading

    def _try_to_load(self) -> None:
        self._completer = None
        self._on_loading()
        try:
            completer = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, the user must read it
            first, most = _RETRY_S
            self._retry_at = self._clock() + min(most, first * 2**self._failures)
            self._failures += 1
            failure = Failure(describe(error))
            self._completer = failure
            self._on_failed(failure)
        else:
            self._failures = 0
            self._completer = completer
            self._on_loaded(completer)

    def _unload(self) -> None:
        if self._completer is not None and not isinstance(self._completer, Failure):
            self._completer.close()
        self._completer = Failure("closed")

    def _relieve(self) -> bool:
        if self._completer is not None and not isinstance(self._completer, Failure):
            self._completer.relieve()
        return False

    def _rest(self) -> None:
        """Unloads the model until somebody asks again."""
        self._unload()
        self._completer = None
        release_memory()

    def _recall(self, request: CompletionRequest) -> Completion | None:
        completer = self._completer
        if completer is None or isinstance(completer, Failure):
            return None
        return completer.recall(request)

    def _submit_ahead(self, ticket: Ticket) -> None:
        """Makes the ticket what is made when nobody waits, unless that is done or under way."""
        with self._lock:
            known = self._draining or (self._ahead is not None and _covers(self._ahead, ticket))
        known = known or self._recall(ticket.request) is not None
        if not known:
            with self._lock:
                self._ahead = ticket
            self._thread.put(ticket)
        else:
            self._finish(ticket, Completion("", "cancelled", Stats()))

    def _make_next(self, ticket: Ticket, done: Completion) -> None:
        """Has made ahead what will be asked when all of `done` is accepted."""
        request = ticket.request
        if done.text and done.finish_reason != "cancelled" and request.temperature == 0:
            following = replace(request, prefix=request.prefix + done.text, seconds=None)
            self._submit_ahead(Ticket(following, channel=ticket.channel, ahead=True))

    def _serve(self, ticket: Ticket) -> None:
        if ticket.done:  # by what was made for an earlier one
            return
        with self._lock:
            self._waiting.discard(ticket)
        failed = isinstance(self._completer, Failure)
        again = self._completer is None or (failed and self._clock() >= self._retry_at)
        if again and not self._thread.closing.is_set():
            self._try_to_load()
        making = _Making(self, ticket)
        done = self._complete(making)
        with self._lock:
            if self._ahead is ticket:
                self._ahead = None
        asked = making.ticket
        if isinstance(done, Completion):
            done = making.rest(done)
        self._finish(asked, done)
        if isinstance(done, Completion) and not asked.ahead:
            self._make_next(asked, done)

    def _complete(self, making: _Making) -> Completion | Failure:
        completer = self._completer
        if completer is None or isinstance(completer, Failure):
            return completer or Failure("not loaded")
        if making.ended() == "cancelled":
            return Completion("", "cancelled", Stats())
        try:
            return completer.complete(making.request, making.ended, making.add)
        except ServerGone as error:
            self._completer = Failure(describe(error))
            if making.begun or self._thread.closing.is_set():
                return self._completer
            self._try_to_load()
            return self._complete(making)
        except Exception as error:  # noqa: BLE001 - one bad request must not end the helper
            return Failure(describe(error))

    def _finish(self, ticket: Ticket, done: Completion | Failure) -> None:
        with self._lock:
            ticket.done = True
            self._waiting.discard(ticket)
            if self._latest.get(ticket.channel) is ticket:
                del self._latest[ticket.channel]
        ticket.on_done(done)

    def wants(self, ticket: Ticket) -> bool:
        """Whether `ticket`, which is being served, shall be."""
        if ticket.cancelled.is_set() or self._thread.closing.is_set():
            return False
        if not ticket.ahead:
            return True
        with self._lock:
            return self._ahead is ticket and not self._waiting and not self._draining

    def newest(self, channel: str) -> Ticket | None:
        """The last request on the channel that somebody waits for."""
        with self._lock:
            return self._latest.get(channel)

    def take_over(self, superseded: Ticket, ticket: Ticket) -> None:
        """Has `ticket` served by what is made for `superseded`, which ends."""
        with self._lock:
            self._waiting.discard(ticket)
            if self._ahead is superseded:
                self._ahead = None
        self._finish(superseded, Completion("", "cancelled", Stats()))


class _Making:
    """A completion while it is made: for a ticket, or for a later one that asks for its rest."""

    def __init__(self, thread: CompletionThread, ticket: Ticket) -> None:
        self._thread = thread
        self.request = ticket.request
        self.ticket = ticket  # the one that it is made for now
        self._text = ""
        self._late = time_limit(ticket.request.seconds)

    def ended(self) -> CompletionReason | None:
        """Why to end now, None to continue; asked between two passes."""
        newest = self._thread.newest(self.ticket.channel)
        if newest is not None and newest is not self.ticket and self._is_made_for(newest):
            superseded, self.ticket = self.ticket, newest
            self._late = time_limit(newest.request.seconds)
            self._thread.take_over(superseded, newest)
            self.add("")
        return self._late() if self._thread.wants(self.ticket) else "cancelled"

    def _is_made_for(self, ticket: Ticket) -> bool:
        """Whether what was made until now is what was typed before `ticket` was submitted."""
        typed = typed_since(self.request, ticket.request)
        if typed is None or ticket.cancelled.is_set() or not self.request.max_tokens:
            return False
        if self.request.edits is not None or ticket.request.edits is not None:
            return False
        same = ticket.request.suffix == self.request.suffix
        another = self.request.temperature and not typed  # another sample is wanted
        return same and not another and self._text.startswith(typed)

    @property
    def begun(self) -> bool:
        """Whether there is text of it."""
        return bool(self._text)

    def add(self, text: str) -> None:
        """Hands on what is new for the ticket."""
        self._text += text
        self.ticket.give(self._rest(self._text))

    def rest(self, done: Completion) -> Completion:
        """The completion as the ticket is given it."""
        return replace(done, text=self._rest(done.text))

    def _rest(self, text: str) -> str:
        return text[len(self.ticket.request.prefix) - len(self.request.prefix) :]


def _covers(ticket: Ticket, other: Ticket) -> bool:
    """Whether what is made ahead for `ticket` does for `other` too."""
    one, two = ticket.request, other.request
    if two.max_tokens and not one.max_tokens:
        return False
    return (one.path, one.suffix, one.prefix) == (two.path, two.suffix, two.prefix)
