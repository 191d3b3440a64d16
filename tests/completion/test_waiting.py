"""What nobody waits for: remembered answers, what was made or read ahead, what is under way."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import (
    CompletionFailure,
    CompletionQueue,
    QueueOptions,
    Ticket,
)
from akunu_py.completion.request import Completion, CompletionRequest
from akunu_py.decoding.events import Event, Finished
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from tests.support.complete import complete
from tests.support.jobs import open_jobs
from tests.support.slow import slow
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
ASKED = CompletionRequest("x = [[[[", max_tokens=12)  # the random model never closes the brackets


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = Path(tmp_path_factory.mktemp("tiny"))
    return Engine.load(write_model(directory, sentence_piece([END]), end=END))


@dataclass
class Asked:
    """A request, and what came of it."""

    request: CompletionRequest
    parts: list[str] = field(default_factory=list)
    done: list[Completion | CompletionFailure] = field(default_factory=list)
    thread: threading.Thread | None = None
    ticket: Ticket = field(init=False)

    @property
    def completion(self) -> Completion:
        (done,) = self.done
        assert isinstance(done, Completion)
        return done


class Host:
    """A thread with a tiny model. `on_pass` is called in it before each pass, with its number."""

    def __init__(self, engine: Engine, pause_s: float = 0.0) -> None:
        self.changed = threading.Condition()
        self.passes = self.passes_before = 0
        self.rows: list[int] = []
        self.made: list[CompletionRequest] = []  # by the model, whoever was answered
        self.on_pass: Callable[[int], None] = lambda number: None
        self.completer = Completer(engine)
        self.queue = CompletionQueue(lambda: self.completer, QueueOptions(pause_s=pause_s))
        target = self.completer.session.target
        forward, on_event = target.forward, self.queue._on_event

        def count(tokens: Any, wanted: int | None = None) -> Any:
            self.passes += 1
            self.rows.append(tokens.size)
            self.on_pass(self.passes)
            return forward(tokens, wanted)

        def noted(served: Any, event: Event) -> None:
            if isinstance(event, Finished) and self.passes > self.passes_before:
                self.passes_before = self.passes
                with self.changed:
                    self.made.append(served.request)
                    self.changed.notify_all()
            on_event(served, event)

        target.forward = count  # type: ignore[method-assign]
        self.queue._on_event = noted  # type: ignore[method-assign]

    def ask(
        self,
        request: CompletionRequest,
        channel: str = "",
        on_part: Callable[[Asked], None] = lambda asked: None,
    ) -> Asked:
        asked = Asked(request)

        def on_text(text: str) -> None:
            asked.parts.append(text)
            on_part(asked)

        def on_done(done: Completion | CompletionFailure) -> None:
            with self.changed:
                asked.done.append(done)
                asked.thread = threading.current_thread()
                self.changed.notify_all()

        asked.ticket = Ticket(request, on_done, channel, on_text)
        self.queue.submit(asked.ticket)
        return asked

    def wait(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 60)

    def has_made(self, number: int) -> bool:
        return len(self.made) == number

    def answer(self, request: CompletionRequest, channel: str = "") -> Completion:
        asked = self.ask(request, channel)
        self.wait(lambda: asked.done)
        return asked.completion


@pytest.fixture
def host(engine: Engine) -> Iterator[Host]:
    made = Host(engine)
    made.queue.start()
    yield made
    assert made.queue.close(60)


def typed(request: CompletionRequest, text: str) -> CompletionRequest:
    return replace(request, prefix=request.prefix + text)


@pytest.fixture(scope="module")
def whole(engine: Engine) -> Completion:
    """What the model alone completes."""
    done = complete(Completer(engine), ASKED)
    assert len(done.text) == 12
    return done


@pytest.mark.long
def test_a_remembered_answer_waits_for_nobody(host: Host) -> None:
    """Another document's request is in the middle of a pass, and stays there."""
    first = host.answer(ASKED)
    pause, go_on = threading.Event(), threading.Event()

    def hold(number: int) -> None:
        pause.set()
        assert go_on.wait(60)

    host.wait(partial(host.has_made, 2))  # and what follows it was made ahead
    host.on_pass = hold
    other = host.ask(CompletionRequest("y = ((((", max_tokens=5), "other")
    assert pause.wait(60)
    before = host.passes
    remembered = host.ask(typed(ASKED, first.text[:3]), "this")
    assert remembered.completion.text == first.text[3:] == "".join(remembered.parts)
    assert remembered.completion.reused
    assert remembered.thread is threading.current_thread()
    assert (host.passes, other.done) == (before, [])
    go_on.set()


