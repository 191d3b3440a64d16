"""The model host: every job gets its events, the last one once; loading, unloading and closing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import queue
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest

from akunu_py import files
from akunu_py.completion.completion_queue import CompletionJob
from akunu_py.completion.completion_request import Completion, CompletionRequest
from akunu_py.engine.answer import ChatJob, chat_job
from akunu_py.engine.constraint import matcher
from akunu_py.engine.drafters import learned_state
from akunu_py.engine.drafters.learned_state import LearnedState
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Failed, Finished, PrefillProgress, TextDelta
from akunu_py.engine.host import ModelHost, SleepBlocker
from akunu_py.engine.job import BeginJob, Job, JobHandle
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.tokens import TokenCodec
from akunu_py.engine.text.prompt_rewrites import PromptRewrites
from akunu_py.errors import AkunuError, ServerGone
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions, Stats
from tests.support.command import until
from tests.support.engines import altered
from tests.support.families import build
from tests.support.jobs import Events, ScriptedAnswer, all_of, end_of, open_jobs, scripted, submit
from tests.support.jobs import text_job as job_of
from tests.support.scripted_loop import ScriptedLoop
from tests.support.tiny_fim import load_tiny

PROMPT = [1, 2, 3, 4, 1, 2, 3]
END = "<|end|>"


@pytest.fixture
def load(tiny: Engine) -> Callable[[], StepLoop]:
    return lambda: StepLoop(Engine.load(tiny.path))


@pytest.fixture
def host(load: Callable[[], StepLoop]) -> Iterator[ModelHost]:
    host = ModelHost(load)
    yield host
    assert host.close()


def text_job(prompt: list[int] = PROMPT, count: int = 12) -> BeginJob:
    return job_of(prompt, GenerateOptions(max_tokens=count))


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

    def __call__(self, loop: object) -> ScriptedAnswer:
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
    reasons = [reason_of(each.events) for each in (idle, waiting, last)]
    assert reasons == ["cancelled", "cancelled", "stop"]
    assert reason_of(Gate(is_open=True).submit(host, idle=True).events) == "stop"


def test_an_idle_job_neither_loads_a_model_nor_is_retried(load: Callable[[], StepLoop]) -> None:
    error, counted = ServerGone("the server is gone"), Mock(side_effect=load)

    def failing(loop: StepLoop) -> Iterator[Event]:
        yield Failed(error)

    host = ModelHost(counted)
    host.start()
    assert all_of(submit(host, scripted(failing), idle=True)) == [Failed(error)]
    assert len(all_of(submit(host, scripted(failing), idle=True))) == 1
    assert counted.call_count == 1
    assert host.close()


def test_failing_jobs_are_reported_and_harm_no_other_job(host: ModelHost) -> None:
    def failing(loop: StepLoop) -> Iterator[Event]:
        yield PrefillProgress(0, 1)
        raise RuntimeError("out of memory")

    def unfinished(loop: StepLoop) -> Iterator[Event]:
        yield TextDelta("and")

    host.submit(text_job(PROMPT, 10_000), Mock(side_effect=ValueError("closed")))
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
def test_a_failing_step_loop_fails_its_jobs_and_no_later_ones(tiny: Engine) -> None:
    class FailingOnce(StepLoop):
        failing = True

        def step(self, jobs: Sequence[JobHandle]) -> Any:
            if FailingOnce.failing:
                FailingOnce.failing = False
                raise RuntimeError("a fault of the loop")
            return super().step(jobs)

    host = ModelHost(lambda: FailingOnce(Engine.load(tiny.path)))
    jobs = [submit(host, text_job()) for _ in range(3)]
    host.start()
    for events in jobs:
        (event,) = all_of(events)
        assert isinstance(event, Failed)
        assert str(event.error) == "a fault of the loop"
    assert reason_of(submit(host, text_job())) == "length"
    assert host.close()


def test_a_failed_load_is_retried_after_growing_delays_or_an_unload(
    load: Callable[[], StepLoop],
) -> None:
    now, tries = [0.0], [OSError("no disk"), OSError("no disk")]

    def failing() -> StepLoop:
        if tries:
            raise tries.pop()
        return load()

    host = ModelHost(failing, clock=lambda: now[0])
    host.start()
    for at, works in ((0.0, False), (0.5, False), (1.5, False), (3.0, False), (3.1, True)):
        now[0] = at
        if works:
            host.unload().result(60)
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

    def endless(loop: StepLoop) -> Iterator[Event | None]:
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
    tiny: Engine, models_frozen: None
) -> None:
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    models: list[weakref.ref[Any]] = []

    def load() -> StepLoop:
        loop = StepLoop(Engine.load(tiny.path))
        loop.itself = loop  # type: ignore[attr-defined]  # only garbage collection frees it
        models.append(weakref.ref(loop.engine.model))
        return loop

    host = ModelHost(load, idle_s=0.01, on_state=states.put)
    host.save_after_s = 0.0
    host.start()
    wait_for(states, "unloaded")
    assert host.engine is None
    assert models[-1]() is None
    expected = StepLoop(tiny).answer(PROMPT, GenerateOptions(max_tokens=12)).text
    assert text_of(submit(host, text_job())) == expected != ""
    wait_for(states, "unloaded")
    assert models[-1]() is None
    assert host.close()


@pytest.mark.long
def test_a_load_freezes_no_request_of_another_model(models_frozen: None) -> None:
    """Garbage collection would not free it. Once the other model is idle, it ignores both."""
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    running, may_end = threading.Event(), threading.Event()

    def complete(*_: object) -> Completion:
        running.set()
        assert may_end.wait(60)
        return Completion("", "stop", Stats())

    busy = ModelHost(lambda: ScriptedLoop("busy", complete))
    busy.save_after_s = 0.0
    busy.start()
    job = CompletionJob(CompletionRequest("a"), lambda loop: pytest.fail("none"), lambda: None)
    events = submit(busy, job)
    assert running.wait(60)
    loop = ScriptedLoop("other", complete)
    other = ModelHost(lambda: loop, on_state=states.put)
    other.save_after_s = 0.01
    other.start()
    wait_for(states, "ready")
    assert id(job) in map(id, gc.get_objects())
    may_end.set()
    assert isinstance(end_of(events), Finished)
    assert busy.close()
    other.call(lambda engine: None).exception(60)
    until(lambda: gc.get_freeze_count() and id(loop) not in map(id, gc.get_objects()))
    assert other.close()


class Saving(ScriptedLoop):
    """Saves three prompt caches and logs it."""

    def __init__(self, log: queue.SimpleQueue[str]) -> None:
        super().__init__("scripted", lambda *_: Completion("", "stop", Stats()))
        self.log, self.limits = log, list[float | None]()

    def idle_step(self, stopped: Callable[[], bool], seconds: float | None) -> bool:
        self.log.put("save")
        self.limits.append(seconds)
        return len(self.limits) < 3

    def close(self) -> None:
        self.log.put("close")


@pytest.mark.long
def test_an_idle_model_saves_all_prompt_caches_then_unloads() -> None:
    log: queue.SimpleQueue[str] = queue.SimpleQueue()
    host = ModelHost(lambda: Saving(log), idle_s=0.01, on_state=log.put)
    host.save_after_s = 0.0
    host.start()
    seen: list[str] = []
    while "unloaded" not in seen:
        seen.append(log.get(timeout=60))
    assert seen[:5] == ["loading", "ready", "save", "save", "save"]
    assert seen[-2:] == ["close", "unloaded"]
    host.reload()
    assert [log.get(timeout=60) for _ in range(2)] == ["loading", "ready"]
    assert host.close()


def test_unload_waits_for_submitted_jobs_and_a_later_job_loads_again(
    load: Callable[[], StepLoop],
) -> None:
    states: queue.SimpleQueue[str] = queue.SimpleQueue()
    host = ModelHost(load, on_state=states.put)
    host.unload().result(60)  # nothing to unload
    gate = Gate().submit(host)
    host.start()
    assert gate.begun.wait(60)
    unloaded, second = host.unload(), Gate(is_open=True).submit(host)
    gate.open.set()
    unloaded.result(60)
    assert (host.state, host.facts) == ("unloaded", None)
    third = Gate(is_open=True).submit(host)
    assert [reason_of(each.events) for each in (gate, second, third)] == ["stop"] * 3
    assert host.close()
    found = [states.get(timeout=60) for _ in range(6)]
    assert found == ["loading", "ready", "unloaded"] * 2
    host.unload().result(60)


@pytest.mark.parametrize("release", range(2))
def test_an_unload_at_any_moment_waits_for_running_jobs(
    load: Callable[[], StepLoop], release: int
) -> None:
    """Also between the thread's look at the requested unloads and what it does then."""
    states, gate, unloads = list[str](), Gate(), list[Future[None]]()
    releases = itertools.count()

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *_: object) -> None:
            lock.release()
            if gate.begun.is_set() and next(releases) == release:
                unloads.append(host.unload())

    host, lock = ModelHost(load, on_state=states.append), threading.Lock()
    host._lock = Lock()  # type: ignore[assignment]
    host.start()
    gate.submit(host)
    until(lambda: unloads)
    host.call(lambda _: gate.open.set()).result(60)
    assert reason_of(gate.events) == "stop"
    unloads[0].result(60)
    assert states == ["loading", "ready", "unloaded"]
    assert host.close()


