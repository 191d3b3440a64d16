"""The queue of completion requests to a model: superseding, cancelling, working ahead.

`Tickets` decides. A cached completion is returned in the caller's thread, and a ticket that is
cancelled before it runs ends in the thread that cancels it; all other callbacks run in the model's.
Work ahead (a prefill, or the completion after the last one) runs while no request waits. The next
completion is made after a pause or an acceptance, because typing makes most of them useless. For
the same reason `Pace` delays the requests of a fast typist.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from akunu_py.completion.completion_cache import CompletionCache
from akunu_py.completion.completion_request import (
    Completion,
    CompletionReason,
    CompletionRequest,
    EndCheck,
)
from akunu_py.completion.prompt.project_imports import imported_files
from akunu_py.completion.tickets import Ticket, TicketRun, Tickets, TicketStatus
from akunu_py.engine.events import Event, Failed, Finished
from akunu_py.engine.host import ModelHost, State
from akunu_py.engine.job import ModelLoop, RunningJob
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


class CompletionQueue:
    """Requests to the model that `load` returns, one after the other."""

    def __init__(
        self,
        load: LoadModel,
        options: QueueOptions = QueueOptions(),
        *,
        on_state: Callable[[State], None] = lambda state: None,  # called in the model's thread
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self.saves_power = options, options.saves_power
        self._load, self._clock = load, clock
        self._completer: Completer | None = None
        self._cache = CompletionCache()
        self._tickets = Tickets()
        self._changed = threading.Condition()  # guards the tickets
        self._timer = threading.Thread(target=self._begin_later, name="queue", daemon=True)
        self.host = ModelHost(
            self._load_loop, idle_s=options.unload_s, on_state=on_state, clock=clock
        )

    def start(self) -> None:
        """Start loading, once. Requests may be submitted before."""
        self.host.start()
        if self._timer.ident is None:
            self._timer.start()

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

        The completion in an excluded file is empty; excluded files are dropped. The request cancels
        the earlier one on its channel, or takes over its completion if that starts with the text
        typed since. A request for a prefill cancels nothing.
        """
        request = ticket.request
        if is_excluded(request.path, self._options.exclude):
            known: Completion | None = Completion("", "stop", Stats(), excluded=True)
        elif request.max_tokens:
            known = self._cache.find(request)
        else:
            ticket.ahead = True
            self._add_ahead(ticket, 0.0)
            return
        on_battery = self.saves_power()
        with self._changed:
            if request.max_tokens:
                self._tickets.supersede(ticket)
            if known is None:
                self._tickets.add_paced(ticket, self._clock(), on_battery=on_battery)
        self._begin()
        if known is not None:
            ticket.send(known.text)
            self._make_next(ticket, known)
            self._finish(ticket, known)

    def cancel(self, ticket: Ticket) -> None:
        """Cancel within one pass. `on_done` still runs, with the reason "cancelled" if in time."""
        ticket.cancelled.set()
        self._begin()

    def accepted(self) -> None:
        """Make the next completion now, because the user accepted the last one."""
        with self._changed:
            self._tickets.accept()
        self._begin()

    def close(self, timeout: float | None = None, *, drain: bool = False) -> bool:
        """End the model's thread: cancel all requests, or with `drain` serve clients' first.

        Returns False if the thread is still busy after `timeout` seconds.
        """
        with self._changed:
            self._tickets.draining = True
        self._begin()
        with self._changed:
            if drain:
                self._changed.wait_for(lambda: not self._tickets.open, timeout)
            self._tickets.closing = True
            self._changed.notify_all()
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

    # Before a ticket runs

    def _add_ahead(self, ticket: Ticket, pause_s: float) -> None:
        """Add work ahead instead of any that waits, unless it is cached or costs battery."""
        if self.saves_power() or self._cache.find(ticket.request) is not None:
            ticket.cancelled.set()
        with self._changed:
            self._tickets.add(ticket, self._clock() + pause_s)
        self._begin()

    def _make_next(self, ticket: Ticket, done: Completion) -> None:
        """After a pause, make the completion that follows if all of `done` is accepted."""
        request = ticket.request
        if done.text and request.temperature == 0:
            following = replace(request, prefix=request.prefix + done.text, seconds=None)
            ahead = Ticket(following, channel=ticket.channel, ahead=True)
            self._add_ahead(ahead, self._options.pause_s)

    def _begin(self) -> None:
        with self._changed:
            tickets = self._tickets.begin(self._clock())
            self._changed.notify_all()  # another ticket may be the next one due
        for ticket in tickets:
            if ticket.cancelled.is_set():
                self._finish(ticket, _cancelled())
            else:
                self._put(ticket)

    def _begin_later(self) -> None:
        while not self._tickets.closing:
            with self._changed:
                due = self._tickets.next_due()
                self._changed.wait(None if due is None else max(0.0, due - self._clock()))
            self._begin()

    def _put(self, ticket: Ticket) -> None:
        files = (*ticket.request.files, *imported_files(ticket.request))
        allowed = [each for each in files if not is_excluded(each.path, self._options.exclude)]
        request = replace(ticket.request, files=tuple(allowed))
        run = TicketRun(ticket.request, ticket)
        steps = partial(self._step, run), partial(self._add_text, run)
        job = CompletionJob(request, self._get_completer, *steps)
        self.host.submit(job, partial(self._on_event, run))

    # In the model's thread, while it runs

    def _step(self, run: TicketRun) -> CompletionReason | None:
        """Return the reason to end a run now, None to continue; called between two passes."""
        with self._changed:
            reason, left = self._tickets.step(run, self._clock())
        if left is not None:
            self._finish(left, _cancelled())
            run.ticket.send(run.rest(run.text))
        return reason

    def _add_text(self, run: TicketRun, text: str) -> None:
        if text and not run.text:
            self._note_text(run.ticket)
        run.text += text
        run.ticket.send(run.rest(run.text))

    def _note_text(self, ticket: Ticket) -> None:
        with self._changed:
            self._tickets.paces[ticket.channel].text(self._clock())

    def _on_event(self, run: TicketRun, event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ticket, done = run.ticket, self._outcome(run, event)
            if isinstance(done, Completion) and done.finish_reason != "cancelled":
                self._note_text(ticket)
                if not ticket.ahead and ticket.status is not TicketStatus.DONE:
                    self._make_next(ticket, done)  # first: the client's next request drops it
            self._finish(ticket, done)

    def _outcome(self, run: TicketRun, event: Finished | Failed) -> Completion | Failed:
        if isinstance(event, Finished) and isinstance(event.details, Completion):
            self._cache.add(run.request, event.details)
            return replace(event.details, text=run.rest(event.details.text))
        return event if isinstance(event, Failed) and not self._tickets.closing else _cancelled()

    def _finish(self, ticket: Ticket, done: Completion | Failed) -> None:
        """Call `on_done`, once. The ticket stays open until it returns."""
        if ticket.status is TicketStatus.DONE:
            return
        ticket.status = TicketStatus.DONE
        try:
            ticket.on_done(done)
        finally:
            with self._changed:
                if ticket in self._tickets.open:
                    self._tickets.open.remove(ticket)
                self._changed.notify_all()


def _cancelled() -> Completion:
    return Completion("", "cancelled", Stats())


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
        fnmatchcase(f"/{path if '/' in pattern else name}", f"*/{pattern.lower().lstrip('/')}")
        for pattern in patterns
    )
