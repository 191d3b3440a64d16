"""The model host: every job gets its events, the last one once; loading, unloading and closing."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.request import Completion, CompletionRequest
from akunu_py.decoding.events import Event, Failed, Finished, PrefillProgress, TextDelta
from akunu_py.decoding.generate import answer_jobs
from akunu_py.decoding.generate.job import Job, JobHandle
from akunu_py.decoding.generate.model_host import ModelHost, SleepBlocker
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, ServerGone
from akunu_py.types import GenerateOptions, Stats
from tests.support.jobs import Events, ScriptedAnswer, all_of, end_of, scripted, submit
from tests.support.scripted_loop import ScriptedLoop
from tests.support.tiny_fim import byte_level, write_model

PROMPT = [1, 2, 3, 4, 1, 2, 3]
END = "<|end|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), byte_level([END]), end=END)


@pytest.fixture
def load(directory: Path) -> Callable[[], StepLoop]:
    return lambda: StepLoop(Session(Engine.load(directory)))


@pytest.fixture
def host(load: Callable[[], StepLoop]) -> Iterator[ModelHost]:
    host = ModelHost(load)
    yield host
    assert host.close()


def text_job(prompt: list[int] = PROMPT, count: int = 12) -> Job:
    return answer_jobs.text_job(prompt, GenerateOptions(max_tokens=count))


def text_of(events: Events) -> str:
    return "".join(event.text for event in all_of(events) if isinstance(event, TextDelta))


def reason_of(events: Events) -> str:
    last = end_of(events)
    assert isinstance(last, Finished), last
    return last.reason


def wait_for(states: queue.SimpleQueue[str], state: str) -> None:
    while states.get(timeout=60) != state:
        pass


def test_a_waiting_job_is_cancelled(host: ModelHost) -> None:
    events: Events = queue.SimpleQueue()
    host.submit(text_job(), events.put).cancel()
    host.start()
    assert all_of(events) == [Finished("cancelled", Stats())]


@pytest.mark.parametrize("kind", [PrefillProgress, TextDelta])
def test_a_running_job_is_cancelled_within_a_step(host: ModelHost, kind: type) -> None:
    handles: queue.SimpleQueue[JobHandle] = queue.SimpleQueue()
    events: Events = queue.SimpleQueue()

    def watch(event: Event) -> None:
        events.put(event)
        if isinstance(event, kind):
            handles.get(timeout=60).cancel()

    handles.put(host.submit(text_job(PROMPT * 300, 500), watch))
    host.start()
    *seen, last = all_of(events)
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert sum(isinstance(event, kind) for event in seen) == 1


class Gate:
    """A job that ends when the test opens it, or when it is cancelled."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.events: Events = queue.SimpleQueue()
        self.handle: JobHandle | None = None
        if is_open:
            self.open.set()

    def submit(self, host: ModelHost, **options: Any) -> Gate:
        self.handle = host.submit(self, self.events.put, **options)
        return self

    def __call__(self, session: object) -> ScriptedAnswer:
        def events() -> Iterator[Event | None]:
            self.begun.set()
            while not self.open.is_set() and not (self.handle and self.handle.cancelled):
                yield None
            yield Finished("stop" if self.open.is_set() else "cancelled", Stats())

        return ScriptedAnswer(events())


def test_an_idle_job_runs_alone_and_the_next_job_cancels_it(host: ModelHost) -> None:
    first = Gate().submit(host)
    idle = Gate().submit(host, idle=True)
    host.start()
    assert first.begun.wait(60)
    assert not idle.begun.is_set()
    first.open.set()
    assert reason_of(first.events) == "stop"
    assert idle.begun.wait(60)
    waiting = Gate().submit(host, idle=True)  # of another client
    last = Gate(is_open=True).submit(host)
    assert [reason_of(each.events) for each in (idle, waiting, last)] == [
        "cancelled",
        "cancelled",
        "stop",
    ]
    assert reason_of(Gate(is_open=True).submit(host, idle=True).events) == "stop"


