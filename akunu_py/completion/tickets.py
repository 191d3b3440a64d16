"""The open requests of a queue, without threads; `CompletionQueue` locks them."""

from __future__ import annotations

import enum
import math
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from akunu_py.completion.completion_cache import typed_since
from akunu_py.completion.completion_request import Completion, CompletionReason, CompletionRequest
from akunu_py.engine.events import Failed

_PAUSE_S = 1.5  # a longer pause between two requests ends a rhythm
_NEWEST = 0.3  # weight of the last value in an average
# Clients send a request about this long after a key; a text must come before the next key.
_SHOWN_S = 0.1
_LONGEST_S = 1.0
_BATTERY_S = 0.1
_LOADING_S = 5.0  # a longer latency is that of a model being loaded


class TicketStatus(enum.Enum):
    """The phase of a ticket."""

    WAITING = "waiting"  # until it is due
    QUEUED = "queued"  # its job waits for the model
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Ticket:
    """One request in the queue."""

    request: CompletionRequest
    on_done: Callable[[Completion | Failed], None] = lambda done: None  # called once
    channel: str = ""  # a newer request supersedes those on its channel; not on ""
    on_text: Callable[[str], None] = lambda text: None  # gets parts as they become certain
    ahead: bool = False  # no client waits for it
    supersedes: bool = True  # False: a newer request on its channel cancels it instead
    paced: bool = True  # False: runs at once
    due: float = 0.0  # when it may run
    status: TicketStatus = TicketStatus.WAITING
    sent: int = 0  # characters passed to on_text
    cancelled: threading.Event = field(default_factory=threading.Event)

    def send(self, text: str) -> None:
        """Call `on_text` with the new part of `text`, the completion so far."""
        if new := text[self.sent :]:
            self.sent = len(text)
            self.on_text(new)

    def is_covered_by(self, other: Ticket) -> bool:
        """Return True if the completion made ahead for `other` also serves this ticket."""
        return typed_since(other.request, self.request) == ""


@dataclass(slots=True, eq=False)
class TicketRun:
    """A completion in progress: for its first ticket, or a later one that requests its rest."""

    request: CompletionRequest  # of the first ticket
    ticket: Ticket
    text: str = ""
    end: float | None = None  # time limit, None before the ticket has text

    def rest(self, text: str) -> str:
        """Return the part of `text` that the ticket requests."""
        return text[len(self.ticket.request.prefix) - len(self.request.prefix) :]

    def serves(self, ticket: Ticket) -> bool:
        """Return True if the text so far starts with the text typed before `ticket`."""
        typed = typed_since(self.request, ticket.request)
        if typed is None or not self.request.max_tokens:
            return False
        same = ticket.request.suffix == self.request.suffix
        another = self.request.temperature and not typed  # the client requests another sample
        return same and not another and self.text.startswith(typed)


