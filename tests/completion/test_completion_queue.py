"""The thread that completes: superseding, cancelling, failures, and how many passes they cost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.alternatives import submit_with_alternatives
from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import (
    CompletionFailure,
    CompletionQueue,
    QueueOptions,
    Ticket,
)
from akunu_py.completion.request import Completion, CompletionRequest, EndCheck
from akunu_py.decoding.generate import memory_guard, model_host
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.errors import UsageError
from akunu_py.types import Stats
from tests.support.command import until
from tests.support.complete import complete
from tests.support.scripted_loop import ScriptedLoop
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
PREFIX = "x = [[[["  # brackets that the random model never closes: it continues to max_tokens


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(Path(tmp_path_factory.mktemp("tiny")), sentence_piece([END]), end=END)


def test_on_battery_nothing_is_made_ahead() -> None:
    """Neither a prefill nor the next completion; what is asked for is completed."""
    made: list[CompletionRequest] = []

    def complete(request: CompletionRequest, *_: Any) -> Completion:
        made.append(request)
        return Completion("text", "stop", Stats())

    options = QueueOptions(pause_s=0.0, saves_power=lambda: True)
    queue = CompletionQueue(lambda: ScriptedLoop("x", complete), options)
    queue.start()
    assert queue.complete(CompletionRequest("a", max_tokens=0)).finish_reason == "cancelled"
    assert queue.complete(CompletionRequest("b")).text == "text"
    assert queue.complete(CompletionRequest("c")).text == "text"
    queue.close(drain=True)
    assert [request.prefix for request in made] == ["b", "c"]


def test_alternatives_come_together_and_supersede_nothing() -> None:
    """Repeated and empty ones are dropped. A request that comes meanwhile is served instead."""
    texts = iter(["a", "b", "a", " ", "b", "c"])
    done: dict[str, Completion | CompletionFailure] = {}
    newer = Ticket(CompletionRequest("newer"), lambda its: done.update(newer=its), "buffer")

    def complete(request: CompletionRequest, ended: EndCheck, _: Any) -> Completion:
        if request.prefix == "cut off" and request.temperature:
            queue.submit(newer)
            return Completion("", ended() or "stop", Stats())
        text = "new" if request.prefix == "newer" else next(texts)
        return Completion(text, "stop", Stats())

    queue = CompletionQueue(lambda: ScriptedLoop("x", complete))
    queue.start()
    for prefix, count in (("whole", 4), ("cut off", 2)):
        ticket = Ticket(CompletionRequest(prefix), partial(done.__setitem__, prefix), "buffer")
        submit_with_alternatives(queue, ticket, count)
        until(partial(done.__contains__, prefix))
    queue.close(drain=True)
    whole, cut_off, last = done["whole"], done["cut off"], done["newer"]
    assert isinstance(whole, Completion)
    assert isinstance(cut_off, Completion)
    assert isinstance(last, Completion)
    assert (whole.text, whole.alternatives) == ("a", ("b",))
    assert (cut_off.finish_reason, last.text) == ("cancelled", "new")


class Host:
    """A thread with a tiny model, and what came of the requests; forward passes are counted."""

    def __init__(self, directory: Path, break_it: Callable[[], None] = lambda: None) -> None:
        self.done: dict[str, Completion | CompletionFailure] = {}
        self.order: list[str] = []
        self.passes_when: dict[str, int] = {}
        self.passes = 0
        self.states: list[str] = []
        self.changed = threading.Condition()
        self._directory, self._break_it = directory, break_it
        self.queue = CompletionQueue(self._load, on_state=self.states.append)

    def _load(self) -> Completer:
        self._break_it()
        completer = Completer(Engine.load(self._directory))
        target = completer.session.target
        forward = target.forward

        def count(tokens: Any, wanted: int | None = None) -> Any:
            self.passes += 1
            return forward(tokens, wanted)

        target.forward = count  # type: ignore[method-assign]
        return completer

    def ask(self, name: str, channel: str = "", prefix: str = PREFIX, **options: Any) -> Any:
        def on_done(done: Completion | CompletionFailure) -> None:
            with self.changed:
                assert name not in self.done
                self.done[name] = done
                self.order.append(name)
                self.passes_when[name] = self.passes
                self.changed.notify_all()

        on_text = options.pop("on_text", lambda text: None)
        request = CompletionRequest(prefix, **options)
        ticket = Ticket(request, on_done, channel, on_text)
        self.queue.submit(ticket)
        return ticket

    def wait(self, *names: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: all(n in self.done for n in names), 60)

    def reason(self, name: str) -> str:
        done = self.done[name]
        assert isinstance(done, Completion)
        return done.finish_reason


@pytest.fixture
def host(directory: Path) -> Any:
    made = Host(directory)
    made.queue.start()
    yield made
    assert made.queue.close(60)


@pytest.mark.long
def test_a_newer_request_ends_the_older_within_one_pass(host: Host) -> None:
    asked_at: list[int] = []

    def supersede(text: str) -> None:
        if not asked_at:
            asked_at.append(host.passes)
            host.ask("new", "buffer", PREFIX + "(", max_tokens=4)

    host.ask("old", "buffer", on_text=supersede)
    host.wait("old")
    # At most the pass that was under way already was run to its end.
    assert host.reason("old") == "cancelled"
    old = host.done["old"]
    assert isinstance(old, Completion)
    assert old.text
    assert host.passes_when["old"] - asked_at[0] <= 1
    host.wait("new")
    assert host.reason("new") == "length"


def test_other_channels_and_none_are_left_alone(host: Host) -> None:
    for name, channel in [("a", "1"), ("b", "2"), ("c", ""), ("d", "")]:
        host.ask(name, channel, max_tokens=3)
    host.wait("a", "b", "c", "d")
    assert host.order == ["a", "b", "c", "d"]
    assert {host.reason(name) for name in "abcd"} == {"length"}


def test_a_storm_costs_a_pass_a_request_at_most(host: Host, directory: Path) -> None:
    text = PREFIX + "abcdefghijklmnopqrstuvwxyz" * 2
    names = [str(end) for end in range(len(PREFIX), len(text) + 1)]
    for name in names:
        host.ask(name, "buffer", text[: int(name)], max_tokens=20)
    host.wait(*names)
    reasons = [host.reason(name) for name in names]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) <= {"cancelled", "length"}
    last = host.done[names[-1]]
    assert isinstance(last, Completion)
    finished = reasons.count("length")
    assert host.passes <= 22 * finished + 2 * len(names)
    # Whatever went on before it, the last answer is the one that it alone would have had.
    alone = complete(Completer(Engine.load(directory)), CompletionRequest(text, max_tokens=20))
    assert last.text == alone.text


def test_cancelling_before_and_while_it_runs(host: Host) -> None:
    tickets: dict[str, Any] = {}
    tickets["a"] = host.ask("a", on_text=lambda text: tickets["a"].cancel())
    tickets["b"] = host.ask("b")
    tickets["b"].cancel()
    host.wait("a", "b")
    tickets["a"].cancel()  # long over
    assert (host.reason("a"), host.reason("b")) == ("cancelled", "cancelled")


def test_a_bad_request_fails_alone(host: Host) -> None:
    host.ask("bad", max_tokens=-1)
    host.ask("good", max_tokens=2)
    host.wait("bad", "good")
    assert host.done["bad"] == CompletionFailure("max_tokens must be from 0 to 1024, got -1")
    assert host.reason("good") == "length"


def test_a_bug_costs_the_session_not_the_helper(host: Host) -> None:
    def broken(text: str) -> None:
        raise RuntimeError("no reader")

    host.ask("bad", on_text=broken)
    host.ask("good", max_tokens=2)
    host.wait("bad", "good")
    assert host.done["bad"] == CompletionFailure("RuntimeError: no reader")
    assert host.reason("good") == "length"


def test_a_model_that_does_not_load(directory: Path) -> None:
    def refuse() -> None:
        raise UsageError("no such model")

    host = Host(directory, refuse)
    host.ask("early")
    host.queue.start()
    host.ask("late")
    assert host.queue.close(60, drain=True)
    assert host.states == ["loading", "failed"]
    failure = CompletionFailure("no such model")
    assert host.done == {"early": failure, "late": failure}


def test_closing_answers_everybody(directory: Path) -> None:
    host = Host(directory)
    stop = threading.Thread(target=host.queue.close)

    def close(text: str) -> None:
        if stop.ident is None:
            stop.start()

    names = [str(number) for number in range(5)]
    for name in names:
        host.ask(name, on_text=close)
    host.queue.start()
    host.wait(*names)
    stop.join(60)
    assert {host.reason(name) for name in names} == {"cancelled"}


@pytest.mark.long
def test_a_model_that_nobody_asks_is_unloaded_and_comes_back(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_host, "_SAVE_AFTER_S", 0.0)
    host = Host(directory)
    loads: list[str] = []
    relieved: list[PromptCaches] = []
    monkeypatch.setattr(memory_guard, "release_under_pressure", relieved.append)

    def load() -> Completer:
        loads.append("load")
        return host._load()

    host.queue = CompletionQueue(load, QueueOptions(0.2), on_state=host.states.append)
    host.queue.start()
    host.ask("first", max_tokens=3)
    host.wait("first")
    until(lambda: host.queue.host.facts is None)
    host.ask("second", prefix=PREFIX + "1", max_tokens=3)
    host.wait("second")
    assert len(loads) == 2
    assert relieved
    assert isinstance(host.done["second"], Completion)
    assert host.queue.close(60)
    assert "failed" not in host.states
