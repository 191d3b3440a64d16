"""Draft lengths: of one request, of several in one pass, and the cost of a step without a draft."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import mul, sub, truediv

from akunu_py.ngram.cost import MAX_ROWS, CostCurve, RecentGain
from akunu_py.types import PassCosts

_MAX_FORESIGHT = 64.0  # tokens; a chance near 1 would promise more
_NEGLIGIBLE = 0.01  # chance of a draft token of several requests
_PLAIN_EVERY = 8  # passes between two plain ones whose cost is not measured yet
_HIDDEN_RATE, _MOST_HIDDEN = 0.1, 0.5  # learning rate and limit of `_hidden`
# Prior chance of a draft after 1 to 8 or more plain steps in a row.
_REDRAFT_CHANCES = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.08)
_REDRAFT_RATE = 0.03
_LATE_DRAFT_LOSS = 0.5  # share of the full loss if a draft appears while the next step runs
_FIRST_TOKEN_CHANCE = 0.6  # acceptance of a draft's first token
# Discounts for a predicted draft, and for its first token's chance.
_PREDICTED_DISCOUNT, _FIRST_TOKEN_DISCOUNT = 0.75, 0.65


def best_draft(
    probabilities: Sequence[float],
    costs: Sequence[float],
    rate: float,
    limit: int,
    *,
    ongoing: bool = False,
    rerun_on_reject: bool = False,
) -> tuple[int, list[float]]:
    """Return the best draft length from 0 to `limit`, and the value of each position.

    A value is the number of tokens above the long-run average, after 0, 1, ... right predictions.

    probabilities: of each prediction if all before it are right; there may be more than `limit`.
    costs: of a pass over 1, 2, ... rows; at least limit + 1 of them.
    rate: tokens per unit of cost in the long run.
    ongoing: more predictions like the last one would follow.
    rerun_on_reject: after a rejection the next pass repeats the accepted tokens.

    A pass over k draft tokens costs `costs[k]` and yields the accepted ones and the bonus. If the
    bonus matches too, the next pass continues with the same predictions; its value counts. Source:
    the renewal-reward theorem with the relative values of an average-reward Markov decision process
    (Howard 1960) for the states "the first j predictions were right"; any other state has value 0.
    """
    count = len(probabilities)
    longest = min(limit, len(costs) - 1)
    if not count or longest < 1:
        return 0, [1.0 - rate * costs[0]]
    charged = [rate * cost for cost in costs[: min(longest, count) + 1]]
    after = value = 0.0
    if ongoing:
        # Assume more copying at the lowest cost per token, as long as the last chance predicts.
        after = probabilities[-1]
        cheapest = min(map(truediv, costs, range(1, longest + 2)))
        value = min(1.0 / (1.0 - after), _MAX_FORESIGHT) * max(0.0, 1.0 - rate * cheapest)
    values = [value, value]
    # Tokens of this pass and value after it, by draft length.
    totals = [1.0 + after * value]
    gains: list[float] = []
    chances = [*probabilities, after]
    for start in range(count - 1, -1, -1):
        chance = chances[start]
        totals = [1.0 + chance * total for total in (value, *totals)]
        gains = list(map(sub, totals, charged))
        if rerun_on_reject:
            gains = list(map(sub, gains, _rerun_costs(chances[start:], charged)))
        value = max(gains)
        values.append(value)
    values.reverse()
    return gains.index(value), values


def _rerun_costs(chances: Sequence[float], charged: Sequence[float]) -> Iterator[float]:
    """Yield the expected cost of repeating accepted tokens by draft length; costs are in tokens."""
    reached, cost = 1.0, 0.0
    for length, chance in enumerate(chances, start=1):
        yield cost
        rejected = reached * (1.0 - chance)
        cost += rejected * (charged[min(length, len(charged) - 1)] - charged[0])
        reached -= rejected


def best_count(
    chances: Sequence[float],
    costs: Sequence[float],
    rate: float,
    plain: float,
    *,
    lost: Sequence[float] = (),
    values: Sequence[float] = (),
) -> tuple[int, float]:
    """Return how many draft tokens of the next pass gain the most, and their gain in tokens.

    That is where the expected tokens exceed their added cost most, at `rate` tokens per unit of
    cost: the rule of `best_draft` without the passes after this one.

    chances: of each token and all before it. costs: of the pass with 1, 2, ... of them. plain: of
    the pass without. lost: further tokens lost with 1, 2, ... of them. values: tokens gained later
    with 0, 1, ... of them.
    """
    best, gained = 0, 0.0
    highest = value_at(values, 0)
    for count, chance in enumerate(chances, 1):
        gained += chance
        value = gained - rate * (costs[count - 1] - plain) - value_at(lost, count - 1)
        value += value_at(values, count)
        if value > highest:
            best, highest = count, value
    return best, highest


def value_at(values: Sequence[float], place: int) -> float:
    """Return the value at `place`, 0 behind the end."""
    return values[place] if place < len(values) else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SharedPass:
    """A launched pass of several requests."""

    requests: int
    rows: int
    drafted: int  # tokens
    context: int  # mean tokens per request
    pipelined: bool  # launched while another pass was running
    joined: bool = False  # prompts are among the rows
    drafting: float = 0.0  # cost of the neural drafts


class JointPlanner:
    """Plans the draft tokens of all requests, and learns the costs of their passes."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve  # costs by the rows of all requests; keeps learning
        self._gain = RecentGain()
        self._since_plain = _PLAIN_EVERY  # passes since one without drafts
        self._hidden = 0.0  # share of a plain pass that pipelining hides

    def lengths(
        self,
        offers: Sequence[Sequence[float]],
        rows: int,
        context: int,
        *,
        pipelined: bool = False,
    ) -> list[int]:
        """Return the number of draft tokens for each request.

        Takes the likeliest ones of all requests, by `best_count`. Now and then it takes none, until
        the plain pass is timed: only that shows what drafts gain.

        offers: acceptance chances by request, each given the ones before it. rows: without drafts.
        context: mean tokens per request. pipelined: plain passes are launched ahead, which ends
        with a draft.
        """
        lengths = [0] * len(offers)
        if not self.curve.measured(rows) and self._since_plain >= _PLAIN_EVERY:
            return lengths
        known = self.pass_costs(len(offers), rows, context, pipelined=pipelined)
        queue = heapq.merge(*map(_tokens, offers, itertools.count()))
        drafted = list(itertools.islice(queue, max(0, MAX_ROWS - rows)))
        chances = [-chance for chance, _ in drafted]
        count, _ = best_count(chances, known.costs[1:], known.rate, known.costs[0])
        for _, index in drafted[:count]:
            lengths[index] += 1
        return lengths

    def pass_costs(
        self, requests: int, rows: int, context: int, *, pipelined: bool = False
    ) -> PassCosts:
        """Return the costs of a pass over `rows` rows and draft tokens; see `lengths`."""
        costs = self.curve.table(context)
        plain = costs[min(rows, MAX_ROWS) - 1] * (1.0 - self._hidden * pipelined)
        return PassCosts([plain, *costs[rows:]], self._gain.value * requests / plain)

    def observe(self, done: SharedPass, tokens: int, seconds: float) -> None:
        """Record a pass that yielded `tokens` tokens in all. seconds: NaN if unknown."""
        self._since_plain = self._since_plain + 1 if done.drafted else 0
        costs = self.curve.table(done.context)
        if done.pipelined and self.curve.measured(done.rows) and isfinite(seconds):
            hidden = 1.0 - seconds / costs[min(done.rows, MAX_ROWS) - 1]
            hidden = min(max(hidden, 0.0), _MOST_HIDDEN)
            self._hidden += _HIDDEN_RATE * (hidden - self._hidden)
        elif not self.curve.first_use(done.rows):  # devices compile kernels then
            self.curve.observe(done.rows, seconds, done.context)
            costs = self.curve.table(done.context)
        if done.joined:
            return
        shown = 1.0 - self._hidden
        plain = costs[min(done.requests, MAX_ROWS) - 1] * shown / done.requests
        cost = costs[min(done.rows, MAX_ROWS) - 1] * (shown if done.pipelined else 1.0)
        self._gain.add(tokens, (cost + done.drafting) / plain)


