"""What the device offers: wired memory, threads for matrix products, memory bandwidth."""

import gc
import os
import plistlib
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Finished
from akunu_py.engine.histories.history import TokenHistory
from akunu_py.engine.job import JobHandle
from akunu_py.engine.load import load_stored
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device, wired
from akunu_py.engine.model.blas_threads import BlasThreads
from akunu_py.engine.model.device import chip_bandwidth, cores_in
from akunu_py.errors import DoesNotFit, UsageError
from akunu_py.models.store import model_store
from akunu_py.settings import save_settings
from akunu_py.types import WIRE_MODES, GenerateOptions, LoadOptions, WireMode
from akunu_py.workarounds import openblas
from tests.support.jobs import text_job
from tests.support.targets import some
from tests.support.tiny_model import tiny_directory

pytestmark = pytest.mark.usefixtures("own_directories")

# --- Wired memory: weights from load to unload, KV caches only while idle. Only Metal obeys. ---

RECOMMENDED, BEFORE = 1 << 40, 0
HEAP, STEP = 1 << 20, 256 << 20  # bytes


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits that MLX gets, as on a Mac with a terabyte."""
    limits = [BEFORE]

    def set_wired_limit(limit: int) -> int:
        limits.append(limit)
        return limits[-2]

    info = {"max_recommended_working_set_size": RECOMMENDED}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(device, "on_metal", lambda: True)
    monkeypatch.setattr(wired, "_models", {})
    return limits


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_directory(tmp_path)


def load(path: Path, wire: WireMode | None = None) -> Engine:
    return Engine.load(path, LoadOptions(wire=wire))


def weights_of(engine: Engine) -> int:
    """Return the bytes that Metal allocates: whole pages."""
    sizes = [array.nbytes for _, array in tree_flatten(engine.model.parameters())]
    return sum(-(-size // (16 << 10)) * (16 << 10) for size in sizes)


def test_weights_are_wired_from_load_to_unload(
    limits: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(device, "available_memory", lambda: 1000)
        with pytest.raises(DoesNotFit):
            load(model)
    assert limits == [BEFORE]  # a refused model is never wired
    first = load(model)
    expected = [BEFORE, weights_of(first) + HEAP]
    second = load(model)  # a pass of the first may be running
    del first
    gc.collect()
    StepLoop(second).answer([1, 2], GenerateOptions(max_tokens=2))
    assert limits == expected
    del second
    gc.collect()
    assert limits == [*expected, BEFORE]
    again = load(model)
    assert limits == [*expected, *expected]
    del again
    gc.collect()
    assert limits == [*expected, *expected, BEFORE]


def test_the_weights_of_a_draft_model_are_wired_too(limits: list[int], model: Path) -> None:
    small = load(model, "off")
    engine = Engine.load(model, draft_model=("small", model))
    assert limits == [BEFORE]  # another model is loaded
    expected = 2 * weights_of(small) + HEAP
    del small
    gc.collect()
    StepLoop(engine).idle_step()
    assert limits == [BEFORE, expected]


def test_caches_are_wired_in_steps_while_idle_with_the_mode_all(
    limits: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0
    monkeypatch.setattr(TokenHistory, "nbytes", property(lambda self: size))
    for mode in WIRE_MODES:
        del limits[1:]
        engine = load(model, mode)
        limit, loop = weights_of(engine) + HEAP, StepLoop(engine)
        for held, steps in ((1, 1), (STEP, 1), (STEP + 1, 2), (5, 1)):
            size, before = 0, list(limits)
            loop.answer([1, 2], GenerateOptions(max_tokens=4))
            assert limits == before  # never between two passes
            size = held
            loop.idle_step()
            expected = {"off": BEFORE, "weights": limit, "all": limit + steps * STEP}[mode]
            assert limits[-1] == expected
        assert len(limits) == {"off": 1, "weights": 2, "all": 5}[mode]
        del engine, loop
        gc.collect()


def test_no_limit_exceeds_the_recommendation_of_macos(
    limits: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 5000})
    monkeypatch.setattr(device, "available_memory", lambda: 1 << 40)
    load(model)
    assert limits[1] == 5000


def test_unused_buffers_are_limited_to_the_needs_of_a_prefill_chunk(
    limits: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_limits: list[int] = []
    monkeypatch.setattr(mx, "set_cache_limit", cache_limits.append)
    load(model)
    assert cache_limits == []  # the limit of MLX's CPU backend is smaller
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    engine = load(model)
    assert cache_limits == [max(wired.MIN_UNUSED, engine.plan.fit.estimate.working)]


def test_the_wire_option_comes_before_the_setting(limits: list[int], model: Path) -> None:
    save_settings({"wire": "off"})
    stored = model_store.resolve(str(model))
    assert load_stored(stored, LoadOptions(wire="all")).plan.wire == "all"
    with pytest.raises(UsageError, match='"off" or "weights" or "all"'):
        save_settings({"wire": "most"})
    assert load_stored(stored, LoadOptions()).plan.wire == "off"


@pytest.mark.usefixtures("own_directories")
def test_a_missing_draft_model_of_the_settings_is_noted(model: Path) -> None:
    save_settings({"draft_model": "no-such-model"})
    engine = load_stored(model_store.resolve(str(model)), LoadOptions())
    assert "the draft model no-such-model is not used: " in (engine.plan.fit.note or "")


# --- Threads for matrix products: one for each idle core. ---

TICKS = os.sysconf("SC_CLK_TCK")


class Machine:
    """A machine with four cores, of which this process may use three, and its clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stat = directory / "stat"
        self.now = self.own = 0.0
        self.busy = [0.0] * 4
        self.threads = 3
        self.write(1)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3})
        monkeypatch.setattr(openblas, "threads", lambda: self.threads)
        monkeypatch.setattr(openblas, "set_threads", lambda count: setattr(self, "threads", count))
        self.restart()

    def restart(self) -> None:
        self.blas = BlasThreads(self.stat, lambda: self.own, lambda: self.now)

    def write(self, running: int) -> None:
        rows = ["cpu  1 2 3 4 5 6 7 8 0 0"]
        for core, seconds in enumerate(self.busy):
            rows.append(f"cpu{core} {round(seconds * TICKS)} 0 0 {round(self.now)} 77 0 0 0 0 0")
        rows += ["intr 1 2 3", f"procs_running {running}", "procs_blocked 0"]
        self.stat.write_text("\n".join(rows) + "\n")

    def run(self, seconds: float, own: float, *others: float, running: int = 5) -> int:
        """Let time pass and return the threads.

        own, others: cores used by this process, by others. running: runnable threads at the end.
        """
        self.now += seconds
        self.own += own * seconds
        for core, load in enumerate(others):
            self.busy[core] += load * seconds
        self.busy[0] += own * seconds
        self.write(running)
        self.blas.adapt()
        return self.threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(("own", "others", "threads"), [
    (0.0, (0.0, 0.0, 0.0, 0.0), 3),
    (2.5, (0.0, 0.0, 0.0, 0.0), 3),  # the load of this process does not count
    (1.0, (0.1, 0.0, 0.0, 0.1), 3),  # an editor
    (0.5, (0.6, 0.0, 0.0, 0.0), 2),
    (1.5, (0.0, 0.0, 1.0, 0.0), 3),  # a core that this process may not use
    (0.5, (1.0, 1.0, 0.0, 0.0), 1),
    (1.0, (1.0, 1.0, 1.0, 1.0), 1),
])  # fmt: skip
def test_the_load_of_other_processes_takes_threads(
    machine: Machine, own: float, others: tuple[float, ...], threads: int
) -> None:
    assert machine.run(1.0, own, *others) == threads


