"""Neural drafters: the cost of their tokens, their acceptance rates, and how many tokens to draft.

A draft is n-gram predictions, then tokens of one neural drafter, then predictions again. The split
with the highest expected value (see `planner`) wins; each neural token updates the decision.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, isfinite, log
from operator import sub
from typing import Any

from akunu_py.ngram.acceptance_model import CALIBRATION_EDGES, sigmoid
from akunu_py.ngram.cost import MAX_ROWS, PRIOR_SHAPE, CostCurve
from akunu_py.ngram.planner import best_count, best_draft, value_at
from akunu_py.ngram.prediction import TokenPrediction
from akunu_py.ngram.token_tree import Candidates
from akunu_py.types import NeuralDrafter

_NEGLIGIBLE = 0.02  # longer drafts with a lower chance are not considered
_DEPTHS = 8  # positions in a draft with their own statistics
_ACCEPTANCE_PRIOR = 0.7  # prior chance that a neural token is accepted
_RATE, _PRIOR_TESTS = 0.03, 4.0  # learning rate of that chance; weight of the prior in tests
_CALIBRATION_RATE = 0.1
_MAX_CONFIDENCE = 0.999  # higher confidence is clipped
# A prefill of more rows happens once, so its cost is spread over up to 256 passes.
_SHORT_PREFILL, _SPREAD_PASSES = 17, 256.0
_TRIAL_TOKENS = 2  # draft tokens of a trial
_TRIAL_VALUE = -float("inf")  # marks a plan as a trial
_MAX_SHARE, _MIN_SHARE = 0.01, 0.001  # share of time for trials; it doubles on success
_MAX_STEADY_RATE = 0.9  # acceptance rate of trials that keeps their share
_UNTIMED_SHARE = 0.05  # until the first measured cost
_BUCKETS = len(CALIBRATION_EDGES) + 1
_MAX_TESTS = 1e6
_OTHERS = 3  # alternatives to a token
_OTHERS_PRIOR, _OTHERS_RATE = 0.2, 0.05  # their prior accuracy after a wrong token; learning rate
_LEAST_SHARE = 0.01

# Chances of the predictions after a neural token; None if that token is forbidden.
ChancesAfter = Callable[[int], list[float] | None]


@dataclass(frozen=True, slots=True)
class PlanningLimits:
    """Costs and limits for planning a draft."""

    costs: Sequence[float]  # of a pass over 1, 2, ... rows
    rate: float  # tokens per unit of cost
    plain_cost: float  # cost of a plain step without pipelining
    in_seconds: bool  # costs are measured times
    context: int  # prefilled tokens
    tokens_left: int  # maximum number of further tokens
    ongoing: bool  # see `planner.best_draft`
    rerun: bool  # rerun_on_reject of `planner.best_draft`
    branches: bool = False  # drafts may be token trees


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft: predictions of the n-grams, then tokens of a neural drafter."""

    value: float  # expected value in tokens
    predictions: int  # n-gram predictions at the start
    max_after: int  # maximum tokens after these predictions
    reached: float = 1.0  # chance that all these predictions are accepted


@dataclass(slots=True)
class _NeuralToken:
    token: int
    bucket: int  # index in `LearnedDrafter.calibration`
    chance: float  # calibrated acceptance
    others: Sequence[tuple[int, float]] = ()  # alternatives, with shares of the rest


