"""`python -m tests.measure.neural_drafters TRACES`: replay with simulated neural drafters.

Each simulated drafter has a stated acceptance by position and a stated cost.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from akunu_py.bench.command import add_format, show
from akunu_py.bench.curve import Curve, add_curve, parse_curve
from akunu_py.bench.replay import (
    ReplayCounts,
    add_drafting,
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
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DRAFT_MODES, NEURAL_MODES, Drafter
from tests.measure.tool import run_tool

SUMMARY = "Replay recorded answers with simulated neural drafters"
LUCKS = 10
_WRONG = 1 << 30  # a token that no trace has


@dataclass(frozen=True, slots=True)
class DrafterFigures:
    """name: a draft mode. cost: of a token, where a plain step costs 1. accepted: by position, the
    share of drafts whose tokens up to there are all accepted, as vLLM reports them."""

    name: str
    cost: float
    accepted: tuple[float, ...]


class SimulatedDrafters:
    """Those that draft for the item that is replayed.

    item: must be set before `made`. spent: what they took, in plain steps. learned: what is known
    of them, which stays from item to item as it does from answer to answer. turn: of `LUCKS`, in
    which together each place of the output is lucky as often as is stated.
    spend, clock: how time passes, where there is a device.
    """

    item: TraceItem

    def __init__(self, figures: Sequence[DrafterFigures] = (), turn: int = 0) -> None:
        self._figures = figures
        self.turn = turn
        self.learned: dict[str, LearnedDrafter] = {}
        self.spent = self._now = 0.0
        self.spend: Callable[[float], None] = self._pass
        self.clock: Callable[[], float] = lambda: self._now

    def made(self, mode: str) -> list[SimulatedDrafter]:
        """New ones, those that `--draft mode` uses."""
        used = [each for each in self._figures if mode in ("auto", each.name)]
        return [SimulatedDrafter(each, self.item, self) for each in used]

    def _pass(self, cost: float) -> None:
        self.spent += cost
        self._now += cost


class SimulatedDrafter:
    """A `NeuralDrafter` that knows the output and is right as often as its figures say."""

    def __init__(
        self, figures: DrafterFigures, item: TraceItem, neural_drafters: SimulatedDrafters
    ) -> None:
        self.name, self.relative_cost = figures.name, figures.cost
        self.longest = len(figures.accepted)
        self.prefilled, self.reused, self.key = 0, 0.0, figures.name
        self._figures = figures
        self._truth = [*item.prompt, *item.output]
        self._neural_drafters = neural_drafters
        luck = random.Random(str(item.output))
        turn = neural_drafters.turn / LUCKS
        # By place: the same for all who compare.
        self._luck = [(luck.random() + turn) % 1.0 for _ in self._truth]
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
        self._neural_drafters.spend(self._figures.cost)
        self._place, self._depth = self._place + 1, self._depth + 1
        self.prefilled = self._place
        return token, chance

    def release(self) -> None:
        self.prefilled = 0

    def clock(self) -> float:
        return self._neural_drafters.clock()


def parse_figures(text: str) -> DrafterFigures:
    """Figures from a text such as `mtp:0.06:0.8,0.65,0.5`. Raises UsageError for anything else."""
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


class SimulatedCosts:
    """Cost of a pass plus the cost of the networks since the pass before."""

    def __init__(self, curve: Callable[[int], float], neural_drafters: SimulatedDrafters) -> None:
        self._curve, self._neural_drafters = curve, neural_drafters
        self._charged = neural_drafters.spent

    def __call__(self, rows: int) -> float:
        before, self._charged = self._charged, self._neural_drafters.spent
        return self._curve(rows) + (self._charged - before)


def new_drafter(
    mode: str,
    costs: CostCurve,
    neural_drafters: SimulatedDrafters,
    memory: AnswerCache | None = None,
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
) -> Drafter:
    """Return a new drafter of that draft mode."""
    if mode in ("auto", "ngram", *NEURAL_MODES):
        made, ngrams = neural_drafters.made(mode), mode in ("auto", "ngram")
        return AutoDrafter(
            costs,
            answer_cache=memory,
            neural_drafters=made,
            learned=neural_drafters.learned,
            ngrams=ngrams,
        )
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
    counts, costs = counts or ReplayCounts(), SimulatedCosts(curve, neural_drafters)
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

    even: replay `LUCKS` times, so that each place is lucky as often as the figures say.
    """
    found = {}
    for name, items in trace.workloads.items():
        counts = ReplayCounts()
        for turn in range(LUCKS if even else 1):
            neural_drafters, learned = (
                SimulatedDrafters(figures, turn),
                AnswerCache() if memory else None,
            )

            def make(
                neural_drafters: SimulatedDrafters = neural_drafters,
                learned: AnswerCache | None = learned,
            ) -> Drafter:
                costs = CostCurve(curve.points)
                return new_drafter(mode, costs, neural_drafters, learned, draft_tokens)

            replay_simulated(items, make, curve, neural_drafters, memory=learned, counts=counts)
        found[name] = counts.as_dict()
    return found


def add_drafter_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--network",
        action="append",
        required=required,
        default=[],
        metavar="NAME:COST:SHARE,...",
        help="Simulated drafter: draft mode, cost of a token in plain steps, and the shares "
        "accepted by position, such as mtp:0.06:0.8,0.65,0.5; repeatable",
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="TRACES", help="Trace file, gzipped or not")
    add_curve(parser)
    add_drafter_options(parser, required=True)
    add_drafting(parser, DRAFT_MODES)
    parser.add_argument("--even", action="store_true", help="Replay ten times, to cancel luck")
    parser.add_argument(
        "--compare", action="store_true", help="Compare n-grams, each network, and all together"
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    curve, name = parse_curve(options.curve), options.curve
    trace = load_selected(options.file, options.workload)
    neural_drafters = [parse_figures(text) for text in options.neural_drafter]
    alone = dict.fromkeys(each.name for each in neural_drafters)
    found = {
        mode: replay_mixture(
            trace,
            curve,
            mode,
            neural_drafters,
            draft_tokens=options.draft_tokens,
            memory=options.memory,
            even=options.even,
        )
        for mode in (("ngram", *alone, "auto") if options.compare else (options.draft,))
    }
    if options.compare:
        show(options, {"curve": name, "drafters": found}, lambda: print_replays(name, found))
    else:
        draft = options.draft
        as_json = {"curve": name, "draft": draft, "workloads": found[draft]}
        show(options, as_json, lambda: print_replay(name, draft, found[draft]))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    return run_tool("networks", SUMMARY, add_options, run, argv)


if __name__ == "__main__":
    sys.exit(main())
