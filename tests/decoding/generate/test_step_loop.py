"""Several requests at the same time: every answer is the same as alone, in passes that they share
and in passes of their own, and memory and time are shared as promised."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from akunu_py.decoding import kv_cache
from akunu_py.decoding.events import Event, Failed, Finished, PrefillProgress
from akunu_py.decoding.generate import batched_pass, session
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.job import JobHandle
from akunu_py.decoding.generate.session import Request, Session, Status, Step
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.target import Target
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.joint_plan import JointPlanner, SharedPass
from akunu_py.types import Constraint, DraftMode, GenerateOptions, SamplingOptions
from tests.support.engines import altered
from tests.support.families import UNSHARED, build, families_of_each_kind
from tests.support.slow import cover
from tests.support.targets import Counting, some
from tests.support.tiny_fim import load_tiny

PLENTY = 1 << 30
KINDS = ["llama", "llama-sliding", "llama4", "mamba2", "qwen3_next", "deepseek_v3", "llama-kv8"]
BASE = some(500, 1)  # what all prompts begin with, some of it


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read 16 tokens at a time, and memory is taken for 5."""
    monkeypatch.setattr("akunu_py.decoding.generate.scheduler._CHUNK_S", 1e-9)
    monkeypatch.setattr("akunu_py.decoding.generate.scheduler._PATIENCE_S", 1e-9)
    monkeypatch.setattr(session, "_RESERVED_TOKENS", 5)


def engine_of(
    tiny: Engine,
    name: str,
    prompt_cache_memory: int = PLENTY,
    stop_tokens: Collection[int] = (),
) -> Engine:
    model = Counting(build(name))
    cache = kv_cache.new_cache(model)
    return altered(
        tiny,
        model=model,
        vocabulary=96,
        stop_tokens=frozenset(stop_tokens),
        no_draft_reason=kv_cache.no_rollback_reason(cache),
        recurrent=kv_cache.is_recurrent(cache),
        prompt_cache_memory=prompt_cache_memory,
    )


@dataclass
class Asked:
    """A request, and when it comes: after so many steps of all."""

    prompt: list[int]
    count: int = 12
    draft: DraftMode = "auto"
    seed: int | None = None
    after: int = 0
    cancel_after: int | None = None  # steps of its own
    short: bool = False
    events: list[Event | None] = field(default_factory=list)
    generation: Request | None = None

    @property
    def options(self) -> GenerateOptions:
        sampling = SamplingOptions(0.0 if self.seed is None else 0.9, seed=self.seed)
        return GenerateOptions(self.count, self.draft, sampling=sampling)

    def job(self, session: Session) -> Asked:
        self.generation = session.generate(self.prompt, self.options)
        return self

    @property
    def request(self) -> Request | None:
        return self.generation

    def add(self, steps: Sequence[Step]) -> list[Event]:
        events: list[Event] = [step for step in steps if isinstance(step, PrefillProgress)]
        request = self.generation
        assert request is not None
        if request.status is Status.FINISHED:
            events.append(Finished(request.finish_reason or "cancelled", request.stats))
        return events

    @property
    def tokens(self) -> list[int]:
        assert self.generation is not None
        return self.generation.tokens

    @property
    def cached(self) -> int:
        assert self.generation is not None
        return self.generation.stats.cached_tokens


NUMBER = Constraint("regex", "[0-9]{3,40}")


@dataclass
class Chosen(Asked):
    """A request with given options."""

    chosen: GenerateOptions = field(default_factory=GenerateOptions)

    @property
    def options(self) -> GenerateOptions:
        return self.chosen


