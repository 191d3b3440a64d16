"""A server that unloads its idle model and loads it again keeps nothing of the previous model.

The quick form counts objects and the bytes that Python allocated. The long form has 200 loads,
2,000 answers and 200 cancelled ones, and looks at the memory of the process too.
"""

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
from akunu_py.decoding.generate.job import JobHandle
from akunu_py.serve.http.guard import AccessRules
from akunu_py.serve.http.server import ServeOptions
from akunu_py.settings import ServeSettings
from akunu_py.types import GenerateOptions, SamplingOptions
from tests.reliability.endurance import give_back, resident, tiny_model
from tests.support.command import until
from tests.support.targets import some

pytestmark = pytest.mark.usefixtures("own_directories", "models_frozen")

ANSWERS, CANCELLED = 10, 1  # per load
SHARE = 0.05  # of growth that is allowed
SLACK = 100_000  # bytes: less than a percent of what a load allocates
FEW = 100  # objects: a load makes tens of thousands


@dataclass(frozen=True, slots=True)
class Held:
    """What is held while the model is unloaded."""

    objects: int
    allocated: int  # bytes, by Python; 0 if they are not counted
    resident: int  # bytes of the process
    arrays: int  # bytes of MLX


class Server:
    """The model host of `akunu serve`."""

    def __init__(self, model: Path) -> None:
        parser = argparse.ArgumentParser()
        serve.add_options(parser)
        args = parser.parse_args(["--model", str(model), "--prompt-cache-memory", "10MB"])
        self.warnings: list[str] = []
        options = ServeOptions(AccessRules(), GenerateOptions())
        [found] = serve.served_models(args, ServeSettings())
        pool = serve._pool(args, [found], options, None, self.warnings, lambda *_: None)
        self.served = pool.models[0]
        self.host = self.served.host
        self.asked = 0

    def load_answer_unload(self) -> Held:
        """One life of the model; returns what is held after it."""
        self.served.service()
        self.answer_all()
        self.host.call(lambda engine: self.host._unload()).result(60)
        # The thread drops its reference to the engine after the question.
        self.host._wake.set()
        until(lambda: not self.host._wake.is_set())
        gc.collect()
        give_back()
        traced = tracemalloc.get_traced_memory()[0]
        return Held(len(gc.get_objects()), traced, resident(), mx.get_active_memory())

    def answer_all(self) -> None:
        answers = [self.ask() for _ in range(ANSWERS)]
        cancelled = [self.ask() for _ in range(CANCELLED)]
        for handle, events in cancelled:
            while not isinstance(event := events.get(timeout=60), PromptProcessed):
                assert not isinstance(event, Failed), event
            handle.cancel()
        for _, events in [*answers, *cancelled]:
            while not isinstance(event := events.get(timeout=60), Finished):
                assert not isinstance(event, Failed), event

    def ask(self) -> tuple[JobHandle, queue.SimpleQueue[Event]]:
        self.asked += 1
        prompt = [token % 200 for token in some(40 + self.asked % 50, self.asked % 23)]
        sampling = SamplingOptions(temperature=0.8, seed=self.asked)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        job = text_job(prompt, GenerateOptions(8, sampling=sampling))
        return self.host.submit(job, events.put), events


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tiny_model(tmp_path / "tiny"))
    yield server
    assert server.host.close()
    assert server.warnings == []


def test_a_few_loads_leave_no_objects_and_no_bytes(server: Server) -> None:
    tracemalloc.start()
    try:
        held = [server.load_answer_unload() for _ in range(6)]
    finally:
        tracemalloc.stop()
    first, last = held[3], held[-1]
    assert last.arrays <= first.arrays
    assert last.objects <= first.objects + FEW, held
    assert last.allocated <= first.allocated * (1 + SHARE) + SLACK, held


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_loads_leave_no_memory(server: Server) -> None:
    for load in range(200):
        last = server.load_answer_unload()
        if load == 9:
            first = last
    assert last.arrays <= first.arrays
    assert last.objects <= first.objects * (1 + SHARE)
    assert last.resident <= first.resident * (1 + SHARE)