class Tickets:
    """The open tickets, the oldest first. Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self.open: list[Ticket] = []
        self.paces = defaultdict[str, Pace](Pace)  # by channel
        self.draining = False  # all tickets are due, and nothing is made ahead
        self.closing = False  # all runs end

    def supersede(self, ticket: Ticket) -> None:
        """Cancel what a client's new ticket replaces, or the ticket if it supersedes nothing."""
        self.cancel_next()
        if (previous := self.newest(ticket.channel)) is not None:
            (previous if ticket.supersedes else ticket).cancelled.set()

    def add(self, ticket: Ticket, due: float) -> None:
        """Add a ticket that may run at `due`."""
        if ticket.ahead:
            self.cancel_next()
        ticket.due = due
        self.open.append(ticket)

    def add_paced(self, ticket: Ticket, now: float, *, on_battery: bool) -> None:
        """Add a client's ticket, which waits as long as the typing speed justifies."""
        pace = self.paces[ticket.channel] if ticket.channel and ticket.paced else None
        self.add(ticket, now + (pace.delay(now, on_battery=on_battery) if pace else 0.0))

    def cancel_next(self) -> None:
        """Cancel the work ahead that waits."""
        for each in self._with(TicketStatus.WAITING, ahead=True):
            each.cancelled.set()

    def accept(self) -> None:
        """Make the work ahead due, because the user accepted a completion."""
        self.paces.clear()  # the rhythm of typing ends
        for each in self._with(TicketStatus.WAITING, ahead=True):
            each.due = 0.0

    def next_due(self) -> float | None:
        """Return the time when the next ticket is due, None for no ticket."""
        waiting = (each.due for each in self.open if each.status is TicketStatus.WAITING)
        return min(waiting, default=None)

    def begin(self, now: float) -> list[Ticket]:
        """Return the tickets to run now, and the cancelled ones, which end instead."""
        found = [
            each
            for each in self.open
            if each.status is TicketStatus.WAITING
            and (each.due <= now or self.draining or each.cancelled.is_set())
        ]
        for each in found:
            each.status = TicketStatus.QUEUED
            if each.cancelled.is_set():
                continue
            if not each.ahead:
                self.paces[each.channel].begin(now)
            elif self.draining or any(map(each.is_covered_by, self._running_ahead()[-2:-1])):
                each.cancelled.set()
            elif each.request.max_tokens:
                self.paces.clear()  # a pause ends the rhythm of typing
        return found

    def step(self, run: TicketRun, now: float) -> tuple[CompletionReason | None, Ticket | None]:
        """Return the reason to end a run before its next pass, and the ticket that it leaves.

        It leaves its ticket for the newest one of the channel, if that requests the rest.
        """
        ticket, left = run.ticket, None
        if ticket.status is TicketStatus.DONE:  # with the completion of an earlier run
            return "cancelled", None
        newest = self.newest(ticket.channel)
        if newest is not None and newest is not ticket and run.serves(newest):
            left, run.end = ticket, None
            ticket = run.ticket = newest
        ticket.status = TicketStatus.RUNNING
        waiting = self._with(TicketStatus.WAITING, TicketStatus.QUEUED, ahead=False)
        idle_over = waiting or self.draining or self._running_ahead()[-1:] != [ticket]
        if (ticket.ahead and idle_over) or self.closing or ticket.cancelled.is_set():
            return "cancelled", left
        if run.text and run.end is None:  # no limit for the prefill, or no text would come
            run.end = now + (ticket.request.seconds or math.inf)
        return ("time" if run.end is not None and now >= run.end else None), left

    def newest(self, channel: str) -> Ticket | None:
        """Return the last ticket of a client on the channel that is not cancelled."""
        for each in reversed(self.open):
            current = each.status is not TicketStatus.DONE and not each.cancelled.is_set()
            if current and each.channel == channel != "" and not each.ahead:
                return each
        return None

    def _running_ahead(self) -> list[Ticket]:
        running = self._with(TicketStatus.QUEUED, TicketStatus.RUNNING, ahead=True)
        return [each for each in running if not each.cancelled.is_set()]

    def _with(self, *statuses: TicketStatus, ahead: bool) -> list[Ticket]:
        return [each for each in self.open if each.status in statuses and each.ahead == ahead]


class Pace:
    """Delays requests whose text would come after the user's next key. Times are in seconds."""

    def __init__(self) -> None:
        self._last = float("-inf")  # time of the last request
        self._begun: float | None = None  # of the last request that runs and has no text
        self._interval = 0.0  # average between two requests, 0 after a pause
        self._latency = 0.0  # average until the first text

    def delay(self, now: float, *, on_battery: bool = False) -> float:
        """Note a request at `now`; return how long it waits for a newer request."""
        gap, self._last = now - self._last, now
        self._interval = _average(self._interval, gap) if gap < _PAUSE_S else 0.0
        if self._begun is not None:  # its latency is at least its age
            if self._latency < (age := now - self._begun) < _PAUSE_S:
                self._latency = _average(self._latency, age)
            self._begun = None
        least = _BATTERY_S if on_battery else 0.0
        if not self._interval or self._interval > self._latency + _SHOWN_S:
            return least
        return max(least, min(_LONGEST_S, 1.3 * self._interval))

    def begin(self, now: float) -> None:
        """Note that the last request runs."""
        self._begun = now

    def text(self, now: float) -> None:
        """Note the first text of the last request."""
        if self._begun is not None and now - self._begun < _LOADING_S:
            self._latency = _average(self._latency, now - self._begun)
        self._begun = None


def _average(average: float, value: float) -> float:
    return average + _NEWEST * (value - average) if average else value
