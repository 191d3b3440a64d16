"""A model host that loads its model again keeps nothing of the previous one."""

import gc
import queue
import tracemalloc
from pathlib import Path

import mlx.core as mx
import pytest

from akunu_py.engine.answer import text_job
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Finished, PromptProcessed
from akunu_py.engine.histories.prompt_cache_store import PromptCacheStore
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.types import GenerateOptions, LoadOptions, SamplingOptions
from tests.reliability.endurance import give_back, tiny_model
from tests.support.jobs import end_of, submit
from tests.support.targets import some

pytestmark = pytest.mark.usefixtures("own_directories")

SHARE = 0.05  # of growth that is allowed
SLACK = 100_000  # bytes: less than a percent of a load's allocations
FEW = 100  # objects: a load makes tens of thousands


def answer_and_reload(host: ModelHost) -> tuple[int, int, int]:
    """Answer and cancel requests, load the model again; return objects, and bytes of Python and
    MLX that are held then."""
    queues = []
    for number in range(10):
        prompt = [token % 200 for token in some(40 + number, number)]
        sampling = SamplingOptions(temperature=0.8, seed=number)
        queues.append(submit(host, text_job(prompt, GenerateOptions(8, sampling=sampling))))
    cancelled: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def cancel(event: Event) -> None:
        cancelled.put(event)
        if isinstance(event, PromptProcessed):
            handle.cancel()

    handle = host.submit(text_job([1, 2, 3], GenerateOptions(8)), cancel)
    assert all(isinstance(end_of(events), Finished) for events in [*queues, cancelled])
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    host.on_state = states.put
    host.reload()
    while states.get(timeout=60) != "ready":
        pass
    gc.collect()
    give_back()
    traced = tracemalloc.get_traced_memory()[0]
    return len(gc.get_objects()), traced, mx.get_active_memory()


def test_a_few_loads_leave_no_objects_and_no_bytes(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny")

    def load() -> StepLoop:
        engine = Engine.load(model, LoadOptions(prompt_cache_memory=10_000_000))
        caches = PromptCacheStore(model)
        learned = LearnedState(model, "t", "l", answer_cache=True, caches=caches)
        return StepLoop(engine, learned, slots=4)

    host = ModelHost(load)
    host.start()
    tracemalloc.start()
    try:
        held = [answer_and_reload(host) for _ in range(6)]
    finally:
        tracemalloc.stop()
    assert host.close()
    (objects, allocated, arrays), last = held[3], held[-1]
    assert last[0] <= objects + FEW, held
    assert last[1] <= allocated * (1 + SHARE) + SLACK, held
    assert last[2] <= arrays * (1 + SHARE), held
