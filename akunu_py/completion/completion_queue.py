"""The queue of completion requests to a model: superseding, cancelling, working ahead.

A cached completion is returned in the caller's thread; all other callbacks run in the model's.
Work ahead (a prefill, or the completion after the last one) runs while no request waits. The next
completion is made after a pause or an acceptance, because typing makes most of them useless. For
the same reason `Pace` delays the requests of a fast typist.
"""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from akunu_py.completion.completion_cache import CompletionCache, typed_since
from akunu_py.completion.completion_request import (
    Completion,
    CompletionReason,
    CompletionRequest,
    EndCheck,
    check_request,
    time_limit,
)
from akunu_py.completion.pace import Pace
from akunu_py.completion.prompt.project_imports import imported_files
from akunu_py.engine.events import Event, Failed, Finished
from akunu_py.engine.host import ModelHost, State
from akunu_py.engine.job import ModelLoop, RunningJob
from akunu_py.errors import UsageError
from akunu_py.interrupts import exit_without_teardown
from akunu_py.settings import SECRET_FILES
from akunu_py.types import Stats

if TYPE_CHECKING:
    from akunu_py.completion.completer import Completer
    from akunu_py.engine.loop import StepLoop

_CLOSE_S = 2.0  # for the current pass; loading a model takes longer
_TEMPERATURE = 0.8  # of alternatives, if the request has none
LoadModel = Callable[[], "Completer | ModelLoop"]  # called in the model's thread; see `ModelHost`
_SCHEME = re.compile(r"[A-Za-z][\w+.-]+:")  # of a URI; a drive of Windows has one letter


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The job of a completion, which comes with the last event, in `Finished.details`."""

    request: CompletionRequest
    get_completer: Callable[[StepLoop], Completer]  # called in the loop's thread
    ended: EndCheck  # polled, instead of the request's time limit
    on_text: Callable[[str], None] = lambda text: None  # gets new text before the next poll

    def __call__(self, loop: StepLoop) -> RunningJob:
        return self.get_completer(loop).begin(loop, self.request, self.ended, self.on_text)


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """The user's settings for all requests."""

    unload_s: float | None = None  # idle seconds after which the model is unloaded; None: never
    exclude: tuple[str, ...] = SECRET_FILES  # patterns of files that no prompt may contain
    pause_s: float = 0.5  # without a request, before the next completion is made ahead
    saves_power: Callable[[], bool] = lambda: False  # True: nothing is made ahead


def _begun() -> None:
    """Do nothing for a ticket that is not delayed."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue. `cancel` is thread-safe."""

    request: CompletionRequest
    on_done: Callable[[Completion | Failed], None] = lambda done: None  # called once
    channel: str = ""  # a newer request supersedes those on its channel; not on ""
    on_text: Callable[[str], None] = lambda text: None  # gets parts as they become certain
    ahead: bool = False  # no client waits for it
    supersedes: bool = True  # False: a newer request on its channel cancels it instead
    paced: bool = True  # False: runs at once
    begin: Callable[[], None] = _begun  # ends the delay before it runs
    sent: int = 0  # characters passed to on_text
    done: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """Cancel within one pass. `on_done` still runs, with the reason "cancelled" if in time."""
        self.cancelled.set()
        self.begin()

    def send(self, text: str) -> None:
        """Call `on_text` with the new part of `text`, the completion so far."""
        if new := text[self.sent :]:
            self.sent = len(text)
            self.on_text(new)


DEFAULT_QUEUE_OPTIONS = QueueOptions()


