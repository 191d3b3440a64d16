"""Simulated devices and neural drafters: exact costs, and drafting costs little without a gain."""

import random
from collections.abc import Sequence
from functools import partial

import pytest

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.trace import TraceItem
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.fixed import NoDrafter
from akunu_py.types import Drafter, DraftMode
from tests.support.drafters import FixedCosts
from tests.support.simulated_device import (
    Device,
    DeviceOptions,
    decode_on,
    decoding_time,
)
from tests.support.simulated_drafters import (
    DrafterFigures,
    SimulatedDrafters,
    mixture_drafter,
    replay_mixture,
    replay_simulated,
)
from tests.support.slow import cover

CURVE = parse_curve("1:1,2:1.5,5:3")
ITEM = TraceItem((1, 2), tuple(random.Random(1).choices(range(100), k=41)))
MTP = DrafterFigures("mtp", 0.06, (0.8, 0.65, 0.5))  # as published for heads of one layer


class Scripted(NoDrafter):
    def __init__(self, mode: DraftMode, drafts: Sequence[Sequence[int]]) -> None:
        self.pipelines = mode == "off"
        self.drafts = list(drafts)

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        return list(self.drafts.pop(0))[:limit] if self.drafts else []


RIGHT = ITEM.output[1:5]  # four rows more than the first token; and a bonus token


@pytest.mark.parametrize(("mode", "drafts", "cost"), [
    # Pipelined, only the first pass waits for the host; unpipelined, each of them does.
    ("off", [], 0.25 + 40),
    ("fixed", [], 40 * 1.25),
    ("fixed", [RIGHT], 3.25 + 35 * 1.25),
    ("fixed", [(RIGHT[0], 999, 999, 999)], 3.25 + 38 * 1.25),
    # A draft is verified behind a plain step: two gaps are not hidden.
    ("off", [(), ITEM.output[3:6]], 2 * 0.25 + 36 + 2.5),
    ("off", [(), (999,) * 3], 2 * 0.25 + 39 + 2.5),
])  # fmt: skip
def test_times_counted_by_hand(
    mode: DraftMode, drafts: Sequence[Sequence[int]], cost: float
) -> None:
    time = decoding_time(ITEM, CURVE, DeviceOptions(gap=0.25), Scripted(mode, drafts))
    assert time == pytest.approx(cost)


def written(kind: str, length: int = 500) -> TraceItem:
    """Return a made-up text.

    words: as frequent as in prose, in no order. phrases: earlier words recur, often with another
    ending. edit: of the prompt.
    """
    draw = random.Random(1)
    source = draw.choices(range(600), weights=[1 / rank for rank in range(1, 601)], k=2 * length)
    if kind == "phrases":
        for place in range(200, len(source), 12):
            begin, size = draw.randrange(place - 12), draw.choice((2, 3, 4, 8))
            source[place : place + size] = source[begin : begin + size]
    if kind == "edit":
        output = [token if draw.random() < 0.98 else 700 for token in source[:length]]
        return TraceItem(tuple(source), tuple(output))
    return TraceItem(tuple(source[:length]), tuple(source[length:]))


@pytest.mark.long
@pytest.mark.parametrize(("gap", "name"), cover([0.0, 0.3], ["m5max", "m1"]))
def test_drafting_costs_little_without_any_gain(name: str, gap: float) -> None:
    """Costs and chances are learned from nothing, from noisy times with outliers."""
    options = DeviceOptions(gap=gap, noise=0.05, outliers=0.02, first=5, seed=2)
    curve, scores = parse_curve(name), dict[str, float]()
    for kind in ("words", "phrases", "edit"):
        drafters: list[Drafter] = [NoDrafter(), AutoDrafter(CostCurve())]
        plain, drafted = (
            decoding_time(written(kind, 800), curve, options, each) for each in drafters
        )
        scores[kind] = plain / drafted
    assert min(scores["words"], scores["phrases"]) > 0.98, scores
    assert scores["edit"] > 3.5


@pytest.mark.long
def test_costs_learned_under_load_recover_within_a_thousand_tokens() -> None:
    source = random.Random(4).choices(range(1000), k=2000)
    edited = [token if i % 40 else 5000 + i for i, token in enumerate(source)]
    curve, options, spoiled = parse_curve("m1"), DeviceOptions(gap=0.3, noise=0.05), CostCurve()
    for rows, cost in [(PIPELINED, 0.9), (1, 1.0), *((rows, 60.0) for rows in range(2, MAX_ROWS))]:
        for _ in range(3):  # the number that is saved
            spoiled.observe(rows, cost, 10)

    def rate_after_a_thousand(costs: CostCurve) -> float:
        device, done, started = Device(curve, options), 1, 0.0
        item = TraceItem(tuple(source), tuple(edited))
        for piece in decode_on(device, item, AutoDrafter(costs)):
            done += len(piece.tokens)
            if done < 1000:
                started, counted = device.true.now, done
        return (done - counted) / (device.true.now - started)

    known = {rows: options.gap + curve(rows) for rows in range(1, MAX_ROWS + 1)}
    undisturbed = rate_after_a_thousand(FixedCosts({PIPELINED: curve(1)} | known))
    assert undisturbed > 3
    assert rate_after_a_thousand(spoiled) > 0.9 * undisturbed


def text(copied: float) -> list[TraceItem]:
    """Return answers with the share `copied` of the prompt, in runs of 20 tokens."""
    draw, items = random.Random(0), []
    for _ in range(2):
        prompt = [draw.randrange(5000) for _ in range(400)]
        output: list[int] = []
        while len(output) < 300:
            start = draw.randrange(380)
            new = [draw.randrange(5000) for _ in range(20)]
            output += prompt[start : start + 20] if draw.random() < copied else new
        items.append(TraceItem(tuple(prompt), tuple(output)))
    return items


@pytest.mark.long
@pytest.mark.parametrize(("curve", "copied"), cover(["m5max", "m4pro", "m1"], [0.0, 0.3, 0.8]))
def test_the_mixture_is_as_good_as_its_better_part(curve: str, copied: float) -> None:
    items, costs = text(copied), parse_curve(curve)
    score = {
        mode: replay_mixture(items, costs, mode, [MTP])["score"]
        for mode in ("ngram", "mtp", "auto")
    }
    assert score["auto"] >= 0.98 * max(1.0, *score.values())


@pytest.mark.long
def test_trials_are_due_in_sessions_of_any_length() -> None:
    """Each session ends long before a trial of an expensive drafter is due."""
    neural_drafters = SimulatedDrafters([DrafterFigures("model", 0.3, (0.9, 0.8))])
    costs, scores = parse_curve("m5max"), []
    item = text(0.0)[0]
    for number in range(80):
        make = partial(mixture_drafter, "auto", CostCurve(costs.points), neural_drafters)
        short = [TraceItem(item.prompt, item.output[:25])]
        scores.append(replay_simulated(short, make, costs, neural_drafters)["score"])
        if number == 0:
            neural_drafters.learned["model"].expected[0] = 0.1  # an unlucky start
    assert max(scores[1:6]) < 1.1
    assert min(scores[-5:]) > 1.2, scores
