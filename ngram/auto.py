"""`--draft auto`: draft the planned number of tokens, often none.

`guess` predicts tokens, `GuessChain` chains them, `planner` chooses the length by the costs in
`cost`, and `neural_plan` decides when a neural drafter is better.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from itertools import pairwise

from akunu_py.ngram.acceptance_model import CALIBRATION_RATE, AcceptanceModel
from akunu_py.ngram.answer_cache import AnswerCache
from akunu_py.ngram.copies import CopyTracker
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.guess import FROM_GRAMMAR, Guess, Guesser
from akunu_py.ngram.index import LONGEST_MATCH, SuffixIndex
from akunu_py.ngram.neural_plan import (
    DraftPlan,
    LearnedDrafter,
    PlannedDrafter,
    PlanningLimits,
    remaining_values,
)
from akunu_py.ngram.planner import best_draft, choose_length
from akunu_py.ngram.token_view import TokenView
from akunu_py.types import DraftGuide, NeuralDrafter

MAX_DRAFT = 32
HORIZON = MAX_DRAFT + 1  # guesses looked at: the longest draft, and its bonus

MAX_OUTCOMES = 1 << 15  # per kind; each takes about 60 bytes
_RATE_DECAY = 0.97  # per pass, for the running rate of tokens per cost
_RATE_PRIOR = 6.0  # passes at one token each
# Prior chance of a draft after 1 to 8 or more plain steps in a row.
_REDRAFT_CHANCES = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.08)
_REDRAFT_RATE = 0.03
_LATE_DRAFT_LOSS = 0.5  # share of the full loss if a draft appears while the next step runs
_FIRST_TOKEN_CHANCE = 0.6  # acceptance of a draft's first token
# Discounts for a predicted draft, and for its first token's chance.
_PREDICTED_DISCOUNT, _FIRST_TOKEN_DISCOUNT = 0.75, 0.65
PROBE_INTERVAL, MAX_PROBE_INTERVAL = 64, 2048  # plain passes between probes; each doubles it
PROBE_LENGTH = 4
PROBE_CHANCE = 0.3


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
        self.model = AcceptanceModel()
        self.index = SuffixIndex()
        self.tracker = CopyTracker(self.index.tokens, self.model.edit_outcomes)
        guesser = Guesser(self.index, self.model, self.tracker, answer_cache)
        self.chain = GuessChain(guesser, self.stop_tokens)
        self.pipelines = False
        self._recent = 0  # see `Guess.recent`
        self._idle = 0  # plain steps since the last draft
        self._redraft_chances = list(_REDRAFT_CHANCES)
        self._guesses: list[Guess] = []  # for the last proposal, drafted or not
        self._drafted = 0  # tokens drafted for the last observed pass
        self._searched = 0  # leading history tokens already searched for earlier answers
        self._proposed_range = 0, 0  # the part of `_guesses` that starts the last proposal
        saved = {} if learned is None else learned
        self.neural_drafters = [
            PlannedDrafter(each, saved.setdefault(each.key, LearnedDrafter.of(each)))
            for each in neural_drafters
        ]
        self._ngrams = ngrams
        self._neural_drafter: PlannedDrafter | None = None  # that made the last proposal
        self._trailing_guesses: list[Guess] = []  # guesses drafted after its tokens
        self._chooser = DraftChooser(self.neural_drafters)
        self._answering = False
        self._earned = self._spent = _RATE_PRIOR
        self._since_probe = 0
        self._probe_interval = PROBE_INTERVAL
        self._probing = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the history and learn from them.

        After a proposal, tokens that the observed pass can have yielded count as output, and so
        does a single token later in an answer. Anything else is a prompt; the answer starts at its
        last token.
        """
        guesses, self._guesses = self._guesses, []
        drafted, self._drafted = self._drafted, 0
        neural_drafter, self._neural_drafter = self._neural_drafter, None
        if not self._answering or len(tokens) > drafted + 1:
            self._end_answer()
            self.index.extend(tokens)
            self.tracker.begin_answer(max(0, self.index.size - 1))
            return
        if neural_drafter is not None:
            neural_drafter.learn(tokens)
        if self.neural_drafters:
            self._learn_preference(guesses, tokens)
        if not self._ngrams:
            self.index.extend(tokens)
            return
        learned = 0
        for guess, token in zip(guesses, tokens, strict=False):
            self._learn(guess, token)
            learned += 1
            if guess.token != token:
                break
        else:
            self._guesses = guesses[learned:]  # for the pass that is still running
        for token in tokens[learned:]:
            guess = self.chain.first(self._recent)
            if neural_drafter is None:
                self._advance(guess, token)
            else:  # the n-grams learn from each neural token too
                self._learn(guess, token)

    def _learn_preference(self, guesses: Sequence[Guess], tokens: Sequence[int]) -> None:
        start, end = self._proposed_range
        if start:  # the proposal follows the running step, and `tokens` is that step's token
            right = bool(guesses) and guesses[0].token == tokens[0]
            self._proposed_range = (start - 1, end - 1) if right else (0, 0)
            return
        self._chooser.learn(guesses[:end], tokens)

    def rewind(self, length: int) -> None:
        """Truncate the history to `length` tokens. Estimates about drafting stay."""
        self._end_answer()
        self.index.rewind(length)
        for each in self.neural_drafters:
            each.unchanged = min(each.unchanged, max(0, length - self.draft_only_tokens))
        self._searched = min(self._searched, length)
        self.tracker.begin_answer(max(0, length - 1))
        self._guesses = []
        self._drafted = 0
        self._neural_drafter = None

    def forget_texts(self) -> None:
        """Forget the known edits, which hold tokens of earlier texts. Call after `rewind`."""
        self.tracker.forget()

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        longest = max(0, min(limit, MAX_DRAFT))
        guesses = self._look_ahead(max(1, min(HORIZON, limit + 1)) + ahead)
        found = sum(guess.token >= 0 for guess in guesses)
        chances = [guess.probability for guess in guesses[:found]]
        gained = max(self._earned / self._spent, 1.0)  # tokens per pipelined step's time
        costs = self._pass_costs(gained, chances[ahead:])
        rate = gained / self.curve.pipelined(self._context)
        ongoing = found == HORIZON + ahead
        upcoming = chances[ahead:]
        if ahead:  # the draft counts only if the running step's token was predicted too
            chances[:2] = [chances[0] * chances[1]] if found > 1 else []
        length = choose_length(
            chances, costs, rate, longest, ongoing=ongoing, rerun_on_reject=self.rerun_on_reject
        )
        choice: tuple[DraftPlan, PlannedDrafter] | None = None
        draft: list[int] | None = None
        if self.neural_drafters and longest and not (ahead and length):
            limits = self._planning_limits(costs, rate, limit, ongoing=ongoing)
            stops = bool(upcoming) and guesses[found - 1].token in self.stop_tokens
            choice = self._chooser.choose(upcoming, limits, longest, stops=stops)
        if choice is not None:
            self.pipelines = False
            if ahead:  # neural drafters wait for the running step
                draft, self._proposed_range = [], (0, 0)
            else:
                draft = self._draft_with(guesses, *choice, limits)
                self._proposed_range = 0, choice[0].guesses
        if self._idle:
            place = min(self._idle, len(_REDRAFT_CHANCES)) - 1
            drafts = bool(length if draft is None else draft)
            self._redraft_chances[place] += _REDRAFT_RATE * (drafts - self._redraft_chances[place])
        self._probing = not length and draft is None
        if self._probing:
            length = self._probe(guesses[ahead:found], longest)
        self._guesses = guesses
        self._answering = True
        if draft is None:
            self._proposed_range = int(ahead), ahead + length
            draft = [guess.token for guess in guesses[slice(*self._proposed_range)]]
        self._idle = 0 if draft else self._idle + 1
        return draft

    def offer(self, limit: int) -> list[float]:
        self._guesses = self._look_ahead(max(1, min(HORIZON, limit + 1)))
        self._answering = True
        self._proposed_range = 0, 0
        found = [guess.probability for guess in self._guesses if guess.token >= 0]
        return found[: max(0, min(limit, MAX_DRAFT))]

    def take(self, count: int) -> list[int]:
        self._proposed_range = 0, count
        self._drafted = count
        self._idle = 0 if count else self._idle + 1
        return [guess.token for guess in self._guesses[:count]]

    def _look_ahead(self, most: int) -> list[Guess]:
        """Return up to `most` guesses after the history, the last one maybe without a token."""
        if not self._answering:
            start = self.tracker.answer_start
            for answer in earlier_answers(self.index.tokens, start, self._searched):
                self.index.mark_answer(*answer)
            self._searched = start
        return self.chain.after_history(self._recent, most, self.guide) if self._ngrams else []

    def _planning_limits(
        self, costs: Sequence[float], rate: float, tokens_left: int, *, ongoing: bool
    ) -> PlanningLimits:
        context, curve = self._context, self.curve
        plain = curve.table(context)[0]
        return PlanningLimits(
            costs, rate, plain, curve.timed, context, tokens_left, ongoing, self.rerun_on_reject
        )

    def _draft_with(
        self,
        guesses: Sequence[Guess],
        plan: DraftPlan,
        neural_drafter: PlannedDrafter,
        limits: PlanningLimits,
    ) -> list[int]:
        """Draft guesses, then tokens of the neural drafter, then guesses again."""
        self._neural_drafter = neural_drafter
        drafted = guesses[: plan.guesses]
        prefix = [guess.token for guess in drafted]
        start, end = self.draft_only_tokens, self.index.size
        unchanged = neural_drafter.unchanged if start == neural_drafter.unchanged_from else 0
        history = TokenView(self.index.tokens, start, end, unchanged=unchanged)
        neural_drafter.unchanged, neural_drafter.unchanged_from = end - start, start
        longest = plan.guesses + plan.max_after
        # A drafter that computes part of the pass does so only for its own tokens.
        following = [] if neural_drafter.neural_drafter.reused else guesses
        after = Continuation(self.chain, following, prefix, longest, self.guide)
        tokens = neural_drafter.draft(history, prefix, plan, limits, self.stop_tokens, after.add)
        after.end()
        self._trailing_guesses = after.guesses[: neural_drafter.trailing]
        return [*prefix, *tokens, *(guess.token for guess in self._trailing_guesses)]

    def _end_answer(self) -> None:
        """Mark the generated tokens as an earlier answer."""
        if self._answering:
            self.index.mark_answer(self.tracker.answer_start, self.index.size)
            self._searched = self.index.size
            self._answering = False
            self.model.drop_oldest(MAX_OUTCOMES)
            self.tracker.drop_oldest(MAX_OUTCOMES)

    def _pass_costs(self, gained: float, chances: Sequence[float]) -> list[float]:
        """Return the costs of passes over 1, 2, ... rows.

        A plain step costs its pipelined time plus the expected loss if a draft appears while the
        next step runs, and at most its unpipelined time. chances: of the upcoming guesses.
        """
        plain, *more = self.curve.table(self._context)
        if self.guide is not None or not self.can_pipeline:
            self.pipelines = False
            return [plain, *more]
        pipelined = self.curve.pipelined(self._context)
        redraft_chance = self._redraft_chances[min(self._idle, len(_REDRAFT_CHANCES) - 1)]
        lost = _LATE_DRAFT_LOSS * redraft_chance * (gained - 1.0 + _FIRST_TOKEN_CHANCE)  # in tokens
        if len(chances) > 1 and self.curve.measured(2) and self.curve.measured(3):
            two, three = more[:2]
            first, then = chances[:2]
            if then * pipelined > gained * (two - pipelined):  # worth drafting after this step
                # Drafting now costs one more row and the pipeline gap, but saves the step.
                saved = gained * (2.0 - (plain + three - two) / pipelined)
                promised = _FIRST_TOKEN_DISCOUNT * then - 1.0 + saved
                lost = max(lost, _PREDICTED_DISCOUNT * first * promised)
        lost *= pipelined / gained
        self.pipelines = pipelined + lost < plain
        return [min(plain, pipelined + lost), *more]

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, pipelined: bool = False
    ) -> None:
        self._drafted = drafted
        neural_drafter, drafting, reused = self._neural_drafter, 0.0, 0.0
        if neural_drafter is not None:
            seconds, drafting = seconds - neural_drafter.seconds, neural_drafter.cost
            reused = neural_drafter.neural_drafter.reused
        costs = self.curve.table(self._context)
        pipelined_cost = self.curve.pipelined(self._context)
        hidden = costs[0] - pipelined_cost if pipelined else 0.0
        if drafted and self._probing:
            self._since_probe = 0
            self._probe_interval = min(2 * self._probe_interval, MAX_PROBE_INTERVAL)
        if not reused and not self.curve.first_use(rows):  # reuse makes passes cheaper than usual
            if pipelined and rows == 1:
                self.curve.observe(PIPELINED, seconds, self._context)
            else:
                self.curve.observe(rows, seconds + hidden, self._context)
        # Planned costs, not measured ones: a slow outlier must not look like a slow text.
        costs = self.curve.table(self._context)
        cost = costs[min(rows, MAX_ROWS) - 1]
        spent = (cost - reused * (cost - costs[0]) - hidden + drafting) / pipelined_cost
        self._earned = self._earned * _RATE_DECAY + accepted + 1
        self._spent = self._spent * _RATE_DECAY + spent

    @property
    def _context(self) -> int:
        return self.index.size - self.draft_only_tokens

    def _learn(self, guess: Guess, token: int) -> None:
        for candidate in guess.candidates:
            candidate.learn(token)
        hit = guess.token == token
        if guess.source == FROM_GRAMMAR and guess.token >= 0:
            self.chain.learn_forced(guess, hit)
        elif guess.token >= 0:
            weights = self.model.calibration[guess.source]
            weights[guess.bucket] += CALIBRATION_RATE * (hit - guess.probability)
        self._advance(guess, token)

    def _advance(self, guess: Guess, token: int) -> None:
        self._recent = (self._recent << 1 | (guess.token == token)) & 7
        self.tracker.observe(
            token, guess.copy_guesses, guess.edits, guess.skip, guess.pair, guess.matches
        )
        self.index.append(token)

    def _probe(self, guesses: Sequence[Guess], longest: int) -> int:
        """Return the length of an occasional draft that looks too expensive, 0 for none.

        The cost curve may be wrong: never measured, or measured while the machine was busy.
        """
        length = min(PROBE_LENGTH, longest, len(guesses))
        if not length or self.curve.preset:
            return 0
        self._since_probe += 1
        if self._since_probe < self._probe_interval or guesses[0].probability < PROBE_CHANCE:
            return 0
        return length


