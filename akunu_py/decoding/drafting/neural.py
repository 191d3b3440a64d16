"""Neural drafters: a draft model with a KV cache of its own, and the target's MTP head."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.decoding.model.drafters import DraftModel
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.target import Target
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.models.mtp import Head, Trunk
from akunu_py.types import DraftNetwork


class Network:
    """A `DraftNetwork` of a target's: tokens are drawn as the target draws its own."""

    in_auto = True  # whether `--draft auto` uses it

    @classmethod
    def missing(cls, engine: Engine) -> str:
        """Return why `engine` cannot have one, "" if it can."""
        raise NotImplementedError

    @classmethod
    def make(cls, engine: Engine, target: Target) -> DraftNetwork:
        """Make one for the history of `target`."""
        raise NotImplementedError

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: list[int] = []  # the history, and guesses behind it

    def clock(self) -> float:
        """See `DraftNetwork`: that of the target's passes."""
        return self._target.clock()

    def _draw(self, logits: mx.array) -> tuple[int, float]:
        """The token behind what is known, which is known then, and how likely it is. logits: [1,
        vocab]."""
        guess = self._target.guess(logits, self._known)
        self._known.append(guess[0])
        return guess


class ModelNetwork(Network):
    """A `DraftNetwork` of a smaller model.

    Its token at a position is what it would sample there: by the target's own sampler, so with its
    filters, penalties and bias, and with the noise that the target's token is drawn with. The
    target keeps it where its own draw gives the same token. That is exact whatever the draft model
    says, as what is kept is always the target's draw; the rule of Leviathan et al., which accepts x
    with min(1, p(x) / q(x)) and else samples from the rest, would need the two distributions to be
    compared, and gives other tokens with drafts than without for the same seed. Equal draws come
    about at least with the probability sum(min(p, q)) / (2 - sum(min(p, q))), against sum(min(p,
    q)) of that rule (Daliri et al. 2025, "Coupling without communication and drafter-invariant
    speculative decoding", theorem 3), and nearly always where p and q are close or greedy.
    """

    name = "model"
    longest = 16
    reused = 0.0

    @classmethod
    def missing(cls, engine: Engine) -> str:
        return (
            "" if engine.draft_model else "name one with --draft-model, or draft_model in settings"
        )

    @classmethod
    def make(cls, engine: Engine, target: Target) -> ModelNetwork:
        assert engine.draft_model is not None
        return cls(engine.draft_model, target)

    def __init__(self, draft_model: DraftModel, target: Target) -> None:
        super().__init__(target)
        self.key, self.share = f"model {draft_model.name}", draft_model.share
        self._model = draft_model.model
        self._vocabulary = draft_model.vocabulary
        self._guessed = False

    @property
    def read(self) -> int:
        return len(self._history.tokens)

    @property
    def _history(self) -> TokenHistory:
        """What it has read of the target's history, which it stays with."""
        beside = self._target.history.beside
        if self.key not in beside:
            beside[self.key] = TokenHistory(kv_cache.new_cache(self._model))
        return beside[self.key]

    def forget(self) -> None:
        """See `DraftNetwork`: all that it has read stays with the target's history."""

    def begin(self, known: Sequence[int]) -> bool:
        """See `DraftNetwork`: a chunk at a time, so that an answer can be stopped meanwhile."""
        self._known, self._guessed = list(known), False
        history = self._history
        reached = history.reach(history.shared(known))
        if reached:
            history.return_to(reached)
        elif history.tokens:
            del self._target.history.beside[self.key]
        if len(known) - reached <= PREFILL_ROWS:
            return True
        self._forward(PREFILL_ROWS)
        mx.eval([entry.state for entry in self._history.cache])
        self._checkpoint()
        return False

    def guess(self) -> tuple[int, float]:
        """See `DraftNetwork`."""
        unread = len(self._known) - len(self._history.tokens)
        logits = self._forward(unread)
        if not self._guessed:  # what comes from here on may be wrong
            self._checkpoint()
        self._guessed = True
        return self._draw(logits)

    def _forward(self, count: int) -> mx.array:
        """A pass over the next `count` tokens that it knows. Returns the last row's logits, [1,
        vocab]."""
        start = len(self._history.tokens)
        rows = self._known[start : start + count]
        # One that it has not got may be the target's: whatever stands there, its guess is verified.
        seen = [token if token < self._vocabulary else 0 for token in rows]
        logits = self._model(mx.array([seen]), cache=self._history.cache)[0, -1:]
        self._history.tokens += rows
        return logits

    def _draw(self, logits: mx.array) -> tuple[int, float]:
        """See `Network`. The noise depends on the width of the logits, so that is made the
        target's."""
        width = self._target.vocabulary or self._vocabulary
        if (more := width - logits.shape[-1]) > 0:
            logits = mx.pad(logits, [(0, 0), (0, more)], constant_values=-math.inf)
        return super()._draw(logits[:, :width])

    def _checkpoint(self) -> None:
        """Makes this a place to return to, where trimming will not do. The one before stays: the
        guesses of n-grams may be wrong that were read behind it."""
        self._history.checkpoint()
        del self._history.checkpoints[:-2]


_KEPT = 512  # hidden states of a prompt: a head reads no more of it
_PASS = 33  # rows of the widest pass of an answer, whose hidden states are computed anyway


