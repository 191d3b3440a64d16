"""The thread that completes: superseding, cancelling, failures, work ahead, files with secrets."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from akunu_py.completion.completer import Completer
from akunu_py.completion.completion_queue import (
    CompletionQueue,
    QueueOptions,
    is_excluded,
    submit_with_alternatives,
)
from akunu_py.completion.completion_request import (
    Completion,
    CompletionRequest,
    EndCheck,
    SourceFile,
)
from akunu_py.completion.tickets import Pace, Ticket
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Failed, Finished
from akunu_py.engine.loop import StepLoop
from akunu_py.settings import SECRET_FILES
from akunu_py.types import Stats
from tests.support.command import until
from tests.support.complete import complete
from tests.support.engines import altered
from tests.support.jobs import open_jobs
from tests.support.scripted_loop import RecordingLoop, ScriptedLoop
from tests.support.slow import slow
from tests.support.targets import Counting
from tests.support.tiny_fim import sentence_piece, write_model

END = "<|endoftext|>"
# The random model never closes the brackets.
REQUESTED = CompletionRequest("x = [[[[", max_tokens=12)
LONG = "value = [1, 2]\n" * 60 + "x = [[[["


def typed(request: CompletionRequest, text: str, **changes: Any) -> CompletionRequest:
    return replace(request, prefix=request.prefix + text, **changes)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    directory = tmp_path_factory.mktemp("tiny")
    return Engine.load(write_model(directory, sentence_piece([END]), end=END))


class Watched(Counting):
    """A model that records its passes in `recorder`."""

    def __init__(self, model: Any, recorder: Any) -> None:
        super().__init__(model)
        self._recorder = recorder

    def __call__(self, tokens: Any, *args: Any, **options: Any) -> Any:
        self._recorder.rows.append(tokens.size)
        self._recorder.on_pass()
        return super().__call__(tokens, *args, **options)


@dataclass
class Requested:
    """A request and its outcome."""

    request: CompletionRequest
    parts: list[str] = field(default_factory=list)
    done: list[Completion | Failed] = field(default_factory=list)
    ticket: Ticket = field(init=False)
    passes: list[int] = field(default_factory=list)  # of the host, at both ends

    @property
    def completion(self) -> Completion:
        (done,) = self.done
        assert isinstance(done, Completion)
        return done

    @property
    def reason(self) -> str:
        return self.completion.finish_reason


class Host:
    """A queue with a tiny model. `on_pass` is called in its thread before each pass."""

    def __init__(self, engine: Engine, options: QueueOptions | None = None) -> None:
        self.rows: list[int] = []  # of each pass
        self.made: list[CompletionRequest] = []  # completed by at least one pass
        self.states: list[str] = []
        self.on_pass: Callable[[], None] = lambda: None
        options = options or QueueOptions(pause_s=0.0)
        self.queue = CompletionQueue(
            lambda: self.counted(Completer(engine)), options, on_state=self.states.append
        )
        submit, noted_passes = self.queue.host.submit, 0

        def noted(job: Any, on_event: Callable[[Any], None]) -> None:
            def note(event: Any) -> None:
                nonlocal noted_passes
                passes = self.passes
                on_event(event)
                if isinstance(event, Finished) and passes > noted_passes:
                    noted_passes = passes
                    self.made.append(job.request)

            submit(job, note)

        self.queue.host.submit = noted  # type: ignore[method-assign, assignment]

    @property
    def passes(self) -> int:
        return len(self.rows)

    def counted(self, completer: Completer) -> Completer:
        engine = altered(completer.engine, model=Watched(completer.engine.model, self))
        completer.loop = StepLoop(engine, slots=1)
        return completer

    def submit_now(
        self,
        request: CompletionRequest,
        channel: str = "",
        on_part: Callable[[Requested], object] = lambda requested: None,
    ) -> Requested:
        requested = Requested(request, passes=[self.passes])

        def on_text(text: str) -> None:
            requested.parts.append(text)
            on_part(requested)

        def on_done(done: Completion | Failed) -> None:
            requested.passes.append(self.passes)
            requested.done.append(done)

        requested.ticket = Ticket(request, on_done, channel, on_text)
        self.queue.submit(requested.ticket)
        return requested

    def wait_done(self, *requested: Requested) -> None:
        until(lambda: all(each.done for each in requested))

    def answer(self, request: CompletionRequest, channel: str = "") -> Completion:
        requested = self.submit_now(request, channel)
        self.wait_done(requested)
        return requested.completion


@contextlib.contextmanager
def running(engine: Engine, pause_s: float = 0.0) -> Iterator[Host]:
    host = Host(engine, QueueOptions(pause_s=pause_s))
    host.queue.start()
    yield host
    assert host.queue.close(60)


@pytest.fixture
def host(engine: Engine) -> Iterator[Host]:
    with running(engine) as host:
        yield host


@pytest.fixture
def patient(engine: Engine) -> Iterator[Host]:
    """A host whose pause never ends."""
    with running(engine, 3600) as host:
        yield host


@pytest.fixture(scope="module")
def accepted(engine: Engine) -> CompletionRequest:
    """The request after all of the completion of REQUESTED was accepted."""
    done = complete(Completer(engine), REQUESTED)
    assert len(done.text) == 12
    return typed(REQUESTED, done.text)


# Superseding, cancelling, failures


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_any_requests_are_answered_once_and_as_the_model_alone_completes(
    engine: Engine, host: Host, seed: int
) -> None:
    """Typing, accepting, undoing and cancelling in three documents at the same time."""
    rng = random.Random(seed)
    wholes: dict[str, str] = {}  # prefix -> the prefix with its completion

    def whole(request: CompletionRequest) -> str:
        if request.prefix not in wholes:
            done = complete(Completer(engine), request)
            wholes[request.prefix] = request.prefix + done.text
        return wholes[request.prefix]

    begun = [f"{name} = [[[[" for name in "xyz"]
    requested: list[Requested] = []
    for _ in range(40):
        number = rng.randrange(3)
        request = CompletionRequest(begun[number], max_tokens=5)
        action = rng.random()
        if action < 0.4:  # a part of the ghost is typed, or all of it accepted
            text = whole(request)
            request = replace(request, prefix=text[: rng.randint(len(request.prefix), len(text))])
        elif action < 0.5:
            request = typed(request, rng.choice("?!x "))
        elif action < 0.6:
            request = replace(request, max_tokens=0)
        begun[number] = request.prefix
        requested.append(host.submit_now(request, rng.choice(["", f"document {number}"])))
        if rng.random() < 0.2:
            host.queue.cancel(rng.choice(requested).ticket)
        if rng.random() < 0.3:
            host.wait_done(rng.choice(requested))
    host.wait_done(*requested)
    for each in requested:
        if each.reason == "cancelled" or not each.request.max_tokens:
            continue
        assert "".join(each.parts) == each.completion.text
        answer = each.request.prefix + each.completion.text
        whole(each.request)
        following = [replace(each.request, prefix=text) for text in wholes.values()]
        assert answer in wholes.values() or answer in map(whole, following)
    assert [each.reason for each in requested].count("length") > 8


def test_another_text_supersedes_a_completion_within_one_pass(host: Host, engine: Engine) -> None:
    later: list[Requested] = []

    def type_other(requested: Requested) -> None:
        if len(requested.parts) == 3 and not later:
            later.append(host.submit_now(typed(REQUESTED, "!"), "buffer"))

    first = host.submit_now(REQUESTED, "buffer", type_other)
    host.wait_done(first)
    assert first.reason == "cancelled"
    assert first.completion.text
    assert first.passes[1] - later[0].passes[0] <= 1  # the current pass
    host.wait_done(later[0])
    assert later[0].completion.text == complete(Completer(engine), typed(REQUESTED, "!")).text


def test_requests_on_other_channels_are_served_in_order(host: Host) -> None:
    order: dict[int, bool] = {}  # of the requests, by max_tokens
    requested = [
        host.submit_now(
            replace(REQUESTED, max_tokens=number),
            channel,
            lambda requested: order.setdefault(requested.request.max_tokens, True),
        )
        for number, channel in ((3, "1"), (4, "2"), (5, ""), (6, ""))
    ]
    host.wait_done(*requested)
    assert list(order) == [3, 4, 5, 6]
    assert {each.reason for each in requested} == {"length"}


def test_the_time_limit_starts_with_the_first_text(host: Host, engine: Engine) -> None:
    """A prefill may take longer than the limit, and the text still comes."""
    request = CompletionRequest(LONG, max_tokens=12, seconds=1e-6)
    done = host.answer(request)
    assert done.finish_reason == "time"
    assert done.text
    assert complete(Completer(engine), replace(request, seconds=None)).text.startswith(done.text)


def test_closing_answers_every_request(engine: Engine) -> None:
    host = Host(engine)
    stop = threading.Thread(target=host.queue.close)

    def close(requested: Requested) -> None:
        if stop.ident is None:
            stop.start()
            until(lambda: host.queue._tickets.closing)  # the answer could end before that

    requested = [host.submit_now(REQUESTED, on_part=close) for _ in range(5)]
    host.queue.start()
    host.wait_done(*requested)
    stop.join(60)
    assert {each.reason for each in requested} == {"cancelled"}


def test_requests_of_a_fast_typist_wait_for_a_pause() -> None:
    """Of text that would come after the next key, only the last is made; by key, at once."""
    now, made = [0.0], []
    done: dict[str, str] = {}

    def complete(request: CompletionRequest, *_: Any) -> Completion:
        made.append(request.prefix)
        now[0] += 0.5 if request.prefix == "a" else 0.0
        return Completion("x", "stop", Stats())

    def submit(prefix: str, count: int = 0) -> Ticket:
        def on_done(outcome: Completion | Failed) -> None:
            assert isinstance(outcome, Completion)
            done[prefix] = outcome.finish_reason

        ticket = Ticket(CompletionRequest(prefix), on_done, "buffer")
        submit_with_alternatives(queue, ticket, count)
        return ticket

    queue = CompletionQueue(lambda: ScriptedLoop("x", complete), clock=lambda: now[0])
    queue.start()
    submit("a")
    until(lambda: "a" in done)
    for prefix in "bcdef":
        now[0] += 0.05
        submit(prefix)
    now[0] += 0.5
    until(lambda: "f" in done)
    assert made == ["a", "f"]
    assert done == {"a": "stop", **dict.fromkeys("bcde", "cancelled"), "f": "stop"}
    now[0] += 0.05
    queue.cancel(submit("g"))  # while it waits
    submit("h", 1)
    until(lambda: done.get("g") == "cancelled")
    assert queue.close(60, drain=True)
    assert done["h"] == "stop"


@pytest.mark.parametrize(
    ("gap", "latency", "expected"),
    [(0.15, 0.0, 0.0), (0.15, 0.02, 0.0), (0.15, 0.3, 0.195), (0.5, 0.3, 0.0), (0.9, 2.0, 1.0),
     (2.0, 3.0, 0.0)],
)  # fmt: skip
def test_the_delay_follows_typing_and_latency(gap: float, latency: float, expected: float) -> None:
    pace, now = Pace(), 0.0
    pace.delay(now)
    pace.begin(now)
    pace.text(now + latency)
    for _ in range(5):
        now += gap
        delay = pace.delay(now)
    assert delay == pytest.approx(expected)
    assert pace.delay(now + 2, on_battery=True) == 0.1


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_loaded_again(engine: Engine) -> None:
    host = Host(engine, QueueOptions(0.2, pause_s=3600))
    host.queue.start()
    host.answer(REQUESTED)
    until(lambda: host.queue.host.facts is None)
    assert host.answer(typed(REQUESTED, "1")).finish_reason == "length"
    assert host.queue.close(60)
    assert host.states == ["loading", "ready", "unloaded"] * 2


def test_alternatives_come_together_and_supersede_nothing() -> None:
    """Repeated and empty ones are dropped. A newer request is served instead of them."""
    texts = iter(["a", "b", "a\n", " ", "b ", "c"])
    done: dict[str, Any] = {}
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
    assert (done["whole"].text, done["whole"].alternatives) == ("a", ("b",))
    assert (done["cut off"].finish_reason, done["newer"].text) == ("cancelled", "new")


# Completions made ahead


def test_a_completion_that_is_being_made_ahead_is_taken_over(
    host: Host, engine: Engine, accepted: CompletionRequest
) -> None:
    alone = complete(Completer(engine), accepted).text
    later: list[Requested] = []

    def accept() -> None:
        if host.made and not later:  # the first answer has been sent
            later.append(host.submit_now(accepted, "buffer"))

    host.on_pass = accept
    host.answer(REQUESTED, "buffer")
    until(lambda: later and later[0].done and len(host.made) > 1)
    assert later[0].completion.text == alone == "".join(later[0].parts)
    assert [request.prefix for request in host.made[:2]] == [REQUESTED.prefix, accepted.prefix]


def test_while_the_user_types_nothing_is_made_ahead(patient: Host) -> None:
    text = REQUESTED.prefix
    for letter in "abcdefghij" * 2:
        text += letter
        patient.answer(replace(REQUESTED, prefix=text, max_tokens=2), "buffer")
    assert len(patient.made) <= 20
    assert all(request.prefix in text for request in patient.made)


def test_an_acceptance_makes_the_next_one_once(patient: Host, accepted: CompletionRequest) -> None:
    patient.answer(REQUESTED)
    patient.queue.accepted()
    until(lambda: len(patient.made) == 2)
    assert patient.made[1].prefix == accepted.prefix
    patient.queue.accepted()  # of the rest of it, for example
    passes = patient.passes
    assert patient.answer(accepted).reused
    assert patient.passes == passes
    # A prefill elsewhere replaces the next completion, which would cancel it after the pause.
    assert patient.answer(CompletionRequest(LONG, max_tokens=0)).finish_reason == "length"
    patient.queue.accepted()
    assert open_jobs(patient.queue.host) == (0, 0)


def test_a_pause_makes_the_next_completion(engine: Engine, accepted: CompletionRequest) -> None:
    with running(engine, 0.01) as host:
        host.answer(REQUESTED)
        until(lambda: len(host.made) == 2)
        assert host.made[1].prefix == accepted.prefix


def test_on_battery_nothing_is_made_ahead() -> None:
    """Neither a prefill nor the next completion; requests of clients are completed."""
    loop = RecordingLoop()
    options = QueueOptions(pause_s=0.0, saves_power=lambda: True)
    queue = CompletionQueue(lambda: loop, options)
    queue.start()
    assert queue.complete(CompletionRequest("a", max_tokens=0)).finish_reason == "cancelled"
    assert queue.complete(CompletionRequest("b")).text == "text"
    assert queue.complete(CompletionRequest("c")).text == "text"
    queue.accepted()
    queue.close(drain=True)
    assert [request.prefix for request in loop.made] == ["b", "c"]


# Prefills


@pytest.mark.long
def test_prefilled_tokens_are_not_prefilled_again(host: Host, engine: Engine) -> None:
    request = CompletionRequest(LONG, max_tokens=4)
    prefilled = host.answer(replace(request, max_tokens=0))
    assert (prefilled.text, prefilled.finish_reason) == ("", "length")
    assert prefilled.stats.generated_tokens == 0
    done = host.answer(request)
    assert done.stats.prompt_tokens - done.stats.cached_tokens <= 2
    assert done.text == complete(Completer(engine), request).text
    host.answer(CompletionRequest("other(1)\n" * 80, max_tokens=0))  # evicts nothing
    again = host.answer(typed(request, "?"))
    assert again.stats.prompt_tokens - again.stats.cached_tokens <= 4


def test_a_request_interrupts_a_prefill_and_uses_its_tokens(host: Host) -> None:
    request = CompletionRequest(LONG, max_tokens=4)
    requested: list[Requested] = []

    def submit_now() -> None:
        if not requested:
            requested.append(host.submit_now(request))

    host.on_pass = submit_now
    prefill = host.submit_now(replace(request, max_tokens=0))
    until(lambda: requested and requested[0].done)
    assert prefill.reason == "cancelled"
    assert requested[0].completion.stats.cached_tokens == host.rows[0]


def test_only_the_last_place_is_prefilled_and_no_cached_one(host: Host) -> None:
    release = threading.Event()
    host.on_pass = lambda: None if release.wait(60) else pytest.fail("never released")
    busy = host.submit_now(replace(REQUESTED, temperature=0.1), "other")  # nothing follows a sample
    places = [host.submit_now(CompletionRequest(LONG + letter, max_tokens=0)) for letter in "abc"]
    assert host.answer(CompletionRequest(LONG + "c", max_tokens=0)).finish_reason == "cancelled"
    release.set()
    host.wait_done(busy, *places)
    assert [place.reason for place in places] == ["cancelled", "cancelled", "length"]
    host.answer(REQUESTED)
    assert host.answer(replace(REQUESTED, max_tokens=0)).finish_reason == "cancelled"


# Files with secrets


SECRET = [
    "/home/me/app/.env", "/home/me/app/.env.local", ".env", "/etc/ssl/server.pem",
    "/etc/ssl/Server.KEY", "/app/secrets.yaml", "/home/me/.ssh/id_ed25519", "/home/me/.netrc",
    "/app/prod.env", "/app/secret.yaml", "/home/me/.npmrc", "/home/me/.pypirc",
    "/app/credentials.json", "/app/prod.tfvars", "/app/terraform.tfstate", "/home/me/kubeconfig",
    "/app/AuthKey.p8", "/app/release.keystore", "/home/me/.aws/config", "/home/me/.ssh/config",
    "vscode-remote://ssh-remote%2Bhost/home/me/%2Eenv",
    "git:/home/me/app/.env?%7B%22ref%22%3A%22HEAD%22%7D", "untitled:.env.local",
]  # fmt: skip
OPEN = [
    "", "/home/me/app/environment.py", "/home/me/app/keys.py", "/home/me/.env/app.py",
    "/home/me/app/my_secrets.py", "git:/home/me/app/main.py?%7B%22ref%22%3A%22.env%22%7D",
]  # fmt: skip


def test_only_files_with_secrets_are_excluded() -> None:
    assert [path for path in SECRET + OPEN if is_excluded(path, SECRET_FILES)] == SECRET


def test_a_pattern_with_a_slash_matches_the_end_of_a_path() -> None:
    assert is_excluded("/home/me/app/config/prod.toml", ["config/*.toml"])
    assert is_excluded("/home/me/app/Private/deep/a.py", ["private/*"])
    assert not is_excluded("/home/me/app/myconfig/prod.toml", ["config/*.toml"])


def test_secrets_never_reach_the_model() -> None:
    """Neither in the buffer, which is not prefilled either, nor as other files."""
    loop = RecordingLoop()
    queue = CompletionQueue(lambda: loop)
    queue.start()
    for path in SECRET:
        for tokens in (2, 0):
            done = queue.complete(CompletionRequest("KEY=", path=path, max_tokens=tokens))
            assert (done.text, done.finish_reason, done.excluded) == ("", "stop", True)
    files = tuple(SourceFile(path, "TOKEN = 1\n") for path in [*SECRET, "/app/b.py"])
    request = CompletionRequest("a = ", path="/app/a.py", files=files)
    for each in (replace(request, max_tokens=0), request):
        queue.complete(each)
    assert queue.close(60, drain=True)
    assert [request.path for request in loop.made] == ["/app/a.py"] * 2
    assert [[file.path for file in request.files] for request in loop.made] == [["/app/b.py"]] * 2


def test_a_request_in_an_excluded_file_cancels_the_older_one_of_its_channel() -> None:
    done: dict[str, Completion | Failed] = {}

    def complete(request: CompletionRequest, ended: EndCheck, _: Any) -> Completion:
        until(ended)
        return Completion("", ended() or "stop", Stats())

    queue = CompletionQueue(lambda: ScriptedLoop("x", complete))
    queue.start()
    for path in ("a.py", ".env"):
        request = CompletionRequest("x", path=path)
        queue.submit(Ticket(request, partial(done.__setitem__, path), "buffer"))
    until(lambda: len(done) == 2)
    assert queue.close(60)
    reasons = {path: getattr(each, "finish_reason", "") for path, each in done.items()}
    assert reasons == {"a.py": "cancelled", ".env": "stop"}
