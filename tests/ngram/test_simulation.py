"""Replays with noisy times and simulated neural drafters: drafting costs little without a gain."""

import random
from functools import partial

import pytest

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.replay import ReplayCounts, TraceItem, replay_item
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from tests.support.simulated_drafters import (
    DrafterFigures,
    SimulatedDrafters,
    mixture_drafter,
    replay_mixture,
    replay_simulated,
)
from tests.support.slow import cover

MTP = DrafterFigures("mtp", 0.06, (0.8, 0.65, 0.5))  # as published for heads of one layer


def written(kind: str, length: int) -> TraceItem:
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


class Noisy(AutoDrafter):
    """Observes times with noise and outliers; the first of each number of rows is slow."""

    def __init__(self) -> None:
        super().__init__(CostCurve())
        self._draw, self._used = random.Random(2), set[int]()

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        seconds *= max(0.5, self._draw.gauss(1.0, 0.05)) * (10 if self._draw.random() < 0.02 else 1)
        seconds += 0 if rows in self._used else 5
        self._used.add(rows)
        super().observe(drafted, accepted, rows, seconds, pipelined=pipelined)


@pytest.mark.parametrize("name", ["m5max", "m1"])
def test_drafting_costs_little_without_any_gain(name: str) -> None:
    """Costs and chances are learned from nothing, from noisy times."""
    curve, scores = parse_curve(name), dict[str, float]()
    for kind in ("words", "phrases", "edit"):
        counts = ReplayCounts()
        replay_item(written(kind, 800), Noisy(), curve, counts)
        scores[kind] = counts.as_dict()["score"]
    assert min(scores["words"], scores["phrases"]) > 0.98, scores
    assert scores["edit"] > 3.5


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
