"""A draft model at work: a KV cache of its own, beside the target's, and draws of its own from the
same noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import kvcache
from akunu_py.decoding.drafters import DraftModel
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.networks.network import Network
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.target import Target
from akunu_py.models.fit import PREFILL_ROWS

LONGEST = 16  # tokens in a row


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
    longest = LONGEST
    reused = 0.0

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
            beside[self.key] = TokenHistory(kvcache.new_cache(self._model))
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


def missing(engine: Engine) -> str:
    """See `offers.Offer`."""
    return "" if engine.draft_model else "name one with --draft-model, or draft_model in settings"


def make(engine: Engine, target: Target) -> ModelNetwork:
    """See `offers.Offer`."""
    assert engine.draft_model is not None
    return ModelNetwork(engine.draft_model, target)
