"""The scheduler: every job gets its events, the last one once, whatever becomes of the others."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from akunu_py.completion.completion_job import CompletionJob
from akunu_py.completion.request import Completion, CompletionRequest, EndCheck
from akunu_py.decoding.events import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    TextDelta,
)
from akunu_py.decoding.generate import answer_jobs
from akunu_py.decoding.generate.job import Job, JobHandle
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, ServerGone
from akunu_py.types import GenerateOptions, Stats
from tests.support.jobs import ScriptedAnswer, open_jobs, scripted
from tests.support.scripted_loop import ScriptedLoop
from tests.support.tiny_fim import byte_level, write_model

PROMPT = [1, 2, 3, 4, 1, 2, 3]
END = "<|end|>"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), byte_level([END]), end=END)


def text_job(prompt: list[int], count: int = 12) -> Job:
    return answer_jobs.text_job(prompt, GenerateOptions(max_tokens=count))


class Served:
    """A scheduler of the tiny model, and the events of its jobs."""

    def __init__(self, directory: Path, load: Callable[[], StepLoop] | None = None) -> None:
        self.scheduler = ModelHost(load or (lambda: StepLoop(Session(Engine.load(directory)))))

    def submit(self, job: Job) -> tuple[JobHandle, queue.SimpleQueue[Event]]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        return self.scheduler.submit(job, events.put), events


@pytest.fixture
def served(directory: Path) -> Iterator[Served]:
    served = Served(directory)
    yield served
    assert served.scheduler.close()


def all_of(events: queue.SimpleQueue[Event]) -> list[Event]:
    found: list[Event] = []
    while not found or not isinstance(found[-1], Finished | Failed):
        found.append(events.get(timeout=60))
    return found


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


@pytest.mark.long
def test_jobs_submitted_before_the_model_is_loaded_are_answered(served: Served) -> None:
    answers = [served.submit(text_job(PROMPT))[1] for _ in range(3)]
    served.scheduler.start()
    ended = [all_of(each) for each in answers]
    texts = {text_of(each) for each in ended}
    assert len(texts) == 1
    assert texts != {""}
    for *_, last in ended:
        assert isinstance(last, Finished)
        assert last.stats.generated_tokens == 12
    assert open_jobs(served.scheduler) == (0, 0)


def test_a_job_is_cancelled_while_it_waits(served: Served) -> None:
    waiting, events = served.submit(text_job(PROMPT))
    waiting.cancel()
    served.scheduler.start()
    assert all_of(events) == [Finished("cancelled", Stats())]


@pytest.mark.parametrize("kind", [PrefillProgress, TextDelta])
def test_a_job_is_cancelled_within_a_step(served: Served, kind: type) -> None:
    handles: queue.SimpleQueue[JobHandle] = queue.SimpleQueue()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def watch(event: Event) -> None:
        events.put(event)
        if isinstance(event, kind):
            handles.get(timeout=60).cancel()

    handles.put(served.scheduler.submit(text_job(PROMPT * 300, 500), watch))
    served.scheduler.start()
    *seen, last = all_of(events)
    assert isinstance(last, Finished)
    assert last.reason == "cancelled"
    assert sum(isinstance(event, kind) for event in seen) == 1


class Gate:
    """A job that ends when it may, or when it is cancelled."""

    def __init__(self) -> None:
        self.open, self.begun = threading.Event(), threading.Event()
        self.handle: JobHandle | None = None

    @property
    def cancelled(self) -> bool:
        return self.handle is not None and self.handle.cancelled

    def __call__(self, session: Session) -> ScriptedAnswer:
        def events() -> Iterator[Event | None]:
            self.begun.set()
            while not (self.open.is_set() or self.cancelled):
                yield None
            yield Finished("cancelled" if self.cancelled else "stop", Stats())

        return ScriptedAnswer(events())


def reason_of(events: queue.SimpleQueue[Event]) -> str:
    last = all_of(events)[-1]
    assert isinstance(last, Finished)
    return last.reason


def test_an_idle_job_runs_alone_and_the_next_job_cancels_it(served: Served) -> None:
    served.scheduler.start()

    def submit(gate: Gate, *, idle: bool) -> queue.SimpleQueue[Event]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        gate.handle = served.scheduler.submit(gate, events.put, idle=idle)
        return events

    first, second, third = Gate(), Gate(), Gate()
    answer, title = submit(first, idle=False), submit(second, idle=True)
    assert first.begun.wait(60)
    first.open.set()
    assert reason_of(answer) == "stop"
    assert second.begun.wait(60)
    waiting = submit(Gate(), idle=True)  # of another client
    last = submit(third, idle=False)
    assert (reason_of(title), reason_of(waiting)) == ("cancelled", "cancelled")
    third.open.set()
    assert reason_of(last) == "stop"
    fourth = Gate()
    fourth.open.set()
    assert reason_of(submit(fourth, idle=True)) == "stop"


def test_an_idle_job_never_starts_before_another_one(served: Served) -> None:
    gate = Gate()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    _, answer = served.submit(gate)
    served.scheduler.submit(later := Gate(), events.put, idle=True)
    served.scheduler.start()
    assert gate.begun.wait(60)
    assert not later.begun.is_set()
    gate.open.set()
    later.open.set()
    assert (reason_of(answer), reason_of(events)) == ("stop", "stop")


@pytest.mark.parametrize("error", [AkunuError("damaged"), ServerGone("the server is gone")])
def test_an_idle_job_neither_loads_a_model_nor_is_retried(
    directory: Path, error: AkunuError
) -> None:
    loads: list[str] = []

    def load() -> StepLoop:
        loads.append("")
        return StepLoop(Session(Engine.load(directory)))

    def failing(session: Session) -> Iterator[Event]:
        yield Failed(error)

    host = ModelHost(load)
    host.start()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(scripted(failing), events.put, idle=True)
    assert all_of(events) == [Failed(error)]
    host.submit(scripted(failing), events.put, idle=True)
    assert len(all_of(events)) == 1
    assert len(loads) == 1
    assert host.close()


def test_what_fails_is_told_and_harms_nobody(served: Served) -> None:
    def failing(session: Session) -> Iterator[Event]:
        yield PrefillProgress(0, 1)
        raise RuntimeError("out of memory")

    def refused(session: Session) -> Iterator[Event]:
        raise ValueError("no such thing")

    def unfinished(session: Session) -> Iterator[Event]:
        yield TextDelta("and")

    jobs = [
        text_job(PROMPT),
        *map(scripted, (failing, refused, unfinished)),
        text_job([]),
        text_job(PROMPT),
    ]
    answers = [served.submit(each)[1] for each in jobs]
    served.scheduler.start()
    first, *bad, last = [all_of(each) for each in answers]
    assert all(isinstance(each[-1], Failed) for each in bad)
    assert text_of(first) == text_of(last)
    assert served.scheduler.call(lambda engine: engine.name).result(60)
    with pytest.raises(ZeroDivisionError):
        served.scheduler.call(lambda engine: 1 // 0).result(60)


@pytest.mark.long
def test_failing_step_loop_fails_its_jobs_and_no_later_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(loop: StepLoop) -> None:
        raise RuntimeError("a fault of the loop")

    served.scheduler.start()
    with monkeypatch.context() as patch:
        patch.setattr(StepLoop, "step", fail)
        for _, events in [served.submit(text_job(PROMPT)) for _ in range(3)]:
            event = events.get(timeout=60)
            assert isinstance(event, Failed)
            assert str(event.error) == "a fault of the loop"
    _, events = served.submit(text_job(PROMPT))
    while not isinstance(event := events.get(timeout=60), Finished):
        assert not isinstance(event, Failed), event


def test_a_reader_that_fails_wants_no_more(served: Served) -> None:
    def broken(event: Event) -> None:
        raise ValueError("closed")

    served.scheduler.start()
    served.scheduler.submit(text_job(PROMPT, 10_000), broken)
    assert text_of(all_of(served.submit(text_job(PROMPT))[1]))
    assert open_jobs(served.scheduler) == (0, 0)


def test_a_model_that_does_not_load_fails_its_jobs_until_it_does(directory: Path) -> None:
    now, tries = [0.0], [OSError("no disk"), OSError("no disk")]

    def load() -> StepLoop:
        if tries:
            raise tries.pop()
        return StepLoop(Session(Engine.load(directory)))

    served = Served(directory)
    served.scheduler = ModelHost(load, clock=lambda: now[0])
    served.scheduler.start()
    for at, works in ((0.0, False), (0.5, False), (1.5, False), (3.0, False), (5.0, True)):
        now[0] = at
        last = all_of(served.submit(text_job(PROMPT))[1])[-1]
        assert isinstance(last, Finished) == works, at
        assert served.scheduler.state == ("ready" if works else "failed")
    assert served.scheduler.close()


def test_closing_finishes_what_runs_and_nothing_else(directory: Path) -> None:
    served, begun = Served(directory), queue.SimpleQueue[Event]()
    last: list[Event] = []

    def watch(event: Event) -> None:
        last[:] = [event]
        begun.put(event)

    served.scheduler.start()
    served.scheduler.submit(text_job(PROMPT, 40), watch)
    begun.get(timeout=60)
    assert served.scheduler.close(60)
    assert isinstance(last[0], Finished)
    assert last[0].reason == "length"
    assert isinstance(all_of(served.submit(text_job(PROMPT))[1])[0], Failed)
    with pytest.raises(Exception, match="closing"):
        served.scheduler.call(lambda engine: engine).result(60)


def test_a_step_that_never_ends_is_abandoned(directory: Path) -> None:
    """Whoever waits is told why, once, and nothing waits for the step."""
    begun, goes_on = threading.Event(), threading.Event()

    def endless(session: Session) -> Iterator[Event | None]:
        begun.set()
        goes_on.wait()
        yield TextDelta("too late")
        yield Finished("stop", Stats())

    served, why = Served(directory), AkunuError("it is gone")
    running, told = served.submit(scripted(endless))
    served.scheduler.start()
    assert begun.wait(60)
    _, waits = served.submit(text_job(PROMPT))
    future = served.scheduler.call(lambda engine: engine)
    served.scheduler.abandon(why)
    for events in (told, waits, served.submit(text_job(PROMPT))[1]):
        (event,) = all_of(events)
        assert isinstance(event, Failed)
    with pytest.raises(AkunuError, match="it is gone"):
        future.result(timeout=60)
    assert not served.scheduler.close(finish_s=600.0)  # not one second of them
    goes_on.set()
    while any(open_jobs(served.scheduler)):
        time.sleep(0.01)
    assert told.empty()
    assert running.ended


class CyclicLoop(StepLoop):
    """A step loop that only garbage collection frees."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.itself = self


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_comes_back_by_itself(
    directory: Path, monkeypatch: pytest.MonkeyPatch, models_frozen: None
) -> None:
    monkeypatch.setattr("akunu_py.decoding.generate.model_host._SAVE_AFTER_S", 0.0)
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    engines: list[weakref.ref[Engine]] = []

    def load() -> StepLoop:
        engine = Engine.load(directory)
        engines.append(weakref.ref(engine.model))
        return CyclicLoop(Session(engine))

    served = Served(directory)
    served.scheduler = ModelHost(load, idle_s=0.01, on_state=states.put)
    served.scheduler.start()
    answers = []
    for _ in range(2):
        while states.get(timeout=60) != "unloaded":
            pass
        assert served.scheduler.engine is None
        assert engines[-1]() is None
        answers.append(text_of(all_of(served.submit(text_job(PROMPT))[1])))
    assert answers[0] == answers[1] != ""
    assert served.scheduler.close()


