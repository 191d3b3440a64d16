"""Neural drafters: the cost of their tokens, their acceptance rates, and how many tokens to draft.

A draft is guesses of the n-grams, then tokens of one neural drafter, then guesses again. The split
with the highest value (see `planner`) wins; it is decided again after each neural token.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, log
from typing import Any

from akunu_py.ngram.acceptance_model import CALIBRATION_EDGES, sigmoid
from akunu_py.ngram.cost import MAX_ROWS, PRIOR_SHAPE, CostCurve
from akunu_py.ngram.planner import best_draft
from akunu_py.types import NeuralDrafter

_NEGLIGIBLE = 0.02  # longer drafts with a lower chance are not considered
_DEPTHS = 8  # positions in a draft with their own statistics
_EXPECTED = 0.7  # prior chance that a neural token is accepted
_RATE, _TESTS = 0.03, 2.0  # learning rate of that average, and the prior's weight in tests
_CALIBRATION_RATE = 0.1
_SURE = 0.999  # higher confidence is clipped
# A longer prefill happens once, so its cost is spread over up to 256 passes.
_CATCHING_UP, _SPREAD = 17, 256.0
_TRIED = 2  # tokens of a trial, while drafting does not pay
_TRIAL = -float("inf")  # marks a plan as a trial
_TRY, _TRY_LEAST = 0.01, 0.001  # range of the share of time for trials; it doubles on success
_STEADY_MOST = 0.9
_TRY_UNTIMED = 0.05  # until its cost was measured once
_BUCKETS = len(CALIBRATION_EDGES) + 1
_SAVED_TESTS = 1e6

# Chances of the guesses after a neural token; None if that token is forbidden.
Behind = Callable[[int], list[float] | None]


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """Costs and limits for planning a draft."""

    costs: Sequence[float]  # of a pass over 1, 2, ... rows
    rate: float  # tokens per unit of cost
    plain: float  # cost of a plain step without pipelining
    seconds: bool  # costs are measured times
    context: int  # prefilled tokens
    left: int  # maximum number of further tokens
    ongoing: bool  # see `planner.best_draft`
    rerun: bool


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft: guesses of the n-grams, then tokens of a neural drafter."""

    value: float  # expected value in tokens
    guesses: int  # n-gram guesses at the start
    most: int  # maximum number of tokens after them
    reached: float = 1.0  # chance that all guesses are accepted


@dataclass(slots=True)
class _Drafted:
    """A token of a neural drafter."""

    token: int
    bucket: int  # of the calibration
    chance: float  # that it is accepted


