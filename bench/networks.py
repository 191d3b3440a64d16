"""Networks that draft, simulated: with a stated acceptance by position and a stated cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from akunu_py.bench.trace import TraceItem
from akunu_py.errors import UsageError
from akunu_py.ngram.networks import LearnedNetwork

LUCKS = 10
_WRONG = 1 << 30  # a token that no trace has


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """name: a draft mode. cost: of a token, where a plain step costs 1. accepted: by position, the
    share of drafts whose tokens up to there are all accepted, as vLLM reports them."""

    name: str
    cost: float
    accepted: tuple[float, ...]


class SimulatedNetworks:
    """Those that draft for the item that is replayed.

    item: must be set before `made`. spent: what they took, in plain steps. learned: what is known
    of them, which stays from item to item as it does from answer to answer. turn: of `LUCKS`, in
    which together each place of the output is lucky as often as is stated.
    spend, clock: how time passes, where there is a device.
    """

    item: TraceItem

    def __init__(self, figures: Sequence[NetworkFigures] = (), turn: int = 0) -> None:
        self._figures = figures
        self.turn = turn
        self.learned: dict[str, LearnedNetwork] = {}
        self.spent = self._now = 0.0
        self.spend: Callable[[float], None] = self._pass
        self.clock: Callable[[], float] = lambda: self._now

    def made(self, mode: str) -> list[SimulatedNetwork]:
        """New ones, those that `--draft mode` uses."""
        used = [each for each in self._figures if mode in ("auto", each.name)]
        return [SimulatedNetwork(each, self.item, self) for each in used]

    def _pass(self, cost: float) -> None:
        self.spent += cost
        self._now += cost


class SimulatedNetwork:
    """A `DraftNetwork` that knows the output, and is right as often as its figures say."""

    def __init__(
        self, figures: NetworkFigures, item: TraceItem, networks: SimulatedNetworks
    ) -> None:
        self.name, self.share = figures.name, figures.cost
        self.longest = len(figures.accepted)
        self.read, self.reused, self.key = 0, 0.0, figures.name
        self._figures = figures
        self._truth = [*item.prompt, *item.output]
        self._networks = networks
        luck = random.Random(str(item.output))
        turn = networks.turn / LUCKS
        # By place: the same for all who compare.
        self._luck = [(luck.random() + turn) % 1.0 for _ in self._truth]
        self._place = self._depth = 0
        self._right = True

    def begin(self, known: Sequence[int]) -> bool:
        self._right = known[-1] == self._truth[len(known) - 1]
        self._place, self._depth = len(known), 0
        return True

    def guess(self) -> tuple[int, float]:
        accepted = (1.0, *self._figures.accepted)
        chance = accepted[self._depth + 1] / max(accepted[self._depth], 1e-9)
        # Beyond the end nothing is verified.
        self._right &= self._place < len(self._luck) and self._luck[self._place] < chance
        token = self._truth[self._place] if self._right else _WRONG
        self._networks.spend(self._figures.cost)
        self._place, self._depth = self._place + 1, self._depth + 1
        self.read = self._place
        return token, chance

    def forget(self) -> None:
        self.read = 0

    def clock(self) -> float:
        return self._networks.clock()


def parse_network(text: str) -> NetworkFigures:
    """Figures from a text such as `mtp:0.06:0.8,0.65,0.5`. Raises UsageError for anything else."""
    name, _, rest = text.partition(":")
    cost, _, shares = rest.partition(":")
    try:
        figures = NetworkFigures(name, float(cost), tuple(map(float, shares.split(","))))
    except ValueError:
        figures = NetworkFigures("", 0.0, ())
    falling = [1.0, *figures.accepted, 0.0]
    named = figures.name in ("mtp", "model", "exit")
    if not (named and 0 < figures.cost < float("inf") and falling == sorted(falling)[::-1]):
        raise UsageError(
            "--network: expected mtp, model or exit, what a token costs and the shares accepted by "
            f"position, which do not rise, such as mtp:0.06:0.8,0.65,0.5, found {text!r}"
        )
    return figures
