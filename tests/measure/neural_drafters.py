"""Replay traces with simulated neural drafters.

Each simulated drafter has a stated acceptance by position and a stated cost.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from akunu_py.bench.command import show
from akunu_py.bench.curve import Curve, add_curve_option, expected_tokens, parse_curve
from akunu_py.bench.replay import (
    ReplayCounts,
    add_draft_options,
    drafter_named,
    load_selected,
    print_replay,
    print_replays,
    replay_item,
)
from akunu_py.bench.trace import Trace, TraceItem
from akunu_py.errors import UsageError
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.neural_plan import LearnedDrafter
from akunu_py.parser import add_format
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DRAFT_MODES, NEURAL_MODES, Drafter
from tests.measure.tool import run_tool

LUCK_TURNS = 10
LONGEST = 32
_WRONG = 1 << 30  # a token id that no trace contains


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """Stated cost and acceptance of a simulated drafter."""

    name: str  # a draft mode
    cost: float  # of a draft token, in plain steps
    accepted: tuple[float, ...]  # by position: share of drafts accepted up to it, as in vLLM


class SimulatedDrafters:
    """The simulated drafters of one replay, with the state that they share.

    Over `LUCK_TURNS` turns, each position of the output is accepted as often as the figures state.
    """

    item: TraceItem  # set before `make`
    rejected = 0  # leading tokens of the output at which every draft is rejected

    def __init__(self, figures: Sequence[DrafterFigures] = (), turn: int = 0) -> None:
        self._figures = figures
        self.turn = turn  # from 0 to LUCK_TURNS - 1
        self.learned: dict[str, LearnedDrafter] = {}  # kept from item to item
        self.spent = self._now = 0.0  # cost of drafting so far, and the time, in plain steps
        self.spend: Callable[[float], None] = self._add_cost  # a device replaces these two
        self.clock: Callable[[], float] = lambda: self._now

    def make(self, mode: str) -> list[SimulatedDrafter]:
        """Return new drafters for `--draft mode` and the current item."""
        used = [each for each in self._figures if mode in ("auto", each.name)]
        return [SimulatedDrafter(each, self.item, self) for each in used]

    def _add_cost(self, cost: float) -> None:
        self.spent += cost
        self._now += cost


class SimulatedDrafter:
    """A neural drafter that knows the output, and is right as often as its figures state."""

    def __init__(
        self, figures: DrafterFigures, item: TraceItem, neural_drafters: SimulatedDrafters
    ) -> None:
        self.name, self.relative_cost = figures.name, figures.cost
        self.longest = len(figures.accepted)
        self.prefilled, self.key = 0, figures.name
        self._figures = figures
        self._truth = [*item.prompt, *item.output]
        self._simulated = neural_drafters
        draw = random.Random(str(item.output))
        turn = neural_drafters.turn / LUCK_TURNS
        # By position, and the same for every drafter.
        self._luck = [(draw.random() + turn) % 1.0 for _ in self._truth]
        start, rejected = len(item.prompt), neural_drafters.rejected
        self._luck[start : start + rejected] = [1.0] * rejected
        self._place = self._depth = 0
        self._right = True

    def start_draft(self, known: Sequence[int]) -> bool:
        self._right = known[-1] == self._truth[len(known) - 1]
        self._place, self._depth = len(known), 0
        return True

    def draft_token(self) -> tuple[int, float]:
        accepted = (1.0, *self._figures.accepted)
        chance = accepted[self._depth + 1] / max(accepted[self._depth], 1e-9)
        # Beyond the end nothing is verified.
        self._right &= self._place < len(self._luck) and self._luck[self._place] < chance
        token = self._truth[self._place] if self._right else _WRONG
        self._simulated.spend(self._figures.cost)
        self._place, self._depth = self._place + 1, self._depth + 1
        self.prefilled = self._place
        return token, chance

    def release(self) -> None:
        self.prefilled = 0

    def clock(self) -> float:
        return self._simulated.clock()


Cost = Callable[[int], float]
"""Cost of a pass by its rows; one row costs 1."""


def improvement(chance: float, drafted: int, c: float, cost: Cost = lambda rows: 1.0) -> float:
    """Return the speedup over plain decoding: theorem 3.8 of Leviathan et al. (2023).

    chance: acceptance rate. c: cost of drafting a token, in plain steps. The theorem's `cost` is 1.
    """
    return expected_tokens(chance, drafted) / (cost(drafted + 1) + drafted * c)


def best_length(chance: float, c: float, cost: Cost) -> int:
    """Return the draft length up to LONGEST with the greatest improvement, 0 for none."""
    return max(range(LONGEST + 1), key=lambda drafted: improvement(chance, drafted, c, cost))


def parse_figures(text: str) -> DrafterFigures:
    """Parse text such as `mtp:0.06:0.8,0.65,0.5`. Raises UsageError."""
    name, _, rest = text.partition(":")
    cost, _, shares = rest.partition(":")
    try:
        figures = DrafterFigures(name, float(cost), tuple(map(float, shares.split(","))))
    except ValueError:
        figures = DrafterFigures("", 0.0, ())
    falling = [1.0, *figures.accepted, 0.0]
    named = figures.name in NEURAL_MODES
    if not (named and 0 < figures.cost < float("inf") and falling == sorted(falling)[::-1]):
        raise UsageError(
            "--network: expected mtp, model or exit, what a token costs and the shares accepted by "
            f"position, which do not rise, such as mtp:0.06:0.8,0.65,0.5, found {text!r}"
        )
    return figures


class CostsWithDrafting:
    """Cost of a pass, and of the drafting since the previous pass."""

    def __init__(self, curve: Callable[[int], float], neural_drafters: SimulatedDrafters) -> None:
        self._curve, self._simulated = curve, neural_drafters
        self._charged = neural_drafters.spent

    def __call__(self, rows: int) -> float:
        before, self._charged = self._charged, self._simulated.spent
        return self._curve(rows) + (self._charged - before)


def mixture_drafter(
    mode: str,
    costs: CostCurve,
    neural_drafters: SimulatedDrafters,
    memory: AnswerCache | None = None,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
) -> Drafter:
    """Return a new drafter of that draft mode."""
    if mode in ("auto", "ngram", *NEURAL_MODES):
        return AutoDrafter(
            costs, answer_cache=memory, neural_drafters=neural_drafters.make(mode),
            learned=neural_drafters.learned, ngrams=mode in ("auto", "ngram"),
        )  # fmt: skip
    return drafter_named(mode, costs, memory, draft_tokens)


def replay_simulated(
    items: Iterable[TraceItem],
    make_drafter: Callable[[], Drafter],
    curve: Callable[[int], float],
    neural_drafters: SimulatedDrafters,
    *,
    memory: AnswerCache | None = None,
    counts: ReplayCounts | None = None,
) -> dict[str, Any]:
    """Replay each item through a new drafter with `neural_drafters`; see `bench.replay.replay`."""
    counts, costs = counts or ReplayCounts(), CostsWithDrafting(curve, neural_drafters)
    for item in items:
        neural_drafters.item = item
        replay_item(item, make_drafter(), costs, counts)
        if memory is not None:
            memory.learn(item.output)
    return counts.as_dict()


def replay_mixture(
    trace: Trace,
    curve: Curve,
    mode: str,
    figures: Sequence[DrafterFigures],
    *,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    memory: bool = False,
    even: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return counts and rates by workload.

    even: replay `LUCK_TURNS` times, so that acceptance matches the figures exactly.
    """
    found = {}
    for name, items in trace.workloads.items():
        counts = ReplayCounts()
        for turn in range(LUCK_TURNS if even else 1):
            simulated, learned = SimulatedDrafters(figures, turn), AnswerCache() if memory else None

            def make(each: SimulatedDrafters = simulated, memo: Any = learned) -> Drafter:
                return mixture_drafter(mode, CostCurve(curve.points), each, memo, draft_tokens)

            replay_simulated(items, make, curve, simulated, memory=learned, counts=counts)
        found[name] = counts.as_dict()
    return found


