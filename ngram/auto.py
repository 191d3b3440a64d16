"""`--draft auto`: draft the planned number of tokens, often none.

`guess` predicts tokens, `GuessChain` chains them, `planner` chooses the length by the costs in
`cost`, and `neural_drafters` decides when a neural drafter is better.
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
    futures,
)
from akunu_py.ngram.planner import best_draft, choose_length
from akunu_py.types import DraftGuide, NeuralDrafter

MAX_DRAFT = 32
HORIZON = MAX_DRAFT + 1  # guesses looked at: the longest draft, and its bonus

_RATE_DECAY = 0.97  # per pass, for the running rate of tokens per cost
_RATE_PRIOR = 6.0  # passes at one token each
# Prior chance of a draft after 1 to 8 or more plain steps in a row.
_RETURN = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.08)
_RETURN_RATE = 0.03
_LOST = 0.5  # share of the full loss when a draft comes up while the next step is running
_LIKELY = 0.6  # chance of a first drafted token
_FORESEEN, _PROMISED = 0.75, 0.65  # discounts for a predicted draft and its first token's chance
PROBE_EVERY, PROBE_RARELY = 64, 2048  # plain passes between two probes; doubles with each probe
PROBE_LENGTH = 4
PROBE_CHANCE = 0.3


class AutoDrafter:
    """A `Drafter` that plans the length and the origin of each draft."""

    def __init__(
        self,
        curve: CostCurve | None = None,
        *,
        stop_tokens: Collection[int] = (),
        rerun_on_reject: bool = False,
        memory: AnswerCache | None = None,
        neural_drafters: Sequence[NeuralDrafter] = (),
        learned: MutableMapping[str, LearnedDrafter] | None = None,
        ngrams: bool = True,
    ) -> None:
        self.curve = CostCurve() if curve is None else curve  # keeps learning
        self.stop_tokens = frozenset(stop_tokens)  # a draft ends with the first of them
        self.rerun_on_reject = rerun_on_reject  # recurrent cache: the next pass repeats tokens
        self.unread = 0  # draft-only tokens at the start of the history
        self.guide: DraftGuide | None = None  # the grammar of the answer
        self.alone = True  # passes may be launched before the previous one is collected
        self.model = AcceptanceModel()
        self.index = SuffixIndex()
        self.tracker = CopyTracker(self.index.tokens, self.model.edit_outcomes)
        guesser = Guesser(self.index, self.model, self.tracker, memory)
        self.chain = GuessChain(guesser, self.stop_tokens)
        self.pipelines = False
        self._recent = 0  # see `Guess.recent`
        self._idle = 0  # plain steps since the last draft
        self._returns = list(_RETURN)
        self._guesses: list[Guess] = []  # for the last proposal, drafted or not
        self._drafted = 0  # tokens drafted for the last observed pass
        self._searched = 0  # leading history tokens already searched for earlier answers
        self._planned = 0, 0  # range of `_guesses` that starts the last proposal
        known = {} if learned is None else learned
        self.neural_drafters = [
            PlannedDrafter(each, known.setdefault(each.key, LearnedDrafter.of(each)))
            for each in neural_drafters
        ]
        self._ngrams = ngrams
        self._neural_drafter: PlannedDrafter | None = (
            None  # the neural drafter of the last proposal
        )
        self._behind: list[Guess] = []  # guesses drafted after its tokens
        self._chooser = DraftChooser(self.neural_drafters)
        self._answering = False
        self._earned = self._spent = _RATE_PRIOR
        self._since_probe = 0
        self._probe_every = PROBE_EVERY
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
            self._learn_choice(guesses, tokens)
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

    def _learn_choice(self, guesses: Sequence[Guess], tokens: Sequence[int]) -> None:
        start, end = self._planned
        if start:  # the proposal follows the running step, and `tokens` is that step's token
            right = bool(guesses) and guesses[0].token == tokens[0]
            self._planned = (start - 1, end - 1) if right else (0, 0)
            return
        self._chooser.learn(guesses[:end], tokens)

    def rewind(self, length: int) -> None:
        """Truncate the history to `length` tokens. Estimates about drafting stay."""
        self._end_answer()
        self.index.rewind(length)
        self._searched = min(self._searched, length)
        self.tracker.begin_answer(max(0, length - 1))
        self._guesses = []
        self._drafted = 0
        self._neural_drafter = None

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        longest = max(0, min(limit, MAX_DRAFT))
        guesses = self._look_ahead(max(1, min(HORIZON, limit + 1)) + ahead)
        found = sum(guess.token >= 0 for guess in guesses)
        chances = [guess.probability for guess in guesses[:found]]
        gained = max(self._earned / self._spent, 1.0)  # tokens per pipelined step's time
        costs = self._costs(gained, chances[ahead:])
        rate = gained / self.curve.pipelined(self._context)
        ongoing = found == HORIZON + ahead
        coming = chances[ahead:]
        if ahead:  # the draft counts only if the running step's token was predicted too
            chances[:2] = [chances[0] * chances[1]] if found > 1 else []
        length = choose_length(
            chances, costs, rate, longest, ongoing=ongoing, rerun_on_reject=self.rerun_on_reject
        )
        choice: tuple[DraftPlan, PlannedDrafter] | None = None
        draft: list[int] | None = None
        if self.neural_drafters and longest and not (ahead and length):
            terms = self._terms(costs, rate, limit, ongoing=ongoing)
            stops = bool(coming) and guesses[found - 1].token in self.stop_tokens
            choice = self._chooser.choose(coming, terms, longest, stops=stops)
        if choice is not None:
            self.pipelines = False
            if ahead:  # neural drafters wait for the running step
                draft, self._planned = [], (0, 0)
            else:
                draft = self._from_neural_drafter(guesses, *choice, terms)
                self._planned = 0, choice[0].guesses
        if self._idle:
            place = min(self._idle, len(_RETURN)) - 1
            drafts = bool(length if draft is None else draft)
            self._returns[place] += _RETURN_RATE * (drafts - self._returns[place])
        self._probing = not length and draft is None
        if self._probing:
            length = self._probe(guesses[ahead:found], longest)
        self._guesses = guesses
        self._answering = True
        if draft is None:
            self._planned = int(ahead), ahead + length
            draft = [guess.token for guess in guesses[slice(*self._planned)]]
        self._idle = 0 if draft else self._idle + 1
        return draft

    def offer(self, limit: int) -> list[float]:
        self._guesses = self._look_ahead(max(1, min(HORIZON, limit + 1)))
        self._answering = True
        self._planned = 0, 0
        found = [guess.probability for guess in self._guesses if guess.token >= 0]
        return found[: max(0, min(limit, MAX_DRAFT))]

    def take(self, count: int) -> list[int]:
        self._planned = 0, count
        self._drafted = count
        self._idle = 0 if count else self._idle + 1
        return [guess.token for guess in self._guesses[:count]]

    def _look_ahead(self, most: int) -> list[Guess]:
        """Return up to `most` guesses after the history, the last one maybe without a token."""
        if not self._answering:
            start = self.tracker.answer_start
            for answer in find_answers(self.index.tokens, start, self._searched):
                self.index.mark_answer(*answer)
            self._searched = start
        return self.chain.behind_history(self._recent, most, self.guide) if self._ngrams else []

    def _terms(
        self, costs: Sequence[float], rate: float, left: int, *, ongoing: bool
    ) -> PlanningLimits:
        context, curve = self._context, self.curve
        plain = curve.table(context)[0]
        return PlanningLimits(
            costs, rate, plain, curve.timed, context, left, ongoing, self.rerun_on_reject
        )

    def _from_neural_drafter(
        self,
        guesses: Sequence[Guess],
        plan: DraftPlan,
        neural_drafter: PlannedDrafter,
        terms: PlanningLimits,
    ) -> list[int]:
        """Draft guesses, then tokens of the neural drafter, then guesses again."""
        self._neural_drafter = neural_drafter
        drafted = guesses[: plan.guesses]
        prefix = [guess.token for guess in drafted]
        known = self.index.tokens[self.unread :]
        longest = plan.guesses + plan.most
        # A drafter that computes part of the pass does so for its own tokens only.
        goes_on = [] if neural_drafter.neural_drafter.reused else guesses
        behind = Continuation(self.chain, goes_on, prefix, longest, self.guide)
        own = neural_drafter.draft(known, prefix, plan, terms, self.stop_tokens, behind.add)
        behind.end()
        self._behind = behind.guesses[: neural_drafter.followed]
        return [*prefix, *own, *(guess.token for guess in self._behind)]

    def _end_answer(self) -> None:
        """Mark the generated tokens as an earlier answer."""
        if self._answering:
            self.index.mark_answer(self.tracker.answer_start, self.index.size)
            self._searched = self.index.size
            self._answering = False

    def _costs(self, gained: float, chances: Sequence[float]) -> list[float]:
        """Return the costs of passes over 1, 2, ... rows.

        A plain step costs its pipelined time plus the expected loss when a draft comes up while the
        next step is running, or its time alone if that is less. chances: of the coming guesses.
        """
        alone, *more = self.curve.table(self._context)
        if self.guide is not None or not self.alone:  # passes are not pipelined
            self.pipelines = False
            return [alone, *more]
        pipelined = self.curve.pipelined(self._context)
        back = self._returns[min(self._idle, len(_RETURN) - 1)]
        lost = _LOST * back * (gained - 1.0 + _LIKELY)  # in tokens
        if len(chances) > 1 and self.curve.measured(2) and self.curve.measured(3):
            two, three = more[:2]
            first, then = chances[:2]
            if then * pipelined > gained * (two - pipelined):  # worth drafting after this step
                # Drafting now costs one more row and the pipeline gap, but saves the step.
                saved = gained * (2.0 - (alone + three - two) / pipelined)
                lost = max(lost, _FORESEEN * first * (_PROMISED * then - 1.0 + saved))
        lost *= pipelined / gained
        self.pipelines = pipelined + lost < alone
        return [min(alone, pipelined + lost), *more]

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        self._drafted = drafted
        neural_drafter, drafting, reused = self._neural_drafter, 0.0, 0.0
        if neural_drafter is not None:
            seconds, drafting = seconds - neural_drafter.seconds, neural_drafter.cost
            reused = neural_drafter.neural_drafter.reused
        costs = self.curve.table(self._context)
        pipelined = self.curve.pipelined(self._context)
        hidden = costs[0] - pipelined if behind else 0.0
        if drafted and self._probing:
            self._since_probe, self._probe_every = 0, min(2 * self._probe_every, PROBE_RARELY)
        if not reused and not self.curve.first_use(rows):  # reuse makes passes cheaper than usual
            if behind and rows == 1:
                self.curve.observe(PIPELINED, seconds, self._context)
            else:
                self.curve.observe(rows, seconds + hidden, self._context)
        # Planned costs, not measured ones: a slow outlier must not look like a slow text.
        costs = self.curve.table(self._context)
        cost = costs[min(rows, MAX_ROWS) - 1]
        spent = (cost - reused * (cost - costs[0]) - hidden + drafting) / pipelined
        self._earned = self._earned * _RATE_DECAY + accepted + 1
        self._spent = self._spent * _RATE_DECAY + spent

    @property
    def _context(self) -> int:
        return self.index.size - self.unread

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
        """Return the length of an occasional draft that the curve advises against.

        The curve may be wrong: never measured, or measured while the machine was busy.
        """
        length = min(PROBE_LENGTH, longest, len(guesses))
        if not length or self.curve.given:
            return 0
        self._since_probe += 1
        if self._since_probe < self._probe_every or guesses[0].probability < PROBE_CHANCE:
            return 0
        return length


OPENING = 5  # tokens at the end of a prompt that identify the start of an answer


def find_answers(tokens: list[int], start: int, searched: int = 0) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of the answers from `searched` on, before the one at `start`.

    They follow the same opening tokens, and end where two adjacent opening tokens recur; the first
    of these is included.
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
_HOLDS, _PREFERRED = 0.95, 10.0


class DraftChooser:
    """Choose between guesses and neural drafters by expected value.

    Also learns how far preferred guesses keep their promise: the highest of several equally good
    estimates is too high.
    """

    def __init__(self, neural_drafters: Sequence[PlannedDrafter]) -> None:
        self._networks = neural_drafters
        self._promised, self._held = _PREFERRED, _PREFERRED * _HOLDS

    def choose(
        self, chances: Sequence[float], terms: PlanningLimits, longest: int, *, stops: bool
    ) -> tuple[DraftPlan, PlannedDrafter] | None:
        """Return the best plan with a neural drafter, or None if guesses alone are better.

        chances: of the guesses. stops: whether the last guess is a stop token.
        """
        if any(neural_drafter.competes(longest, terms) for neural_drafter in self._networks):
            trust = min(1.0, self._held / self._promised)
            chances = [trust * chance for chance in chances]
        costs, rate = terms.costs, terms.rate
        length, values = best_draft(
            chances, costs, rate, longest, ongoing=terms.ongoing, rerun_on_reject=terms.rerun
        )
        coming = futures(chances, values)
        before = chances[:-1] if stops else chances
        least, best = values[0], None
        for neural_drafter in self._networks:
            plan = neural_drafter.plan(before, coming, longest, terms)
            if plan.value > least:
                least, best = plan.value, (plan, neural_drafter)
            elif not length and best is None and (trial := neural_drafter.trial(longest, terms)):
                best = trial, neural_drafter
        return best

    def learn(self, preferred: Sequence[Guess], tokens: Sequence[int]) -> None:
        """Compare the preferred guesses with the actual `tokens`."""
        for guess, token in zip(preferred, tokens, strict=False):
            self._promised += guess.probability
            self._held += guess.token == token
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
    """Chains guesses; each one counts as accepted when the next one is made.

    A chain ends at a position without a guess, at an unlikely one, or at a stop token. With a
    guide, forced tokens are guessed and forbidden ones are not.
    """

    def __init__(self, guesser: Guesser, stop_tokens: Collection[int]) -> None:
        self.stop_tokens = stop_tokens
        self.index, self.tracker = guesser.index, guesser.tracker
        self._guesser = guesser
        self._forced_chances = [*_FORCED_PRIORS, *_ENDING_PRIORS]

    def first(self, recent: int) -> Guess:
        """Return the guess after the history. recent: see `Guess`."""
        return self._guesser.guess(recent, self.index.matches(), self.tracker.copies)

    def behind_history(self, recent: int, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return at most `longest` guesses after the history."""
        if guide is not None:
            guide.begin_draft()
        guesses = self.behind(self.first(recent), longest, guide)
        self.index.drop_tentative()
        if guide is not None:
            guide.end_draft()
        return guesses

    def behind(self, guess: Guess, longest: int, guide: DraftGuide | None) -> list[Guess]:
        """Return `guess`, after the last tentative token, and the guesses after it."""
        chance, forced = 1.0, _NOTHING_FORCED
        guesses: list[Guess] = []
        while True:
            if guide is not None:
                forced = self._guided(guess, guide, forced)
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
        """Return the guess after `token`, which becomes tentative in the place of `guess`."""
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

    def _guided(self, guess: Guess, guide: DraftGuide, forced: _Forced) -> _Forced:
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
    """The guesses after the tokens of a neural drafter."""

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
        self._given = list(prefix)
        self._here: Guess | None = None  # at the position of the next neural token
        chain.index.tokens += prefix
        if len(prefix) < len(guesses):
            self._here = guesses[len(prefix)]
        elif guesses:
            del chain.index.tokens[-1]
            self._here = chain.after(guesses[-1], prefix[-1])
        if guide is not None:
            self._walk(guide)

    def add(self, token: int) -> list[float] | None:
        """Append neural `token`; return the chances of the guesses after it, None if forbidden."""
        if self._guide is not None and not self._guide.advance(token):
            return None
        self._given.append(token)
        self.guesses = []
        if self._here is None or token in self._chain.stop_tokens:
            return []
        tokens, left = self._chain.index.tokens, self._longest - len(self._given)
        self._here = self._chain.after(self._here, token)
        if left > 0:
            before = len(tokens)
            found = self._chain.behind(self._here, left, self._guide)
            del tokens[before:]
            self.guesses = [guess for guess in found if guess.token >= 0]
            if self._guide is not None:  # back to behind `token`
                self._guide.end_draft()
                self._walk(self._guide)
        return [guess.probability for guess in self.guesses]

    def end(self) -> None:
        """End the neural draft."""
        self._chain.index.drop_tentative()
        if self._guide is not None:
            self._guide.end_draft()

    def _walk(self, guide: DraftGuide) -> None:
        guide.begin_draft()
        for token in self._given:
            guide.advance(token)
