"""The thread that owns a completer: superseding, cancelling, work ahead, failures as values.

A cached completion is returned in the caller's thread; all other callbacks run in this thread.
Work ahead (a prefill, or the completion after the last one) runs while no request waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from akunu_py.completion.completion_cache import typed_since
from akunu_py.completion.request import (
    Completion,
    CompletionMaker,
    CompletionReason,
    CompletionRequest,
    check_request,
    time_limit,
)
from akunu_py.decoding.generate.model_thread import Idle, ModelThread, release_memory
from akunu_py.errors import ServerGone, UsageError, describe
from akunu_py.interrupts import exit_without_teardown
from akunu_py.types import Stats

_CLOSE_S = 2.0  # for the current pass; loading a model takes longer
_RETRY_S = 1.0, 60.0  # until a failed load is retried: first, doubled each time, and maximum


@dataclass(frozen=True, slots=True)
class CompletionFailure:
    """The reason for a missing completion, in one line."""

    message: str


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue. `cancel` is thread-safe."""

    request: CompletionRequest
    on_done: Callable[[Completion | CompletionFailure], None] = lambda done: None  # called once
    channel: str = ""  # a newer request supersedes those on its channel; not on ""
    on_text: Callable[[str], None] = lambda text: None  # gets parts as they become certain
    ahead: bool = False  # no client waits for it
    sent: int = 0  # characters passed to on_text
    done: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Cancel within one pass. `on_done` still runs, with the reason "cancelled" if in time."""
        self.cancelled.set()

    def send(self, text: str) -> None:
        """Call `on_text` with the new part of `text`, the completion so far."""
        if new := text[self.sent :]:
            self.sent = len(text)
            self.on_text(new)


class CompletionThread:
    """Loads a completer, then serves one request after the other.

    `load` runs in the thread. If it fails, requests fail with its message; later ones retry it.
    unload_s: idle seconds after which the completer is unloaded, None for never.
    """

    def __init__(
        self,
        load: Callable[[], CompletionMaker],
        *,
        on_loading: Callable[[], None] = lambda: None,
        on_loaded: Callable[[CompletionMaker], None] = lambda completer: None,
        on_failed: Callable[[CompletionFailure], None] = lambda failure: None,
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
        self._completer: CompletionMaker | CompletionFailure | None = None  # None while it loads
        self._lock = threading.Lock()
        self._latest: dict[str, Ticket] = {}  # by channel
        self._waiting: set[Ticket] = set()  # queued tickets of clients
        self._ahead: Ticket | None = None  # the current work ahead
        self._draining = False
        self._thread = ModelThread[Ticket](
            "completions",
            load=self._try_to_load,
            serve=self._serve,
            unload=self._unload,
            idle=Idle(self._release_under_pressure, self._rest, unload_s),
        )

    @property
    def state(self) -> Literal["loading", "ready", "failed"]:
        completer = self._completer
        if completer is None:
            return "loading"
        return "failed" if isinstance(completer, CompletionFailure) else "ready"

    def start(self) -> None:
        """Start to load the model. Requests may be submitted before."""
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        """Queue a request, or answer it at once from the completion cache.

        It cancels the earlier request on its channel, or takes over its completion if that starts
        with the text typed since. A request for a prefill cancels nothing.
        """
        try:
            check_request(ticket.request)
        except UsageError as error:
            self._finish(ticket, CompletionFailure(describe(error)))
            return
        if not ticket.request.max_tokens:
            ticket.ahead = True
            self._submit_ahead(ticket)
            return
        cached = self._find_cached(ticket.request)
        with self._lock:
            previous = self._latest.pop(ticket.channel, None) if ticket.channel else None
            if cached is None:
                self._waiting.add(ticket)
                if ticket.channel:
                    self._latest[ticket.channel] = ticket
        if previous is not None:
            previous.cancel()
        if cached is None:
            self._thread.put(ticket)
        else:
            ticket.send(cached.text)
            self._finish(ticket, cached)
            self._make_next(ticket, cached)

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """End the thread: cancel all requests, or with `drain` serve clients' requests first.

        Returns False if the thread is still busy after `timeout` seconds.
        """
        self._draining = True
        return self._thread.close(timeout, drain=drain)

    def close_or_exit(self, code: int) -> bool:
        """End the thread; exit the program with `code` if loading a model keeps it busy.

        Returns True if the model was loading. The caller then ends with `exit_without_teardown`,
        because threads of MLX may abort at Python's teardown.
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
        except Exception as error:  # noqa: BLE001 - the user must see any error
            first, most = _RETRY_S
            self._retry_at = self._clock() + min(most, first * 2**self._failures)
            self._failures += 1
            failure = CompletionFailure(describe(error))
            self._completer = failure
            self._on_failed(failure)
        else:
            self._failures = 0
            self._completer = completer
            self._on_loaded(completer)

    def _unload(self) -> None:
        if self._completer is not None and not isinstance(self._completer, CompletionFailure):
            self._completer.close()
        self._completer = CompletionFailure("closed")

    def _release_under_pressure(self) -> bool:
        if self._completer is not None and not isinstance(self._completer, CompletionFailure):
            self._completer.release_under_pressure()
        return False

    def _rest(self) -> None:
        """Unload the model until the next request."""
        self._unload()
        self._completer = None
        release_memory()

    def _find_cached(self, request: CompletionRequest) -> Completion | None:
        completer = self._completer
        if completer is None or isinstance(completer, CompletionFailure):
            return None
        return completer.find_cached(request)

    def _submit_ahead(self, ticket: Ticket) -> None:
        """Queue a completion to make ahead, unless it is cached or in progress."""
        with self._lock:
            known = self._draining or (self._ahead is not None and _covers(self._ahead, ticket))
        known = known or self._find_cached(ticket.request) is not None
        if not known:
            with self._lock:
                self._ahead = ticket
            self._thread.put(ticket)
        else:
            self._finish(ticket, Completion("", "cancelled", Stats()))

    def _make_next(self, ticket: Ticket, done: Completion) -> None:
        """Queue the completion that follows if all of `done` is accepted."""
        request = ticket.request
        if done.text and done.finish_reason != "cancelled" and request.temperature == 0:
            following = replace(request, prefix=request.prefix + done.text, seconds=None)
            self._submit_ahead(Ticket(following, channel=ticket.channel, ahead=True))

    def _serve(self, ticket: Ticket) -> None:
        if ticket.done:  # with the completion of an earlier ticket
            return
        with self._lock:
            self._waiting.discard(ticket)
        failed = isinstance(self._completer, CompletionFailure)
        again = self._completer is None or (failed and self._clock() >= self._retry_at)
        if again and not self._thread.closing.is_set():
            self._try_to_load()
        job = _Job(self, ticket)
        done = self._complete(job)
        with self._lock:
            if self._ahead is ticket:
                self._ahead = None
        served = job.ticket
        if isinstance(done, Completion):
            done = replace(done, text=job.rest(done.text))
        self._finish(served, done)
        if isinstance(done, Completion) and not served.ahead:
            self._make_next(served, done)

    def _complete(self, job: _Job) -> Completion | CompletionFailure:
        completer = self._completer
        if completer is None or isinstance(completer, CompletionFailure):
            return completer or CompletionFailure("not loaded")
        if job.ended() == "cancelled":
            return Completion("", "cancelled", Stats())
        try:
            return completer.complete(job.request, job.ended, job.add)
        except ServerGone as error:
            self._completer = CompletionFailure(describe(error))
            if job.text or self._thread.closing.is_set():
                return self._completer
            self._try_to_load()
            return self._complete(job)
        except Exception as error:  # noqa: BLE001 - a bad request must not end the program
            return CompletionFailure(describe(error))

    def _finish(self, ticket: Ticket, done: Completion | CompletionFailure) -> None:
        with self._lock:
            ticket.done = True
            self._waiting.discard(ticket)
            if self._latest.get(ticket.channel) is ticket:
                del self._latest[ticket.channel]
        ticket.on_done(done)

    def wants(self, ticket: Ticket) -> bool:
        """Return False if `ticket`, which is running, must end."""
        if ticket.cancelled.is_set() or self._thread.closing.is_set():
            return False
        if not ticket.ahead:
            return True
        with self._lock:
            return self._ahead is ticket and not self._waiting and not self._draining

    def newest(self, channel: str) -> Ticket | None:
        """Return the last ticket of a client on the channel."""
        with self._lock:
            return self._latest.get(channel)

    def take_over(self, superseded: Ticket, ticket: Ticket) -> None:
        """Serve `ticket` with the completion of `superseded`, and cancel `superseded`."""
        with self._lock:
            self._waiting.discard(ticket)
            if self._ahead is superseded:
                self._ahead = None
        self._finish(superseded, Completion("", "cancelled", Stats()))