def test_garbage_collection_ignores_a_loaded_model(models_frozen: None) -> None:
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    loop = ScriptedLoop("scripted", lambda *_: pytest.fail("nothing to complete"))
    assert any(each is loop for each in gc.get_objects())
    host = ModelHost(lambda: loop, on_state=states.put)
    host.start()
    while states.get(timeout=60) != "ready":
        pass
    assert not any(each is loop for each in gc.get_objects())
    assert host.close()


@pytest.mark.long
def test_an_idle_model_saves_all_prompt_caches_then_unloads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("akunu_py.decoding.generate.model_host._SAVE_AFTER_S", 0.0)
    log: queue.SimpleQueue[str] = queue.SimpleQueue()
    left = [True, True, False]

    class Saving(ScriptedLoop):
        def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
            log.put("save")
            return bool(left) and left.pop(0)

        def close(self) -> None:
            log.put("close")

    host = ModelHost(
        lambda: Saving("scripted", lambda request, ended, on_text: Completion("", "stop", Stats())),
        idle_s=0.01,
        on_state=log.put,
    )
    host.start()
    seen: list[str] = []
    while "unloaded" not in seen:
        seen.append(log.get(timeout=60))
    assert seen[:5] == ["loading", "ready", "save", "save", "save"]
    assert seen[-2:] == ["close", "unloaded"]
    host.reload()
    assert [log.get(timeout=60) for _ in range(2)] == ["loading", "ready"]
    assert host.close()