@dataclass
class Run:
    """Requests in a step loop. at_step: called before each step."""

    loop: StepLoop
    at_step: Callable[[StepLoop], None] = lambda loop: None
    steps: list[list[Asked]] = field(default_factory=list)  # the requests of each step

    @property
    def shared(self) -> int:
        """Steps of several requests."""
        return sum(len(each) > 1 for each in self.steps)

    def serve(self, requests: Sequence[Asked]) -> None:
        waiting = sorted(requests, key=lambda each: each.after)
        handles: dict[int, Asked] = {}
        while waiting or handles:
            while waiting and (waiting[0].after <= len(self.steps) or not handles):
                if len(self.loop._running) >= self.loop.slots + waiting[0].short:
                    break
                asked = waiting.pop(0)
                handle = JobHandle(
                    asked.job, lambda event: None, "", lambda: None, short=asked.short
                )
                handles[id(handle)] = asked
                self.loop.begin(handle)
            self.at_step(self.loop)
            self.steps.append([])
            for handle, events in self.loop.step():
                asked = handles[id(handle)]
                asked.events += events or [None]
                self.steps[-1].append(asked)
                if len(asked.events) == asked.cancel_after:
                    handle.cancel()
                if events and isinstance(events[-1], Finished | Failed):
                    del handles[id(handle)]


class Costly:
    """A model of which every pass takes so many seconds of a clock, and more for each row."""

    def __init__(self, model: Any, clock: Clock, pass_s: float) -> None:
        self._model, self._clock, self._pass_s = model, clock, pass_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, *args: Any, **options: Any) -> Any:
        self._clock.now += self._pass_s + 0.0005 * tokens.shape[1]
        return self._model(tokens, *args, **options)


class Clock:
    """Time that passes as a test says, between 0 and 1 second from one look to the next."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self._random.random()
        return self.now


REQUESTS = st.lists(
    st.builds(
        lambda shared, own, text, **more: Asked([*BASE[:shared], *some(own, text)], **more),
        st.sampled_from([0, 70, 300, 500]),
        st.integers(1, 60),
        st.integers(0, 3),
        count=st.integers(1, 16),
        draft=st.sampled_from(["auto", "off", "fixed"]),
        seed=st.sampled_from([None, 5]),
        after=st.integers(0, 60),
        cancel_after=st.sampled_from([None, None, None, 2, 20]),
    ),
    min_size=2,
    max_size=8,
)


@pytest.mark.long
@pytest.mark.usefixtures("fine")
@families_of_each_kind(quick=KINDS)
@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    requests=REQUESTS,
    seed=st.integers(0, 99),
    memory=st.sampled_from([PLENTY, 300_000, 0]),
    slots=st.sampled_from([3, 8]),
    stops=st.sampled_from([(), range(0, 96, 8)]),
)
def test_every_answer_is_the_same_as_alone(
    name: str,
    tiny: Engine,
    requests: list[Asked],
    seed: int,
    memory: int,
    slots: int,
    stops: Collection[int],
) -> None:
    engine = engine_of(tiny, name, memory, stops)
    run = Run(StepLoop(Session(engine), slots, Clock(seed)))
    run.serve(requests)
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert isinstance(asked.events[-1], Finished), asked.events[-1]
        expected = list(alone.tokens)
        if asked.events[-1].reason == "cancelled":
            assert asked.cancel_after is not None
            expected = expected[: len(asked.tokens)]
        assert asked.tokens == expected


def test_plain_passes_are_launched_before_the_previous_one_is_read(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when requests end: only the first passes wait."""
    passes: list[SharedPass] = []
    observe = JointPlanner.observe

    def record(self: JointPlanner, done: SharedPass, tokens: int, seconds: float) -> None:
        passes.append(done)
        observe(self, done, tokens, seconds)

    monkeypatch.setattr(JointPlanner, "observe", record)
    requests = [Asked(some(9, index), 20 + 4 * index, "off") for index in range(3)]
    Run(StepLoop(Session(engine_of(tiny, "llama")), 4)).serve(requests)
    together = [done for done in passes if done.requests == 3]
    assert len(together) >= 18
    assert all(done.pipelined for done in together[2:])


