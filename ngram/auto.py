"""`--draft auto`: drafts as many tokens as pay on this machine, often none.

`index`, `copies` and `memory` find what came next before, `guess` compares it by `acceptance`;
guesses are put in a `chain`, which `planner` cuts by what `cost` knows of a pass; where a network
drafts too, `networks` says whether its tokens are worth more; and the output teaches them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from itertools import pairwise

from akunu_py.ngram.acceptance import CALIBRATION_RATE, AcceptanceModel
from akunu_py.ngram.chain import Continuation, GuessChain
from akunu_py.ngram.copies import CopyTracker
from akunu_py.ngram.cost import MAX_ROWS, PIPELINED, CostCurve
from akunu_py.ngram.guess import FROM_GRAMMAR, Guess, Guesser
from akunu_py.ngram.index import SuffixIndex
from akunu_py.ngram.memory import Memory
from akunu_py.ngram.networks import Division, LearnedNetwork, PlannedNetwork, Terms, futures
from akunu_py.ngram.planner import best_draft, choose_length
from akunu_py.types import DraftGuide, DraftNetwork

MAX_DRAFT = MAX_ROWS - 1
HORIZON = MAX_DRAFT + 1  # guesses looked at: the longest draft, and its bonus

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


class AutoDrafter:
    """A `Drafter` that plans its drafts.

    curve: cost of passes; it keeps learning. stop_tokens: a draft ends with the first of them.
    rerun_on_reject: the next pass reads accepted tokens again (recurrent caches). memory: output of
    earlier conversations, only read. guide: the grammar of the answer; what it forces is drafted,
    what it forbids ends the draft. alone: passes may be launched before the last one is read.
    networks: neural drafters, behind the n-grams' guesses or in their place; learned: by their
    keys. ngrams: whether there are guesses.
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
        self.model = AcceptanceModel()
        self.index = SuffixIndex()
        self.tracker = CopyTracker(self.index.tokens, self.model.edit_outcomes)
        guesser = Guesser(self.index, self.model, self.tracker, memory)
        self.chain = GuessChain(guesser, self.stop_tokens)
        self.pipelines = False
        self._recent = 0
        self._idle = 0  # plain steps since the last draft
        self._returns = list(_RETURN)
        self._guesses: list[Guess] = []  # of the last proposal, drafted or not
        self._drafted = 0  # for the pass that was observed last
        self._searched = 0  # tokens at the start of the history, for earlier answers
        self._planned = 0, 0  # the guesses from and to which are the last proposal, or begin it
        known = {} if learned is None else learned
        self.networks = [
            PlannedNetwork(each, known.setdefault(each.key, LearnedNetwork.of(each)))
            for each in networks
        ]
        self._ngrams = ngrams
        self._network: PlannedNetwork | None = None  # that is part of the last proposal
        self._behind: list[Guess] = []  # the guesses of that behind the network's tokens
        self._chooser = Chooser(self.networks)
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
            self._guesses = guesses[learned:]  # of what a pass that is under way will say
        for token in tokens[learned:]:
            guess = self.chain.first(self._recent)
            if network is None:
                self._advance(guess, token)
            else:  # which got there, and n-grams learn from each token
                self._learn(guess, token)

    def _learn_choice(self, guesses: Sequence[Guess], tokens: Sequence[int]) -> None:
        start, end = self._planned
        if start:  # of what comes behind the step under way, whose token this is
            right = bool(guesses) and guesses[0].token == tokens[0]
            self._planned = (start - 1, end - 1) if right else (0, 0)
            return
        self._chooser.learn(guesses[:end], tokens)

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
        most = max(1, min(HORIZON, limit + 1)) + ahead
        guesses = self.chain.behind_history(self._recent, most, self.guide) if self._ngrams else []
        found = sum(guess.token >= 0 for guess in guesses)
        chances = [guess.probability for guess in guesses[:found]]
        gained = max(self._earned / self._spent, 1.0)  # tokens in the time of a pipelined step
        costs = self._costs(gained, chances[ahead:])
        rate = gained / self.curve.pipelined(self._context)
        ongoing = found == HORIZON + ahead
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
        choice: tuple[Division, PlannedNetwork] | None = None
        draft: list[int] | None = None
        if self.networks and longest and not (ahead and length):
            terms = self._terms(costs, rate, limit, ongoing=ongoing)
            stops = bool(coming) and guesses[found - 1].token in self.stop_tokens
            choice = self._chooser.choose(coming, terms, longest, stops=stops)
        if choice is not None:
            self.pipelines = False
            if ahead:  # it waits for the step that is under way
                draft, self._planned = [], (0, 0)
            else:
                draft = self._from_network(guesses, *choice, terms)
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

    def _terms(self, costs: Sequence[float], rate: float, left: int, *, ongoing: bool) -> Terms:
        context, curve = self._context, self.curve
        plain = curve.table(context)[0]
        return Terms(costs, rate, plain, curve.timed, context, left, ongoing, self.rerun_on_reject)

    def _from_network(
        self, guesses: Sequence[Guess], division: Division, network: PlannedNetwork, terms: Terms
    ) -> list[int]:
        """A draft of the first of the guesses, tokens of the network, and what is guessed then."""
        self._network = network
        drafted = guesses[: division.guesses]
        prefix = [guess.token for guess in drafted]
        known = self.index.tokens[self.unread :]
        longest = division.guesses + division.most
        # Where the network computes a part of the pass, it does so of its own tokens only.
        goes_on = [] if network.network.reused else guesses
        behind = Continuation(self.chain, goes_on, prefix, longest, self.guide)
        own = network.draft(known, prefix, division, terms, self.stop_tokens, behind.add)
        behind.end()
        self._behind = behind.guesses[: network.followed]
        return [*prefix, *own, *(guess.token for guess in self._behind)]

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
        named = [guess.named_source for guess in self._guesses[slice(*self._planned)]]
        if self._network is not None:
            named += [(self._network.network.name, 0)] * self._network.verified
            named += [guess.named_source for guess in self._behind]
        return named

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