def test_an_idle_job_neither_loads_a_model_nor_is_retried(load: Callable[[], StepLoop]) -> None:
    error, loads = ServerGone("the server is gone"), list[StepLoop]()

    def counted() -> StepLoop:
        loads.append(load())
        return loads[-1]

    def failing(session: Session) -> Iterator[Event]:
        yield Failed(error)

    host = ModelHost(counted)
    host.start()
    assert all_of(submit(host, scripted(failing), idle=True)) == [Failed(error)]
    assert len(all_of(submit(host, scripted(failing), idle=True))) == 1
    assert len(loads) == 1
    assert host.close()


def test_failing_jobs_are_reported_and_harm_no_other_job(host: ModelHost) -> None:
    def failing(session: Session) -> Iterator[Event]:
        yield PrefillProgress(0, 1)
        raise RuntimeError("out of memory")

    def unfinished(session: Session) -> Iterator[Event]:
        yield TextDelta("and")

    def broken(event: Event) -> None:
        raise ValueError("closed")

    host.submit(text_job(PROMPT, 10_000), broken)
    first = submit(host, text_job())
    jobs = [*map(scripted, (failing, unfinished)), text_job([])]
    bad = [submit(host, each) for each in jobs]
    last = submit(host, text_job())
    host.start()
    assert text_of(first) == text_of(last) != ""
    assert all(isinstance(end_of(each), Failed) for each in bad)
    assert host.call(lambda engine: engine.name).result(60)
    with pytest.raises(ZeroDivisionError):
        host.call(lambda engine: 1 // 0).result(60)


@pytest.mark.long
def test_a_failing_step_loop_fails_its_jobs_and_no_later_ones(directory: Path) -> None:
    class FailingOnce(StepLoop):
        failing = True

        def step(self) -> Any:
            if FailingOnce.failing:
                FailingOnce.failing = False
                raise RuntimeError("a fault of the loop")
            return super().step()

    host = ModelHost(lambda: FailingOnce(Session(Engine.load(directory))))
    jobs = [submit(host, text_job()) for _ in range(3)]
    host.start()
    for events in jobs:
        (event,) = all_of(events)
        assert isinstance(event, Failed)
        assert str(event.error) == "a fault of the loop"
    assert reason_of(submit(host, text_job())) == "length"
    assert host.close()


def test_a_failed_load_is_retried_after_growing_delays(load: Callable[[], StepLoop]) -> None:
    now, tries = [0.0], [OSError("no disk"), OSError("no disk")]

    def failing() -> StepLoop:
        if tries:
            raise tries.pop()
        return load()

    host = ModelHost(failing, clock=lambda: now[0])
    host.start()
    for at, works in ((0.0, False), (0.5, False), (1.5, False), (3.0, False), (5.0, True)):
        now[0] = at
        last = end_of(submit(host, text_job()))
        assert isinstance(last, Finished) == works, at
        assert host.state == ("ready" if works else "failed")
    assert host.close()


def test_closing_finishes_running_jobs_and_refuses_later_ones(load: Callable[[], StepLoop]) -> None:
    host, events = ModelHost(load), queue.SimpleQueue[Event]()
    begun = threading.Event()

    def watch(event: Event) -> None:
        events.put(event)
        begun.set()

    host.start()
    host.submit(text_job(PROMPT, 40), watch)
    assert begun.wait(60)
    assert host.close(60)
    assert reason_of(events) == "length"
    assert isinstance(end_of(submit(host, text_job())), Failed)
    with pytest.raises(Exception, match="closing"):
        host.call(lambda engine: engine).result(60)


def test_an_abandoned_step_delays_nothing(load: Callable[[], StepLoop]) -> None:
    """Every job fails at once and only once."""
    begun, may_end, too_late = threading.Event(), threading.Event(), threading.Event()

    def endless(session: Session) -> Iterator[Event | None]:
        begun.set()
        may_end.wait()
        yield TextDelta("too late")
        too_late.set()
        yield Finished("stop", Stats())

    host = ModelHost(load)
    running = submit(host, scripted(endless))
    host.start()
    assert begun.wait(60)
    waiting = submit(host, text_job())
    future = host.call(lambda engine: engine)
    host.abandon(AkunuError("it is gone"))
    for events in (running, waiting, submit(host, text_job())):
        (event,) = all_of(events)
        assert isinstance(event, Failed)
    with pytest.raises(AkunuError, match="it is gone"):
        future.result(timeout=60)
    assert not host.close(finish_s=600.0)  # returns at once
    may_end.set()
    assert too_late.wait(60)
    assert running.empty()


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_the_next_job_loads_it(
    directory: Path, models_frozen: None
) -> None:
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    models: list[weakref.ref[Any]] = []

    def load() -> StepLoop:
        loop = StepLoop(Session(Engine.load(directory)))
        loop.itself = loop  # type: ignore[attr-defined]  # only garbage collection frees it
        models.append(weakref.ref(loop.engine.model))
        return loop

    host = ModelHost(load, idle_s=0.01, save_after_s=0.0, on_state=states.put)
    host.start()
    answers = []
    for _ in range(2):
        wait_for(states, "unloaded")
        assert host.engine is None
        assert models[-1]() is None
        answers.append(text_of(submit(host, text_job())))
    assert answers[0] == answers[1] != ""
    assert host.close()


def test_garbage_collection_ignores_a_loaded_model(models_frozen: None) -> None:
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = ScriptedLoop("scripted", lambda *_: pytest.fail("nothing to complete"))
    assert any(each is loop for each in gc.get_objects())
    host = ModelHost(lambda: loop, on_state=states.put)
    host.start()
    wait_for(states, "ready")
    assert not any(each is loop for each in gc.get_objects())
    assert host.close()


class Saving(ScriptedLoop):
    """Saves three prompt caches and logs it."""

    def __init__(self, log: queue.SimpleQueue[str]) -> None:
        super().__init__("scripted", lambda *_: Completion("", "stop", Stats()))
        self.log, self.limits = log, list[float | None]()

    def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        self.log.put("save")
        self.limits.append(seconds)
        return len(self.limits) < 3

    def close(self) -> None:
        self.log.put("close")


@pytest.mark.long
def test_an_idle_model_saves_all_prompt_caches_then_unloads() -> None:
    log: queue.SimpleQueue[str] = queue.SimpleQueue()
    host = ModelHost(lambda: Saving(log), idle_s=0.01, save_after_s=0.0, on_state=log.put)
    host.start()
    seen: list[str] = []
    while "unloaded" not in seen:
        seen.append(log.get(timeout=60))
    assert seen[:5] == ["loading", "ready", "save", "save", "save"]
    assert seen[-2:] == ["close", "unloaded"]
    host.reload()
    assert [log.get(timeout=60) for _ in range(2)] == ["loading", "ready"]
    assert host.close()


@pytest.mark.parametrize(("save_s", "saved"), [(60.0, 3), (0.0, 0)])
def test_closing_saves_all_prompt_caches_within_the_time_limit(save_s: float, saved: int) -> None:
    loop = Saving(queue.SimpleQueue())
    host = ModelHost(lambda: loop)
    host.start()
    assert host.close(save_s=save_s)
    assert len(loop.limits) == saved
    assert all(limit is not None and 0 < limit <= save_s for limit in loop.limits)


@pytest.mark.long
def test_a_job_without_output_is_retried_once_after_its_server_is_gone() -> None:
    tries: list[CompletionRequest] = []
    job = CompletionJob(CompletionRequest("a"), lambda session: pytest.fail("none"), lambda: None)

    def complete(request: CompletionRequest, *_: object) -> Completion:
        tries.append(request)
        if len(tries) != 2:
            raise ServerGone("it is gone")
        return Completion("b", "stop", Stats())

    host = ModelHost(lambda: ScriptedLoop("scripted", complete))
    host.start()
    assert [type(end_of(submit(host, job))) for _ in range(2)] == [Finished, Failed]
    assert len(tries) == 4
    assert host.close()


@pytest.mark.parametrize("command", [("sleep", "600"), ("/no/such/caffeinate",)])
def test_long_work_keeps_the_machine_awake(command: tuple[str, ...]) -> None:
    now = [0.0]
    awake = SleepBlocker(command, lambda: now[0])
    for begin in (0, 100):
        for seconds in (0, 4, 5, 60):
            now[0] = begin + seconds
            awake.keep_awake()
            assert awake.is_active == (seconds >= 5 and command[0] == "sleep")
        awake.allow_sleep()
        assert not awake.is_active
