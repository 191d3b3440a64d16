"""The scheduler's promises, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest

from akunu_py.decoding.generate.scheduler import Scheduler, Slot, StepPlan

RATE = 1000.0  # prompt tokens per second


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

    def step(self, unshared: Work | None = None) -> StepPlan:
        ready = [each.slot for each in self.running]
        for each in self.running:
            each.slot.can_share = self.shared and each.slot.decodes and each is not unshared
        plan = self._scheduler.schedule(ready, RATE)
        members = [each for each in self.running if each.slot in plan.slots]
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
    assert simulation.step().slots == [each.slot for each in works]
    alone = Work(0, 400)
    simulation.begin(alone)
    simulation.step()
    for _ in range(200):
        plan = simulation.step(alone)
        assert alone.slot not in plan.slots or len(plan.slots) == 1
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
        plan = scheduler.schedule(slots, rate)
        joining = [each.joining_tokens for each in plan.slots]
        assert sum(joining) <= room
        assert all(each in plan.slots for each in slots if not each.joining_tokens)
        left_out = [each.joining_tokens for each in slots if each not in plan.slots]
        assert plan.alone == (not left_out)
        assert not left_out or sum(joining) + min(left_out) > room
        for each in plan.slots:
            each.joining_tokens = 0
            waiting.discard(id(each))
        scheduler.charge(plan, 0.1)


@pytest.mark.parametrize("change", [{"is_running": True}, {"cancelled": True}, {"begun": False}])
def test_running_passes_cancellations_and_new_requests_come_first(change: dict[str, bool]) -> None:
    slots = [Slot(short=False, since=0.0, spent=spent, begun=True) for spent in (0.0, 1.0, 9.0)]
    for name, value in change.items():
        setattr(slots[2], name, value)
    assert Scheduler(lambda: 0.0).schedule(slots, None).slots == [slots[2]]
