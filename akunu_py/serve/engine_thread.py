"""The asyncio side of the scheduler: the events of a job, as they come, in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from akunu_py.decoding.generate.events import (
    CallArguments,
    Ended,
    Event,
    Failed,
    Reading,
    Text,
    Thinking,
)
from akunu_py.decoding.scheduling.job import Job
from akunu_py.decoding.scheduling.scheduler import Scheduler


async def events_of(
    scheduler: Scheduler, job: Job, *, client: str = "", short: bool = False
) -> AsyncGenerator[Event]:
    """The events of a job, which is submitted now; the last is Ended or Failed. Closing the
    generator cancels the job.

    client, short: see `Scheduler.submit`. A reader that is slow finds what came meanwhile merged,
    so that it never takes more memory than the text that waits.
    """
    mailbox = _Mailbox()
    handle = scheduler.submit(job, mailbox.put, client=client, short=short)
    try:
        while True:
            event = await mailbox.get()
            yield event
            if isinstance(event, Ended | Failed):
                return
    finally:
        handle.cancel()


class _Mailbox:
    """Events on their way from the thread of the model to the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: list[Event] = []  # for the loop alone

    def put(self, event: Event) -> None:
        """From any thread. Raises RuntimeError where the loop is closed."""
        self._loop.call_soon_threadsafe(self._add, event)

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        merged = None if last is None else _merged(last, event)
        if merged is None:
            self._events.append(event)
        else:
            self._events[-1] = merged
        self._arrived.set()

    async def get(self) -> Event:
        """The next event."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        return self._events.pop(0)


def _merged(first: Event, second: Event) -> Event | None:
    """One event that tells what both do, None where there is none."""
    if isinstance(first, Reading) and isinstance(second, Reading):
        return second
    for kind in (Text, Thinking, CallArguments):
        if isinstance(first, kind) and isinstance(second, kind):
            return replace(first, text=first.text + second.text)
    return None