def test_threads_return_once_the_load_has_ended(machine: Machine) -> None:
    assert machine.run(60.0, 0.0, 1.0, 1.0, running=1) == 3
    assert machine.run(1.0, 0.0, 1.0, 1.0, running=2) == 2
    assert machine.run(1.0, 0.0, 1.0, 1.0) == 1
    assert machine.run(0.1, 0.0) == 1  # too short to measure
    assert machine.run(1.0, 0.0) == 3


@pytest.mark.parametrize("content", [None, "", "cpu0 x", "cpu0\n"])
def test_an_unreadable_load_counts_as_none(machine: Machine, content: str | None) -> None:
    machine.stat.unlink() if content is None else machine.stat.write_text(content)
    machine.restart()
    machine.now += 1.0
    machine.blas.adapt()
    assert machine.threads == 3


@pytest.mark.parametrize("requests", [1, 3])
def test_decoding_adapts_the_threads_all_the_time(
    requests: int, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: list[int] = []
    monkeypatch.setattr(BlasThreads, "adapt", lambda self: adapted.append(1))
    loop = StepLoop(tiny)
    jobs = []
    for seed in range(requests):
        job = text_job(some(20, seed), GenerateOptions(max_tokens=12, draft="off"))
        jobs.append(JobHandle(job, lambda event: None, "", lambda: None, short=False))
    while jobs:
        for handle, events in loop.step(jobs):
            if any(isinstance(event, Finished) for event in events):
                jobs.remove(handle)
    assert len(adapted) >= 12
    assert bool(loop.shared.passes) == (requests > 1)


# --- Bandwidth: that of the chip's whole name, estimated for unknown chips. ---


@pytest.mark.parametrize(("name", "cores", "low", "high"), [
    ("Apple M3 Max", 30, 300, 300),
    ("Apple M3 Max", 40, 400, 400),
    ("Apple M4 Max", None, 410, 410),  # the smaller variant, if macOS does not say
    ("Apple M5 Ultra", 80, 1100, 1300),
    ("Apple M5 Ultra", 64, 900, 1100),
    ("Apple M6", 10, 120, 200),
    ("Apple M6 Pro", None, 250, 400),
    ("Apple M6 Extreme", 160, 2000, 3000),
    ("Apple M6 Extreme", None, 100, 200),  # an unknown kind: as the smallest
    ("Apple A18 Pro", 5, 40, 80),
    ("", None, 50, 120),
])  # fmt: skip
def test_bandwidth_by_chip_and_cores(name: str, cores: int | None, low: float, high: float) -> None:
    assert low <= chip_bandwidth(name, cores) <= high


def test_no_chip_is_slower_than_a_smaller_one_of_its_generation() -> None:
    for generation in range(1, 9):
        names = [f"Apple M{generation}{kind}" for kind in ("", " Pro", " Max", " Ultra")]
        values = [chip_bandwidth(name, None) for name in names]
        assert values == sorted(values), names


def test_the_machine_has_the_bandwidth_of_its_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [{"IOObjectClass": "AGXAcceleratorG16X"}, {"gpu-core-count": 40}]
    assert cores_in(plistlib.dumps(entries)) == 40
    for other in (b"", b"<plist", plistlib.dumps([]), plistlib.dumps({"a": 1})):
        assert cores_in(other) is None
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "Apple M5 Ultra"})
    monkeypatch.setattr(device, "on_cpu", lambda: False)
    monkeypatch.setattr(device, "on_metal", lambda: True)
    monkeypatch.setattr(device, "gpu_cores", lambda: 80)
    assert 1.1e12 < device.machine().bandwidth < 1.3e12
