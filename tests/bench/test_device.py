"""Replays on a simulated device: its time counted by hand, the same numbers from the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.device import (
    Device,
    DeviceOptions,
    SimulatedTarget,
    parse_device,
    replay_items,
    replay_on_device,
)
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.decoding.decode import decode
from akunu_py.errors import UsageError
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import DRAFT_MODES, DraftMode
from tests.support.tiny import Adversary

CURVE = parse_curve("1:1,2:1.5,5:3")
COUNT = 41
ITEM = TraceItem((1, 2), tuple(random.Random(1).choices(range(100), k=COUNT)))


def spent(mode: DraftMode, drafts: Sequence[Sequence[int]] = (), **options: float) -> float:
    counts = replay_items([ITEM], CURVE, DeviceOptions(**options), mode, lambda: Scripted(drafts))
    assert counts.tokens == COUNT - 1
    return counts.cost


class Scripted(NoDrafter):
    def __init__(self, drafts: Sequence[Sequence[int]]) -> None:
        self.drafts = list(drafts)

    def propose(self, limit: int) -> list[int]:
        return list(self.drafts.pop(0))[:limit] if self.drafts else []


def test_pipelining_hides_the_gap_and_drafting_does_not() -> None:
    # Only the first pass waits for the host; unpipelined, each of them does.
    assert spent("off", gap=0.25) == pytest.approx(0.25 + 40)
    assert spent("fixed", gap=0.25) == pytest.approx(40 * 1.25)
    right = list(ITEM.output[1:5])  # four rows more than the first token; a bonus token besides
    assert spent("fixed", [right], gap=0.25) == pytest.approx(3.25 + 35 * 1.25)
    wrong = [right[0], 999, 999, 999]
    assert spent("fixed", [wrong], gap=0.25) == pytest.approx(3.25 + 38 * 1.25)


def test_a_reader_is_waited_for_where_nothing_is_under_way() -> None:
    assert spent("off", reader=0.5, gap=0.25) == pytest.approx(0.25 + 40 + 0.5)
    # Host and reader together take longer than the device: it waits for them.
    assert spent("off", reader=1.0, gap=0.5) == pytest.approx(1.5 * 40, abs=1.5)


def test_the_first_use_of_a_row_count_takes_longer_once() -> None:
    assert spent("fixed", first=7) == pytest.approx(40 + 7)
    right = list(ITEM.output[1:5])
    again = list(ITEM.output[6:10])
    assert spent("fixed", [right, again], first=7) == pytest.approx(30 + 6 + 14)


def test_noise_is_told_and_does_not_count() -> None:
    device = Device(CURVE, DeviceOptions(noise=0.1, outliers=0.1, seed=3))
    target = SimulatedTarget(device, ITEM)
    pieces = decode(target, NoDrafter(), 40, (), plain_steps_before_pipelining=0)
    told = [piece.seconds for piece in pieces]
    assert device.true.now == pytest.approx(40)
    assert device.told.now == pytest.approx(sum(told))
    assert len(set(told)) == 40
    assert 1 <= sum(seconds > 5 for seconds in told) <= 10


@pytest.mark.parametrize("mode", DRAFT_MODES)
def test_whatever_is_drafted_the_trace_is_said(mode: DraftMode) -> None:
    items = [TraceItem((5, 6, seed), ITEM.output) for seed in range(20)]
    drafters = iter([Adversary(item.prompt, item.output, item.prompt[2]) for item in items])
    counts = replay_items(items, CURVE, DeviceOptions(gap=0.1), mode, lambda: next(drafters))
    assert counts.drafted > counts.accepted > 0


def test_the_same_seed_gives_the_same_figures() -> None:
    words = random.Random(2).choices(range(12), k=900)
    trace = Trace("t", {"words": (TraceItem(tuple(words[:450]), tuple(words[450:])),)})

    def figures(seed: int) -> Any:
        options = DeviceOptions(gap=0.15, noise=0.3, outliers=0.02, first=5, seed=seed)
        return replay_on_device(trace, parse_curve("m5max"), "auto", options)["words"]

    assert figures(1) == figures(1)
    assert len({figures(seed)["score"] for seed in range(4)}) > 1


def test_plain_decoding_scores_one() -> None:
    trace = Trace("t", {"a": (ITEM, ITEM)})
    options = parse_device("gap:0.3 reader:0.1,noise:0.05,first:5,outliers:0.02")
    assert replay_on_device(trace, CURVE, "off", options)["a"]["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["gap", "gap:x", "gap:-1", "gap:inf", "gap:nan", "gap:1,gap:1", "lag:1"]
)
def test_what_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--device: expected gap"):
        parse_device(text)