class _Job:
    """An unfinished completion for a ticket, or for a later ticket that requests its rest."""

    def __init__(self, thread: CompletionThread, ticket: Ticket) -> None:
        self._thread = thread
        self.request = ticket.request
        self.ticket = ticket  # the one that gets the completion
        self.text = ""
        self._timed_out = time_limit(ticket.request.seconds)

    def ended(self) -> CompletionReason | None:
        """Return the reason to end now, None to continue; called between two passes.

        First, if the newest ticket of the channel requests the rest of this text, the job serves
        that ticket from now on, and the old ticket ends as cancelled.
        """
        newest = self._thread.newest(self.ticket.channel)
        if newest is not None and newest is not self.ticket and self._fits(newest):
            superseded, self.ticket = self.ticket, newest
            self._timed_out = time_limit(newest.request.seconds)
            self._thread.take_over(superseded, newest)
            self.add("")
        return self._timed_out() if self._thread.wants(self.ticket) else "cancelled"

    def _fits(self, ticket: Ticket) -> bool:
        """Return True if the text so far starts with the text typed before `ticket`."""
        typed = typed_since(self.request, ticket.request)
        if typed is None or ticket.cancelled.is_set() or not self.request.max_tokens:
            return False
        if self.request.edits is not None or ticket.request.edits is not None:
            return False
        same = ticket.request.suffix == self.request.suffix
        another = self.request.temperature and not typed  # the client requests another sample
        return same and not another and self.text.startswith(typed)

    def add(self, text: str) -> None:
        """Send the new text to the client."""
        self.text += text
        self.ticket.send(self.rest(self.text))

    def rest(self, text: str) -> str:
        """Return the part of `text` that the ticket requests."""
        return text[len(self.ticket.request.prefix) - len(self.request.prefix) :]


def _covers(ticket: Ticket, other: Ticket) -> bool:
    """Return True if the completion made ahead for `ticket` also serves `other`."""
    one, two = ticket.request, other.request
    if two.max_tokens and not one.max_tokens:
        return False
    return (one.path, one.suffix, one.prefix) == (two.path, two.suffix, two.prefix)
