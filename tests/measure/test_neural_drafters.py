"""Simulated neural drafters: the planner matches theory, and a mixture its best part."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, product, repeat
from operator import mul
from pathlib import Path

import pytest

from akunu_py.bench.curve import parse_curve
from akunu_py.bench.theory import LONGEST, best_length, improvement
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.errors import UsageError
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.neural_plan import DraftPlan, PlannedDrafter, PlanningLimits
from akunu_py.ngram.prediction import TokenPrediction
from tests.measure.device import parse_device, replay_on_device
from tests.measure.neural_drafters import (
    DrafterFigures,
    SimulatedDrafters,
    main,
    mixture_drafter,
    parse_figures,
    replay_mixture,
    replay_simulated,
)
from tests.support.slow import cover

pytestmark = pytest.mark.rotating

MTP = DrafterFigures("mtp", 0.06, (0.8, 0.65, 0.5))  # as published for heads of one layer
DEAR = DrafterFigures("model", 0.9, (0.5, 0.2))


def text(copied: float, seed: int = 0) -> Trace:
    """Return answers with the share `copied` of the prompt, in runs of 20 tokens."""
    randomly = random.Random(seed)
    items = []
    for _ in range(4):
        prompt = [randomly.randrange(5000) for _ in range(400)]
        output: list[int] = []
        while len(output) < 300:
            start = randomly.randrange(380)
            new = [randomly.randrange(5000) for _ in range(20)]
            output += prompt[start : start + 20] if randomly.random() < copied else new
        items.append(TraceItem(tuple(prompt), tuple(output)))
    return Trace("", {"text": tuple(items)})


def score(trace: Trace, curve: str, mode: str, *neural_drafters: DrafterFigures) -> float:
    found = replay_mixture(trace, parse_curve(curve), mode, neural_drafters)
    return float(found["text"]["score"])


@pytest.mark.parametrize(("curve", "copied"), cover(["m5max", "m4pro", "m1"], [0.0, 0.3, 0.8]))
def test_the_mixture_is_as_good_as_the_better_part(curve: str, copied: float) -> None:
    trace = text(copied)
    alone = score(trace, curve, "ngram"), score(trace, curve, "mtp", MTP)
    assert score(trace, curve, "auto", MTP) >= 0.98 * max(1.0, *alone)


@pytest.mark.parametrize("copied", [0.0, 0.5])
def test_ngrams_learn_from_each_neural_draft_token(
    copied: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn, learned = AutoDrafter._learn, list[int]()

    def noted(drafter: AutoDrafter, prediction: TokenPrediction, token: int) -> None:
        learned.append(token)
        learn(drafter, prediction, token)

    monkeypatch.setattr(AutoDrafter, "_learn", noted)
    trace = text(copied)
    found = replay_mixture(trace, parse_curve("m5max"), "auto", [MTP])["text"]
    assert learned == [token for item in trace.workloads["text"] for token in item.output[1:]]
    assert found["accepted"] > 0.4 * found["tokens"]


def test_unprofitable_neural_drafter_is_not_used() -> None:
    trace = text(0.0)
    assert score(trace, "m1", "auto", DEAR) >= 0.98
    assert score(trace, "m4pro", "auto", DEAR, MTP) >= 0.98 * score(trace, "m4pro", "auto", MTP)


def test_cost_of_an_expensive_neural_drafter_is_learned_early_and_kept() -> None:
    """Two tokens suffice, and the knowledge outlives an answer."""
    trace, curve = text(0.0), parse_curve("m4pro")
    neural_drafters = SimulatedDrafters([DrafterFigures("exit", 0.97, (0.5, 0.2))])
    spent = []
    for item in trace.workloads["text"]:
        neural_drafters.item = item
        make = partial(mixture_drafter, "exit", CostCurve(curve.points), neural_drafters)
        replay_simulated([item], make, curve, neural_drafters)
        spent.append(neural_drafters.spent)
    learned = neural_drafters.learned["exit"]
    assert learned.timed
    assert learned.curve.measured(1)
    assert spent[0] < 0.03 * len(item.output)
    assert spent[-1] == pytest.approx(spent[0], abs=0.97 * 4)


def test_trials_are_due_in_sessions_of_any_length() -> None:
    """Each session ends long before a trial of an expensive drafter is due."""
    neural_drafters = SimulatedDrafters([DrafterFigures("model", 0.3, (0.9, 0.8))])
    costs, scores = parse_curve("m5max"), []
    (item, *_) = text(0.0).workloads["text"]
    neural_drafters.item = TraceItem(item.prompt, item.output[:25])
    for _ in range(80):
        make = partial(mixture_drafter, "auto", CostCurve(costs.points), neural_drafters)
        scores.append(
            replay_simulated([neural_drafters.item], make, costs, neural_drafters)["score"]
        )
        if len(scores) == 1:
            neural_drafters.learned["model"].expected[0] = 0.1  # an unlucky start
    assert max(scores[1:6]) < 1.1
    assert min(scores[-5:]) > 1.2, scores


@pytest.mark.parametrize(("curve", "answers", "least"), [("m4pro", 1, 1.5), ("m1", 2, 1.1)])
def test_neural_drafter_recovers_from_early_rejections(
    curve: str, answers: int, least: float
) -> None:
    """150 rejections in a row disable it; occasional trials enable it again."""
    costs, scores = parse_curve(curve), []
    neural_drafters, items = SimulatedDrafters([MTP]), text(0.0).workloads["text"]
    for number, neural_drafters.item in enumerate(items):

        def make(first: bool = number == 0) -> AutoDrafter:
            made = neural_drafters.make("auto")
            start = len(neural_drafters.item.prompt)
            for each in made if first else ():
                each._luck[start : start + 150] = [1.0] * 150
            return AutoDrafter(
                CostCurve(costs.points), neural_drafters=made, learned=neural_drafters.learned
            )

        scores.append(
            replay_simulated([neural_drafters.item], make, costs, neural_drafters)["score"]
        )
    assert scores[0] < 0.9 * scores[-1]
    assert min(scores[answers:]) >= least, scores


@pytest.mark.long
def test_costs_are_learned_from_the_clock() -> None:
    """The planner starts without costs, on a device with noisy times."""
    trace, curve = text(0.3), parse_curve("m4pro")
    options = parse_device("gap:0.05,noise:0.05,first:3")
    by_figures = {
        figures.name: replay_on_device(trace, curve, "auto", options, figures=[figures])["text"]
        for figures in (MTP, DEAR)
    }
    plain = replay_on_device(trace, curve, "ngram", options)["text"]["score"]
    assert by_figures["mtp"]["score"] > 1.15 * plain
    assert by_figures["model"]["score"] > 0.95 * plain


@pytest.mark.parametrize("c", [0.03, 0.1, 0.3])
@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
def test_planner_reaches_the_speedup_of_theory(chance: float, c: float) -> None:
    """Return the speedup of theorem 3.8 (Leviathan et al.) at the best length."""
    trace, curve = text(0.0), parse_curve("m5max")
    figures = DrafterFigures("model", c, tuple(accumulate(repeat(chance, 16), mul)))
    best = max(1.0, improvement(chance, best_length(chance, c, curve), c, curve))
    assert score(trace, "m5max", "model", figures) == pytest.approx(best, rel=0.1)


class Steady:
    """A neural drafter with constant acceptance and cost."""

    name = key = "model"
    longest, reused, prefilled = LONGEST, 0.0, 9

    def __init__(self, chance: float, share: float) -> None:
        self.chance, self.relative_cost = chance, share

    def start_draft(self, known: Sequence[int]) -> bool:
        return True

    def draft_token(self) -> tuple[int, float]:
        return 1, self.chance

    def release(self) -> None:
        """Do nothing: no token is processed."""

    def clock(self) -> float:
        return 0.0


@pytest.mark.parametrize("curve", ["1:1,33:1", "m5max", "m4pro", "m1"])
def test_planner_chooses_the_draft_length_of_theory(curve: str) -> None:
    """The length of the greatest improvement, by theorem 3.8 with the cost of rows, where a unit of
    cost is worth that improvement; none where there is none."""
    cost = parse_curve(curve)
    costs, found = [cost(rows) for rows in range(1, LONGEST + 2)], {}
    for chance, c in product((0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.01, 0.05, 0.1, 0.2, 0.4)):
        best = best_length(chance, c, cost)
        rate = improvement(chance, best, c, cost)
        planned = PlannedDrafter(Steady(chance, c))
        planned.learned.expected[:] = [chance] * len(planned.learned.expected)
        terms = PlanningLimits(costs, rate, 1.0, True, 10, 1000, False, False)
        division = planned.plan([], [1.0 - rate], LONGEST, terms)
        drafted: list[int] = []
        if division.value > 1.0 - rate + 1e-9:
            drafted = planned.draft([0] * 10, [], division, terms, (), lambda token: [])
        found[chance, c] = len(drafted), best
    assert all(length == best for length, best in found.values()), found
    assert len({best for _, best in found.values()}) > 3


@pytest.mark.parametrize("rate", [1.0, 2.5])
@pytest.mark.parametrize("curve", ["m5max", "m4pro", "m1"])
def test_a_copy_is_verified_with_a_token_that_is_likely_and_else_behind_it(
    curve: str, rate: float
) -> None:
    """An early draft is lost after a wrong token, and cheaper later."""
    cost, followed = parse_curve(curve), []
    costs = [cost(rows) for rows in range(1, LONGEST + 2)]

    def copied(token: int) -> list[float]:
        return [0.97] * (LONGEST - 1)

    for chance in (0.4, 0.6, 0.95):
        planned, steady = DraftPlan(1.0, 0, LONGEST), Steady(chance, 0.06)
        steady.longest = 1
        neural_drafter = PlannedDrafter(steady)
        terms = PlanningLimits(costs, rate, 1.0, True, 10, 1000, False, False)
        neural_drafter.draft([0] * 10, [], planned, terms, (), copied)
        followed.append(neural_drafter.trailing)
    assert max(followed[:2]) <= 1
    assert followed[2] == LONGEST - 1


@pytest.mark.parametrize(
    "wrong", ["mtp", "mtp:0:0.5", "mtp:0.1:0.5,0.6", "head:0.1:0.5", "mtp:x:1"]
)
def test_invalid_figures_are_rejected(wrong: str) -> None:
    assert parse_figures("mtp:0.06:0.8,0.65,0.5") == MTP
    with pytest.raises(UsageError, match=r"such as mtp:0\.06"):
        parse_figures(wrong)


def test_the_command_compares_the_mixture_with_its_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    loop = {"prompt": list(range(50)) * 2, "output": list(range(50)) * 2}
    fresh = {"prompt": list(range(100, 150)), "output": list(range(200, 290))}
    workloads = {"loop": [loop, loop], "fresh": [fresh]}
    path.write_text(json.dumps({"tokenizer": "none", "workloads": workloads}))
    words = [str(path), "--network", "mtp:0.06:0.8,0.65,0.5", "--network", "model:0.2:0.7,0.5"]
    assert main([*words, "--compare", "--format", "json"]) == 0
    both = json.loads(capsys.readouterr().out)["drafters"]
    assert list(both) == ["ngram", "mtp", "model", "auto"]
    for workload in workloads:
        score = {name: found[workload]["score"] for name, found in both.items()}
        assert score["auto"] >= 0.98 * max(score.values()), workload
    assert main([*words, "--even", "--workload", "fresh", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["workloads"]["fresh"]["items"] == 10
    assert main([str(path), "--network", "mtp"]) == 2
    assert "--network" in capsys.readouterr().err
