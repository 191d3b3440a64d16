"""Slow work of a request that no decode pass has to wait for: it runs in other threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding import learned_state
from akunu_py.decoding.constraint import matcher
from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.annotated_answer import AnnotatedAnswerJob
from akunu_py.decoding.generate.answer_jobs import chat_job, text_job
from akunu_py.decoding.generate.job import BeginJob, Job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.learned_state import LearnedState
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.model.tokens import TokenCodec
from akunu_py.decoding.text.prompt_rewrites import PromptRewrites
from akunu_py.errors import UsageError
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions
from tests.support.engines import altered
from tests.support.families import build
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("own_directories")

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
# (class or module, name): renders a turn, and writes or reads files.
SLOW: list[tuple[Any, str]] = [
    (TokenCodec, "stable_prefix"),
    (TokenCodec, "encode_chat"),
    (PromptRewrites, "of"),
    (AnswerCache, "dump"),
    (AnswerCache, "load"),
    (learned_state, "_append"),
    (learned_state, "_write"),
    (learned_state, "_records"),
    (learned_state, "write_atomically"),
]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A model that needs checkpoints."""
    tiny = load_tiny(tmp_path / "model", ["<|end|>"])
    monkeypatch.setattr(tiny.tokens.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(tiny.tokens.tokenizer, "has_chat_template", True)
    return altered(tiny, model=build("llama-sliding"), needs_checkpoints=True, vocabulary=96)


def wait_for_end(events: queue.SimpleQueue[Event]) -> None:
    while not isinstance(event := events.get(timeout=60), Finished):
        assert not isinstance(event, Failed), event


def shown_job(engine: Engine, messages: list[Message], options: GenerateOptions) -> Job:
    return AnnotatedAnswerJob(messages, options)


@pytest.mark.long
@pytest.mark.parametrize("job", [chat_job, shown_job])
def test_the_models_thread_renders_no_turn_and_writes_no_file(
    job: Callable[[Engine, list[Message], GenerateOptions], Job],
    engine: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, set[str]] = {}

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return function(*args, **options)

        return call

    learned = LearnedState(tmp_path, "t", "l", answer_cache=True)
    monkeypatch.setattr(learned_state, "_JOURNAL_TOKENS", 20)
    for place, name in SLOW:
        monkeypatch.setattr(place, name, noted(name, getattr(place, name)))
    host = ModelHost(lambda: StepLoop(Session(engine, learned)))
    host.start()
    for number in range(3):
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        messages = [Message("user", f"{number}timesthesame")]
        host.submit(job(engine, messages, GenerateOptions(12)), events.put)
        wait_for_end(events)
    assert host.close()
    learned.flush()
    assert {"stable_prefix", "of", "dump", "_append", "_write"} <= threads.keys()
    assert {name: found for name, found in threads.items() if "model" in found} == {}


def test_what_an_answer_teaches_is_on_disk_when_the_host_is_closed(
    engine: Engine, tmp_path: Path
) -> None:
    learned = LearnedState(tmp_path, "t", "l", answer_cache=True)
    host = ModelHost(lambda: StepLoop(Session(engine, learned)))
    host.start()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(chat_job(engine, [Message("user", "Hi")], GenerateOptions(12)), events.put)
    wait_for_end(events)
    assert host.close()
    again = LearnedState(tmp_path, "t", "l", answer_cache=True)
    assert again.answer_cache is not None
    assert again.answer_cache.total >= 12


class SlowJob:
    """A job whose preparation ends when the test says so."""

    def __init__(self, job: BeginJob) -> None:
        self.job = job
        self.begun, self.go_on = threading.Event(), threading.Event()

    def prepare(self, engine: Engine) -> BeginJob:
        self.begun.set()
        assert self.go_on.wait(60)
        return self.job


def test_preparing_a_job_delays_no_other(engine: Engine) -> None:
    host = ModelHost(lambda: StepLoop(Session(engine)))
    host.start()
    ends: dict[str, queue.SimpleQueue[Event]] = {
        name: queue.SimpleQueue() for name in ("first", "slow", "cancelled", "second")
    }

    def job(text: str) -> BeginJob:
        return chat_job(engine, [Message("user", text)], GenerateOptions(12))

    host.submit(job("first"), ends["first"].put)
    slow, cancelled = SlowJob(job("slow")), SlowJob(job("cancelled"))
    host.submit(slow, ends["slow"].put)
    handle = host.submit(cancelled, ends["cancelled"].put)
    wait_for_end(ends["first"])
    assert slow.begun.wait(60)
    assert cancelled.begun.wait(60)
    handle.cancel()
    slow.go_on.set()
    wait_for_end(ends["slow"])
    host.submit(job("second"), ends["second"].put)
    cancelled.go_on.set()
    wait_for_end(ends["second"])
    end = ends["cancelled"].get(timeout=60)
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    assert host.close()


def test_job_that_cannot_be_prepared_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.tokens.tokenizer, "chat_template", "{{ raise_exception('No.') }}")
    host = ModelHost(lambda: StepLoop(Session(engine)))
    host.start()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    host.submit(AnnotatedAnswerJob([Message("user", "Hi")], GenerateOptions(12)), events.put)
    failed = events.get(timeout=60)
    assert isinstance(failed, Failed)
    assert "No." in str(failed.error)
    host.submit(text_job([1, 2, 3], GenerateOptions(12)), events.put)
    wait_for_end(events)
    assert host.close()


