"""Alternatives to a completion: further samples, which an editor shows as "2 of 3"."""

from __future__ import annotations

from dataclasses import replace

from akunu_py.completion.completion_queue import CompletionFailure, CompletionQueue, Ticket
from akunu_py.completion.request import Completion

_TEMPERATURE = 0.8  # of the samples, if the request has none


def submit_with_alternatives(queue: CompletionQueue, ticket: Ticket, count: int) -> None:
    """Submit a request, then `count` samples of it, one after the other.

    `on_done` gets one completion with all of them, or the first failure. A newer request on the
    channel cancels them.
    """
    temperature = ticket.request.temperature or _TEMPERATURE
    sample, on_done = replace(ticket.request, temperature=temperature), ticket.on_done
    found: list[Completion] = []

    def add(done: Completion | CompletionFailure) -> None:
        if isinstance(done, CompletionFailure) or done.finish_reason == "cancelled":
            on_done(done)
            return
        found.append(done)
        if len(found) <= count:
            more = Ticket(sample, add, ticket.channel, supersedes=False)
            more.cancelled = ticket.cancelled  # shared
            queue.submit(more)
            return
        texts = dict.fromkeys(each.text for each in found if each.text.strip())
        texts.pop(found[0].text, None)
        on_done(replace(found[0], alternatives=tuple(texts)))

    ticket.on_done = add
    queue.submit(ticket)
