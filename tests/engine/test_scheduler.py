"""The scheduler's promises, in simulated time."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.engine.prefill import ChunkSizes, prefill
from akunu_py.engine.scheduler import Scheduler
from akunu_py.models.load.fit import PREFILL_ROWS, WIDE_PREFILL_ROWS
from akunu_py.ngram.cost import CostCurve
from tests.support.families import build
from tests.support.slow import cover
from tests.support.targets import Timed, answer, fresh, some

RATE = 1000.0  # prompt tokens per second


@dataclass(eq=False)
class Slot:
    """The fields of a request."""

    short: bool
    since: float
    spent: float
    begun: bool = False
    cancelled: bool = False
    can_share: bool = False
    is_running: bool = False
    prompt_tokens_left: int = 0
    joining_tokens: int = 0
    stepped_s: float = 0.0
    pass_s: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.begun and self.prompt_tokens_left == 0


def planned(scheduler: Scheduler, slots: Sequence[Any], rate: float | None) -> Any:
    return scheduler.schedule(slots, [each for each in slots if each.can_share], rate)


@dataclass(eq=False)
class Work:
    """A request that prefills `prompt` tokens, then decodes `count` tokens, one a pass."""

    prompt: int
    count: int
    pass_s: float = 0.025
    short: bool = False
    slot: Slot = field(init=False)
    times: list[float] = field(default_factory=list)  # of its tokens


class Simulation:
    """Requests in simulated time. shared: decode passes are shared, for the time of one."""

    def __init__(self, *, shared: bool) -> None:
        self.now = 0.0
        self.shared = shared
        self.running: list[Work] = []
        self._scheduler = Scheduler(lambda: self.now)

    def begin(self, work: Work) -> None:
        spent = min((each.slot.spent for each in self.running), default=0.0)
        work.slot = Slot(work.short, self.now, spent)
        self.running.append(work)

    def step(self, unshared: Work | None = None) -> Any:
        ready = [each.slot for each in self.running]
        for each in self.running:
            each.slot.can_share = self.shared and each.slot.decodes and each is not unshared
        plan = planned(self._scheduler, ready, RATE)
        members = [each for each in self.running if each.slot in plan.requests]
        started = self.now
        begun = members[0].slot.begun
        if not begun:  # nothing runs yet
            members[0].slot.begun, members[0].slot.prompt_tokens_left = True, members[0].prompt
        elif plan.chunk and (left := members[0].slot.prompt_tokens_left):
            size = min(left, max(16, int(RATE * (plan.chunk_seconds or 1.0))))
            members[0].slot.prompt_tokens_left -= size
            self.now += size / RATE
        elif not plan.chunk:
            self.now += members[0].pass_s
            for each in members:
                each.times.append(self.now)
        self._scheduler.charge(plan, self.now - started)
        self.running = [each for each in self.running if len(each.times) < each.count]
        return plan


def check_share(times: Sequence[float], pass_s: float, late: float) -> None:
    """Check that the passes between any two tokens take at least half of the time, but for `late`.

    pass_s: time of the passes for one token of each request.
    """
    behind = [at - 2 * pass_s * number for number, at in enumerate(times)]
    earliest = accumulate(behind, min)
    assert max(at - least for at, least in zip(behind, earliest, strict=True)) <= late


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lengths", [[20_000], [20_000, 3000, 50], [6000, 6000]])
@pytest.mark.parametrize("writers", [1, 2, 3])
@pytest.mark.parametrize("pass_s", [0.025, 0.15])
def test_prefill_takes_no_more_time_than_decoding(
    pass_s: float, writers: int, lengths: list[int], shared: bool
) -> None:
    simulation = Simulation(shared=shared)
    round_s = pass_s if shared else pass_s * writers
    count, chunk_s = 20 + int(sum(lengths) / RATE / round_s), max(0.2, 2 * pass_s)
    writing = [Work(0, count, pass_s) for _ in range(writers)]
    reading = [Work(length, 1, pass_s) for length in lengths]
    for each in writing:
        simulation.begin(each)
    for _ in range(5 * writers):
        simulation.step()
    before = len(writing[0].times)
    for each in reading:
        simulation.begin(each)
    chunks: list[float] = []
    while simulation.running:
        started, tokens = simulation.now, sum(len(each.times) for each in [*writing, *reading])
        simulation.step()
        if sum(len(each.times) for each in [*writing, *reading]) > tokens:
            chunks = []
        elif simulation.now > started and any(len(each.times) < count for each in writing):
            chunks.append(simulation.now - started)
        # One chunk between two passes, or the end of a prompt and the beginning of the next one.
        assert len(chunks) <= (1 if len(lengths) == 1 else 2)
        assert sum(chunks) <= chunk_s + (len(chunks) - 1) * pass_s + 1e-9
    for each in writing:
        late = chunk_s + (2 * writers + len(lengths)) * pass_s
        check_share(each.times[before:], round_s, late)
    # The shortest prompt is prefilled first.
    assert sorted(reading, key=lambda each: each.prompt) == sorted(
        reading, key=lambda each: each.times[0]
    )


@pytest.mark.parametrize("shared", [False, True])
def test_short_requests_come_first_and_long_ones_are_not_starved(shared: bool) -> None:
    simulation = Simulation(shared=shared)
    long = [Work(0, 2000), Work(20_000, 10), Work(8000, 10)]
    for each in long:
        simulation.begin(each)
    for _ in range(50):
        simulation.step()
    short, started = Work(300, 16, short=True), simulation.now
    simulation.begin(short)
    while len(short.times) < 16:
        simulation.step()
    assert short.times[-1] - started <= 2 * (0.3 + 16 * 0.025)
    while simulation.running and not (long[1].times and long[2].times):
        simulation.step()
    assert long[2].times[0] < long[1].times[0]


def test_requests_that_share_a_pass_all_take_part_and_others_get_equal_time() -> None:
    simulation = Simulation(shared=True)
    works = [Work(0, 400) for _ in range(4)]
    for each in works:
        simulation.begin(each)
    for _ in range(10):
        simulation.step()
    assert simulation.step().requests == [each.slot for each in works]
    alone = Work(0, 400)
    simulation.begin(alone)
    simulation.step()
    for _ in range(200):
        plan = simulation.step(alone)
        assert alone.slot not in plan.requests or len(plan.requests) == 1
    assert len(alone.times) == pytest.approx(200 / 5, abs=3)  # a fifth of the time


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rate", [None, 100.0, 900.0, 9000.0])
def test_short_prompts_join_a_pass_while_there_is_room(seed: int, rate: float | None) -> None:
    """All of them do in the end, and answers never miss a pass."""
    rng = random.Random(seed)
    room = {None: 100, 100.0: 64, 900.0: 180, 9000.0: 256}[rate]
    scheduler = Scheduler(lambda: 0.0)
    slots = [Slot(short=False, since=0.0, spent=0.0, begun=True) for _ in range(rng.randint(2, 12))]
    for each in slots:
        each.can_share, each.joining_tokens = True, rng.choice([0, 0, rng.randint(1, 64)])
    waiting = {id(each) for each in slots if each.joining_tokens}
    passes = 0
    while waiting:
        passes += 1
        assert passes <= len(slots)
        plan = planned(scheduler, slots, rate)
        joining = [each.joining_tokens for each in plan.requests]
        assert sum(joining) <= room
        assert all(each in plan.requests for each in slots if not each.joining_tokens)
        left_out = [each.joining_tokens for each in slots if each not in plan.requests]
        assert plan.alone == (not left_out)
        assert not left_out or sum(joining) + min(left_out) > room
        for each in plan.requests:
            each.joining_tokens = 0
            waiting.discard(id(each))
        scheduler.charge(plan, 0.1)


@pytest.mark.parametrize("change", [{"is_running": True}, {"cancelled": True}, {"begun": False}])
def test_running_passes_cancellations_and_new_requests_come_first(change: dict[str, bool]) -> None:
    slots = [Slot(short=False, since=0.0, spent=spent, begun=True) for spent in (0.0, 1.0, 9.0)]
    for name, value in change.items():
        setattr(slots[2], name, value)
    assert planned(Scheduler(lambda: 0.0), slots, None).requests == [slots[2]]


NAMES = ["llama", "llama-sliding", "llama4", "llama-kv8", "qwen3_next", "mamba2"]
LONG, LEAST, LARGEST = 640, 64, 256


def sizes_at(
    rate: float | None, seconds: float | None = None, largest: int = WIDE_PREFILL_ROWS
) -> ChunkSizes:
    costs = CostCurve()
    costs.prefill_rate = rate
    return ChunkSizes(costs, largest, seconds)


def small_sizes() -> ChunkSizes:
    return ChunkSizes(largest=LARGEST, least=LEAST)


@given(st.floats(1, 1e6), st.integers(1, WIDE_PREFILL_ROWS))
def test_prefill_stops_within_a_second_unless_512_tokens_take_longer(
    rate: float, under_way: int
) -> None:
    sizes = sizes_at(rate)
    size = sizes.next()
    assert PREFILL_ROWS <= size <= WIDE_PREFILL_ROWS
    assert size == PREFILL_ROWS or size <= rate
    assert size in (WIDE_PREFILL_ROWS, PREFILL_ROWS) or size > rate - 64
    assert sizes.may_follow(under_way, size) == (under_way + size <= rate)


@given(st.floats(1, 1e6), st.floats(0.001, 2))
def test_a_timed_chunk_takes_no_longer_than_its_limit(rate: float, seconds: float) -> None:
    sizes = sizes_at(rate, seconds)
    assert sizes.next() <= max(16, rate * seconds)
    assert not sizes.may_follow(1, 1)


def test_a_slow_short_last_chunk_does_not_lower_the_rate() -> None:
    sizes = sizes_at(None)
    sizes.observe(20, 0.02, last=True)
    assert sizes.costs.prefill_rate == 1000
    sizes.observe(100, 0.2, last=True)
    assert sizes.costs.prefill_rate == 1000
    sizes.observe(512, 1.0, last=False)
    assert sizes.costs.prefill_rate == 512
    sizes.observe(5, 1e-6, last=True)
    assert sizes.costs.prefill_rate == 512


@pytest.mark.long
@pytest.mark.parametrize(("name", "speed"), cover(NAMES, [30.0, 250.0, 3000.0]))
def test_chunks_grow_with_the_speed_and_follow_each_other(name: str, speed: float) -> None:
    prompt, target = some(LONG, 3), Timed(build(name), speed)
    target.reuse_prefix(prompt)
    seen = [(0, 0)]  # launched and finished tokens

    def meanwhile(launched: int) -> None:
        seen.append((launched, seen[-1][1]))

    for done in prefill(target, small_sizes(), meanwhile):
        seen.append((seen[-1][0], done))
    assert seen[-1] == (LONG - target.prompt_tail, LONG - target.prompt_tail)
    chunks = [after - before for (before, _), (after, _) in pairwise(seen) if after > before]
    assert chunks[0] == LEAST  # the speed is unknown
    assert max(chunks) == max(LEAST, min(LARGEST, speed - speed % 64))
    under_way = [launched - done for launched, done in seen]
    assert max(under_way) <= max(LEAST, speed)
    assert (max(under_way) > max(chunks)) == (speed == 3000)
    assert answer(target, prompt, []) == fresh(name, prompt)


@pytest.mark.parametrize(("name", "after"), cover(NAMES, [0, 320]))
def test_launched_tokens_are_kept_when_prefill_is_cancelled(name: str, after: int) -> None:
    prompt, target = some(LONG, 3), Timed(build(name), 30_000.0)
    target.reuse_prefix(prompt)
    chunks = prefill(target, small_sizes())
    while next(chunks) < after:
        pass
    chunks.close()
    kept = len(target.tokens)
    assert after <= kept <= after + 2 * LARGEST
    assert target.tokens + target.pending == prompt
    longer = [*prompt, *some(90, 1)]
    assert target.reuse_prefix(longer).cached == kept
    assert answer(target, longer, []) == fresh(name, longer)


def sliced(fixed: float, per_token: float, length: int, noise: float = 0.0) -> list[float]:
    """Return the seconds of each chunk, for passes with a fixed cost and one per token."""
    sizes, chance, slices = sizes_at(None, 0.1), Random(7), []
    while length > 0:
        size = min(length, sizes.next())
        length -= size
        seconds = (fixed + per_token * size) * (1 + chance.uniform(-noise, noise))
        sizes.observe(size, seconds, last=length <= 0)
        slices.append(seconds)
    return slices


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("fixed", [0.0, 0.005, 0.063, 0.15])
@pytest.mark.parametrize("per_token", [0.0002, 0.004])
def test_a_high_fixed_cost_of_a_pass_does_not_make_chunks_tiny(
    fixed: float, per_token: float, noise: float
) -> None:
    """A 7B model at 68 GB/s: 63 ms a pass and 1 ms a token."""
    length = 5120
    slices = sliced(fixed, per_token, length, noise)
    work = per_token * length
    limit = max(0.1, 4 * fixed)  # at most a quarter of the time is the fixed cost
    least = work + fixed * work / (limit - fixed)
    assert sum(slices) <= 1.25 * least + 0.5
    assert sorted(slices)[len(slices) // 2] <= limit * (1.1 + 2 * noise)
    assert max(slices) <= 0.7 + 2 * noise


@pytest.mark.parametrize("length", [700, 1000])
def test_pipelined_chunks_are_not_measured_as_faster(length: int) -> None:
    """On a CPU, launching the second waits until the first is done."""
    target, sizes = Timed(build("llama"), 1000.0), sizes_at(5000.0, largest=512)
    target.reuse_prefix(some(length, 3))
    list(prefill(target, sizes))
    assert sizes.costs.prefill_rate == pytest.approx(1000.0, rel=0.01)