@pytest.mark.long
@families_of_each_kind(quick=KINDS)
def test_decode_passes_are_shared_and_change_nothing(name: str, tiny: Engine) -> None:
    """Drafts of any kind in batches of four, past sliding windows, with an early leaver."""
    engine = engine_of(tiny, name)
    modes: list[tuple[DraftMode, int | None]] = [
        ("auto", None), ("fixed", None), ("off", None), ("fixed", 5),
    ]  # fmt: skip
    requests = [
        Asked(some(20 + 7 * index, index), 44 - 24 * (index == 2), draft, seed, after=index)
        for index, (draft, seed) in enumerate(modes)
    ]
    run = Run(StepLoop(Session(engine), 4))
    run.serve(requests)
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)
    # Recurrent models also draft in passes of their own.
    assert (run.shared > (0 if engine.recurrent else 20)) == (name not in UNSHARED)


@dataclass
class Copying(Asked):
    """A request with a text to draft from."""

    known: list[int] = field(default_factory=list)

    def job(self, session: Session) -> Asked:
        self.generation = session.generate(self.prompt, self.options, [self.known])
        return self


@pytest.mark.parametrize(("name", "right"), cover(["qwen3_next", "mamba2"], [True, False]))
def test_recurrent_model_drafts_alone_where_that_beats_sharing(
    name: str, right: bool, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shared passes have no drafts. Costs stay those of an average machine."""
    monkeypatch.setattr(CostCurve, "observe", lambda *args, **options: None)
    engine = engine_of(tiny, name)
    prompts = [some(12 + index, index) for index in range(3)]
    expected = [
        list(Session(engine).generate(prompt, GenerateOptions(60)).answer().tokens)
        for prompt in prompts
    ]
    known = [*prompts[0][-8:], *(expected[0] if right else some(60, 77))]
    requests = [Copying(prompts[0], 60, known=known), *(Asked(each, 60) for each in prompts[1:])]
    run = Run(StepLoop(Session(engine), 3))
    run.serve(requests)
    assert all(isinstance(asked.events[-1], Finished) for asked in requests), requests[0].events[-1]
    assert [asked.tokens for asked in requests] == expected
    passes = [asked.generation.stats.target_passes for asked in requests if asked.generation]
    assert (passes[0] < 30) == right, passes
    assert run.shared > 20


@pytest.mark.long
@pytest.mark.parametrize(("name", "why"), [("llama", None), ("llama4", "ChunkedKVCache")])
def test_facts_tell_why_requests_take_turns(name: str, why: str | None, tiny: Engine) -> None:
    loop = StepLoop(Session(engine_of(tiny, name)))
    assert loop.runner.can_batch() == (why is None)
    assert (loop.facts.not_batched is None) == (why is None)
    assert why is None or why in str(loop.facts.not_batched)


@pytest.mark.long
def test_structured_answers_in_shared_passes(tiny: Engine) -> None:
    """Grammars, stop texts, penalties, logprobs and filters, each beside all others."""
    engine = tiny
    prompt = engine.tokens.encode_text("What is it? ")
    choices = [
        GenerateOptions(24, "auto", sampling=SamplingOptions(constraint=Constraint("json"))),
        GenerateOptions(24, "fixed", sampling=SamplingOptions(0.8, seed=3, constraint=NUMBER)),
        GenerateOptions(24, "auto", stop=("e",)),
        GenerateOptions(24, "auto", sampling=SamplingOptions(repetition_penalty=1.3, logprobs=2)),
        GenerateOptions(24, "off", sampling=SamplingOptions(0.9, top_p=0.8, seed=8)),
    ]
    requests = [Chosen(list(prompt), after=index) for index in range(len(choices))]
    for asked, options in zip(requests, choices, strict=True):
        asked.chosen = options
    run = Run(StepLoop(Session(engine), 8))
    run.serve(requests)
    assert run.shared > 10
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options)
        assert asked.tokens == list(alone.answer().tokens)
        assert asked.generation is not None
        assert asked.generation.text == alone.text
        assert [each.text for each in asked.generation.logprobs] == [
            each.text for each in alone.logprobs
        ]


@pytest.mark.long
@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize(("memory", "name"), cover([PLENTY, 0], ["llama", "qwen3_next"]))
def test_what_another_is_reading_is_waited_for(name: str, memory: int, tiny: Engine) -> None:
    first, second = Asked([*BASE, 1]), Asked([*BASE, 2, 3], after=3)
    engine = engine_of(tiny, name, memory)
    run = Run(StepLoop(Session(engine), 3, Clock(1)))
    run.serve([first, second])
    if memory:
        assert second.cached >= len(BASE) - 16  # what is left to the first pass
        assert engine.model.rows < len(BASE) + 120  # it was read once
    # Who is waited for may go away.
    gone, waits = Asked(some(400, 7), cancel_after=9), Asked([*some(400, 7), 1], after=2)
    run.serve([gone, waits])
    assert waits.tokens == list(
        Session(engine).generate(waits.prompt, waits.options).answer().tokens
    )
    assert waits.cached >= 16 * 5


@pytest.mark.long
@pytest.mark.usefixtures("fine")
def test_memory_is_shared_and_who_has_none_waits_or_gives_up_its_own(tiny: Engine) -> None:
    engine = engine_of(tiny, "llama")
    per_token = engine.plan.fit.needs.cache.at(256) // 256
    engine = altered(engine, prompt_cache_memory=per_token * 256 * 3)
    requests = [Asked(some(250, seed), 24, after=seed) for seed in range(5)]
    together: set[int] = set()

    def watch(loop: StepLoop) -> None:
        in_use = [each for each in run.loop._sessions[0].target.caches.in_use if each.reserved]
        together.add(len(in_use))
        assert (
            len(in_use) < 2
            or sum(each.reserved for each in in_use) <= engine.plan.prompt_cache_memory
        )

    run = Run(StepLoop(Session(engine), 5, Clock(1)), watch)
    run.serve(requests)
    assert max(together) == 3  # until the answers cross 256 tokens
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)


@pytest.mark.long
def test_a_job_that_fails_leaves_the_others_as_they_were(tiny: Engine) -> None:
    engine = engine_of(tiny, "qwen3_next")
    good = [Asked(some(90, seed), 20) for seed in (1, 2)]
    bad = Asked([*some(90, 1), 3], 20, after=9)
    add = bad.add

    calls = []

    def failing(steps: Sequence[Step]) -> list[Event]:
        calls.append(steps)
        if len(calls) == 6:  # as where a pass fails
            assert bad.generation is not None
            bad.generation.target.forward(mx.array([1, 2]))
            raise RuntimeError("out of memory")
        return add(steps)

    bad.add = failing  # type: ignore[method-assign]
    run = Run(StepLoop(Session(engine), 3, Clock(1)))
    run.serve([*good, bad])
    assert isinstance(bad.events[-1], Failed)
    after = Asked(bad.prompt, 20)
    run.serve([after])
    for asked in [*good, after]:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only work moves."""
    clock = Clock(0)
    monkeypatch.setattr(Clock, "__call__", lambda self: self.now)
    return clock


def check_shares(passes: Sequence[float], alone: float, late: float) -> None:
    """passes: when those of an answer ended. Between any two of them as much time again as they
    take by themselves goes to reading, and `late` at most."""
    behind = [at - 2 * alone * number for number, at in enumerate(passes)]
    earliest = accumulate(behind, min)
    assert max(at - least for at, least in zip(behind, earliest, strict=True)) <= late


@pytest.mark.long
@pytest.mark.parametrize(("writers", "pass_s"), [(1, 0.1), (3, 0.3)])
def test_a_long_prompt_beside_answers_that_are_really_written(
    writers: int, pass_s: float, still: Clock, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sessions of a model whose passes alone move the clock."""
    monkeypatch.setattr(Target, "clock", lambda self: still.now)
    engine = engine_of(tiny, "llama")
    engine = altered(engine, model=Costly(engine.model, still, pass_s), context_length=40_000)
    long = Asked(some(1500, 9), 1, "off", after=12)
    answers = [Asked(some(30, seed), 60 // writers, "off") for seed in range(writers)]
    times: list[float] = []
    run = Run(StepLoop(Session(engine), 4, still), lambda loop: times.append(still.now))
    run.serve([*answers, long])
    times.append(still.now)
    took = [after - before for before, after in pairwise(times)]
    reading = [number for number, asked in enumerate(run.steps) if long in asked]
    # A chunk is longer than 0.2 s or two passes if its fixed cost would be over a quarter of it.
    chunk_s, first, last = max(0.2, 4 * pass_s), reading[0], reading[-1]
    chunks = [number for number in reading[:-1] if took[number] > 0.0]
    assert len(chunks) >= 5
    assert max(took[number] for number in chunks) <= chunk_s
    assert 1 not in [after - before for before, after in pairwise(chunks[:-1])]  # passes between
    for asked in answers:
        ended = [times[i + 1] for i in range(first, last) if asked in run.steps[i]]
        check_shares(ended, pass_s + 0.001 * writers, chunk_s + 4 * pass_s)
    # And the prompt does not wait: it gets as much of the time.
    assert sum(took[first : last + 1]) <= 2 * sum(took[i] for i in reading) + 2 * pass_s


@pytest.mark.parametrize("new_tokens", [1, 2, 31, 63, 64, 65, 100])
def test_few_new_prompt_tokens_join_the_first_decode_pass(tiny: Engine, new_tokens: int) -> None:
    clock = Clock(0)
    engine = engine_of(tiny, "llama")
    engine = altered(engine, model=Costly(engine.model, clock, 1000.0))
    session = Session(engine)
    first = session.generate(BASE[:100], GenerateOptions(3, "off")).answer()
    passes = clock.now // 1000
    prompt = [*BASE[:100], *first.tokens[:2], *some(new_tokens, 8)]
    later = session.generate(prompt, GenerateOptions(1, "off")).answer()
    assert later.stats.cached_tokens == 102
    assert clock.now // 1000 - passes == (1 if new_tokens <= 64 else 2)
    assert later.tokens == Session(engine).generate(prompt, GenerateOptions(1)).answer().tokens


@pytest.mark.long
@pytest.mark.parametrize("part", ["planning", "pass"])
def test_failed_shared_pass_fails_its_requests_and_no_later_ones(
    part: str, tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning fails, or the forward pass; the step loop continues with new caches."""
    engine = engine_of(tiny, "llama")
    run = Run(StepLoop(Session(engine), 4))

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        if part == "planning":
            patch.setattr(JointPlanner, "lengths", fail)
        else:
            patch.setattr(batched_pass, "run", fail)
            patch.setattr(batched_pass, "why_not_batched", lambda *args: None)
        bad = [Asked(some(30, seed), 20) for seed in (1, 2)]
        run.serve(bad)
    assert all(isinstance(asked.events[-1], Failed) for asked in bad)
    good = [Asked(some(30, seed), 20) for seed in (1, 2)]
    run.serve(good)
    for asked in good:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)


def test_a_session_is_chosen_by_what_its_drafter_knows(tiny: Engine) -> None:
    """Conversations in turn, some at the same time: no drafter learns a conversation again."""
    loop = StepLoop(Session(tiny), 3)
    conversations = [some(200 + 50 * number, number) for number in range(3)]
    learned: list[int] = []

    def ask(*numbers: int) -> None:
        handles = {}
        for number in numbers:
            options = GenerateOptions(4)
            job = text_job(conversations[number], options)
            handle = JobHandle(job, lambda event: None, "", lambda: None, short=False)
            loop.begin(handle)
            handles[id(handle)] = number
        for each in loop._sessions:
            drafting, before = each.drafting, len(each.drafting._drafter.tokens)
            extend = drafting._drafter.extend

            def counting(tokens: Sequence[int], extend: Any = extend) -> None:
                learned.append(len(tokens))
                extend(tokens)

            drafting._drafter.extend = counting  # type: ignore[method-assign]
            assert before >= 0
        while handles:
            for handle, events in loop.step():
                if events and isinstance(events[-1], Finished | Failed):
                    number = handles.pop(id(handle))
                    conversations[number] += some(20, len(learned))

    ask(0, 1, 2)
    learned.clear()
    for numbers in [(2,), (1,), (0,), (2, 0), (1, 2, 0), (0,), (1,)]:
        ask(*numbers)
    assert max(learned) < 100