def test_when_a_ghost_is_accepted_the_next_one_is_there(host: Host) -> None:
    asked = typed(ASKED, host.answer(ASKED).text)
    for number in range(3):  # each has the next one made ahead
        host.wait(partial(host.has_made, number + 2))
        assert host.made[-1] == asked
        following = host.ask(asked)
        assert following.completion.reused
        assert following.thread is threading.current_thread()
        assert following.completion.text
        asked = typed(asked, following.completion.text)


def test_a_ghost_that_is_accepted_while_the_next_is_made_is_not_made_again(
    host: Host, engine: Engine
) -> None:
    first = complete(Completer(engine), ASKED).text
    alone = complete(Completer(engine), typed(ASKED, first)).text
    accepted: list[Asked] = []
    begun = threading.Event()

    def accept(number: int) -> None:
        if host.made and not accepted:  # the first answer was given
            accepted.append(host.ask(typed(ASKED, first), "buffer"))
            begun.set()

    host.on_pass = accept
    assert host.answer(ASKED, "buffer").text == first
    assert begun.wait(60)
    host.wait(lambda: accepted[0].done)
    assert accepted[0].completion.text == alone == "".join(accepted[0].parts)
    prefixes = [request.prefix for request in host.made[:2]]
    assert prefixes == [ASKED.prefix, ASKED.prefix + first]


@pytest.mark.long
def test_typing_what_is_being_made_does_not_start_again(host: Host, whole: Completion) -> None:
    """At every place in it, and letter by letter."""
    text = whole.text
    for at in range(1, len(text)):
        host.completer.cache._entries.clear()
        host.queue._cache._entries.clear()
        later: list[Asked] = []

        def type_on(asked: Asked, at: int = at, later: list[Asked] = later) -> None:
            if len("".join(asked.parts)) >= at and not later:
                later.append(host.ask(typed(ASKED, text[:at]), "buffer"))

        first = host.ask(ASKED, "buffer", type_on)
        host.wait(partial(host.has_made, 2))
        assert host.made == [ASKED, typed(ASKED, text)]  # what follows is made ahead
        assert later[0].completion.text == text[at:] == "".join(later[0].parts)
        assert first.completion.finish_reason in ("cancelled", whole.finish_reason)
        del host.made[:]


def test_something_else_is_typed_while_it_is_made(host: Host, engine: Engine) -> None:
    asked_at: list[int] = []
    later: list[Asked] = []

    def type_other(asked: Asked) -> None:
        if len(asked.parts) == 3 and not later:
            asked_at.append(host.passes)
            later.append(host.ask(typed(ASKED, "!"), "buffer"))

    first = host.ask(ASKED, "buffer", type_other)
    host.wait(lambda: first.done)
    assert first.completion.finish_reason == "cancelled"
    assert host.passes - asked_at[0] <= 2  # the one under way, and the first of the next
    host.wait(lambda: later[0].done)
    assert later[0].completion.text == complete(Completer(engine), typed(ASKED, "!")).text


