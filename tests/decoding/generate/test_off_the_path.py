"""Slow work of a request runs in helper threads, where no decode pass waits for it."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from akunu_py import files
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
from tests.support.jobs import Events, end_of, submit
from tests.support.tiny_fim import byte_level, write_model

pytestmark = pytest.mark.usefixtures("own_directories")

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
HI = [Message("user", "Hi")]
OPTIONS = GenerateOptions(12)


def load(directory: Path, template: str = TEMPLATE) -> Engine:
    write_model(directory, byte_level(["<|end|>"]), end="<|end|>")
    (directory / "chat_template.jinja").write_text(template)
    return Engine.load(directory)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """A model that needs checkpoints."""
    model = build("llama-sliding")
    return altered(load(tmp_path / "model"), model=model, needs_checkpoints=True, vocabulary=96)


def started(engine: Engine, learned: LearnedState | None = None) -> ModelHost:
    host = ModelHost(lambda: StepLoop(Session(engine, learned)))
    host.start()
    return host


def answer(host: ModelHost, job: Job) -> Event:
    return end_of(submit(host, job))


@contextmanager
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
@pytest.mark.parametrize("job", [chat_job, lambda engine, *args: AnnotatedAnswerJob(*args)])
def test_the_models_thread_renders_no_turn_and_writes_no_file(
    job: Callable[[Engine, list[Message], GenerateOptions], Job], engine: Engine, tmp_path: Path
) -> None:
    learned = LearnedState(tmp_path, "t", "l", answer_cache=True, journal_tokens=20)
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
    engine = load(tmp_path / "model")
    with threads_of(matcher.lark) as threads:
        host = started(engine)
        for job in (AnnotatedAnswerJob(HI, options), chat_job(engine, HI, options)):
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


def test_preparing_a_job_delays_no_other(engine: Engine) -> None:
    """Not even a job that is cancelled while it is prepared."""
    host, job = started(engine), text_job([1, 2, 3], OPTIONS)
    begun, may_end = threading.Event(), threading.Event()

    class SlowJob:
        def prepare(self, engine: Engine) -> BeginJob:
            begun.set()
            assert may_end.wait(60)
            return job

    slow, cancelled = submit(host, SlowJob()), Events()
    handle = host.submit(SlowJob(), cancelled.put)
    assert begun.wait(60)
    assert isinstance(answer(host, job), Finished)
    handle.cancel()
    may_end.set()
    for events, reason in ((slow, "length"), (cancelled, "cancelled")):
        end = end_of(events)
        assert isinstance(end, Finished)
        assert end.reason == reason
    assert host.close()


def test_a_job_that_cannot_be_prepared_fails_alone(tmp_path: Path) -> None:
    host = started(load(tmp_path / "model", "{{ raise_exception('No.') }}"))
    failed = answer(host, AnnotatedAnswerJob(HI, OPTIONS))
    assert isinstance(failed, Failed)
    assert "No." in str(failed.error)
    assert isinstance(answer(host, text_job([1, 2, 3], OPTIONS)), Finished)
    assert host.close()


def test_the_least_recently_used_grammar_is_forgotten_and_a_failed_one_at_once() -> None:
    compiled: list[str] = []

    def get(name: str, error: Exception | None = None) -> BaseException | None:
        def work() -> Any:
            compiled.append(name)
            if error is not None:
                raise error
            return object(), ""

        return matcher.compiled(name, work).exception(60)

    for name in ("first", *map(str, range(31)), "first", "other", "first", "0"):
        assert get(name) is None
    assert compiled.count("first") == 1
    assert compiled.count("0") == 2
    assert isinstance(get("bad", UsageError("no")), UsageError)
    assert get("bad") is None
