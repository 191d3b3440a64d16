"""Simulated neural drafters for replays of traces, with a stated cost and acceptance."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from akunu_py.bench.curve import Curve
from akunu_py.bench.replay import ReplayCounts, TraceItem, replay_item
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.neural_plan import LearnedDrafter
from akunu_py.types import Drafter

_WRONG = 1 << 30  # a token id that no trace contains


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """Stated cost and acceptance of a simulated drafter."""

    name: str  # a draft mode
    cost: float  # of a draft token, in plain steps
    accepted: tuple[float, ...]  # by position: share of drafts accepted up to it, as in vLLM


class SimulatedDrafters:
    """The simulated drafters of one replay, with the state that they share."""

    item: TraceItem  # set before `make`

    def __init__(self, figures: Sequence[DrafterFigures] = ()) -> None:
        self._figures = figures
        self.learned: dict[str, LearnedDrafter] = {}  # kept from item to item
        self.spent = 0.0  # cost of drafting so far, in plain steps

    def make(self, mode: str) -> list[SimulatedDrafter]:
        """Return new drafters for `--draft mode` and the current item."""
        used = [each for each in self._figures if mode in ("auto", each.name)]
        return [SimulatedDrafter(each, self) for each in used]


class SimulatedDrafter:
    """A neural drafter that knows the output, and is right as often as its figures state."""

    def __init__(self, figures: DrafterFigures, simulated: SimulatedDrafters) -> None:
        self.name = self.key = figures.name
        self.relative_cost, self.longest = figures.cost, len(figures.accepted)
        self.parallel, self.prefilled, self.most_others = False, 0, 0
        self.others: Sequence[tuple[int, float]] = ()
        self._accepted, self._simulated = (1.0, *figures.accepted), simulated
        item = simulated.item
        self._truth = [*item.prompt, *item.output]
        draw = random.Random(str(item.output))
        self._luck = [draw.random() for _ in self._truth]  # the same for every drafter
        self._place = self._depth = 0
        self._right = True

    def start_draft(self, known: Sequence[int]) -> bool:
        self._right = known[-1] == self._truth[len(known) - 1]
        self._place, self._depth = len(known), 0
        return True

    def draft_token(self) -> tuple[int, float]:
        chance = self._accepted[self._depth + 1] / max(self._accepted[self._depth], 1e-9)
        # Beyond the end nothing is verified.
        self._right &= self._place < len(self._luck) and self._luck[self._place] < chance
        token = self._truth[self._place] if self._right else _WRONG
        self._simulated.spent += self.relative_cost
        self._place, self._depth = self._place + 1, self._depth + 1
        self.prefilled = self._place
        return token, chance

    def release(self) -> None:
        self.prefilled = 0

    def clock(self) -> float:
        return self._simulated.spent


def mixture_drafter(mode: str, costs: CostCurve, simulated: SimulatedDrafters) -> AutoDrafter:
    """Return a new drafter of that draft mode: auto, ngram, or a neural one."""
    return AutoDrafter(
        costs, neural_drafters=simulated.make(mode), learned=simulated.learned,
        ngrams=mode in ("auto", "ngram"),
    )  # fmt: skip


def replay_simulated(
    items: Iterable[TraceItem], make_drafter: Callable[[], Drafter], curve: Callable[[int], float],
    simulated: SimulatedDrafters,
) -> dict[str, Any]:  # fmt: skip
    """Replay each item through a new drafter; the cost includes that of neural drafting."""
    counts, charged = ReplayCounts(), simulated.spent

    def cost(rows: int) -> float:
        nonlocal charged
        drafting, charged = simulated.spent - charged, simulated.spent
        return curve(rows) + drafting

    for item in items:
        simulated.item = item
        replay_item(item, make_drafter(), cost, counts)
    return counts.as_dict()


def replay_mixture(
    items: Iterable[TraceItem], curve: Curve, mode: str, figures: Sequence[DrafterFigures]
) -> dict[str, Any]:
    """Return counts and rates of a draft mode that begins with the costs of `curve`."""
    simulated = SimulatedDrafters(figures)
    return replay_simulated(
        items, lambda: mixture_drafter(mode, CostCurve(curve.points), simulated), curve, simulated
    )
