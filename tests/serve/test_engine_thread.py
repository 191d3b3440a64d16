"""The asyncio side of the scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from akunu_py.decoding.events import (
    Event,
    Finished,
    PrefillProgress,
    PromptProcessed,
    TextDelta,
    ToolCallArguments,
    ToolCallFinished,
    ToolCallStarted,
)
from akunu_py.decoding.generate.job import Job, JobHandle
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.serve.http.request_handler import run_job
from akunu_py.types import Stats
from tests.support.jobs import ScriptedAnswer

END = Finished("stop", Stats())


class ScriptedScheduler(ModelHost):
    """A scheduler that runs a scripted job in its own thread."""

    def __init__(self, script: Callable[[JobHandle], Iterator[Event]]) -> None:
        self.script = script
        self.finished = threading.Event()

    def submit(self, job: Job, on_event: Callable[[Event], None], **options: Any) -> JobHandle:
        self.handle = JobHandle(job, on_event, "", lambda: None, short=False)

        def run() -> None:
            for event in self.script(self.handle):
                self.handle.deliver(event)
            self.finished.set()

        threading.Thread(target=run).start()
        return self.handle


def no_job(session: object) -> ScriptedAnswer:
    return ScriptedAnswer(iter([]))


async def test_queued_events_are_merged_for_slow_reader() -> None:
    parts = [TextDelta(str(number)) for number in range(10_000)]
    progress = [PrefillProgress(number, 500) for number in range(500)]
    calls: list[Event] = [
        ToolCallStarted("1", "find"),
        *[ToolCallArguments("[]")] * 1000,
        ToolCallFinished(),
    ]
    scheduler = ScriptedScheduler(
        lambda handle: iter([*progress, PromptProcessed(1, 0), *parts, *calls, END])
    )
    events = run_job(scheduler, no_job)
    found = [await anext(events)]
    await asyncio.to_thread(scheduler.finished.wait)
    found += [event async for event in events]
    assert isinstance(found[0], PrefillProgress)
    text = "".join(each.text for each in found if isinstance(each, TextDelta))
    assert text == "".join(each.text for each in parts)
    assert found[-4:] == [calls[0], ToolCallArguments("[]" * 1000), calls[-1], END]
    assert len(found) < 20


@pytest.mark.parametrize("leave", ["close", "cancel"])
async def test_closing_the_reader_cancels_the_job(leave: str) -> None:
    def until_cancelled(handle: JobHandle) -> Iterator[Event]:
        while not handle.cancelled:
            yield TextDelta("more ")
        yield END

    scheduler = ScriptedScheduler(until_cancelled)
    events = run_job(scheduler, no_job)
    await anext(events)
    if leave == "close":
        await events.aclose()
    else:
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert scheduler.handle.cancelled
    await asyncio.to_thread(scheduler.finished.wait)
