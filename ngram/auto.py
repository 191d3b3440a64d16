"""`--draft auto`: draft the planned number of tokens, often none.

`prediction` predicts chains of tokens, `planner` chooses the length by the costs in `cost`, and
`neural_plan` decides when a neural drafter is better.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import truediv

from akunu_py.ngram.acceptance_model import CALIBRATION_RATE, AcceptanceModel
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.copies import CopyTracker
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve, RecentGain
from akunu_py.ngram.index import SuffixIndex
from akunu_py.ngram.neural_plan import (
    DraftChooser,
    DraftPlan,
    LearnedDrafter,
    PlannedDrafter,
    PlanningLimits,
    TokenView,
)
from akunu_py.ngram.planner import Pipelining, best_draft
from akunu_py.ngram.prediction import (
    FROM_GRAMMAR,
    Continuation,
    PredictionChain,
    TokenPrediction,
    TokenPredictor,
)
from akunu_py.ngram.token_tree import Candidates, TokenTree
from akunu_py.types import DraftGuide, NeuralDrafter, PassCosts

MAX_DRAFT = 32
HORIZON = MAX_DRAFT + 1  # maximum predictions: the longest draft and the bonus token

MAX_OUTCOMES = 1 << 15  # per kind, after each answer; each takes about 60 bytes
PROBE_LENGTH = 4
PROBE_CHANCE = 0.3
_ROWS_TRIED = 8  # rows of a pass whose costs decide whether to look for alternatives


@dataclass(slots=True)
class Proposal:
    """A draft: predictions, then maybe tokens of a neural drafter, then maybe predictions again."""

    # Continuation of the history, drafted or not:
    predictions: Sequence[TokenPrediction] = ()
    start: int = 0  # 1 if the draft follows the unknown token of the running step
    end: int = 0  # predictions[start:end] begin the draft
    neural_drafter: PlannedDrafter | None = None  # that drafts `neural_tokens`
    neural_tokens: Sequence[int] = ()
    trailing: Sequence[TokenPrediction] = ()
    is_probe: bool = False  # drafted to measure the cost of a pass
    tree: list[int] | None = None  # the draft, if it has branches
    reached: Sequence[float] = ()  # the chance of each token in it and all before that one

    @property
    def tokens(self) -> list[int]:
        """The draft tokens."""
        if self.tree is not None:
            return self.tree
        leading = [each.token for each in self.predictions[self.start : self.end]]
        trailing = [each.token for each in self.trailing]
        return [*leading, *self.neural_tokens, *trailing]

    def rest(self, known: int) -> Proposal:
        """Return the proposal for the running pass, after `known` right predictions."""
        start, end = (max(0, place - known) for place in (self.start, self.end))
        return Proposal(self.predictions[known:], start, end, is_probe=self.is_probe)


class AutoDrafter:
    """A `Drafter` that plans the length and the sources of each draft."""

    def __init__(
        self,
        curve: CostCurve | None = None,
        *,
        stop_tokens: Collection[int] = (),
        rerun_on_reject: bool = False,
        answer_cache: AnswerCache | None = None,
        neural_drafters: Sequence[NeuralDrafter] = (),
        learned: MutableMapping[str, LearnedDrafter] | None = None,
        ngrams: bool = True,
    ) -> None:
        self.curve = CostCurve() if curve is None else curve  # keeps learning
        self.stop_tokens = frozenset(stop_tokens)  # a draft ends with the first of them
        self.rerun_on_reject = rerun_on_reject  # recurrent cache: the next pass repeats tokens
        self.draft_only_tokens = 0  # at the start of the history: not in the prompt
        self.guide: DraftGuide | None = None  # the grammar of the answer
        self.can_pipeline = True  # a pass may be launched while the previous one runs
        self.pipelines = False  # whether it is worth it, by the last proposal
        self.branches = False  # drafts may be token trees
        self.model = AcceptanceModel()
        self.index = SuffixIndex()
        self.tracker = CopyTracker(self.index.tokens, self.model.edit_outcomes)
        predictor = TokenPredictor(self.index, self.model, self.tracker, answer_cache)
        self.chain = PredictionChain(predictor, self.stop_tokens)
        saved = {} if learned is None else learned
        self.neural_drafters = [
            PlannedDrafter(each, saved.setdefault(each.key, LearnedDrafter.of(each)))
            for each in neural_drafters
        ]
        self._ngrams = ngrams
        self._chooser = DraftChooser(self.neural_drafters)
        self._pipelining = Pipelining(self.curve)
        self._gain = RecentGain()
        self._proposal = Proposal()  # the last one, or what may still be right of it
        self._drafted = 0  # tokens drafted for the last observed pass
        self._answering = False
        self._recent = 0  # see `TokenPrediction.recent`

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the history and learn from them.

        Tokens count as output if the last observed pass can have produced them, or if they are a
        single token of a running answer. Other tokens are a prompt; the answer starts at its last
        token.
        """
        proposal = self._proposal
        self._proposal = Proposal(is_probe=proposal.is_probe)  # that may be running still
        drafted, self._drafted = self._drafted, 0
        if not self._answering or len(tokens) > drafted + 1:
            self._end_answer()
            self.index.extend(tokens)
            self.tracker.begin_answer(max(0, self.index.size - 1))
            return
        if proposal.neural_drafter is not None:
            proposal.neural_drafter.learn(tokens)
        # A draft that follows the running step is not verified by that step's token.
        if self.neural_drafters and not proposal.start:
            self._chooser.learn(proposal.predictions[: proposal.end], tokens)
        if self._ngrams:
            self._learn_predictions(proposal, tokens)
        else:
            self.index.extend(tokens)

    def _learn_predictions(self, proposal: Proposal, tokens: Sequence[int]) -> None:
        learned = 0
        for prediction, token in zip(proposal.predictions, tokens, strict=False):
            self._learn(prediction, token)
            learned += 1
            if prediction.token != token:
                break
        else:
            self._proposal = proposal.rest(learned)
        for token in tokens[learned:]:
            prediction = self.chain.first(self._recent)
            if proposal.neural_drafter is None:
                self._advance(prediction, token)
            else:  # the n-grams learn from each neural token too
                self._learn(prediction, token)

    def rewind(self, length: int) -> None:
        """Truncate the history to `length` tokens. Estimates about drafting stay."""
        self._end_answer()
        self.index.rewind(length)
        for each in self.neural_drafters:
            each.unchanged = min(each.unchanged, max(0, length - self.draft_only_tokens))
        self.tracker.begin_answer(max(0, length - 1))
        self._proposal = Proposal()
        self._drafted = 0

    def forget_texts(self) -> None:
        """Forget the known edits, which hold tokens of earlier texts. Call after `rewind`."""
        self.tracker.forget()

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        self._proposal = self._plan(limit, ahead=ahead)
        self._answering = True
        draft = self._proposal.tokens
        self._pipelining.add_plan(drafts=bool(draft) and not self._proposal.is_probe)
        self._pipelining.add_pass(drafted=bool(draft))
        return draft

    def offer(self, limit: int, known: PassCosts | None = None) -> list[float]:
        # These costs are for alternatives; the chain is planned with the other requests' chains.
        doubt = self._least_doubt(known.costs, known.rate) if known else inf
        self._proposal = Proposal(self._look_ahead(max(1, min(HORIZON, limit + 1)), doubt))
        self._answering = True
        longest = max(0, min(limit, MAX_DRAFT))
        chances = [each.probability for each in self._proposal.predictions if each.token >= 0]
        neural = self._offer_neural(limit, known) if known and self.neural_drafters else None
        proposal, chances = self._proposal, chances[:longest] if neural is None else neural
        if neural is None and known and any(each.others for each in proposal.predictions):
            _, values = best_draft(chances, known.costs, known.rate, longest)
            self._add_branches(proposal, chances, values[1:], known, longest)
        if proposal.tree is None:
            return chances
        return list(map(truediv, proposal.reached, [1.0, *proposal.reached]))

    def plan_neural(self, limit: int, known: PassCosts) -> DraftPlan | None:
        """Return the best neural draft after the last `offer`, None for none; do not draft."""
        choice, _ = self._choose_neural(self._proposal.predictions, limit, known)
        return None if choice is None else choice[0]

    def _offer_neural(self, limit: int, known: PassCosts) -> list[float] | None:
        """Draft with a neural drafter if that beats the predictions; return the new chances."""
        proposal = self._proposal
        choice, limits = self._choose_neural(proposal.predictions, limit, known)
        if choice is None:
            return None
        self._add_neural_tokens(proposal, *choice, limits, limits)
        leading, trailing = proposal.predictions[: proposal.end], proposal.trailing
        chances = [each.probability for each in leading], [each.probability for each in trailing]
        return [*chances[0], *choice[1].chances, *chances[1]]

    def _choose_neural(
        self, predictions: Sequence[TokenPrediction], limit: int, known: PassCosts,
        *, ongoing: bool = False,
    ) -> tuple[tuple[DraftPlan, PlannedDrafter] | None, PlanningLimits]:  # fmt: skip
        """Return the best neural draft instead of the predictions, and the limits of its plan."""
        predictions = [each for each in predictions if each.token >= 0]
        longest = min(limit, MAX_DRAFT, len(known.costs) - 1)
        context = self._context
        limits = PlanningLimits(
            known.costs, known.rate, self.curve.table(context)[0], self.curve.timed, context, limit,
            ongoing, self.rerun_on_reject, branches=self.branches,
        )  # fmt: skip
        stops = bool(predictions) and predictions[-1].token in self.stop_tokens
        chances = [each.probability for each in predictions]
        choose = self._chooser.choose
        return choose(chances, limits, longest, stops=stops) if longest > 0 else None, limits

    @property
    def drafting_cost(self) -> float:
        """Cost of the neural tokens of the last proposal."""
        neural_drafter = self._proposal.neural_drafter
        return 0.0 if neural_drafter is None else neural_drafter.cost

    def take(self, count: int) -> list[int]:
        proposal = self._proposal
        self._drafted = count
        self._pipelining.add_pass(drafted=bool(count))
        if proposal.tree is not None:
            return TokenTree.of(proposal.tree).first(count)
        if proposal.neural_drafter is None:
            proposal.end = count
        else:
            proposal.end = min(count, proposal.end)
            proposal.neural_tokens = proposal.neural_tokens[: count - proposal.end]
            left = count - proposal.end - len(proposal.neural_tokens)
            proposal.trailing = proposal.trailing[:left]
        return proposal.tokens

    def _plan(self, limit: int, *, ahead: bool) -> Proposal:
        longest = max(0, min(limit, MAX_DRAFT))
        gain = self._gain.value  # tokens per pipelined step's time
        context = self._context
        costs, pipelined = self.curve.table(context), self.curve.pipelined(context)
        doubt = inf if ahead else self._least_doubt(costs, gain / pipelined)
        predictions = self._look_ahead(max(1, min(HORIZON, limit + 1)) + ahead, doubt)
        chances = [prediction.probability for prediction in predictions if prediction.token >= 0]
        found, upcoming = len(chances), chances[ahead:]
        self.pipelines = False
        if self.can_pipeline and self.guide is None:
            cost = self._pipelining.plain_cost(costs, pipelined, gain, upcoming)
            if cost < costs[0]:
                self.pipelines, costs = True, [cost, *costs[1:]]
        rate = gain / pipelined
        ongoing = found == HORIZON + ahead
        if ahead:  # the draft counts only if the running step's token was predicted too
            chances[:2] = [chances[0] * chances[1]] if found > 1 else []
        length, values = best_draft(
            chances, costs, rate, longest, ongoing=ongoing, rerun_on_reject=self.rerun_on_reject
        )
        choice = None
        if self.neural_drafters and not (ahead and length):
            known = PassCosts(costs, rate)
            choice, limits = self._choose_neural(predictions[ahead:], limit, known, ongoing=ongoing)
        probe = 0 if length or choice else self._probe(predictions[ahead:found], longest)
        end = ahead + (length or probe)
        proposal = Proposal(predictions, int(ahead), end, is_probe=bool(probe))
        if choice is not None:
            self.pipelines = False
            if not ahead:  # else the neural drafter waits for the running step
                tried = replace(limits, costs=self.curve.optimistic(costs))
                self._add_neural_tokens(proposal, *choice, limits, tried)
        elif not (ahead or probe):
            known = PassCosts(costs[: MAX_DRAFT + 1], rate)
            self._add_branches(proposal, chances[:longest], values[1:], known, longest)
        return proposal

    def _add_branches(
        self, proposal: Proposal, chances: Sequence[float], later: Sequence[float],
        known: PassCosts, longest: int,
    ) -> None:  # fmt: skip
        """Add alternatives to the draft while they pay for their rows.

        chances, later: of the predictions; see `Candidates.add`.
        """
        predictions = proposal.predictions[:longest]
        if not any(prediction.others for prediction in predictions):
            return
        tokens = [prediction.token for prediction in predictions[: len(chances)]]
        candidates = Candidates(tokens, chances, later)
        for at, prediction in enumerate(predictions):
            for token, chance in prediction.others:
                tokens, after = self._follow(predictions, at, token, longest)
                _, values = best_draft(after, known.costs, known.rate, longest)
                candidates.add(at - 1, tokens, [chance, *after], values if after else ())
        proposal.tree, proposal.reached, _ = candidates.best(proposal.end, known.costs, known.rate)

    def _least_doubt(self, costs: Sequence[float], rate: float) -> float:
        """Return the chance of a wrong prediction above which alternatives may be worth a row."""
        if not self.branches or self.guide is None:
            return inf
        steps = [(costs[more] - costs[0]) / more for more in range(1, min(len(costs), _ROWS_TRIED))]
        return 2.0 * rate * min(steps, default=0.0)  # two or more of them share the chance

    def _follow(
        self, predictions: Sequence[TokenPrediction], at: int, token: int, longest: int
    ) -> tuple[list[int], list[float]]:
        """Return `token` with what follows it, instead of `predictions[at]`, and the chances."""
        prefix = [prediction.token for prediction in predictions[:at]]
        continuation = Continuation(self.chain, predictions, prefix, longest, self.guide)
        chances = continuation.add(token)
        continuation.end()
        return [token, *[each.token for each in continuation.predictions]], chances or []

    def _look_ahead(self, most: int, least_doubt: float = inf) -> list[TokenPrediction]:
        """Return up to `most` predictions after the history, the last one maybe without a token."""
        if not self._answering:
            self.index.mark_earlier_answers(self.tracker.answer_start)
        if not self._ngrams:
            return []
        return self.chain.after_history(self._recent, most, self.guide, least_doubt)

    def _add_neural_tokens(
        self,
        proposal: Proposal,
        plan: DraftPlan,
        neural_drafter: PlannedDrafter,
        limits: PlanningLimits,
        for_tree: PlanningLimits,
    ) -> None:
        """Draft predictions, neural tokens, predictions again; then add branches by `for_tree`."""
        predictions = proposal.predictions
        prefix = [prediction.token for prediction in predictions[: plan.predictions]]
        start, end = self.draft_only_tokens, self.index.size
        unchanged = neural_drafter.unchanged if start == neural_drafter.unchanged_from else 0
        history = TokenView(self.index.tokens, start, end, unchanged=unchanged)
        neural_drafter.unchanged, neural_drafter.unchanged_from = end - start, start
        longest = plan.predictions + plan.max_after
        after = Continuation(self.chain, predictions, prefix, longest, self.guide)
        tokens = neural_drafter.draft(history, prefix, plan, limits, self.stop_tokens, after.add)
        after.end()
        proposal.end = plan.predictions
        proposal.neural_drafter, proposal.neural_tokens = neural_drafter, list(tokens)
        proposal.trailing = after.predictions[: neural_drafter.trailing]
        most = min(limits.tokens_left, MAX_DRAFT)
        proposal.tree, proposal.reached = neural_drafter.alternatives(plan.reached, most, for_tree)

    def _end_answer(self) -> None:
        if self._answering:
            self.index.mark_answer(self.tracker.answer_start, self.index.size)
            self._answering = False
            self.model.drop_oldest(MAX_OUTCOMES)
            self.tracker.drop_oldest(MAX_OUTCOMES)

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        self._drafted = drafted
        curve, context = self.curve, self._context
        neural_drafter, drafting = self._proposal.neural_drafter, self.drafting_cost
        if neural_drafter is not None:
            seconds -= neural_drafter.seconds
        pipelined_cost = curve.pipelined(context)
        hidden = curve.table(context)[0] - pipelined_cost if pipelined else 0.0
        if drafted and self._proposal.is_probe:
            curve.probed()
        if not curve.first_use(rows):
            if pipelined and rows == 1:
                curve.observe(PIPELINED, seconds, context)
            else:
                curve.observe(rows, seconds + hidden, context)
        # Planned costs, not measured ones: a slow outlier must not look like a slow text.
        costs = curve.table(context)
        cost = costs[min(rows, MAX_ROWS) - 1]
        spent = (cost - hidden + drafting) / pipelined_cost
        self._gain.add(accepted + 1, spent)

    @property
    def _context(self) -> int:
        return self.index.size - self.draft_only_tokens

    def _learn(self, prediction: TokenPrediction, token: int) -> None:
        for candidate in prediction.candidates:
            candidate.learn(token)
        if prediction.others:
            self.chain.learn_others(prediction, token)
        if prediction.token >= 0:
            hit = prediction.token == token
            if prediction.source == FROM_GRAMMAR:
                self.chain.learn_forced(prediction, hit)
            else:
                weights = self.model.calibration[prediction.source]
                weights[prediction.bucket] += CALIBRATION_RATE * (hit - prediction.probability)
        self._advance(prediction, token)

    def _advance(self, prediction: TokenPrediction, token: int) -> None:
        self._recent = (self._recent << 1 | (prediction.token == token)) & 7
        self.tracker.observe(
            token,
            prediction.copy_predictions,
            prediction.edits,
            prediction.skip,
            prediction.pair,
            prediction.matches,
        )
        self.index.append(token)

    def _probe(self, predictions: Sequence[TokenPrediction], longest: int) -> int:
        """Return the length of a probe, 0 for none: a draft although the costs predict a loss.

        The cost curve may be wrong: never measured, or measured while the machine was busy.
        """
        length = min(PROBE_LENGTH, longest, len(predictions))
        if not length or not self.curve.probe_is_due() or predictions[0].probability < PROBE_CHANCE:
            return 0
        return length