class CompletionQueue:
    """Requests to the model that `load` returns, one after the other.

    on_state: called in the model's thread.
    """

    def __init__(
        self,
        load: LoadModel,
        options: QueueOptions = DEFAULT_QUEUE_OPTIONS,
        *,
        on_state: Callable[[State], None] = lambda state: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._exclude, self._pause_s = options.exclude, options.pause_s
        self.saves_power = options.saves_power
        # The completion after the last one, until it is queued, and the timer that queues it.
        self._next: tuple[Ticket, threading.Timer] | None = None
        self._load = load
        self._completer: Completer | None = None
        self._cache = CompletionCache()
        self._clock, self._paces = clock, defaultdict[str, Pace](Pace)  # by channel
        self._lock = threading.Lock()
        self._latest: dict[str, Ticket] = {}  # by channel
        self._waiting: set[Ticket] = set()  # queued tickets of clients
        self._ahead: Ticket | None = None  # the current work ahead
        self._open: set[Ticket] = set()
        self._all_done = threading.Condition(self._lock)
        self._draining = self._closing = False
        self.host = ModelHost(
            self._load_loop, idle_s=options.unload_s, on_state=on_state, clock=clock
        )

    def start(self) -> None:
        """Start loading, once. Requests may be submitted before."""
        self.host.start()

    def complete(self, request: CompletionRequest) -> Completion:
        """Block until the request completes. Raises the error if loading or completion fails."""
        outcome = Future[Completion | Failed]()
        self.submit(Ticket(request, outcome.set_result))
        done = outcome.result()
        if isinstance(done, Failed):
            raise done.error
        return done

    def submit(self, ticket: Ticket) -> None:
        """Queue a request, or answer it at once from the completion cache.

        The completion in an excluded file is empty; excluded files are dropped. It
        cancels the earlier request on its channel, or takes over its completion if that starts with
        the text typed since. A request for a prefill cancels nothing.
        """
        try:
            check_request(ticket.request)
        except UsageError as error:
            self.finish(ticket, Failed(error))
            return
        if is_excluded(ticket.request.path, self._exclude):
            with self._lock:
                previous = self._latest.get(ticket.channel) if ticket.request.max_tokens else None
            if previous is not None:
                previous.cancel()
            self.finish(ticket, Completion("", "stop", Stats(), excluded=True))
            return
        if not ticket.request.max_tokens:
            ticket.ahead = True
            self._take_next()  # it would cancel the prefill at the end of its pause
            self._submit_ahead(ticket)
            return
        cached = self._cache.find(ticket.request)
        self._take_next()
        with self._lock:
            previous = self._latest.pop(ticket.channel, None) if ticket.channel else None
            if cached is None:
                self._waiting.add(ticket)
                if ticket.channel:
                    self._latest[ticket.channel] = ticket
            if not ticket.supersedes and previous is not None:
                self._latest[ticket.channel], previous = previous, ticket
        if previous is not None:
            previous.cancel()
        if cached is None:
            self._delay(ticket)
        else:
            ticket.send(cached.text)
            self._make_next(ticket, cached)
            self.finish(ticket, cached)

    def accepted(self) -> None:
        """Make the next completion now, because the user accepted the last one."""
        with self._lock:
            self._paces.clear()  # the rhythm of typing ends
        if ticket := self._take_next():
            self._submit_ahead(ticket)

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """End the model's thread: cancel all requests, or with `drain` serve clients' first.

        Returns False if the thread is still busy after `timeout` seconds.
        """
        self._take_next()
        with self._lock:
            self._draining = True
            delayed = list(self._open)
        for each in delayed:
            each.begin()
        with self._lock:
            if drain:
                self._all_done.wait_for(lambda: not self._open, timeout)
            self._closing = True
        return self.host.close(cancel_s=timeout)

    def close_or_exit(self, code: int) -> bool:
        """End the thread; exit the program with `code` if loading a model keeps it busy.

        Returns True if the model was loading. The caller then ends with `exit_without_teardown`,
        because threads of MLX may abort at Python's teardown.
        """
        loading = self.host.state == "loading"
        if not self.close(_CLOSE_S):
            exit_without_teardown(code)
        return loading

    def _load_loop(self) -> ModelLoop:
        loaded = self._load()
        if isinstance(loaded, ModelLoop):
            return loaded
        self._completer = loaded
        return loaded.loop

    def _get_completer(self, loop: StepLoop) -> Completer:
        assert self._completer is not None
        return self._completer

    def _delay(self, ticket: Ticket) -> None:
        """Queue the job of a client after the delay that its typing speed justifies."""
        seconds, on_battery = 0.0, self.saves_power()
        with self._lock:
            self._open.add(ticket)
            if ticket.channel and ticket.paced:
                pace = self._paces[ticket.channel]
                seconds = pace.delay(self._clock(), on_battery=on_battery)

        def begin() -> None:
            with self._lock:
                if ticket.begin is not begin:
                    return
                ticket.begin = _begun
                self._paces[ticket.channel].begin(self._clock())
            timer.cancel()
            if ticket.cancelled.is_set():
                self.finish(ticket, Completion("", "cancelled", Stats()))
            else:
                self._put(ticket)

        timer = threading.Timer(seconds, begin)
        timer.daemon, ticket.begin = True, begin
        timer.start() if seconds else begin()

    def note_text(self, ticket: Ticket) -> None:
        """Note the first text of a request, for its latency."""
        with self._lock:
            self._paces[ticket.channel].text(self._clock())

    def _put(self, ticket: Ticket) -> None:
        """Queue a job, with the closed files that the buffer imports."""
        with self._lock:
            self._open.add(ticket)
        files = (*ticket.request.files, *imported_files(ticket.request))
        request = replace(ticket.request, files=files)
        request = without_excluded(request, self._exclude)
        served = _ServedTicket(self, ticket)
        job = CompletionJob(request, self._get_completer, served.ended, served.add)
        self.host.submit(job, lambda event: self._on_event(served, event))

    def _submit_ahead(self, ticket: Ticket) -> None:
        """Queue a completion to make ahead, unless it is cached, in progress or costs battery."""
        with self._lock:
            known = self._draining or (self._ahead is not None and _covers(self._ahead, ticket))
        known = known or self._cache.find(ticket.request) is not None
        if not known and not self.saves_power():
            with self._lock:
                self._ahead = ticket
            self._put(ticket)
        else:
            self.finish(ticket, Completion("", "cancelled", Stats()))

    def _make_next(self, ticket: Ticket, done: Completion) -> None:
        """After a pause, queue the completion that follows if all of `done` is accepted."""
        request = ticket.request
        if done.text and done.finish_reason != "cancelled" and request.temperature == 0:
            following = replace(request, prefix=request.prefix + done.text, seconds=None)
            self._take_next()  # of another channel
            pause = threading.Timer(self._pause_s, self.accepted)
            pause.daemon = True
            with self._lock:
                self._next = Ticket(following, channel=ticket.channel, ahead=True), pause
            pause.start()

    def _take_next(self) -> Ticket | None:
        """Return the next completion to make, if it still waits for the end of the pause."""
        with self._lock:
            waiting, self._next = self._next, None
        if waiting is None:
            return None
        ticket, pause = waiting
        pause.cancel()
        return ticket

    def _on_event(self, served: _ServedTicket, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ticket, done = served.ticket, self._outcome(served, event)
            if isinstance(done, Completion) and done.finish_reason != "cancelled":
                self.note_text(ticket)
            with self._lock:
                if self._ahead is served.first:
                    self._ahead = None
            if not ticket.done:
                if isinstance(done, Completion) and not ticket.ahead:
                    self._make_next(ticket, done)  # first: the client's next request drops it
                self.finish(ticket, done)

    def _outcome(self, served: _ServedTicket, event: Finished | Failed) -> Completion | Failed:
        if isinstance(event, Finished) and isinstance(event.details, Completion):
            self._cache.add(served.request, event.details)
            return replace(event.details, text=served.rest(event.details.text))
        if isinstance(event, Failed) and not self._closing:
            return event
        return Completion("", "cancelled", Stats())

    def finish(self, ticket: Ticket, done: Completion | Failed) -> None:
        with self._lock:
            ticket.done = True
            self._waiting.discard(ticket)
            if self._latest.get(ticket.channel) is ticket:
                del self._latest[ticket.channel]
        try:
            ticket.on_done(done)
        finally:
            with self._lock:
                self._open.discard(ticket)
                self._all_done.notify_all()

    def is_wanted(self, ticket: Ticket) -> bool:
        """Return False if `ticket`, which has begun, must end."""
        with self._lock:
            self._waiting.discard(ticket)
            if ticket.done or ticket.cancelled.is_set() or self._closing:
                return False
            idle = self._ahead is ticket and not self._waiting and not self._draining
            return idle or not ticket.ahead

    def newest(self, channel: str) -> Ticket | None:
        """Return the last ticket of a client on the channel."""
        with self._lock:
            return self._latest.get(channel)

    def reassign(self, superseded: Ticket, ticket: Ticket) -> None:
        """Give the running completion of `superseded` to `ticket`, and cancel `superseded`."""
        with self._lock:
            self._waiting.discard(ticket)
            if self._ahead is superseded:
                self._ahead = None
        self.finish(superseded, Completion("", "cancelled", Stats()))


class _ServedTicket:
    """The ticket that a completion is made for, or a later one that requests its rest."""

    def __init__(self, queue: CompletionQueue, ticket: Ticket) -> None:
        self._queue = queue
        self.request = ticket.request
        self.first = self.ticket = ticket
        self.text = ""
        self._timed_out: EndCheck | None = None  # None: no text yet

    def ended(self) -> CompletionReason | None:
        """Return the reason to end now, None to continue; called between two passes.

        First, if the newest ticket of the channel requests the rest of this text, the completion is
        made for that ticket from now on, and the old ticket ends as cancelled.
        """
        if self.ticket.done:  # with the completion of an earlier ticket
            return "cancelled"
        newest = self._queue.newest(self.ticket.channel)
        if newest is not None and newest is not self.ticket and self._fits(newest):
            superseded, self.ticket = self.ticket, newest
            self._timed_out = None
            self._queue.reassign(superseded, newest)
            self.add("")
        if not self._queue.is_wanted(self.ticket):
            return "cancelled"
        if self.text and self._timed_out is None:  # no limit for the prefill, or no text would come
            self._timed_out = time_limit(self.ticket.request.seconds)
        return self._timed_out() if self._timed_out else None

    def _fits(self, ticket: Ticket) -> bool:
        """Return True if the text so far starts with the text typed before `ticket`."""
        typed = typed_since(self.request, ticket.request)
        if typed is None or ticket.cancelled.is_set() or not self.request.max_tokens:
            return False
        same = ticket.request.suffix == self.request.suffix
        another = self.request.temperature and not typed  # the client requests another sample
        return same and not another and self.text.startswith(typed)

    def add(self, text: str) -> None:
        """Send the new text to the client."""
        if text and not self.text:
            self._queue.note_text(self.ticket)
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


def submit_with_alternatives(queue: CompletionQueue, ticket: Ticket, count: int) -> None:
    """Submit a request, then `count` samples of it, one after the other.

    `on_done` gets one completion with all of them, or the first failure. A newer request on the
    channel cancels them.
    """
    temperature = ticket.request.temperature or _TEMPERATURE
    sample, on_done = replace(ticket.request, temperature=temperature), ticket.on_done
    found: list[Completion] = []
    ticket.paced = not count  # the user requests alternatives with a key

    def add(done: Completion | Failed) -> None:
        if isinstance(done, Failed) or done.finish_reason == "cancelled":
            on_done(done)
            return
        found.append(done)
        if len(found) <= count:
            more = Ticket(sample, add, ticket.channel, supersedes=False, paced=False)
            more.cancelled = ticket.cancelled  # shared
            queue.submit(more)
            return
        # Texts that look the same are one.
        texts = {each.text.rstrip(): each.text for each in reversed(found) if each.text.strip()}
        texts.pop(found[0].text.rstrip(), None)
        on_done(replace(found[0], alternatives=tuple(reversed(texts.values()))))

    ticket.on_done = add
    queue.submit(ticket)


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Return True if a path or URI matches one of the shell patterns, in upper or lower case.

    A pattern without a slash matches file names, one with a slash the end of the path.
    """
    if _SCHEME.match(path):
        path = unquote(urlsplit(path).path)
    path = path.replace("\\", "/").lower()
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(f"/{path}", f"*/{pattern.lower().lstrip('/')}")
        if "/" in pattern
        else fnmatchcase(name, pattern.lower())
        for pattern in patterns
    )


def without_excluded(request: CompletionRequest, patterns: Sequence[str]) -> CompletionRequest:
    """Return the request without the files whose paths match the patterns."""
    files = tuple(file for file in request.files if not is_excluded(file.path, patterns))
    return replace(request, files=files)