def _tokens(offer: Sequence[float], index: int) -> Iterator[tuple[float, int]]:
    """Yield (minus the chance, index) of each draft token of a request, the likeliest first."""
    for place, chance in enumerate(itertools.accumulate(offer, mul)):
        if place and chance <= _NEGLIGIBLE:
            return
        yield -chance, index


class Pipelining:
    """Decides whether the next plain step is pipelined, by the chance that a draft follows it."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._plain_steps = 0  # since the last draft
        self._redraft_chances = list(_REDRAFT_CHANCES)

    def plain_cost(
        self, costs: Sequence[float], pipelined: float, gain: float, chances: Sequence[float]
    ) -> float:
        """Return the expected cost of a plain step in seconds, at most the unpipelined time.

        It is the `pipelined` time, plus the expected loss if a draft appears while the next step
        runs. costs: by rows. gain: see `RecentGain`. chances: of the upcoming predictions.
        """
        curve = self._curve
        plain, two, three = costs[:3]
        chance = self._redraft_chances[min(self._plain_steps, len(_REDRAFT_CHANCES) - 1)]
        lost = _LATE_DRAFT_LOSS * chance * (gain - 1.0 + _FIRST_TOKEN_CHANCE)  # in tokens
        if len(chances) > 1 and curve.measured(2) and curve.measured(3):
            first, then = chances[:2]
            if then * pipelined > gain * (two - pipelined):  # worth drafting after this step
                # Drafting now costs one more row and the pipeline gap, but saves the step.
                saved = gain * (2.0 - (plain + three - two) / pipelined)
                promised = _FIRST_TOKEN_DISCOUNT * then - 1.0 + saved
                lost = max(lost, _PREDICTED_DISCOUNT * first * promised)
        lost *= pipelined / gain
        return min(plain, pipelined + lost)

    def add_plan(self, *, drafts: bool) -> None:
        """Learn from a plan how often a draft follows a run of plain steps of this length."""
        if self._plain_steps:
            place = min(self._plain_steps, len(_REDRAFT_CHANCES)) - 1
            self._redraft_chances[place] += _REDRAFT_RATE * (drafts - self._redraft_chances[place])

    def add_pass(self, *, drafted: bool) -> None:
        """Count the plain steps since the last pass with a draft."""
        self._plain_steps = 0 if drafted else self._plain_steps + 1