def test_a_job_submitted_while_the_model_is_unloaded_loads_it_again(
    load: Callable[[], StepLoop],
) -> None:
    """The thread looked at the waiting jobs before, and found none."""
    host, late = ModelHost(load), list[Gate]()

    def submit(state: str) -> None:
        if state == "unloaded" and not late:
            late.append(Gate(is_open=True).submit(host))

    host.on_state = submit
    host.start()
    host.unload().result(60)
    assert reason_of(late[0].events) == "stop"
    assert host.close()


def test_reloading_an_unloaded_model_loads_it_once(load: Callable[[], StepLoop]) -> None:
    """Also if a job waits for it."""
    ends: Iterator[Event] = iter([Failed(ServerGone("gone")), Finished("stop", Stats())])

    counted = Mock(side_effect=load)
    host = ModelHost(counted)

    def on_state(state: str) -> None:
        if state == "unloaded" and counted.call_count == 1:
            host.reload()

    host.on_state = on_state
    job = submit(host, scripted(lambda loop: ends))
    host.start()
    assert reason_of(job) == "stop"
    host.call(lambda engine: None).result(60)
    assert counted.call_count == 2
    assert host.close()


@pytest.mark.parametrize(("save_s", "saved"), [(60.0, 3), (0.0, 0)])
def test_unloading_saves_all_prompt_caches_within_the_limit(save_s: float, saved: int) -> None:
    loop = Saving(queue.SimpleQueue())
    host = ModelHost(lambda: loop)
    host.start()
    host.unload(save_s).result(60)
    assert host.close()
    assert [loop.log.get() for _ in range(saved + 1)] == ["save"] * saved + ["close"]
    assert all(limit is not None and 0 < limit <= save_s for limit in loop.limits)


