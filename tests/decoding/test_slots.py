"""Several answers at the same time: each is the one that it is alone, and time and memory are
shared as the scheduler says."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from akunu_py.decoding import kvcache, session, slots
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.events import Ended, Event, Failed, Reading
from akunu_py.decoding.job import JobHandle
from akunu_py.decoding.session import Generation, Session
from akunu_py.decoding.slots import Slots
from akunu_py.types import DraftMode, GenerateOptions, SamplingOptions
from tests.support.families import build
from tests.support.targets import Counting, some
from tests.support.tiny_fim import load_tiny

pytestmark = pytest.mark.usefixtures("uncompiled")

PLENTY = 1 << 30
KINDS = ["llama", "llama-sliding", "llama4", "mamba2", "qwen3_next", "deepseek_v3", "llama-kv8"]
BASE = some(500, 1)  # what all prompts begin with, some of it


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load_tiny(tmp_path_factory.mktemp("model"), ["<|end|>"])


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read 16 tokens at a time, and memory is taken for 5."""
    monkeypatch.setattr(slots, "_CHUNK_S", 1e-9)
    monkeypatch.setattr(slots, "_PATIENCE_S", 1e-9)
    monkeypatch.setattr(session, "_LEG", 5)


def engine_of(tiny: Engine, name: str, cache_memory: int = PLENTY) -> Engine:
    model = Counting(build(name))
    cache = kvcache.new_cache(model)
    return replace(
        tiny,
        model=model,
        vocabulary=96,
        stop_tokens=frozenset(),
        no_draft=kvcache.why_no_rollback(cache),
        recurrent=kvcache.is_recurrent(cache),
        cache_memory=cache_memory,
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
    generation: Generation | None = None

    @property
    def options(self) -> GenerateOptions:
        sampling = SamplingOptions(0.0 if self.seed is None else 0.9, seed=self.seed)
        return GenerateOptions(self.count, self.draft, sampling=sampling)

    def job(self, session: Session) -> Iterator[Event | None]:
        self.generation = session.generate(self.prompt, self.options)
        for step in self.generation.steps():
            yield step if isinstance(step, Reading) else None
        yield Ended(self.generation.finish_reason or "cancelled", self.generation.stats)

    @property
    def tokens(self) -> list[int]:
        assert self.generation is not None
        return self.generation.tokens

    @property
    def cached(self) -> int:
        assert self.generation is not None
        return self.generation.stats.cached_tokens


@dataclass
class Run:
    """Requests on slots. at_step: looks at them before each step."""

    slots: Slots
    at_step: Callable[[Slots], None] = lambda slots: None
    order: list[Asked] = field(default_factory=list)  # whose the steps were

    def serve(self, requests: Sequence[Asked]) -> None:
        waiting = sorted(requests, key=lambda each: each.after)
        handles: dict[int, Asked] = {}
        while waiting or handles:
            while waiting and (waiting[0].after <= len(self.order) or not handles):
                if not self.slots.has_room(short=waiting[0].short):
                    break
                asked = waiting.pop(0)
                handle = JobHandle(
                    asked.job, asked.events.append, "", lambda: None, short=asked.short
                )
                handles[id(handle)] = asked
                self.slots.begin(handle)
            self.at_step(self.slots)
            handle, event = self.slots.step()
            asked = handles[id(handle)]
            asked.events.append(event)
            self.order.append(asked)
            if len(asked.events) == asked.cancel_after:
                handle.cancel()
            if isinstance(event, Ended | Failed):
                del handles[id(handle)]


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
    max_size=4,
)


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("name", KINDS)
@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(requests=REQUESTS, seed=st.integers(0, 99), memory=st.sampled_from([PLENTY, 300_000, 0]))
def test_every_answer_is_the_one_that_it_is_alone(
    name: str, tiny: Engine, requests: list[Asked], seed: int, memory: int
) -> None:
    engine = engine_of(tiny, name, memory)
    run = Run(Slots(Session(engine), 3, Clock(seed)))
    run.serve(requests)
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert isinstance(asked.events[-1], Ended), asked.events[-1]
        expected = list(alone.tokens)
        if asked.events[-1].reason == "cancelled":
            assert asked.cancel_after is not None
            expected = expected[: len(asked.tokens)]
        assert asked.tokens == expected


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("memory", [PLENTY, 0])
def test_what_another_is_reading_is_waited_for(name: str, memory: int, tiny: Engine) -> None:
    first, second = Asked([*BASE, 1]), Asked([*BASE, 2, 3], after=3)
    engine = engine_of(tiny, name, memory)
    run = Run(Slots(Session(engine), 3, Clock(1)))
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


@pytest.mark.usefixtures("fine")
def test_memory_is_shared_and_who_has_none_waits_or_gives_up_its_own(tiny: Engine) -> None:
    engine = engine_of(tiny, "llama")
    per_token = engine.fit.needs.cache.at(256) // 256
    engine = replace(engine, cache_memory=per_token * 256 * 3)
    requests = [Asked(some(250, seed), 24, after=seed) for seed in range(5)]
    together: set[int] = set()

    def watch(slots: Slots) -> None:
        in_use = [each for each in run.slots.caches.in_use if each.reserved]
        together.add(len(in_use))
        assert len(in_use) < 2 or sum(each.reserved for each in in_use) <= engine.cache_memory

    run = Run(Slots(Session(engine), 5, Clock(1)), watch)
    run.serve(requests)
    assert max(together) == 3  # until the answers cross 256 tokens
    for asked in requests:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)


def test_a_job_that_fails_leaves_the_others_as_they_were(tiny: Engine) -> None:
    engine = engine_of(tiny, "qwen3_next")
    good = [Asked(some(90, seed), 20) for seed in (1, 2)]
    bad = Asked([*some(90, 1), 3], 20, after=9)
    work = bad.job

    def failing(session: Session) -> Iterator[Event | None]:
        for number, event in enumerate(work(session)):
            if number == 6:  # as where a pass fails
                session.target.forward(mx.array([1, 2]))
                raise RuntimeError("out of memory")
            yield event

    bad.job = failing  # type: ignore[method-assign]
    run = Run(Slots(Session(engine), 3, Clock(1)))
    run.serve([*good, bad])
    assert isinstance(bad.events[-1], Failed)
    after = Asked(bad.prompt, 20)
    run.serve([after])
    for asked in [*good, after]:
        alone = Session(engine).generate(asked.prompt, asked.options).answer()
        assert asked.tokens == list(alone.tokens)