def test_who_takes_over_what_is_made_ahead_has_its_time_kept(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that takes 20 ms a pass. What is made ahead has no limit of its own."""
    now = [0.0]
    monkeypatch.setattr("akunu_py.completion.request.time.monotonic", lambda: now[0])
    accepted: list[tuple[float, Asked]] = []

    def pass_time(number: int) -> None:
        now[0] += 0.02
        if host.made and not accepted:  # the first answer was given
            asked = typed(ASKED, first[0].completion.text)
            asked = replace(asked, seconds=0.1)
            accepted.append((now[0], host.ask(asked, "buffer")))

    host.on_pass = pass_time
    first = [host.ask(ASKED, "buffer")]
    host.wait(lambda: accepted and accepted[0][1].done)
    began, second = accepted[0]
    assert second.completion.finish_reason == "time"
    assert second.completion.text
    host.wait(partial(host.has_made, 3))  # and what follows that
    assert first[0].completion.finish_reason == "length"
    assert now[0] - began <= 0.1 + 0.02 * (1 + 2 + 12)  # one pass too many, and the third one's


LONG = "value = [1, 2]\n" * 60 + "x = [[[["


@pytest.fixture
def patient(engine: Engine) -> Iterator[Host]:
    """A host whose pause never ends."""
    made = Host(engine, pause_s=3600)
    made.queue.start()
    yield made
    assert made.queue.close(60)


def test_while_one_types_nothing_is_made_ahead(patient: Host) -> None:
    """Twenty keys cost twenty completions at most, and not the one after each of them."""
    text = ASKED.prefix
    for letter in "abcdefghij" * 2:
        text += letter
        patient.answer(replace(ASKED, prefix=text, max_tokens=2), "buffer")
    assert len(patient.made) <= 20
    assert all(request.prefix in text for request in patient.made)


def test_an_accepted_completion_has_the_next_one_made_once(
    patient: Host, whole: Completion
) -> None:
    patient.answer(ASKED)
    patient.queue.accepted()
    patient.wait(partial(patient.has_made, 2))
    assert patient.made[1].prefix == ASKED.prefix + whole.text
    patient.queue.accepted()  # of the rest of it, for example
    passes = patient.passes
    assert patient.answer(typed(ASKED, whole.text)).reused
    assert patient.passes == passes


def test_a_prefill_elsewhere_replaces_the_next_completion(patient: Host) -> None:
    """Otherwise the end of the pause would cancel the prefill."""
    patient.answer(ASKED)
    assert patient.answer(CompletionRequest(LONG, max_tokens=0)).finish_reason == "length"
    patient.queue.accepted()
    assert open_jobs(patient.queue.host) == (0, 0)


def test_a_pause_has_the_next_one_made(engine: Engine, whole: Completion) -> None:
    host = Host(engine, pause_s=0.01)
    host.queue.start()
    host.answer(ASKED)
    host.wait(partial(host.has_made, 2))
    assert host.made[1].prefix == ASKED.prefix + whole.text
    assert host.queue.close(60)


@pytest.mark.long
def test_what_was_read_ahead_is_not_read_again(host: Host, engine: Engine) -> None:
    request = CompletionRequest(LONG, max_tokens=4)
    read = host.answer(replace(request, max_tokens=0))
    assert (read.text, read.finish_reason) == ("", "length")
    assert read.stats.generated_tokens == 0
    done = host.answer(request)
    assert done.stats.prompt_tokens - done.stats.cached_tokens <= 2
    assert done.text == complete(Completer(engine), request).text


@pytest.mark.long
def test_reading_another_file_ahead_does_not_lose_what_was_read(host: Host) -> None:
    request = CompletionRequest(LONG, max_tokens=4)
    host.answer(request)
    host.answer(CompletionRequest("other(1)\n" * 80, max_tokens=0))
    done = host.answer(typed(request, "?"))
    assert done.stats.prompt_tokens - done.stats.cached_tokens <= 4


def test_reading_ahead_makes_way_and_goes_on_from_there(host: Host) -> None:
    """A request that comes meanwhile waits for one pass, and has what was read."""
    request = CompletionRequest(LONG, max_tokens=4)
    asked: list[Asked] = []

    def ask(number: int) -> None:
        if not asked:
            asked.append(host.ask(request))

    host.on_pass = ask
    reading = host.ask(replace(request, max_tokens=0))
    host.wait(lambda: asked and asked[0].done)
    assert reading.completion.finish_reason == "cancelled"
    assert asked[0].completion.stats.cached_tokens == host.rows[0]


def test_only_the_last_place_is_read_ahead_and_nothing_that_is_known(host: Host) -> None:
    go_on = threading.Event()
    host.on_pass = lambda number: None if go_on.wait(60) else pytest.fail("nobody goes on")
    busy = host.ask(replace(ASKED, temperature=0.1), "other")  # nothing follows a sample
    places = [host.ask(CompletionRequest(LONG + letter, max_tokens=0)) for letter in "abc"]
    again = host.ask(CompletionRequest(LONG + "c", max_tokens=0))
    assert again.completion.finish_reason == "cancelled"
    go_on.set()
    host.wait(lambda: busy.done and all(place.done for place in places))
    reasons = [place.completion.finish_reason for place in places]
    assert reasons == ["cancelled", "cancelled", "length"]
    host.answer(ASKED)
    known = host.ask(replace(ASKED, max_tokens=0))
    assert known.thread is threading.current_thread()


@pytest.mark.parametrize("drain", [True, False])
def test_closing_does_not_wait_for_what_is_made_ahead(engine: Engine, drain: bool) -> None:
    host = Host(engine)
    closing = threading.Event()

    def close(number: int) -> None:
        if host.made and not closing.is_set():  # what follows is being made
            closing.set()
            host.queue._draining = True
            host.queue._closing = not drain

    host.on_pass = close
    host.queue.start()
    host.answer(ASKED)
    assert closing.wait(60)
    before = host.passes
    assert host.queue.close(60, drain=drain)
    assert host.passes - before <= 1


def test_a_model_that_did_not_load_is_tried_again_with_later_requests(engine: Engine) -> None:
    now, tries, states = [0.0], [0], list[str]()

    def load() -> Completer:
        tries[0] += 1
        states.append(queue.host.state)
        if tries[0] < 5:
            raise UsageError("no such model")
        return Completer(engine)

    queue = CompletionQueue(load, clock=lambda: now[0])
    queue.start()
    done: list[Completion | CompletionFailure] = []
    came = threading.Semaphore(0)

    def on_done(outcome: Completion | CompletionFailure) -> None:
        done.append(outcome)
        came.release()

    for wait in (0, 0.9, 0.1, 1.9, 0.1, 4.0, 7.9, 0.1):
        now[0] += wait
        queue.submit(Ticket(ASKED, on_done))
        assert came.acquire(timeout=60)
    assert queue.close(60)
    assert [isinstance(outcome, CompletionFailure) for outcome in done] == [True] * 7 + [False]
    assert tries[0] == 5
    assert states == ["loading"] * 5


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_whatever_is_asked_is_answered_once_and_as_the_model_completes(
    engine: Engine, host: Host, seed: int
) -> None:
    """Typing, accepting, taking back and cancelling in three documents while it is at work."""
    rng = random.Random(seed)
    alone = Completer(engine)
    wholes: dict[str, str] = {}  # prefix -> with what the model completes there

    def whole(request: CompletionRequest) -> str:
        if request.prefix not in wholes:
            alone.cache._entries.clear()
            wholes[request.prefix] = request.prefix + complete(alone, request).text
        return wholes[request.prefix]

    begun = [f"{name} = [[[[" for name in "xyz"]
    asked: list[Asked] = []
    for _ in range(40):
        number = rng.randrange(3)
        request = CompletionRequest(begun[number], max_tokens=5)
        action = rng.random()
        if action < 0.4:  # some of the ghost is typed, or all of it accepted
            text = whole(request)
            request = replace(request, prefix=text[: rng.randint(len(request.prefix), len(text))])
        elif action < 0.5:
            request = typed(request, rng.choice("?!x "))
        elif action < 0.6:
            request = replace(request, max_tokens=0)
        begun[number] = request.prefix
        asked.append(host.ask(request, rng.choice(["", f"document {number}"])))
        if rng.random() < 0.2:
            rng.choice(asked).ticket.cancel()
        if rng.random() < 0.3:
            host.wait(partial(getattr, rng.choice(asked), "done"))
    host.wait(lambda: all(each.done for each in asked))
    for each in asked:
        done = each.completion
        if done.finish_reason == "cancelled" or not each.request.max_tokens:
            continue
        assert "".join(each.parts) == done.text
        answer = each.request.prefix + done.text
        whole(each.request)
        following = [replace(each.request, prefix=text) for text in wholes.values()]
        assert answer in wholes.values() or answer in map(whole, following)
    answered = [each for each in asked if each.completion.finish_reason == "length"]
    assert len(answered) > 8