@pytest.mark.long
def test_a_job_without_output_is_retried_once_after_its_server_is_gone() -> None:
    tries: list[CompletionRequest] = []
    job = CompletionJob(CompletionRequest("a"), lambda loop: pytest.fail("none"), lambda: None)

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
            assert (awake.process is not None) == (seconds >= 5 and command[0] == "sleep")
        awake.allow_sleep()
        assert awake.process is None


pytestmark = pytest.mark.usefixtures("own_directories")

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = [Message("user", "Hi")]
OPTIONS = GenerateOptions(12)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A model that needs checkpoints."""
    loaded = load_tiny(tmp_path / "model", [END], template=TEMPLATE)
    return altered(loaded, model=build("llama-sliding"), needs_checkpoints=True, vocabulary=96)


def started(engine: Engine, learned: LearnedState | None = None) -> ModelHost:
    host = ModelHost(lambda: StepLoop(engine, learned))
    host.start()
    return host


def answer(host: ModelHost, job: Job) -> Event:
    return end_of(submit(host, job))


@contextlib.contextmanager
def threads_of(*functions: Any) -> Iterator[dict[str, list[str]]]:
    """Record which threads call the functions: this one, and those started from here on."""
    names = {getattr(each, "__wrapped__", each).__code__: each.__name__ for each in functions}
    found = defaultdict[str, list[str]](list)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in names:
            found[names[frame.f_code]].append(threading.current_thread().name)

    for each in (threading, sys):
        each.setprofile(note)
    try:
        yield found
    finally:
        for each in (threading, sys):
            each.setprofile(None)


@pytest.mark.long
@pytest.mark.parametrize("job", [chat_job, lambda engine, *args: ChatJob(*args)])
def test_the_models_thread_renders_no_turn_and_writes_no_file(
    job: Callable[[Engine, list[Message], GenerateOptions], Job], engine: Engine, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(learned_state, "JOURNAL_BYTES", 80)
    learned = LearnedState(tmp_path, "t", "l", answer_cache=True)
    slow = [TokenCodec.stable_prefix, TokenCodec.encode_chat, PromptRewrites.of, AnswerCache.dump]
    disk = [files.locked, files.read_bounded, files.write_atomically]
    with threads_of(*slow, *disk) as threads:
        host = started(engine, learned)
        for number in range(3):
            messages = [Message("user", f"{number}timesthesame")]
            assert isinstance(answer(host, job(engine, messages, OPTIONS)), Finished)
        assert host.close()
        learned.flush()
    assert {"stable_prefix", "of", "dump", "locked", "write_atomically"} <= threads.keys()
    assert [name for name, found in threads.items() if "model" in found] == []


def test_the_models_thread_compiles_no_grammar(tmp_path: Path) -> None:
    """Each grammar, that of the answer and two for drafts, is compiled once in a helper thread."""
    constraint = Constraint(
        "grammar", 'start: "abc" | "abcd"', likely=('start: "ab"', 'start: "abc"')
    )
    options = GenerateOptions(12, sampling=SamplingOptions(constraint=constraint))
    engine = load_tiny(tmp_path / "model", [END], template=TEMPLATE)
    with threads_of(matcher.lark) as threads:
        host = started(engine)
        for job in (ChatJob(HI, options), chat_job(engine, HI, options)):
            assert isinstance(answer(host, job), Finished)
        assert host.close()
    assert threads == {"lark": ["grammar"] * 3}


def test_learned_answers_are_on_disk_once_the_host_is_closed(
    engine: Engine, tmp_path: Path
) -> None:
    host = started(engine, LearnedState(tmp_path, "t", "l", answer_cache=True))
    answer(host, chat_job(engine, HI, OPTIONS))
    assert host.close()
    again = LearnedState(tmp_path, "t", "l", answer_cache=True)
    assert again.answer_cache is not None
    assert again.answer_cache.total >= 12


class SlowJob:
    """A job whose preparation takes until a lock is released."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def prepare(self, engine: Engine) -> BeginJob:
        with self.lock:
            return text_job()