@dataclass(slots=True)
class LearnedDrafter:
    """Learned state of one neural drafter."""

    curve: CostCurve  # cost of its passes
    timed: bool = False  # the curve has times of this device
    # By depth: acceptance rate, and the number of tests behind it.
    expected: list[float] = field(default_factory=lambda: [_EXPECTED] * _DEPTHS)
    tests: list[float] = field(default_factory=lambda: [_TESTS] * _DEPTHS)
    # Corrections of its own confidence, in logits.
    calibration: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    by_depth: list[float] = field(default_factory=lambda: [0.0] * _DEPTHS)
    attempts: float = _TRY  # share of time for trials while drafting does not pay
    saved: float = 0.0  # budget for the next trial, in plain steps

    @classmethod
    def of(cls, neural_drafter: NeuralDrafter) -> LearnedDrafter:
        """Return the initial state for `neural_drafter`."""
        curve = CostCurve({rows: neural_drafter.share * cost for rows, cost in PRIOR_SHAPE.items()})
        curve.given = False
        return cls(curve)

    def to_dict(self) -> dict[str, Any]:
        """Return the learned state, ready for JSON."""
        return {name: getattr(self, name) for name in self.__slots__} | {
            "curve": self.curve.to_dict()
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> LearnedDrafter:
        """Restore the state from `to_dict`. Raises ValueError if it is invalid."""
        try:
            lists = {
                name: [float(value) for value in content[name]]
                for name in ("expected", "tests", "calibration", "by_depth")
            }
            attempts, saved = float(content["attempts"]), float(content.get("saved", 0.0))
            values = [*lists["expected"], *(rate / _SAVED_TESTS for rate in lists["tests"])]
            sizes = [len(values) for values in lists.values()]
            if (
                sizes != [_DEPTHS, _DEPTHS, _BUCKETS, _DEPTHS]
                or not all(0.0 <= value <= 1.0 for value in values)
                or not all(isfinite(value) for values in lists.values() for value in values)
                or not _TRY_LEAST <= attempts <= _TRY
                or not 0.0 <= saved < inf
            ):
                raise ValueError("values outside the learned range")
            curve = CostCurve.from_dict(content["curve"])
            timed = bool(content["timed"])
            return cls(curve, timed, **lists, attempts=attempts, saved=saved)
        except (KeyError, TypeError, ValueError, OverflowError) as err:
            raise ValueError(f"expected a saved neural drafter, found {content!r:.80}") from err


class PlannedDrafter:
    """A neural drafter with its costs and acceptance rates."""

    def __init__(
        self, neural_drafter: NeuralDrafter, learned: LearnedDrafter | None = None
    ) -> None:
        self.neural_drafter = neural_drafter
        self.learned = learned or LearnedDrafter.of(neural_drafter)
        self._made: list[_Drafted] = []
        self._prefix: list[int] = []
        self._trying = False
        self._setback = 1.0  # factor on `attempts` after a failed trial
        self.seconds = self.total_seconds = 0.0  # of the last draft, and of all drafts
        self.cost = 0.0  # planned cost of the last draft
        self.verified = 0  # its tokens in the last draft
        self.followed = 0  # guesses after them

    def expected(self, depth: int) -> float:
        """Expected chance that its token after `depth` others is accepted."""
        return self.learned.expected[min(depth, _DEPTHS - 1)]

    def plan(
        self, chances: Sequence[float], coming: Sequence[float], longest: int, terms: PlanningLimits
    ) -> DraftPlan:
        """Return the best plan of at most `longest` tokens, some of them neural.

        chances: of the guesses that may come first. coming: see `futures`.
        """
        terms = self._reusing(terms)
        best = DraftPlan(-float("inf"), 0, 0)
        step = self._cost(1, terms)
        unread = max(1, terms.context - self.neural_drafter.read)
        reached, tokens, rerun = 1.0, 1.0, 0.0
        for guesses in range(min(len(chances), longest - 1) + 1):
            spent, future = self._cost(unread + guesses, terms), 0.0
            after, gained, lost = 1.0, tokens, rerun
            for count in range(1, min(self.neural_drafter.longest, longest - guesses) + 1):
                rows = guesses + count
                chance = after * self.expected(count - 1)
                lost += _rerun(reached * (after - chance), rows, terms)
                future += (after - chance) * _at(coming, rows)
                after, gained = chance, gained + reached * chance
                value = gained - terms.rate * (terms.costs[rows] + spent) - lost
                value += future + after * _at(coming, rows + 1)
                if value > best.value:
                    best = DraftPlan(value, guesses, longest - guesses, reached)
                if reached * after < _NEGLIGIBLE:
                    break
                spent += step
            if guesses < len(chances):
                chance = reached * chances[guesses]
                rerun += _rerun(reached - chance, guesses + 1, terms)
                reached, tokens = chance, tokens + chance
                if reached < _NEGLIGIBLE:
                    break
        return best

    def competes(self, longest: int, terms: PlanningLimits) -> bool:
        """Return whether it would draft if there were no guesses."""
        return self.plan((), (), longest, terms).value > 1.0 - terms.rate * terms.costs[0]

    def trial(self, longest: int, terms: PlanningLimits) -> DraftPlan | None:
        """Return a plan now and then, even if drafting looked unprofitable before."""
        learned, terms, step = self.learned, self._reusing(terms), self._cost(1, terms)
        learned.saved += learned.attempts if learned.timed else _TRY_UNTIMED
        waits = terms.plain - terms.costs[0]  # the lost pipelining
        if learned.saved * terms.plain < _TRIED * step + waits:
            return None
        needed = terms.rate * (terms.costs[1] - terms.costs[0] + step)  # of its tokens
        steady = min(needed, _STEADY_MOST)
        self._setback = 2.0 ** (-steady / (1.0 - steady))
        return DraftPlan(_TRIAL, 0, min(_TRIED, longest))

    def draft(
        self,
        known: Sequence[int],
        prefix: Sequence[int],
        plan: DraftPlan,
        terms: PlanningLimits,
        stop: Collection[int],
        behind: Behind,
    ) -> list[int]:
        """Return the neural tokens to verify after `prefix`, the guesses of `plan`.

        `followed` guesses come after them.
        """
        neural_drafter, learned, context = self.neural_drafter, self.learned, terms.context
        terms = self._reusing(terms)
        self._prefix, self._made = list(prefix), []
        most = min(plan.most, neural_drafter.longest)
        trial = self._trying = plan.value == _TRIAL
        untimed = trial and not learned.timed  # the first pass of a row count is not measured
        learned.saved = 0.0
        if not trial:
            learned.attempts = _TRY
        rows = max(1, len(known) + len(prefix) - neural_drafter.read)
        self.cost = 0.0
        started = last = neural_drafter.clock()
        ready = neural_drafter.begin([*known, *prefix])
        chances, following = [plan.reached], list[float]()
        while ready and len(self._made) < most:
            made = self._make()
            now = neural_drafter.clock()
            if rows <= MAX_ROWS and not learned.curve.first_use(rows):
                learned.curve.observe(rows, now - last, context)
                learned.timed = True
            self.cost += self._cost(rows, terms)
            rows = 1
            coming = behind(made.token) if made.token >= 0 else None
            if coming is None:
                break
            following = coming
            self._made.append(made)
            chances.append(chances[-1] * made.chance)
            if made.token in stop:
                break
            if not untimed and not self._continues(
                chances[-1], following, len(prefix), most, terms
            ):
                break
            last = neural_drafter.clock()
        self.seconds = neural_drafter.clock() - started
        self.total_seconds += self.seconds
        then = _futures_behind(chances, following, terms, plan.most)
        chances = _reaching(chances, following, plan.most + 1)
        length, _ = _worth(chances, len(prefix), terms, then)
        self.verified = min(length, len(self._made))
        self.followed = length - self.verified
        return [made.token for made in self._made[: self.verified]]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the actual `tokens`, also about tokens that were not verified."""
        learned, made, self._made = self.learned, self._made, []
        before = len(self._prefix)
        if list(tokens[:before]) != self._prefix:
            return
        if self._trying and made and len(tokens) > before:
            change = 2.0 if made[0].token == tokens[before] else self._setback
            learned.attempts = min(max(change * learned.attempts, _TRY_LEAST), _TRY)
        for depth, (each, token) in enumerate(zip(made, tokens[before:], strict=False)):
            hit, depth = each.token == token, min(depth, _DEPTHS - 1)
            learned.tests[depth] = min(learned.tests[depth] + 1.0, _SAVED_TESTS)
            rate = max(_RATE, 1.0 / learned.tests[depth])
            learned.expected[depth] += rate * (hit - learned.expected[depth])
            error = _CALIBRATION_RATE * (hit - each.chance)
            learned.calibration[each.bucket] += error
            learned.by_depth[depth] += error
            if not hit:
                break

    def _reusing(self, terms: PlanningLimits) -> PlanningLimits:
        """Adjust the costs for the part of the pass that drafting already computed."""
        reused, costs = self.neural_drafter.reused, terms.costs
        if not reused:
            return terms
        return replace(terms, costs=[cost - reused * (cost - costs[0]) for cost in costs])

    def _make(self) -> _Drafted:
        token, sure = self.neural_drafter.guess()
        sure = min(max(sure, 1 - _SURE), _SURE)
        hint = log(sure / (1 - sure))
        bucket = bisect(CALIBRATION_EDGES, hint)
        depth = min(len(self._made), _DEPTHS - 1)
        chance = sigmoid(hint + self.learned.calibration[bucket] + self.learned.by_depth[depth])
        return _Drafted(token, bucket, chance)

    def _continues(
        self,
        reached: float,
        following: Sequence[float],
        before: int,
        most: int,
        terms: PlanningLimits,
    ) -> bool:
        """Return whether more neural tokens are worth more than the guesses that follow.

        reached: the chance that the whole draft so far is accepted.
        """
        made, gained, step = len(self._made), 0.0, self._cost(1, terms)
        chances = _reaching([reached], following, most - made + 1)
        _, least = _worth(chances, before + made, terms)
        here = terms.costs[before + made]
        for more in range(1, most - made + 1):
            reached *= self.expected(made + more - 1)
            gained += reached
            cost = terms.costs[before + made + more] - here + more * step
            if gained - terms.rate * cost > least:
                return True
            if reached < _NEGLIGIBLE:
                break
        return False

    def _cost(self, rows: int, terms: PlanningLimits) -> float:
        """Return the cost of its own pass over `rows` rows, in the unit of `terms`."""
        table, timed = self.learned.curve.table(terms.context), self.learned.timed
        unit = 1.0 if timed and terms.seconds else terms.plain
        if timed and not terms.seconds:  # times and relative costs cannot be compared
            return self.neural_drafter.share * terms.plain
        if rows <= _CATCHING_UP:
            return unit * table[rows - 1]
        whole = table[min(rows, MAX_ROWS) - 1] * max(1.0, rows / MAX_ROWS)
        return unit * (table[0] + (whole - table[0]) / min(_SPREAD, terms.left))


def futures(chances: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the value of the remaining guesses after a pass that yielded 0, 1, ... of them.

    values: see `planner.best_draft`.
    """
    reached, found = 1.0, [values[0]]
    for chance, value in zip(chances, values[1:], strict=False):
        reached *= chance
        found.append(reached * value)
    return found


def _futures_behind(
    chances: Sequence[float], following: Sequence[float], terms: PlanningLimits, most: int
) -> list[float]:
    """Return `futures` for tokens after the prefix: neural ones, then guesses.

    chances: of the neural tokens, cumulative. following: of the guesses after them.
    """
    if not following:
        return []
    _, values = best_draft(following, terms.costs, terms.rate, most, rerun_on_reject=terms.rerun)
    coming = [chances[-1] * value for value in futures(following, values)]
    return [*[0.0] * (len(chances) - 2), *coming]


def _at(values: Sequence[float], place: int) -> float:
    return values[place] if place < len(values) else 0.0


def _reaching(chances: list[float], following: Sequence[float], most: int) -> list[float]:
    """Extend the cumulative `chances` by the guesses `following`, up to `most` in all."""
    for chance in following[: max(0, most - len(chances))]:
        chances.append(chances[-1] * chance)
    return chances


def _worth(
    chances: Sequence[float], before: int, terms: PlanningLimits, then: Sequence[float] = ()
) -> tuple[int, float]:
    """Return how many drafted tokens are worth a row, and their total value.

    chances: cumulative, of the prefix and each token after it. then: see `_futures_behind`.
    """
    best, best_value, gained, lost = 0, _at(then, 0), 0.0, 0.0
    for count in range(1, len(chances)):
        gained += chances[count]
        lost += _rerun(chances[count - 1] - chances[count], before + count, terms)
        more = terms.costs[before + count] - terms.costs[before]
        value = gained - terms.rate * more - lost + _at(then, count)
        if value > best_value:
            best, best_value = count, value
    return best, best_value


def _rerun(chance: float, rows: int, terms: PlanningLimits) -> float:
    """Return the expected cost, in tokens, of running `rows` tokens again."""
    if not terms.rerun:
        return 0.0
    last = len(terms.costs) - 1
    return chance * terms.rate * (terms.costs[min(rows, last)] - terms.costs[0])