@dataclass(slots=True)
class LearnedDrafter:
    """Learned state of one neural drafter."""

    curve: CostCurve  # cost of its passes
    timed: bool = False  # the curve has times of this device
    # By depth: acceptance rate, and the number of tokens it is based on.
    expected: list[float] = field(default_factory=lambda: [_ACCEPTANCE_PRIOR] * _DEPTHS)
    tests: list[float] = field(default_factory=lambda: [_PRIOR_TESTS] * _DEPTHS)
    # Corrections of the drafter's confidence in logits: by confidence, and by depth.
    calibration: list[float] = field(default_factory=lambda: [0.0] * _BUCKETS)
    by_depth: list[float] = field(default_factory=lambda: [0.0] * _DEPTHS)
    attempts: float = _MAX_SHARE  # share of time for trials while drafting does not pay
    saved: float = 0.0  # budget for the next trial, in plain steps

    @classmethod
    def of(cls, drafter: NeuralDrafter) -> LearnedDrafter:
        """Return the initial state for `drafter`."""
        unit = drafter.relative_cost
        curve = CostCurve({rows: unit * cost for rows, cost in PRIOR_SHAPE.items()})
        curve.preset = False
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
            attempts, saved = float(content["attempts"]), float(content["saved"])
            values = [*lists["expected"], *(rate / _MAX_TESTS for rate in lists["tests"])]
            sizes = [len(values) for values in lists.values()]
            if (
                sizes != [_DEPTHS, _DEPTHS, _BUCKETS, _DEPTHS]
                or not all(0.0 <= value <= 1.0 for value in values)
                or not all(isfinite(value) for values in lists.values() for value in values)
                or not _MIN_SHARE <= attempts <= _MAX_SHARE
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
        # Tokens of the history since `unchanged_from` that are the same as for the last draft.
        self.unchanged = self.unchanged_from = 0
        self._drafted: list[_NeuralToken] = []
        self._prefix: list[int] = []
        self._is_trial = False
        self._setback = 1.0  # factor on `attempts` after a failed trial
        self.seconds = self.total_seconds = 0.0  # of the last draft, and of all drafts
        self.cost = 0.0  # planned cost of the last draft
        self.verified = 0  # neural tokens in the last draft, if it has no branches
        self.trailing = 0  # predictions after the neural tokens
        # By rank of an alternative to wrong tokens: how often it was right, and its mean share.
        self._right, self._shares = ([_OTHERS_PRIOR] * _OTHERS for _ in range(2))
        self._branch_gain = 0.0  # mean gain of a draft with alternatives in tokens

    def expected(self, depth: int) -> float:
        """Return the chance that the neural draft token at `depth` (from 0) is accepted."""
        return self.learned.expected[min(depth, _DEPTHS - 1)]

    def plan(
        self, chances: Sequence[float], values: Sequence[float], most: int, limits: PlanningLimits
    ) -> DraftPlan:
        """Return the best plan of up to `most` tokens: n-gram predictions, then neural tokens.

        chances: acceptance of each prediction. values: from `remaining_values`.
        """
        best = DraftPlan(-float("inf"), 0, 0)
        step = self._next_cost(limits)
        unread = max(1, limits.context - self.neural_drafter.prefilled)
        reached, tokens, rerun = 1.0, 1.0, 0.0
        longest = 0 if self.neural_drafter.parallel else len(chances)
        for predictions in range(min(longest, most - 1) + 1):
            spent, future = self._cost(unread + predictions, limits), 0.0
            after, gained, lost = 1.0, tokens, rerun
            gained += reached * self._branch_gain * limits.branches
            for count in range(1, min(self.neural_drafter.longest, most - predictions) + 1):
                rows = predictions + count
                chance = after * self.expected(count - 1)
                lost += _rerun_cost(reached * (after - chance), rows, limits)
                future += (after - chance) * value_at(values, rows)
                after, gained = chance, gained + reached * chance
                value = gained - limits.rate * (limits.costs[rows] + spent) - lost
                value += future + after * value_at(values, rows + 1)
                if value > best.value:
                    best = DraftPlan(value, predictions, most - predictions, reached)
                if reached * after < _NEGLIGIBLE:
                    break
                spent += step
            if predictions < len(chances):
                chance = reached * chances[predictions]
                rerun += _rerun_cost(reached - chance, predictions + 1, limits)
                reached, tokens = chance, tokens + chance
                if reached < _NEGLIGIBLE:
                    break
        return best

    @property
    def chances(self) -> list[float]:
        """The chances of the neural tokens to verify, each given the ones before it."""
        return [each.chance for each in self._drafted[: self.verified]]

    def would_draft(self, longest: int, limits: PlanningLimits) -> bool:
        """Return whether drafting is expected to be faster if there are no n-gram predictions."""
        return self.plan((), (), longest, limits).value > 1.0 - limits.rate * limits.costs[0]

    def trial(self, longest: int, limits: PlanningLimits) -> DraftPlan | None:
        """Return a plan now and then, although drafting looks unprofitable."""
        learned, step = self.learned, self._cost(1, limits)
        learned.saved += learned.attempts if learned.timed else _UNTIMED_SHARE
        waits = limits.plain_cost - limits.costs[0]  # the lost pipelining
        if learned.saved * limits.plain_cost < _TRIAL_TOKENS * step + waits:
            return None
        needed = limits.rate * (limits.costs[1] - limits.costs[0] + step)  # break-even acceptance
        steady = min(needed, _MAX_STEADY_RATE)
        self._setback = 2.0 ** (-steady / (1.0 - steady))
        return DraftPlan(_TRIAL_VALUE, 0, min(_TRIAL_TOKENS, longest))

    def draft(
        self,
        known: Sequence[int],
        prefix: Sequence[int],
        plan: DraftPlan,
        limits: PlanningLimits,
        stop: Collection[int],
        chances_after: ChancesAfter,
    ) -> list[int]:
        """Return the neural tokens to verify after `prefix`, before `trailing` predictions."""
        neural_drafter, learned, context = self.neural_drafter, self.learned, limits.context
        self._prefix, self._drafted = list(prefix), []
        neural_drafter.most_others = _OTHERS * limits.branches
        most = min(plan.max_after, neural_drafter.longest)
        trial = self._is_trial = plan.value == _TRIAL_VALUE
        untimed = trial and not learned.timed  # the first pass of a row count is not measured
        learned.saved = 0.0
        if not trial:
            learned.attempts = _MAX_SHARE
        rows = max(1, len(known) + len(prefix) - neural_drafter.prefilled)
        self.cost = 0.0
        started = last = neural_drafter.clock()
        ready = neural_drafter.start_draft(TokenView.of(known, prefix))
        chances, trailing = [plan.reached], list[float]()
        while ready and len(self._drafted) < most:
            drafted = self._draft_token()
            now = neural_drafter.clock()
            if 0 < rows <= MAX_ROWS and not learned.curve.first_use(rows):
                learned.curve.observe(rows, now - last, context)
                learned.timed = True
            if rows:
                self.cost += self._cost(rows, limits)
            rows = 0 if neural_drafter.parallel else 1
            upcoming = chances_after(drafted.token) if drafted.token >= 0 else None
            if upcoming is None:
                break
            trailing = upcoming
            self._drafted.append(drafted)
            chances.append(chances[-1] * drafted.chance)
            if drafted.token in stop:
                break
            if not untimed and not self._continues(
                chances[-1], trailing, len(prefix), most, limits
            ):
                break
            last = neural_drafter.clock()
        self.seconds = neural_drafter.clock() - started
        self.total_seconds += self.seconds
        values_after = _values_after_prefix(chances, trailing, limits, plan.max_after)
        chances = _extend_chances(chances, trailing, plan.max_after + 1)
        length, _ = _best_length(chances, len(prefix), limits, values_after)
        self.verified = min(length, len(self._drafted))
        self.trailing = length - self.verified
        return [drafted.token for drafted in self._drafted[: self.verified]]

    def alternatives(
        self, reached: float, longest: int, limits: PlanningLimits
    ) -> tuple[list[int] | None, list[float]]:
        """Return the best draft with alternatives and its chances; see `Candidates.best`.

        reached: the chance of the prefix. longest: maximum draft tokens.
        """
        before, drafted = len(self._prefix), self._drafted
        if self.trailing or not any(each.others for each in drafted):
            return None, []
        chances = [*[reached, *[1.0] * before][:before], *[each.chance for each in drafted]]
        candidates = Candidates([*self._prefix, *[each.token for each in drafted]], chances)
        for depth, each in enumerate(drafted):
            rest = 1.0 - each.chance
            ranked = zip(each.others, self._right, self._shares, strict=False)
            for (token, share), right, mean in ranked:
                candidates.add(before + depth - 1, [token], [rest * min(1.0, share * right / mean)])
        draft, found, gain = candidates.best(before, limits.costs[: longest + 1], limits.rate, 0.0)
        self._branch_gain += _OTHERS_RATE * (gain - self._branch_gain)
        return draft, found

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the actual `tokens`, also about draft tokens that were not verified."""
        learned, drafted, self._drafted = self.learned, self._drafted, []
        before = len(self._prefix)
        if list(tokens[:before]) != self._prefix:
            return
        if self._is_trial and drafted and len(tokens) > before:
            change = 2.0 if drafted[0].token == tokens[before] else self._setback
            learned.attempts = min(max(change * learned.attempts, _MIN_SHARE), _MAX_SHARE)
        for depth, (each, token) in enumerate(zip(drafted, tokens[before:], strict=False)):
            hit, depth = each.token == token, min(depth, _DEPTHS - 1)
            learned.tests[depth] = min(learned.tests[depth] + 1.0, _MAX_TESTS)
            rate = max(_RATE, 1.0 / learned.tests[depth])
            learned.expected[depth] += rate * (hit - learned.expected[depth])
            error = _CALIBRATION_RATE * (hit - each.chance)
            learned.calibration[each.bucket] += error
            learned.by_depth[depth] += error
            if not hit:
                for rank, (other, share) in enumerate(each.others):
                    self._right[rank] += _OTHERS_RATE * ((other == token) - self._right[rank])
                    share = max(share, _LEAST_SHARE)
                    self._shares[rank] += _OTHERS_RATE * (share - self._shares[rank])
                break

    def _draft_token(self) -> _NeuralToken:
        token, confidence = self.neural_drafter.draft_token()
        confidence = min(max(confidence, 1 - _MAX_CONFIDENCE), _MAX_CONFIDENCE)
        logit = log(confidence / (1 - confidence))
        bucket = bisect(CALIBRATION_EDGES, logit)
        depth = min(len(self._drafted), _DEPTHS - 1)
        chance = sigmoid(logit + self.learned.calibration[bucket] + self.learned.by_depth[depth])
        return _NeuralToken(token, bucket, chance, self.neural_drafter.others)

    def _continues(
        self,
        reached: float,
        trailing: Sequence[float],
        before: int,
        most: int,
        limits: PlanningLimits,
    ) -> bool:
        """Return whether more neural tokens are worth more than the trailing predictions."""
        made, gained, step = len(self._drafted), 0.0, self._next_cost(limits)
        chances = _extend_chances([reached], trailing, most - made + 1)
        _, least = _best_length(chances, before + made, limits)
        here = limits.costs[before + made]
        for more in range(1, most - made + 1):
            reached *= self.expected(made + more - 1)
            gained += reached
            cost = limits.costs[before + made + more] - here + more * step
            if gained - limits.rate * cost > least:
                return True
            if reached < _NEGLIGIBLE:
                break
        return False

    def _next_cost(self, limits: PlanningLimits) -> float:
        """Return the cost of a token after the first one."""
        return 0.0 if self.neural_drafter.parallel else self._cost(1, limits)

    def _cost(self, rows: int, limits: PlanningLimits) -> float:
        """Return the cost of the drafter's pass over `rows` rows, in the unit of `limits`."""
        table, timed = self.learned.curve.table(limits.context), self.learned.timed
        unit = 1.0 if timed and limits.in_seconds else limits.plain_cost
        if timed and not limits.in_seconds:  # times and relative costs cannot be compared
            return self.neural_drafter.relative_cost * limits.plain_cost
        if rows <= _SHORT_PREFILL:
            return unit * table[rows - 1]
        full = table[min(rows, MAX_ROWS) - 1] * max(1.0, rows / MAX_ROWS)
        return unit * (table[0] + (full - table[0]) / min(_SPREAD_PASSES, limits.tokens_left))


def remaining_values(chances: Sequence[float], values: Sequence[float]) -> list[float]:
    """Return the value of remaining predictions after a pass that accepted 0, 1, ... of them."""
    reached, found = 1.0, [values[0]]
    for chance, value in zip(chances, values[1:], strict=False):
        reached *= chance
        found.append(reached * value)
    return found


def _values_after_prefix(
    chances: Sequence[float], trailing: Sequence[float], limits: PlanningLimits, most: int
) -> list[float]:
    """Return `remaining_values` for tokens after the prefix: neural ones, then predictions.

    chances: of the neural tokens, cumulative. trailing: of each prediction after these tokens.
    """
    if not trailing:
        return []
    _, values = best_draft(trailing, limits.costs, limits.rate, most, rerun_on_reject=limits.rerun)
    upcoming = [chances[-1] * value for value in remaining_values(trailing, values)]
    return [*[0.0] * (len(chances) - 2), *upcoming]


def _extend_chances(chances: list[float], trailing: Sequence[float], most: int) -> list[float]:
    """Append cumulative chances for the predictions `trailing`, up to `most` chances in all."""
    for chance in trailing[: max(0, most - len(chances))]:
        chances.append(chances[-1] * chance)
    return chances


def _best_length(
    chances: Sequence[float], before: int, limits: PlanningLimits, values: Sequence[float] = ()
) -> tuple[int, float]:
    """Return the number of draft tokens with the highest total value, and this value.

    chances: cumulative, of the prefix and each token after it. values: see `_values_after_prefix`.
    """
    rejected = map(sub, chances, chances[1:])
    costs = (_rerun_cost(each, before + at, limits) for at, each in enumerate(rejected, 1))
    rows, plain = limits.costs[before + 1 :], limits.costs[before]
    lost = list(accumulate(costs)) if limits.rerun else ()
    return best_count(chances[1:], rows, limits.rate, plain, lost=lost, values=values)


def _rerun_cost(chance: float, rows: int, limits: PlanningLimits) -> float:
    """Return the expected cost of running `rows` tokens again, in tokens."""
    if not limits.rerun:
        return 0.0
    last = len(limits.costs) - 1
    return chance * limits.rate * (limits.costs[min(rows, last)] - limits.costs[0])


# Prior for `DraftChooser`: actual over predicted accuracy of preferred predictions, and its weight.
_TRUST_PRIOR, _TRUST_WEIGHT = 0.95, 10.0


class DraftChooser:
    """Choose between predictions and neural drafters by expected value.

    Also learns how accurate the preferred predictions are, because the highest of several estimates
    tends to be too high.
    """

    def __init__(self, neural_drafters: Sequence[PlannedDrafter]) -> None:
        self._neural_drafters = neural_drafters
        self._predicted, self._correct = _TRUST_WEIGHT, _TRUST_WEIGHT * _TRUST_PRIOR

    def choose(
        self, chances: Sequence[float], limits: PlanningLimits, longest: int, *, stops: bool
    ) -> tuple[DraftPlan, PlannedDrafter] | None:
        """Return the best plan with a neural drafter, or None if predictions alone are better.

        chances: of the predictions. stops: whether the last prediction is a stop token.
        """
        if any(each.would_draft(longest, limits) for each in self._neural_drafters):
            trust = min(1.0, self._correct / self._predicted)
            chances = [trust * chance for chance in chances]
        costs, rate = limits.costs, limits.rate
        length, values = best_draft(
            chances, costs, rate, longest, ongoing=limits.ongoing, rerun_on_reject=limits.rerun
        )
        upcoming = remaining_values(chances, values)
        before = chances[:-1] if stops else chances
        least, best = values[0], None
        for neural_drafter in self._neural_drafters:
            plan = neural_drafter.plan(before, upcoming, longest, limits)
            if plan.value > least:
                least, best = plan.value, (plan, neural_drafter)
            elif not length and best is None and (trial := neural_drafter.trial(longest, limits)):
                best = trial, neural_drafter
        return best

    def learn(self, preferred: Sequence[TokenPrediction], tokens: Sequence[int]) -> None:
        """Compare the preferred predictions with the actual `tokens`."""
        for prediction, token in zip(preferred, tokens, strict=False):
            self._predicted += prediction.probability
            self._correct += prediction.token == token
            if prediction.token != token:
                break


class TokenView(Sequence[int]):
    """The tokens [start, end) of a sequence and some tokens after them, without a copy."""

    def __init__(
        self,
        tokens: Sequence[int],
        start: int = 0,
        end: int | None = None,
        after: Sequence[int] = (),
        unchanged: int = 0,
    ) -> None:
        """unchanged: tokens at the start that are the same as in the drafter's previous view."""
        self.unchanged = unchanged
        self._tokens, self._start = tokens, start
        self._size = (len(tokens) if end is None else end) - start
        self._after = list(after)

    @classmethod
    def of(cls, tokens: Sequence[int], after: Sequence[int] = ()) -> TokenView:
        """Return a view of `tokens`, which may be a view, and the tokens `after` them."""
        unchanged = tokens.unchanged if isinstance(tokens, TokenView) else 0
        return cls(tokens, after=after, unchanged=unchanged)

    def __len__(self) -> int:
        return self._size + len(self._after)

    def __getitem__(self, at: Any) -> Any:
        size, first = self._size, self._start
        if isinstance(at, slice):
            start, end, _ = at.indices(len(self))
            before = self._tokens[first + start : first + min(end, size)] if start < size else ()
            return [*before, *self._after[max(0, start - size) : max(0, end - size)]]
        at += len(self) if at < 0 else 0
        return self._tokens[first + at] if at < size else self._after[at - size]

    def append(self, token: int) -> None:
        """Add a token to the view, but not to the viewed sequence."""
        self._after.append(token)