OPENING = 5  # tokens at the end of a prompt that identify the start of an answer


def earlier_answers(tokens: list[int], start: int, searched: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the answers from `searched` on, before the one at `start`.

    Each follows the same opening tokens. It ends where two adjacent opening tokens recur, and
    includes the first of these.
    """
    opening = tokens[max(0, start - OPENING) : start]
    ends = set(pairwise(opening))
    place = max(searched - OPENING, 0)
    while len(opening) == OPENING:
        try:
            place = tokens.index(opening[0], place, start - OPENING)
        except ValueError:
            return
        if tokens[place : place + OPENING] != opening:
            place += 1
            continue
        begin = end = place + OPENING
        while end < start - 1 and (tokens[end], tokens[end + 1]) not in ends:
            end += 1
        yield begin, end + 1
        place = end


# Prior for `DraftChooser`: actual over predicted accuracy of preferred guesses, and its weight.
_TRUST_PRIOR, _TRUST_WEIGHT = 0.95, 10.0


class DraftChooser:
    """Choose between guesses and neural drafters by expected value.

    Also learns how accurate the preferred guesses are, because the highest of several estimates
    tends to be too high.
    """

    def __init__(self, neural_drafters: Sequence[PlannedDrafter]) -> None:
        self._neural_drafters = neural_drafters
        self._predicted, self._correct = _TRUST_WEIGHT, _TRUST_WEIGHT * _TRUST_PRIOR

    def choose(
        self, chances: Sequence[float], limits: PlanningLimits, longest: int, *, stops: bool
    ) -> tuple[DraftPlan, PlannedDrafter] | None:
        """Return the best plan with a neural drafter, or None if guesses alone are better.

        chances: of the guesses. stops: whether the last guess is a stop token.
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

    def learn(self, preferred: Sequence[Guess], tokens: Sequence[int]) -> None:
        """Compare the preferred guesses with the actual `tokens`."""
        for guess, token in zip(preferred, tokens, strict=False):
            self._predicted += guess.probability
            self._correct += guess.token == token
            if guess.token != token:
                break


NEGLIGIBLE = 0.1  # a chain ends below this chance

# Acceptance of a forced token: first, inside and last of a text; then the same of a text that is
# only probably forced. Priors of running averages.
_FORCED_PRIORS = (0.99, 0.99, 0.85, 0.95, 0.99, 0.8)
# Acceptance of the guess that a value ends after its first token, its second, ...
_ENDING_PRIORS = (0.3, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1)
_FORCED_RATE = 0.05
_SUREST = 0.99
_Forced = tuple[list[int], bool]  # see `DraftGuide.forced`
_NOTHING_FORCED: _Forced = [], True


class GuessChain:
    """Chains guesses, each of which assumes that the previous one is accepted.

    A chain ends at a position without a guess, at an unlikely guess, or at a stop token. With a
    guide, it guesses forced tokens and no forbidden ones.
    """

    def __init__(self, guesser: Guesser, stop_tokens: Collection[int]) -> None:
        self.stop_tokens = stop_tokens
        self.index, self.tracker = guesser.index, guesser.tracker
        self._guesser = guesser
        self._forced_chances = [*_FORCED_PRIORS, *_ENDING_PRIORS]

    def first(self, recent: int) -> Guess:
        """Return the guess after the history. recent: see `Guess`."""
        return self._guesser.guess(recent, self.index.matches(), self.tracker.copies)

    def after_history(self, recent: int, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return at most `longest` guesses after the history."""
        if guide is not None:
            guide.begin_draft()
        guesses = self.chain_from(self.first(recent), longest, guide)
        self.index.drop_tentative()
        if guide is not None:
            guide.end_draft()
        return guesses

    def chain_from(self, guess: Guess, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return `guess`, which follows the last tentative token, and the guesses after it."""
        chance, forced = 1.0, _NOTHING_FORCED
        guesses: list[Guess] = []
        while True:
            if guide is not None:
                forced = self._apply_guide(guess, guide, forced)
            guesses.append(guess)
            token = guess.token
            chance *= guess.probability
            if (
                token < 0
                or chance < NEGLIGIBLE
                or len(guesses) >= longest
                or token in self.stop_tokens
            ):
                return guesses
            guess = self.after(guess, token)

    def after(self, guess: Guess, token: int) -> Guess:
        """Append `token` as tentative in the place of `guess`; return the guess after it."""
        index, tracker = self.index, self.tracker
        tokens, matches = index.tokens, guess.matches
        copies = tracker.advance(guess.copies, token, guess.copy_guesses, guess.edits, guess.skip)
        copies = tracker.restart(copies, token, matches)
        continued = [
            (position + 1, min(length + 1, LONGEST_MATCH))
            for position, length in matches
            if tokens[position] == token
        ]
        tokens.append(token)
        # Only short matches can have missed a better place.
        long = any(length > 2 for _, length in continued)
        recent = (guess.recent << 1 | (guess.token == token)) & 7
        return self._guesser.guess(recent, continued if long else index.matches(), copies)

    def learn_forced(self, guess: Guess, hit: bool) -> None:
        """Record whether a guess from the grammar was right."""
        chance = self._forced_chances[guess.bucket]
        self._forced_chances[guess.bucket] = min(chance + _FORCED_RATE * (hit - chance), _SUREST)

    def _apply_guide(self, guess: Guess, guide: DraftGuide, forced: _Forced) -> _Forced:
        """Apply the grammar to `guess`; return what it forces next. forced: previous result."""
        tokens, sure = forced if forced[0] else guide.forced()
        place = 2 if len(tokens) == 1 else int(bool(forced[0]))
        bucket = place + 3 * (not sure)
        if not tokens:
            tokens, written = guide.ending()
            bucket = len(_FORCED_PRIORS) - 1 + min(written, len(_ENDING_PRIORS))
            sure = False
        if tokens:
            chance = self._forced_chances[bucket]
            other = guess.token != tokens[0]
            if other and not sure and guess.probability > chance and guide.advance(guess.token):
                return [], sure
            if other or guess.probability < chance:
                guess.token, guess.source, guess.bucket = tokens[0], FROM_GRAMMAR, bucket
                guess.probability = chance
        if guess.token >= 0 and not guide.advance(guess.token):
            guess.token, guess.probability = -1, 0.0
        return tokens[1:], sure


class Continuation:
    """Guesses that follow the tokens of a neural drafter."""

    def __init__(
        self,
        chain: GuessChain,
        guesses: Sequence[Guess],
        prefix: Sequence[int],
        longest: int,
        guide: DraftGuide | None,
    ) -> None:
        """guesses: after the history, or none. prefix: the tokens before the neural ones."""
        self.guesses: list[Guess] = []  # after the latest neural token
        self._chain, self._guide, self._longest = chain, guide, longest
        self._draft = list(prefix)
        self._guess: Guess | None = None  # at the position of the next neural token
        chain.index.tokens += prefix
        if len(prefix) < len(guesses):
            self._guess = guesses[len(prefix)]
        elif guesses:
            del chain.index.tokens[-1]
            self._guess = chain.after(guesses[-1], prefix[-1])
        if guide is not None:
            self._advance_guide(guide)

    def add(self, token: int) -> list[float] | None:
        """Append neural `token`; return the chances of the guesses after it, None if forbidden."""
        if self._guide is not None and not self._guide.advance(token):
            return None
        self._draft.append(token)
        self.guesses = []
        if self._guess is None or token in self._chain.stop_tokens:
            return []
        tokens, room = self._chain.index.tokens, self._longest - len(self._draft)
        self._guess = self._chain.after(self._guess, token)
        if room > 0:
            size = len(tokens)
            found = self._chain.chain_from(self._guess, room, self._guide)
            del tokens[size:]
            self.guesses = [guess for guess in found if guess.token >= 0]
            if self._guide is not None:  # return to the position after `token`
                self._guide.end_draft()
                self._advance_guide(self._guide)
        return [guess.probability for guess in self.guesses]

    def end(self) -> None:
        """Discard the tentative tokens and end the guide's draft."""
        self._chain.index.drop_tentative()
        if self._guide is not None:
            self._guide.end_draft()

    def _advance_guide(self, guide: DraftGuide) -> None:
        guide.begin_draft()
        for token in self._draft:
            guide.advance(token)