@pytest.mark.long
def test_a_job_without_output_begins_again_after_its_server_is_gone() -> None:
    tries: list[str] = []
    job = CompletionJob(CompletionRequest("a"), lambda session: pytest.fail("none"), lambda: None)

    def complete(
        request: CompletionRequest, ended: EndCheck, on_text: Callable[[str], None]
    ) -> Completion:
        tries.append("complete")
        if len(tries) in (1, 3, 4):
            raise ServerGone("it is gone")
        return Completion("b", "stop", Stats())

    host = ModelHost(lambda: ScriptedLoop("scripted", complete))
    host.start()
    for expected in (Finished, Failed):  # the second one fails twice
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        host.submit(job, events.put)
        assert isinstance(all_of(events)[-1], expected)
    assert len(tries) == 4
    assert host.close()


@pytest.mark.parametrize(("save_s", "saved"), [(60.0, 3), (0.0, 0)])
def test_closing_saves_all_prompt_caches_within_the_time_limit(save_s: float, saved: int) -> None:
    """Another model needs the memory, but the next prompts of this one shall not start again."""
    limits: list[float | None] = []

    class Saving(ScriptedLoop):
        def save_idle(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
            limits.append(seconds)
            return len(limits) < 3

    host = ModelHost(lambda: Saving("scripted", lambda *_: pytest.fail("no completion")))
    host.start()
    assert host.close(save_s=save_s)
    assert len(limits) == saved
    assert all(limit is not None and 0 < limit <= save_s for limit in limits)
