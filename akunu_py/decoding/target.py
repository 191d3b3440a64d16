"""The target model and the token history that it goes on with.

Continues the history that shares most with the next prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.decoding.constraint.matcher import ConstraintMatcher
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.prompt_cache.memory import LEAST, PromptCaches
from akunu_py.decoding.sampling import Sampler
from akunu_py.decoding.token_ids import common_prefix
from akunu_py.types import NotCached, SamplingOptions

_WORTH_WAITING = 256  # tokens that need not be read
_TEMPLATE_TAIL = 16  # tokens; more than what templates add to ask for an answer, and drop later


@dataclass(frozen=True, slots=True)
class Reuse:
    """What of a prompt need not be read again.

    cached: tokens. known: tokens that were read before. missing: why those are more, or why they
    are not all but the end: "evicted" (memory was needed), "no checkpoint" (this model's cache
    returns to few places), "changed" (the text was another one from there on), or "".
    """

    cached: int
    known: int
    missing: NotCached


class Target:
    """A model, and the token history that it goes on with: a KV cache with the tokens in it.

    caches: other histories, which a prompt may continue instead; of those that other targets go on
    with it takes a copy, so no pass of theirs may be under way then. alone: whether passes may be
    launched before it is known that they are the next ones of the device. run: what `forward` does
    with the cache; a network that drafts from the target's hidden states puts what keeps them here,
    and gives the same logits.
    """

    def __init__(
        self, model: Any, kv_bits: int | None = None, caches: PromptCaches | None = None
    ) -> None:
        """kv_bits: see `kv_cache.new_cache`, which may refuse it with UsageError."""
        self.model = model
        self.vocabulary: int | None = None  # width of the logits, known after a pass
        self._kv_bits = kv_bits
        self.caches = caches or PromptCaches()
        self.alone = True
        self.run: Callable[[mx.array, kv_cache.Cache], mx.array] = self.run_model
        self._history: TokenHistory | None = None
        self.sampler = Sampler(SamplingOptions())
        self.constraint: ConstraintMatcher | None = None  # of the answer that is being sampled
        self.reset()

    def reset(self) -> None:
        """Begins with an empty history, and forgets the one that it went on with."""
        self.history = TokenHistory(kv_cache.new_cache(self.model, self._kv_bits))

    def release(self) -> None:
        """Leaves its history to the caches, where other targets find it; where they keep none, it
        stays."""
        if not kv_cache.holds(self.cache, len(self.tokens)):  # a pass failed that nobody booked
            self.reset()
        self.history.reserved, self.history.pending = 0, []
        if self.caches.limit:
            self.caches.add(self.history)
            self.reset()
            self.caches.reserve(0, self.history)

    @property
    def history(self) -> TokenHistory:
        assert self._history is not None
        return self._history

    @history.setter
    def history(self, history: TokenHistory) -> None:
        self.caches.exchange(self._history, history)
        self._history = history

    @property
    def runs_ahead(self) -> bool:
        """Whether a pass may be launched before the tokens of the one before are delivered. Under a
        constraint what it may sample depends on them."""
        return self.alone and self.constraint is None

    def adopt(self, history: TokenHistory) -> None:
        """Goes on with a history that was loaded."""
        self.caches.add(self.history)
        self.history = history

    @property
    def cache(self) -> kv_cache.Cache:
        return self.history.cache

    @property
    def tokens(self) -> list[int]:
        """What the cache holds."""
        return self.history.tokens

    @property
    def pending(self) -> list[int]:
        """What follows it, as far as that is known; see `TokenHistory`."""
        return self.history.pending

    @property
    def prompt_tail(self) -> int:
        """How many tokens of a prompt are left to the first pass of its answer, at most.

        Where returning needs a checkpoint, it must lie before what asks for the answer: in the
        prompt of the next turn the template may put that differently.
        """
        return 1 + (_TEMPLATE_TAIL if self.history.needs_checkpoints else 0)

    def forward(self, tokens: mx.array) -> mx.array:
        """One pass over `tokens` [rows], behind what the cache holds.

        Returns logits [rows, vocab], not yet evaluated.
        """
        return self.run(tokens, self.cache)

    def fill(self, tokens: mx.array) -> None:
        """A pass of which nobody wants the logits; `kv_cache.states` are to be evaluated."""
        if isinstance(self.cache, kv_cache.SharedCache):
            self.model.fill(tokens[None], self.cache)
        else:
            self.forward(tokens)

    def rest(self) -> None:
        """No pass follows soon: where other processes follow this one, they sleep."""
        if isinstance(self.cache, kv_cache.SharedCache):
            self.model.rest()

    def run_model(self, tokens: mx.array, cache: kv_cache.Cache) -> mx.array:
        """What `run` does where nobody wants more of it."""
        return self.model(tokens[None], cache=cache)[0]

    def launch(self, rows: Sequence[int], wanted: int, after: mx.array | None = None) -> mx.array:
        """Starts one pass over `rows`, which nobody waits for.

        after: the token of the plain step that is under way, the first row of this pass then; not
        with a constraint, which needs to know that token.
        Returns the tokens [wanted] sampled after each of the last `wanted` rows.
        """
        tokens = mx.array(rows, mx.int32)
        known, count = self.tokens, len(self.tokens)
        if after is not None:
            tokens = mx.concatenate([after, tokens]) if rows else after
            known, count = (
                [*known[-self.sampler.window - 1 :], *self.pending],
                count + len(self.pending),
            )
        logits = self.forward(tokens)[-wanted:]
        self.vocabulary = logits.shape[-1]
        if self.constraint is not None:
            mx.async_eval(logits)  # the masks are made meanwhile
            logits = self.constraint.masked(logits, rows[len(rows) - wanted + 1 :])
        window = self.sampler.window
        before = mx.concatenate([mx.array(known[-window:], mx.int32), tokens]) if window else tokens
        sampled = self.sampler.sample(logits, before, count + tokens.shape[0] - wanted + 1)
        mx.async_eval(sampled)
        return sampled

    def guess(self, logits: mx.array, known: Sequence[int]) -> tuple[int, float]:
        """What would be sampled behind `known`, if another model's logits [1, vocab] were the
        target's, and how likely they have it. Under a constraint `known` is where that walks
        through a draft."""
        if self.constraint is not None:
            logits = self.constraint.masked_ahead(logits)
        before = mx.array(known[-max(1, self.sampler.window) :], mx.int32)
        return self.sampler.guess(logits, before, len(known))

    def read(self, sampled: mx.array) -> list[int]:
        """What `launch` returned, once it is there."""
        return [int(token) for token in sampled.tolist()]

    def pass_state(self) -> Any:
        """What `roll_back` needs to undo the pass of several rows that is launched next."""
        return kv_cache.pass_state(self.cache)

    def roll_back(self, before: Any, written: int, kept: int) -> int:
        """See `kv_cache.roll_back`."""
        return kv_cache.roll_back(self.cache, before, written, kept)

    @staticmethod
    def clock() -> float:
        """Seconds, for how long passes take."""
        return time.perf_counter()

    def commit(self, sampled: Sequence[int], kept: int) -> None:
        """Books that the cache now holds the first `kept` of the pending and the sampled tokens."""
        known = [*self.pending, *sampled]
        self.history.tokens += known[:kept]
        self.history.pending = known[kept:]

    def reuse_prefix(
        self, prompt: Sequence[int], needed: int = 0, stable: int | None = None
    ) -> Reuse:
        """Continues the history that leaves least of `prompt` to read, which is pending then.

        Its last token is always pending. A history of which much would be taken away is kept as it
        is, where memory allows, and a copy of its beginning continued. needed: bytes that the
        history may come to take with its answer; others are dropped for them. stable: how many
        tokens of the prompt the next one will begin with, as far as that is known.
        """
        assert kv_cache.holds(self.cache, len(self.tokens)), "the cache is not what was booked"
        others = self.caches.beside(self.history)
        histories = [self.history, *self.caches.histories(), *others]
        shared = [each.shared(prompt) for each in histories]
        reached = [each.reach(tokens) for each, tokens in zip(histories, shared, strict=True)]
        for index in range(len(histories) - len(others), len(histories)):
            reached[index] *= reached[index] >= LEAST  # fewer are not worth a copy
        best = max(range(len(histories)), key=reached.__getitem__)
        reuse = self._reuse(prompt, reached[best], max(shared))
        if shared[best] == len(histories[best].tokens):
            histories[best].checkpoint()
        self._continue(histories[best], reached[best], needed)
        self.history.pending = list(prompt[reached[best] :])
        if self.history.needs_checkpoints:  # where requests parted once they will again
            self.history.marks = frozenset({shared[best], stable or 0} - {reached[best]})
        return reuse

    def reach(self, prompt: Sequence[int]) -> int:
        """How many tokens of `prompt` need not be read again."""
        best = self.best(prompt)
        return best.reach(best.shared(prompt))

    def best(self, prompt: Sequence[int]) -> TokenHistory:
        """The history that leaves least of `prompt` to read."""
        histories = [self.history, *self.caches.histories()]
        return max(histories, key=lambda each: each.reach(each.shared(prompt)))

    def is_read_elsewhere(self, prompt: Sequence[int]) -> Callable[[], bool] | None:
        """Whether another target is just reading so much of what `prompt` begins with that it is
        worth waiting for: asks for as long as it does. None where it is not."""
        histories = [self.history, *self.caches.histories(), *self.caches.in_use]
        known = max(each.reach(each.shared(prompt)) for each in histories)
        for other in self.caches.beside(self.history):
            whole = [*other.tokens, *other.pending]
            coming = min(common_prefix(whole, prompt), len(prompt) - 1)
            coming = min(coming, len(whole) - self.prompt_tail)
            if coming >= known + _WORTH_WAITING and coming > len(other.tokens):
                if other.needs_checkpoints:
                    other.marks |= {coming}
                return partial(self._is_reading, other, coming)
        return None

    def _is_reading(self, other: TokenHistory, end: int) -> bool:
        in_use = any(each is other for each in self.caches.beside(self.history))
        return in_use and bool(other.pending) and len(other.tokens) < end

    def _continue(self, history: TokenHistory, length: int, needed: int) -> None:
        """Makes the first `length` tokens of a history the one that is gone on with."""
        behind = len(history.tokens) - length
        others = any(each is history for each in self.caches.beside(self.history))
        self.caches.add(self.history)
        self.caches.reserve(needed, self.history, history)
        if others or (behind >= LEAST and self.caches.allows(needed + history.nbytes)):
            if length:
                self.history = history.branch(length)
            else:
                self.reset()
        else:
            self.caches.take(history)
            if behind >= LEAST:
                self.caches.note_lost(history)
            self.history = history
            if length or not behind:
                history.return_to(length)
            else:
                self.reset()
        self.history.reserved = needed

    def _reuse(self, prompt: Sequence[int], cached: int, shared: int) -> Reuse:
        last = len(prompt) - 1
        lost = max((common_prefix(each, prompt) for each in self.caches.lost), default=0)
        known = max(cached, shared, min(lost, last))
        if known > max(cached, shared):
            return Reuse(cached, known, "evicted")
        if known > cached:
            return Reuse(cached, known, "no checkpoint")
        others = [*self.caches.in_use, *self.caches.histories()]
        ended = any(len(each.tokens) == known for each in others)
        return Reuse(cached, known, "changed" if known and not ended and known < last else "")
