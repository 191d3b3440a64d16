"""`--draft auto`: drafts as many tokens as pay on this machine, often none.

`index`, `copies` and `memory` find what came next before, `guess` compares it by `acceptance`;
guesses are chained into a draft, which `planner` cuts by what `cost` knows of a pass; where a
network drafts too, `networks` says whether its tokens are worth more; and the output teaches them
all.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from math import prod

from akunu_py.ngram.acceptance import CALIBRATION_RATE, AcceptanceModel
from akunu_py.ngram.answers import find_answers
from akunu_py.ngram.copies import CopyTracker
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.guess import FROM_GRAMMAR, Guess, Guesser
from akunu_py.ngram.index import LONGEST_MATCH, SuffixIndex
from akunu_py.ngram.memory import Memory
from akunu_py.ngram.networks import Division, LearnedNetwork, PlannedNetwork, Terms, futures
from akunu_py.ngram.planner import best_draft, choose_length
from akunu_py.types import DraftGuide, DraftNetwork

MAX_DRAFT = MAX_ROWS - 1
HORIZON = MAX_DRAFT + 1  # guesses looked at: the longest draft, and its bonus
NEGLIGIBLE = 0.1  # chances of a longer draft below this are not worth the time to guess on

_RATE_DECAY = 0.97  # of the rate of tokens per cost, per pass
_RATE_PRIOR = 6.0  # passes, at one token each
# How likely a draft comes up after so many plain steps in a row, 1 to 8 and more, at first.
_RETURN = (0.35, 0.25, 0.2, 0.15, 0.12, 0.1, 0.1, 0.08)
_RETURN_RATE = 0.03
_LOST = 0.5  # of what is lost at most when that happens while the next step is under way
_LIKELY = 0.6  # chance of a first drafted token
# Of what is lost where the guesses promise a draft, and of their chance that its first token is
# right, which is promised too high: it follows a guess.
_FORESEEN, _PROMISED = 0.75, 0.65
PROBE_EVERY, PROBE_RARELY = 64, 2048  # plain passes between two probes; doubles with each probe
PROBE_LENGTH = 4
PROBE_CHANCE = 0.3
# That a token is accepted which a grammar forces: the first of a text, one inside, where only
# another spelling can come, and the last, which the target may join with what follows; and the same
# of a text that is forced as far as the answer keeps to its ways, which its first token tells.
# Priors, then running averages.
_FORCED_PRIORS = (0.99, 0.99, 0.85, 0.95, 0.99, 0.8)
# And that a value ends behind its first token, its second, ..., and what then probably follows.
_ENDING_PRIORS = (0.3, 0.35, 0.3, 0.25, 0.2, 0.15, 0.1, 0.1)
_FORCED_RATE = 0.05
_SUREST = 0.99
# How often guesses are right that were chosen before a network, for each time that they promise it,
# at first, and how many guesses that counts for.
_HOLDS, _CHOSEN = 0.95, 10.0
_Forced = tuple[list[int], bool]  # see `DraftGuide.forced`


class AutoDrafter:
    """A `Drafter` that plans its drafts.

    curve: what passes cost; it keeps learning from `observe`. Keep it for the next session.
    stop_tokens: a draft ends with the first of them.
    rerun_on_reject: after a rejection the next pass reads the accepted tokens again (recurrent
        caches); the planner charges for it.
    memory: output of earlier conversations. It is only read.
    guide: the grammar that the answer must match: what it forces is drafted with the guesses
        between, and a guess that it forbids ends the draft.
    alone: whether passes may be launched before the one before is read.
    networks: what drafts as well, behind the n-grams' guesses or in their place. learned: what is
        known of networks by their keys; it keeps learning. ngrams: whether there are any guesses.
    """

    def __init__(
        self,
        curve: CostCurve | None = None,
        *,
        stop_tokens: Collection[int] = (),
        rerun_on_reject: bool = False,
        memory: Memory | None = None,
        networks: Sequence[DraftNetwork] = (),
        learned: MutableMapping[str, LearnedNetwork] | None = None,
        ngrams: bool = True,
    ) -> None:
        self.curve = CostCurve() if curve is None else curve
        self.stop_tokens = frozenset(stop_tokens)
        self.rerun_on_reject = rerun_on_reject
        self.unread = 0  # tokens at the start of the history that the target never reads
        self.guide: DraftGuide | None = None
        self.alone = True
        self._forced_chances = [*_FORCED_PRIORS, *_ENDING_PRIORS]
        self.model = AcceptanceModel()
        self.index = SuffixIndex()
        self.tracker = CopyTracker(self.index.tokens, self.model.edit_outcomes)
        self.guesser = Guesser(self.index, self.model, self.tracker, memory)
        self.pipelines = False
        self._recent = 0
        self._idle = 0  # plain steps since the last draft
        self._returns = list(_RETURN)
        self._guesses: list[Guess] = []  # of the last proposal, drafted or not
        self._drafted = 0  # for the pass that was observed last
        self._searched = 0  # tokens at the start of the history, for earlier answers
        self._planned = slice(0)  # which guesses are the last proposal, or begin it
        known = {} if learned is None else learned
        self.networks = [
            PlannedNetwork(each, known.setdefault(each.key, LearnedNetwork.of(each)))
            for each in networks
        ]
        self._ngrams = ngrams
        self._network: PlannedNetwork | None = None  # that the last proposal ends with
        self._promised, self._held = _CHOSEN, _CHOSEN * _HOLDS
        self._answering = False
        self._earned = self._spent = _RATE_PRIOR
        self._since_probe = 0
        self._probe_every = PROBE_EVERY
        self._probing = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Learns `tokens`, which follow the history.

        After a proposal, tokens that the observed pass can have yielded are output; so is a single
        token later in an answer. Anything else is a prompt, and the answer is taken to begin at the
        last of its tokens.
        """
        guesses, self._guesses = self._guesses, []
        drafted, self._drafted = self._drafted, 0
        network, self._network = self._network, None
        if not self._answering or len(tokens) > drafted + 1:
            self._end_answer()
            self.index.extend(tokens)
            self.tracker.begin_answer(max(0, self.index.size - 1))
            return
        if network is not None:
            network.learn(tokens)
        if self.networks:
            self._learn_choice(guesses[self._planned], tokens)
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
            self._guesses = guesses[learned:]  # of what a pass that is under way will say
        for token in tokens[learned:]:
            matches = self.index.matches()
            guess = self.guesser.guess(self._recent, matches, self.tracker.copies)
            if network is None:
                self._advance(guess, token)
            else:  # which got there, and n-grams learn from each token
                self._learn(guess, token)

    def _learn_choice(self, drafted: Sequence[Guess], tokens: Sequence[int]) -> None:
        """How far those guesses hold what they promised that a network's tokens were not preferred
        to: of several estimates, all as good, the highest is too high."""
        for guess, token in zip(drafted, tokens, strict=False):
            self._promised += guess.probability
            self._held += guess.token == token
            if guess.token != token:
                break

    def rewind(self, length: int) -> None:
        """Takes the history back to its first `length` tokens, which another prompt continues.

        What was learned about drafting stays; the tokens after them are not drafted from any more.
        """
        self._end_answer()
        self.index.rewind(length)
        self._searched = min(self._searched, length)
        self.tracker.begin_answer(max(0, length - 1))
        self._guesses = []
        self._drafted = 0
        self._network = None

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        """Drafts at most `limit` tokens to follow the history or, `ahead`, the token after it;
        none means a plain step."""
        longest = max(0, min(limit, MAX_DRAFT))
        if not self._answering:
            start = self.tracker.answer_start
            for answer in find_answers(self.index.tokens, start, self._searched):
                self.index.mark_answer(*answer)
            self._searched = start
        if self.guide is not None:
            self.guide.begin_draft()
        guesses = self._chain(max(1, min(HORIZON, limit + 1)) + ahead) if self._ngrams else []
        if self.guide is not None:
            self.guide.end_draft()
        found = sum(guess.token >= 0 for guess in guesses)
        chances = [guess.probability for guess in guesses[:found]]
        gained = max(self._earned / self._spent, 1.0)  # tokens in the time of a pipelined step
        costs = self._costs(gained, chances[ahead:])
        rate = gained / self.curve.pipelined(self._context)
        ongoing = found == HORIZON + ahead
        if self.networks:
            terms = self._terms(costs, rate, limit, ongoing=ongoing)
            if any(network.competes(longest, terms) for network in self.networks):
                trust = min(1.0, self._held / self._promised)
                chances = [trust * chance for chance in chances]
        coming = chances[ahead:]
        if ahead:  # a draft behind the step under way needs that one's token to be guessed right
            chances[:2] = [chances[0] * chances[1]] if found > 1 else []
        length = choose_length(
            chances,
            costs,
            rate,
            longest,
            ongoing=ongoing,
            rerun_on_reject=self.rerun_on_reject,
        )
        draft = None
        if self.networks and longest and not (ahead and length):
            draft = self._from_network(guesses[ahead:found], coming, terms, longest, ahead=ahead)
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
            self._planned = slice(int(ahead), ahead + length)
            draft = [guess.token for guess in guesses[self._planned]]
        self._idle = 0 if draft else self._idle + 1
        return draft

    def _terms(self, costs: Sequence[float], rate: float, left: int, *, ongoing: bool) -> Terms:
        context, curve = self._context, self.curve
        plain = curve.table(context)[0]
        return Terms(costs, rate, plain, curve.timed, context, left, ongoing, self.rerun_on_reject)

    def _from_network(
        self,
        guesses: Sequence[Guess],
        chances: list[float],
        terms: Terms,
        longest: int,
        *,
        ahead: bool,
    ) -> list[int] | None:
        """A draft that a network makes or ends, where that earns most; None where the guesses
        alone do, which have these chances. `ahead`, it waits for the step that is under way."""
        length, values = best_draft(
            chances,
            terms.costs,
            terms.rate,
            longest,
            ongoing=terms.ongoing,
            rerun_on_reject=terms.rerun,
        )
        coming = futures(chances, values)
        if guesses and guesses[-1].token in self.stop_tokens:
            chances.pop()
        least = values[0]
        best: tuple[Division, PlannedNetwork] | None = None
        for network in self.networks:
            division = network.division(chances, coming, longest, terms)
            if division.value > least:
                least, best = division.value, (division, network)
            elif not length and best is None and (trial := network.trial(longest, terms)):
                best = trial, network
        if best is None:
            return None
        self.pipelines, self._planned = False, slice(0)
        if ahead:
            return []
        division, self._network = best
        self._planned = slice(division.guesses)
        prefix = [guess.token for guess in guesses[self._planned]]
        if self.guide is not None:
            self.guide.begin_draft()
            for token in prefix:  # which it allowed before
                self.guide.advance(token)
        known = self.index.tokens[self.unread :]
        reached = prod(chances[: len(prefix)])
        drafted = self._network.draft(
            known, prefix, reached, division, terms, self.stop_tokens, self.guide
        )
        if self.guide is not None:
            self.guide.end_draft()
        return [*prefix, *drafted]

    def _end_answer(self) -> None:
        """What was generated is an earlier answer from now on, whatever the prompts look like."""
        if self._answering:
            self.index.mark_answer(self.tracker.answer_start, self.index.size)
            self._searched = self.index.size
            self._answering = False

    def _costs(self, gained: float, chances: Sequence[float]) -> list[float]:
        """Of passes over 1, 2, ... rows. A plain step costs what it does in a pipeline, and what is
        lost when a draft comes up while the next step is under way; or, if that is less, what it
        does alone. chances: of the guesses for the steps to come."""
        alone, *more = self.curve.table(self._context)
        if self.guide is not None or not self.alone:  # its passes wait for each other
            self.pipelines = False
            return [alone, *more]
        pipelined = self.curve.pipelined(self._context)
        back = self._returns[min(self._idle, len(_RETURN) - 1)]
        lost = _LOST * back * (gained - 1.0 + _LIKELY)  # in tokens
        if len(chances) > 1 and self.curve.measured(2) and self.curve.measured(3):
            two, three = more[:2]
            first, then = chances[:2]
            if then * pipelined > gained * (two - pipelined):  # it is drafted then
                # At once it costs a row more than behind a step, and the gap, but saves the step.
                saved = gained * (2.0 - (alone + three - two) / pipelined)
                lost = max(lost, _FORESEEN * first * (_PROMISED * then - 1.0 + saved))
        lost *= pipelined / gained
        self.pipelines = pipelined + lost < alone
        return [min(alone, pipelined + lost), *more]

    def observe(
        self, drafted: int, accepted: int, rows: int, seconds: float, *, behind: bool = False
    ) -> None:
        """Learns how a pass fared, and how long it took."""
        self._drafted = drafted
        network, drafting, reused = self._network, 0.0, 0.0
        if network is not None:
            seconds, drafting = seconds - network.seconds, network.cost
            reused = network.network.reused
        costs = self.curve.table(self._context)
        pipelined = self.curve.pipelined(self._context)
        hidden = costs[0] - pipelined if behind else 0.0
        if drafted and self._probing:
            self._since_probe = 0
            self._probe_every = min(2 * self._probe_every, PROBE_RARELY)
        if not reused and not self.curve.first_use(rows):  # less was done than for others
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
    def sources(self) -> list[tuple[str, int]]:
        """Where the last proposal's tokens come from (`Guess.named_source`), until `extend`."""
        named = [guess.named_source for guess in self._guesses[self._planned]]
        if self._network is not None:
            named += [(self._network.network.name, 0)] * self._network.verified
        return named

    @property
    def _context(self) -> int:
        return self.index.size - self.unread

    def _chain(self, longest: int) -> list[Guess]:
        """Guesses chained: each is taken as accepted when the next one is made. Ends with the first
        position that nothing is known about, an unlikely one, or a stop token."""
        index, tracker, guesser = self.index, self.tracker, self.guesser
        tokens = index.tokens
        matches = index.matches()
        copies = tracker.copies
        recent = self._recent
        chance = 1.0
        guesses: list[Guess] = []
        forced: _Forced = [], True
        while True:
            guess = guesser.guess(recent, matches, copies)
            if self.guide is not None:
                forced = self._guided(guess, self.guide, forced)
            guesses.append(guess)
            token = guess.token
            chance *= guess.probability
            if (
                token < 0
                or chance < NEGLIGIBLE
                or len(guesses) >= longest
                or token in self.stop_tokens
            ):
                break
            copies = tracker.advance(copies, token, guess.copy_guesses, guess.edits, guess.skip)
            copies = tracker.restart(copies, token, matches)
            continued = [
                (position + 1, min(length + 1, LONGEST_MATCH))
                for position, length in matches
                if tokens[position] == token
            ]
            tokens.append(token)
            # Matches of 3 tokens and more stay as they are; only shorter ones can have missed
            # a better place.
            long = any(length > 2 for _, length in continued)
            matches = continued if long else index.matches()
            recent = (recent << 1 | 1) & 7
        index.drop_tentative()
        return guesses

    def _guided(self, guess: Guess, guide: DraftGuide, forced: _Forced) -> _Forced:
        """Makes `guess` what is forced there, or none where it is forbidden. Returns what is forced
        behind it; `forced`: what was, behind the guess before."""
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

    def _learn(self, guess: Guess, token: int) -> None:
        for candidate in guess.candidates:
            candidate.learn(token)
        hit = guess.token == token
        if guess.source == FROM_GRAMMAR and guess.token >= 0:
            chance = self._forced_chances[guess.bucket]
            chance = min(chance + _FORCED_RATE * (hit - chance), _SUREST)
            self._forced_chances[guess.bucket] = chance
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
        """Now and then a draft that the curve advises against, because the curve may be wrong:
        never measured, or measured on a day when the machine was busy. Proposed until it is run:
        where a plain step is under way, that ends first."""
        length = min(PROBE_LENGTH, longest, len(guesses))
        if not length or self.curve.given:
            return 0
        self._since_probe += 1
        if self._since_probe < self._probe_every or guesses[0].probability < PROBE_CHANCE:
            return 0
        return length