class HiddenStates:
    """The last hidden states of a history, by position."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, mx.array]] = []  # (position of the first, [1, rows, width])

    @property
    def start(self) -> int:
        """The first position that there is one of."""
        return self._parts[0][0] if self._parts else 0

    @property
    def end(self) -> int:
        """The position behind the last."""
        return self._parts[-1][0] + self._parts[-1][1].shape[1] if self._parts else 0

    def write(self, position: int, states: mx.array) -> None:
        """States [1, rows, width] from `position` on; what was there was of other tokens."""
        while self._parts and self.end > position:
            first, part = self._parts.pop()
            if first < position:
                self._parts.append((first, part[:, : position - first]))
        if self.end != position:
            self._parts = []
        self._parts.append((position, states))
        while self.end - self._parts[0][0] - self._parts[0][1].shape[1] >= _KEPT:
            del self._parts[0]

    def read(self, begin: int, end: int) -> mx.array:
        """Those of the positions from `begin` to before `end`, [1, rows, width]."""
        found = [
            part[:, max(0, begin - first) : end - first]
            for first, part in self._parts
            if first < end and first + part.shape[1] > begin
        ]
        return mx.concatenate(found, axis=1) if len(found) > 1 else found[0]


class MtpNetwork(Network):
    """A `DraftNetwork` of an MTP head.

    Row i of its cache is made of the target's hidden state at position i and the token behind it;
    its guess is the token behind that. For further guesses its own hidden state stands for the
    target's, and what was read so is dropped again: those rows are read once more when the target
    has been there. Guesses are drawn by the target's sampler from the same noise, so a head that
    has nearly the target's distribution nearly always draws the target's token.

    share: see `DraftNetwork`.
    """

    name = key = "mtp"
    longest = 8  # a head that was trained for one token is seldom right so far on
    reused = 0.0

    @classmethod
    def missing(cls, engine: Engine) -> str:
        return engine.no_mtp_head

    @classmethod
    def make(cls, engine: Engine, target: Target) -> MtpNetwork:
        assert engine.mtp_head is not None
        return cls(engine.mtp_head.head, target, engine.mtp_head.share)

    def __init__(self, head: Head, target: Target, share: float) -> None:
        super().__init__(target)
        self.share, self._head = share, head
        self._trunk = Trunk(target.model, normed=head.normed)
        self.forget()
        target.run = self._run

    @property
    def read(self) -> int:
        return max(self._first + len(self._seen), self._states.start)

    def forget(self) -> None:
        """Gives back its cache."""
        self._states, self._of = HiddenStates(), weakref.ref(self._target.history)
        self._restart()

    def _restart(self) -> None:
        self._cache = kv_cache.new_cache(self._head)
        self._rows = 0  # of the cache
        self._first = 0  # position of the first of them
        self._seen: list[int] = []  # tokens of those that are made of the target's states
        self._state: mx.array | None = None  # of its last row

    def _run(self, tokens: mx.array, cache: kv_cache.Cache) -> mx.array:
        """See `Target.run`: a pass that leaves its hidden states here."""
        history: TokenHistory = self._target.history
        if self._of() is not history:
            self.forget()
        position = next(e.offset for e in kv_cache.leaves(cache) if type(e) in kv_cache.GROWING)
        normed, hidden = self._trunk.forward(tokens[None], cache)
        if hidden.shape[1] > _PASS:  # of a prompt, whose logits are not computed
            hidden = mx.contiguous(hidden[:, -_KEPT:])
            mx.async_eval(hidden)
        self._states.write(position + tokens.shape[0] - hidden.shape[1], hidden)
        return self._trunk.logits(normed)[0]

    def begin(self, known: Sequence[int]) -> bool:
        """See `DraftNetwork`."""
        self._known = list(known)
        self._trim(common_prefix(self._seen, known[self._first + 1 :]))
        self._state = None
        return True

    def guess(self) -> tuple[int, float]:
        """See `DraftNetwork`."""
        if self._state is None:
            self._read_states()
        while self._state is not None and self._first + self._rows < len(self._known) - 1:
            self._state = self._forward(self._state, 1)
        if self._state is None:
            return -1, 0.0
        return self._draw(self._trunk.logits(self._state[0, -1:]))

    def _read_states(self) -> None:
        """Makes rows of those states of the target's that are of this history and were not read."""
        target, states = self._target, self._states
        if self._of() is not target.history:
            return
        # Behind it there may be states of drafts that were rejected.
        end = min(states.end, len(target.tokens) + len(target.pending) - 1, len(self._known) - 1)
        begin = min(self._first + self._rows, end - 1)  # one at least, for what it yields
        if begin < max(self._first, states.start):
            self._restart()
            begin = self._first = states.start
        self._trim(begin - self._first)
        if begin < end:
            self._seen += self._known[begin + 1 : end + 1]
            self._state = self._forward(states.read(begin, end), end - begin)[:, -1:]

    def _forward(self, states: mx.array, rows: int) -> mx.array:
        """A pass over the next `rows` tokens. states: the hidden ones before them, [1, rows,
        width]. Returns its own."""
        start = self._first + self._rows + 1
        tokens = mx.array([self._known[start : start + rows]], mx.int32)
        self._rows += rows
        return self._head(self._trunk.embed(tokens), states, self._cache)

    def _trim(self, rows: int) -> None:
        """Drops all but the first rows."""
        kv_cache.trim(self._cache, self._rows - rows)
        self._rows = rows
        del self._seen[rows:]