def test_preparing_a_job_delays_no_other(engine: Engine) -> None:
    """Not even a job that is cancelled while it is prepared."""
    host, job = started(engine), SlowJob()
    slow, cancelled = submit(host, job), Events()
    handle = host.submit(job, cancelled.put)
    assert isinstance(answer(host, text_job()), Finished)
    handle.cancel()
    job.lock.release()
    assert (reason_of(slow), reason_of(cancelled)) == ("length", "cancelled")
    assert host.close()


def test_a_job_that_is_prepared_ends_before_the_host_closes(engine: Engine) -> None:
    host, job = started(engine), SlowJob()
    events = submit(host, job)
    until(lambda: open_jobs(host) == (0, 1))
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(host.close, 60.0)
        job.lock.release()
        assert closed.result(60)
    assert reason_of(events) in ("length", "cancelled")


def test_a_job_that_cannot_be_prepared_fails_alone(tmp_path: Path) -> None:
    host = started(load_tiny(tmp_path, [END], template="{{ raise_exception('No.') }}"))
    failed = answer(host, ChatJob(HI, OPTIONS))
    assert isinstance(failed, Failed)
    assert "No." in str(failed.error)
    assert isinstance(answer(host, text_job()), Finished)
    assert host.close()


@pytest.mark.parametrize("broken", ["close", "loading", "ready", "unloaded"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_the_thread_ends_all_requests_and_later_ones_fail_at_once(
    tiny: Engine, broken: str
) -> None:
    """Whichever method or callback fails."""

    def load() -> StepLoop:
        loop = StepLoop(Engine.load(tiny.path))
        if broken == "close":
            loop.close = Mock(side_effect=RuntimeError("close is broken"))  # type: ignore[method-assign]
        return loop

    def on_state(state: str) -> None:
        if state == broken:
            raise RuntimeError(f"{state} is broken")

    host = ModelHost(load, on_state=on_state)
    waiting = [submit(host, text_job()) for _ in range(2)]
    host.start()
    if broken in ("close", "unloaded"):
        assert all(isinstance(end_of(each), Finished) for each in waiting)
        host.reload()
    else:
        assert all(isinstance(end_of(each), Failed) for each in waiting)
    host._thread.join(60)
    ended = end_of(submit(host, text_job()))
    assert isinstance(ended, Failed)
    assert "broken" in str(ended.error)
    assert not host.close()
