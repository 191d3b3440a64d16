"""Prefill: chunk sizes follow the measured speed; all launched tokens are right and kept."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding.generate.prefill import ChunkSizes, prefill
from akunu_py.models.load.fit import PREFILL_ROWS, WIDE_PREFILL_ROWS
from akunu_py.ngram.cost import CostCurve
from tests.support.families import build
from tests.support.slow import cover
from tests.support.targets import Timed, answer, fresh, some

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