def add_figures_option(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--network",
        dest="figures",
        action="append",
        required=required,
        default=[],
        metavar="NAME:COST:SHARE,...",
        help="Simulated drafter: draft mode, cost of a token in plain steps, and the shares "
        "accepted by position, such as mtp:0.06:0.8,0.65,0.5; repeatable",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="TRACES", help="Trace file, gzipped or not")
    add_curve_option(parser)
    add_figures_option(parser, required=True)
    add_draft_options(parser, DRAFT_MODES)
    parser.add_argument("--even", action="store_true", help="Replay ten times, to cancel luck")
    parser.add_argument(
        "--compare", action="store_true", help="Compare n-grams, each network, and all together"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve, name = parse_curve(options.curve), options.curve
    trace = load_selected(options.file, options.workload)
    neural_drafters = [parse_figures(text) for text in options.figures]
    alone = dict.fromkeys(each.name for each in neural_drafters)
    found = {
        mode: replay_mixture(
            trace, curve, mode, neural_drafters, draft_tokens=options.draft_tokens,
            memory=options.memory, even=options.even,
        )
        for mode in (("ngram", *alone, "auto") if options.compare else (options.draft,))
    }  # fmt: skip
    if options.compare:
        show(options, {"curve": name, "drafters": found}, lambda: print_replays(name, found))
    else:
        draft = options.draft
        as_json = {"curve": name, "draft": draft, "workloads": found[draft]}
        show(options, as_json, lambda: print_replay(name, draft, found[draft]))
    return 0


main = partial(run_tool, "neural_drafters", "Replay recorded answers with simulated neural "
               "drafters", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
