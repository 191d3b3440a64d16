"""The threads of a matrix product: as many as cores are idle."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from akunu_py.decoding import blas_threads
from akunu_py.decoding.blas_threads import BlasThreads
from akunu_py.decoding.events import Finished
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.job import JobHandle
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.types import GenerateOptions
from akunu_py.workarounds import openblas
from tests.support.command import run_here
from tests.support.engines import altered
from tests.support.targets import Counting, some
from tests.support.tiny_fim import load_tiny

TICKS = os.sysconf("SC_CLK_TCK")
END = "<|endoftext|>"


class Machine:
    """A machine with four cores, of which this process may use three, and its clock."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stat = directory / "stat"
        self.now = self.own = 0.0
        self.busy = [0.0] * 4
        self.running = 1
        self.threads = 3
        self.write()
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 3})
        monkeypatch.setattr(openblas, "threads", lambda: self.threads)
        monkeypatch.setattr(openblas, "set_threads", lambda count: setattr(self, "threads", count))
        self.blas = BlasThreads(self.stat, lambda: self.own, lambda: self.now)

    def write(self) -> None:
        rows = ["cpu  1 2 3 4 5 6 7 8 0 0"]
        for core, seconds in enumerate(self.busy):
            rows.append(f"cpu{core} {round(seconds * TICKS)} 0 0 {round(self.now)} 77 0 0 0 0 0")
        rows += ["intr 1 2 3", f"procs_running {self.running}", "procs_blocked 0"]
        self.stat.write_text("\n".join(rows) + "\n")

    def run(self, seconds: float, own: float, *others: float, running: int = 5) -> None:
        """Let time pass. own: cores used by this process; others: load of each core besides."""
        self.running = running
        self.now += seconds
        self.own += own * seconds
        for core, load in enumerate(others):
            self.busy[core] += load * seconds
        self.busy[0] += own * seconds
        self.write()
        self.blas.adapt()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("own", "others", "threads"),
    [
        (0.0, (0.0, 0.0, 0.0, 0.0), 3),
        (2.5, (0.0, 0.0, 0.0, 0.0), 3),  # its own load is no reason
        (1.0, (0.1, 0.0, 0.0, 0.1), 3),  # an editor
        (0.5, (0.6, 0.0, 0.0, 0.0), 2),
        (1.5, (0.0, 0.0, 1.0, 0.0), 3),  # a core that it may not use
        (0.5, (1.0, 1.0, 0.0, 0.0), 1),
        (1.0, (1.0, 1.0, 1.0, 1.0), 1),
    ],
)
def test_the_load_of_others_takes_threads(
    machine: Machine, own: float, others: tuple[float, ...], threads: int
) -> None:
    machine.run(1.0, own, *others)
    assert machine.threads == threads


def test_threads_come_back_with_idle_cores(machine: Machine) -> None:
    machine.run(1.0, 0.0, 1.0, 1.0)
    assert machine.threads == 1
    machine.run(0.1, 0.0)  # too short to tell
    assert machine.threads == 1
    machine.run(1.0, 0.0)
    assert machine.threads == 3


def test_a_load_that_has_ended_takes_no_threads(machine: Machine) -> None:
    machine.run(60.0, 0.0, 1.0, 1.0, running=1)
    assert machine.threads == 3
    machine.run(1.0, 0.0, 1.0, 1.0, running=2)
    assert machine.threads == 2


@pytest.mark.parametrize("content", [None, "", "cpu0 x", "cpu0\n"])
def test_an_unreadable_load_is_no_load(machine: Machine, content: str | None) -> None:
    machine.stat.unlink() if content is None else machine.stat.write_text(content)
    machine.blas = BlasThreads(machine.stat, lambda: machine.own, lambda: machine.now)
    machine.now += 1.0
    machine.blas.adapt()
    assert machine.threads == 3


@pytest.mark.parametrize("requests", [1, 3])
def test_every_step_with_a_pass_adapts(
    requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted: list[int] = []
    monkeypatch.setattr(BlasThreads, "adapt", lambda self: adapted.append(1))
    engine = load_tiny(tmp_path, [END])
    model = Counting(engine.model)
    loop = StepLoop(Session(altered(engine, model=model)))
    for seed in range(requests):
        job = text_job(some(20, seed), GenerateOptions(max_tokens=12))
        loop.begin(JobHandle(job, lambda event: None, "", lambda: None, short=False))
    ended = passes = 0
    while ended < requests:
        before = model.rows, len(adapted)
        ended += sum(isinstance(event, Finished) for _, events in loop.step() for event in events)
        if model.rows > before[0]:
            passes += 1
            assert len(adapted) > before[1]
    assert passes > 2
    assert bool(loop.runner.passes) == (requests > 1)


def test_info_tells_the_threads() -> None:
    if openblas.threads():
        assert f"{blas_threads.describe()}" in run_here("info").stdout
        assert "idle core" in blas_threads.describe()