@pytest.mark.parametrize("tools", [False, True])
def test_the_models_thread_compiles_no_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools: bool
) -> None:
    """Neither the grammar of an answer nor those of its drafts, for a schema and for tools."""
    engine = load_tiny(tmp_path / "model", ["<|end|>"])
    monkeypatch.setattr(engine.tokens.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(engine.tokens.tokenizer, "has_chat_template", True)
    threads: list[str] = []
    compile_grammar, lark = matcher._compile, matcher._grammar

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            threads.append(threading.current_thread().name)
            return function(*args)

        return call

    monkeypatch.setattr(matcher, "_compile", noted(compile_grammar))
    monkeypatch.setattr(matcher, "_grammar", noted(lark))
    schema = '{"type": "object", "properties": {"off the path": {"type": "integer"}}}'
    constraint = Constraint("json_schema", schema)
    if tools:
        likely = ('start: "ab"', 'start: "abc"')
        constraint = Constraint("grammar", 'start: "abc" | "abcd"', likely=likely)
    options = GenerateOptions(12, sampling=SamplingOptions(constraint=constraint))
    host = ModelHost(lambda: StepLoop(Session(engine)))
    host.start()
    messages = [Message("user", "Hi")]
    for job in (AnnotatedAnswerJob(messages, options), chat_job(engine, messages, options)):
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        host.submit(job, events.put)
        wait_for_end(events)
    assert host.close()
    assert len(threads) == 6  # the grammar and two for drafts, once
    assert "model" not in threads


def test_a_grammar_is_compiled_once_for_all_who_ask_at_the_same_time() -> None:
    started, compiled_now = threading.Event(), threading.Event()
    counted: list[int] = []

    def work() -> Any:
        counted.append(1)
        started.set()
        assert compiled_now.wait(60)
        return object(), ""

    futures = [matcher.compiled("one", work) for _ in range(3)]
    assert started.wait(60)
    compiled_now.set()
    assert len({id(each.result(60)[0]) for each in futures}) == len(counted) == 1


def test_the_least_recently_used_grammar_is_forgotten_and_a_failed_one_at_once() -> None:
    counted: list[str] = []

    def get(name: str) -> None:
        def work() -> Any:
            counted.append(name)
            return object(), ""

        matcher.compiled(name, work).result(60)

    for name in ("first", *map(str, range(matcher._MOST - 1)), "first", "other", "first", "0"):
        get(name)
    assert counted.count("first") == 1
    assert counted.count("0") == 2

    def fail() -> Any:
        raise UsageError("no")

    for _ in range(2):
        assert isinstance(matcher.compiled("bad", fail).exception(60), UsageError)
        assert "bad" not in matcher._grammars
