"""Networks that draft, simulated: with a stated acceptance by position and a stated cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from akunu_py.bench.trace import TraceItem
from akunu_py.errors import UsageError

_WRONG = 1 << 30  # a token that no trace has


@dataclass(frozen=True, slots=True)
class NetworkFigures:
    """name: a draft mode. cost: of a token, where a plain step costs 1. accepted: by position, the
    share of drafts whose tokens up to there are all accepted, as vLLM reports them."""

    name: str
    cost: float
    accepted: tuple[float, ...]


@dataclass(slots=True)
class Time:
    """What the networks took, in plain steps. spend: what passes it, on a device."""

    spent: float = 0.0
    spend: Callable[[float], None] = field(default=lambda cost: None)

    def add(self, cost: float) -> None:
        self.spent += cost
        self.spend(cost)


class SimulatedNetwork:
    """A `DraftNetwork` that knows the output, and is right as often as its figures say."""

    def __init__(self, figures: NetworkFigures, item: TraceItem, time: Time, seed: int = 1) -> None:
        self.name, self.share = figures.name, figures.cost
        self.longest = len(figures.accepted)
        self.read = 0
        self._figures = figures
        self._truth = [*item.prompt, *item.output]
        self._time = time
        self._random = random.Random(f"{seed} {item.output[:8]}")
        self._place = self._depth = 0
        self._right = True

    def begin(self, known: Sequence[int]) -> bool:
        self._right = known[-1] == self._truth[len(known) - 1]
        self._place, self._depth = len(known), 0
        return True

    def guess(self) -> tuple[int, float]:
        accepted = (1.0, *self._figures.accepted)
        chance = accepted[self._depth + 1] / max(accepted[self._depth], 1e-9)
        self._right = self._right and self._random.random() < chance
        token = self._truth[self._place] if self._right else _WRONG
        self._time.add(self._figures.cost)
        self._place, self._depth = self._place + 1, self._depth + 1
        self.read = self._place
        return token, chance

    def forget(self) -> None:
        self.read = 0

    def clock(self) -> float:
        return self._time.spent


def parse_network(text: str) -> NetworkFigures:
    """Figures from a text such as `mtp:0.06:0.8,0.65,0.5`. Raises UsageError for anything else."""
    name, _, rest = text.partition(":")
    cost, _, shares = rest.partition(":")
    try:
        figures = NetworkFigures(name, float(cost), tuple(map(float, shares.split(","))))
    except ValueError:
        figures = NetworkFigures("", 0.0, ())
    falling = [1.0, *figures.accepted, 0.0]
    if not (figures.name and 0 < figures.cost < float("inf") and falling == sorted(falling)[::-1]):
        raise UsageError(
            "--network: expected a name, what a token costs and the shares accepted by position, "
            f"which do not rise, such as mtp:0.06:0.8,0.65,0.5, found {text!r}"
        )
    return figures
