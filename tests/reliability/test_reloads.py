"""A server that unloads its model and loads it again keeps nothing of the previous model."""

from __future__ import annotations

import argparse
import gc
import queue
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.commands import serve
from akunu_py.decoding.events import Event, Failed, Finished, PromptProcessed
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.server import ServeOptions
from akunu_py.settings import ServeSettings
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.reliability.endurance import give_back, tiny_model
from tests.support.targets import some

pytestmark = pytest.mark.usefixtures("own_directories")

ANSWERS, CANCELLED = 10, 1  # per load
SHARE = 0.05  # of growth that is allowed
SLACK = 100_000  # bytes: less than a percent of a load's allocations
FEW = 100  # objects: a load makes tens of thousands


@dataclass(frozen=True, slots=True)
class Held:
    """What is held right after a load."""

    objects: int
    allocated: int  # bytes, by Python
    arrays: int  # bytes of MLX


class Server:
    """The model host of `akunu serve`."""

    def __init__(self, model: Path) -> None:
        parser = argparse.ArgumentParser()
        serve.add_options(parser)
        args = parser.parse_args(["--model", str(model), "--prompt-cache-memory", "10MB"])
        options = ServeOptions(AccessRules(), GenerateOptions())
        [found] = serve.served_models(args, ServeSettings())
        self.warnings: list[str] = []
        pool = serve._pool(args, [found], options, None, self.warnings, lambda *_: None)
        self.served = pool.models[0]
        self.host = self.served.host
        self.sent = 0

    def answer_and_reload(self) -> Held:
        """Answer and cancel requests, load the model again, and return what is held then."""
        self.served.service()
        requests = [self.submit(cancel=number < CANCELLED) for number in range(ANSWERS + CANCELLED)]
        for events in requests:
            while not isinstance(event := events.get(timeout=60), Finished):
                assert not isinstance(event, Failed), event
        states: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.host.on_state = states.put
        self.host.reload()
        while states.get(timeout=60) != "ready":
            pass
        gc.collect()
        give_back()
        traced = tracemalloc.get_traced_memory()[0]
        return Held(len(gc.get_objects()), traced, mx.get_active_memory())

    def submit(self, *, cancel: bool) -> queue.SimpleQueue[Event]:
        self.sent += 1
        prompt = [token % 200 for token in some(40 + self.sent % 50, self.sent % 23)]
        sampling = SamplingOptions(temperature=0.8, seed=self.sent)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()

        def deliver(event: Event) -> None:
            events.put(event)
            if cancel and isinstance(event, PromptProcessed):
                handle.cancel()

        job = text_job(prompt, GenerateOptions(8, sampling=sampling))
        handle = self.host.submit(job, deliver)
        return events


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny_model(tmp_path / "tiny"))
    yield server
    assert server.host.close()
    assert server.warnings == []


def test_a_few_loads_leave_no_objects_and_no_bytes(server: Server) -> None:
    tracemalloc.start()
    try:
        held = [server.answer_and_reload() for _ in range(6)]
    finally:
        tracemalloc.stop()
    first, last = held[3], held[-1]
    assert last.arrays <= first.arrays * (1 + SHARE)
    assert last.objects <= first.objects + FEW, held
    assert last.allocated <= first.allocated * (1 + SHARE) + SLACK, held
