"""The simulated device: times counted by hand, and deterministic seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.errors import UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import DraftMode
from tests.measure.device import (
    Device,
    DeviceOptions,
    SimulatedTarget,
    known_costs,
    main,
    parse_device,
    replay_items,
    replay_on_device,
)
from tests.support.decoding import decode
from tests.support.slow import cover
from tests.support.tiny import Adversary

pytestmark = pytest.mark.rotating

CURVE = parse_curve("1:1,2:1.5,5:3")
COUNT = 41
ITEM = TraceItem((1, 2), tuple(random.Random(1).choices(range(100), k=COUNT)))


def spent(mode: DraftMode, drafts: Sequence[Sequence[int]] = (), **options: float) -> float:
    counts = replay_items([ITEM], CURVE, DeviceOptions(**options), lambda: Scripted(mode, drafts))
    assert counts.tokens == COUNT - 1
    return counts.cost


class Scripted(NoDrafter):
    def __init__(self, mode: DraftMode, drafts: Sequence[Sequence[int]]) -> None:
        self.pipelines = mode == "off"
        self.drafts = list(drafts)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        return list(self.drafts.pop(0))[:limit] if self.drafts else []


def test_pipelining_hides_the_gap_and_drafting_does_not() -> None:
    # Only the first pass waits for the host; unpipelined, each of them does.
    assert spent("off", gap=0.25) == pytest.approx(0.25 + 40)
    assert spent("fixed", gap=0.25) == pytest.approx(40 * 1.25)
    right = list(ITEM.output[1:5])  # four rows more than the first token; a bonus token besides
    assert spent("fixed", [right], gap=0.25) == pytest.approx(3.25 + 35 * 1.25)
    wrong = [right[0], 999, 999, 999]
    assert spent("fixed", [wrong], gap=0.25) == pytest.approx(3.25 + 38 * 1.25)


def test_draft_is_verified_after_a_plain_step() -> None:
    said = ITEM.output
    # The first step, and one behind it; then, while that one runs, drafts of what follows it.
    for draft, passes in ((said[3:6], 37), ((said[3], 999, 999), 39), ((999,) * 3, 40)):
        drafter = Scripted("off", [(), draft])  # 4 rows, 2.5 plain steps
        counts = replay_items([ITEM], CURVE, DeviceOptions(gap=0.25), iter([drafter]).__next__)
        assert counts.passes == passes
        # Two gaps are not hidden: that of the first step, and that of the one behind the draft.
        assert counts.cost == pytest.approx(2 * 0.25 + (passes - 1) + 2.5)
        assert counts.accepted == 40 - passes


def test_client_is_served_during_a_pass() -> None:
    assert spent("off", reader=0.5, gap=0.25) == pytest.approx(0.25 + 40 + 0.5)
    assert spent("fixed", reader=0.5, gap=0.25) == pytest.approx(1.25 * 40 + 0.5)
    # Host and reader together take longer than the device: it waits for them.
    assert spent("off", reader=1.0, gap=0.5) == pytest.approx(1.5 * 40, abs=1.5)


def test_the_first_use_of_a_row_count_takes_longer_once() -> None:
    device = Device(CURVE, DeviceOptions(first=7))
    target = SimulatedTarget(device, ITEM)
    drafts = [ITEM.output[1:5], ITEM.output[6:10]]
    pieces = list(decode(target, Scripted("fixed", drafts), 13, ()))
    assert [piece.seconds for piece in pieces] == pytest.approx([10, 3, 8, 1, 1])
    assert device.true.now == pytest.approx(3 + 3 + 1 + 1 + 1)


def test_noise_is_observed_but_not_scored() -> None:
    device = Device(CURVE, DeviceOptions(noise=0.1, outliers=0.1, seed=3))
    target = SimulatedTarget(device, ITEM)
    pieces = decode(target, NoDrafter(), 40, ())
    told = [piece.seconds for piece in pieces]
    assert device.true.now == pytest.approx(40)
    assert device.observed.now == pytest.approx(sum(told))
    assert len(set(told)) == 40
    assert 1 <= sum(seconds > 5 for seconds in told) <= 10


def test_output_equals_the_trace_for_any_draft() -> None:
    items = [TraceItem((5, 6, seed), ITEM.output) for seed in range(20)]
    drafters = iter([Adversary(item.prompt, item.output, item.prompt[2]) for item in items])
    counts = replay_items(items, CURVE, DeviceOptions(gap=0.1), lambda: next(drafters))
    assert counts.drafted > counts.accepted > 0


@pytest.mark.long
def test_the_same_seed_gives_the_same_figures() -> None:
    trace = Trace("t", {"edit": (written("edit", 1),)})

    def figures(seed: int) -> Any:
        options = DeviceOptions(gap=0.15, noise=0.3, outliers=0.02, first=5, seed=seed)
        return replay_on_device(trace, parse_curve("m5max"), "auto", options)["edit"]

    assert figures(1) == figures(1)
    assert len({figures(seed)["score"] for seed in range(4)}) > 1


def spoiled_costs() -> CostCurve:
    """A curve learned under load: 60 plain steps for any draft."""
    costs = CostCurve()
    for rows, cost in [(PIPELINED, 0.9), (1, 1.0), *((rows, 60.0) for rows in range(2, MAX_ROWS))]:
        for _ in range(3):  # as many as are saved
            costs.observe(rows, cost, 10)
    return costs


@pytest.mark.long
@pytest.mark.parametrize(("gap", "name"), cover([0.0, 0.15, 0.3], ["m5max", "m1"]))
def test_wrong_curve_recovers_within_a_thousand_tokens(name: str, gap: float) -> None:
    source = random.Random(4).choices(range(1000), k=2000)
    edited = [token if i % 40 else 5000 + i for i, token in enumerate(source)]
    curve, options = parse_curve(name), DeviceOptions(gap=gap, noise=0.05)

    def rate_after_a_thousand(costs: CostCurve) -> float:
        drafter = AutoDrafter(costs)
        drafter.extend([*source, edited[0]])
        device = Device(curve, options)
        target = SimulatedTarget(device, TraceItem(tuple(source), tuple(edited)))
        said, started = 1, 0.0
        for piece in decode(target, drafter, len(edited) - 1, ()):
            said += len(piece.tokens)
            if said < 1000:
                started, counted = device.true.now, said
        return (said - counted) / (device.true.now - started)

    undisturbed = rate_after_a_thousand(known_costs(curve, options))
    assert undisturbed > 3
    assert rate_after_a_thousand(spoiled_costs()) > 0.9 * undisturbed


def test_plain_decoding_scores_one() -> None:
    trace = Trace("t", {"a": (ITEM, ITEM)})
    options = parse_device("gap:0.3 reader:0.1,noise:0.05,first:5,outliers:0.02")
    assert replay_on_device(trace, CURVE, "off", options)["a"]["score"] == 1.0


@pytest.mark.parametrize(
    "text", ["gap", "gap:x", "gap:-1", "gap:inf", "gap:nan", "gap:1,gap:1", "lag:1"]
)
def test_invalid_device_options_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="--device: expected gap"):
        parse_device(text)


def written(kind: str, seed: int) -> TraceItem:
    """Made up text. words: as frequent as in prose, in no order. phrases: what was said is said
    again, often with another ending. edit: of the prompt."""
    randomly = random.Random(seed)
    source = randomly.choices(range(600), weights=[1 / rank for rank in range(1, 601)], k=1600)
    if kind == "phrases":
        for place in range(200, len(source), 12):
            begin = randomly.randrange(place - 12)
            length = randomly.choice((2, 3, 4, 8))
            source[place : place + length] = source[begin : begin + length]
    if kind == "edit":
        output = [token if randomly.random() < 0.98 else 700 for token in source[:800]]
        return TraceItem(tuple(source), tuple(output))
    return TraceItem(tuple(source[:800]), tuple(source[800:]))


@pytest.mark.parametrize(("gap", "name"), cover([0.0, 0.15, 0.3], ["m5max", "m1"]))
def test_drafting_costs_little_without_any_gain(name: str, gap: float) -> None:
    """Costs are learned from nothing, from noisy times with outliers and slow first uses, and so
    is that in words without order there is nothing to draft."""
    options = DeviceOptions(gap=gap, noise=0.05, outliers=0.02, first=5, seed=2)
    kinds = ("words", "phrases", "edit")
    trace = Trace("made up", {kind: (written(kind, 1),) for kind in kinds})
    found = replay_on_device(trace, parse_curve(name), "auto", options)
    scores = {kind: found[kind]["score"] for kind in kinds}
    assert min(scores["words"], scores["phrases"]) > 0.98, scores
    assert scores["edit"] > 3.5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    loop = {"prompt": list(range(50)) * 2, "output": list(range(50)) * 2}
    path.write_text(json.dumps({"tokenizer": "none", "workloads": {"loop": [loop, loop]}}))
    device = ["--device", "gap:0.15,noise:0.05,first:5"]
    assert main([str(path), *device, "--curve", "m4pro,33:7", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["device"] == "gap:0.15,noise:0.05,first:5"
    counts = result["workloads"]["loop"]
    assert (counts["items"], counts["tokens"]) == (2, 198)
    assert counts["passes"] + counts["accepted"] == counts["tokens"]
    assert counts["score"] > 2
    assert main([str(path), "--draft", "off"]) == 0
    table = capsys.readouterr().out
    assert "on a device (ideal)" in table
    assert "1.00" in table
    assert main([str(path), "--device", "lag:1"]) == 2
    assert "--device" in capsys.readouterr().err