# Tokens that open an answer, at the end of a prompt: the end of the turn before, and the header of
# the model's. Fewer come by chance where a prompt is a text to go on with.
OPENING = 5


def find_answers(tokens: list[int], start: int, searched: int = 0) -> Iterator[tuple[int, int]]:
    """(start, end) of the answers that begin at `searched` or later, before the one at `start`.

    They begin behind the tokens that are before `start`, too, and end where two neighbours of these
    come again, of which the first is included.
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


# How often guesses are right that were preferred to a network's tokens, for each time that they
# promise it, at first, and how many guesses that counts for.
_HOLDS, _PREFERRED = 0.95, 10.0


class Chooser:
    """What earns most, by the chances and costs that were learned, drafts.

    How far preferred guesses hold what they promise is learned, too: of several estimates, all as
    good, the highest is too high.
    """

    def __init__(self, networks: Sequence[PlannedNetwork]) -> None:
        self._networks = networks
        self._promised, self._held = _PREFERRED, _PREFERRED * _HOLDS

    def choose(
        self, chances: Sequence[float], terms: Terms, longest: int, *, stops: bool
    ) -> tuple[Division, PlannedNetwork] | None:
        """The network that drafts, and behind how many guesses; None where those alone do.

        chances: of the guesses. stops: the last of them is a stop token, behind which nothing
        comes."""
        if any(network.competes(longest, terms) for network in self._networks):
            trust = min(1.0, self._held / self._promised)
            chances = [trust * chance for chance in chances]
        length, values = best_draft(
            chances,
            terms.costs,
            terms.rate,
            longest,
            ongoing=terms.ongoing,
            rerun_on_reject=terms.rerun,
        )
        coming = futures(chances, values)
        before = chances[:-1] if stops else chances
        least = values[0]
        best: tuple[Division, PlannedNetwork] | None = None
        for network in self._networks:
            division = network.division(before, coming, longest, terms)
            if division.value > least:
                least, best = division.value, (division, network)
            elif not length and best is None and (trial := network.trial(longest, terms)):
                best = trial, network
        return best

    def learn(self, preferred: Sequence[Guess], tokens: Sequence[int]) -> None:
        """`tokens` came."""
        for guess, token in zip(preferred, tokens, strict=False):
            self._promised += guess.probability
            self._held += guess.token == token
            if guess.token != token:
                break
