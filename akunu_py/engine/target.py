"""The target model and the token history of one request."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx

from akunu_py.engine import batched_pass, kv_cache
from akunu_py.engine.batched_pass import Part, PassFollower
from akunu_py.engine.constraint.masks import TokenMasks
from akunu_py.engine.histories.history import NO_OWNER, Owner, TokenHistory
from akunu_py.engine.histories.memory import MIN_CACHED, PromptCaches
from akunu_py.engine.model.token_ids import common_prefix, shared_prefix
from akunu_py.engine.sampling import RowsToSample, Sampler
from akunu_py.ngram.token_tree import TokenTree
from akunu_py.types import NotCached, SamplingOptions

_WORTH_WAITING = 256  # tokens saved by waiting for another target's prefill
_TEMPLATE_TAIL = 16  # tokens; upper bound of a template's answer header


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a prompt needs no prefill for."""

    cached: int  # tokens
    known: int  # tokens prefilled at some time before
    missing: NotCached  # why not all: "evicted", "no checkpoint", "changed" (another text), or ""


@dataclass(eq=False)
class Target:
    """A model, the token history of a request, and the rules to sample its tokens."""

    model: Any
    kv_bits: int | None = None  # see `kv_cache.new_cache`, which may raise UsageError
    # Histories of other targets are copied, not taken.
    caches: PromptCaches = field(default_factory=PromptCaches)
    vocabulary: int | None = field(default=None, init=False)  # width of the logits, after a pass
    followers: Sequence[PassFollower] = field(default=(), init=False)  # of its passes
    owner: Owner = field(default=NO_OWNER, init=False)  # the request
    sampler: Sampler = field(default_factory=lambda: Sampler(SamplingOptions()), init=False)
    constraint: TokenMasks | None = field(default=None, init=False)
    _history: TokenHistory | None = field(default=None, init=False)  # made when it is needed

    def reset(self) -> None:
        """Drop the current history and start with an empty one."""
        self.history = TokenHistory(kv_cache.new_cache(self.model, self.kv_bits), self.owner)

    def release(self) -> None:
        """Return the history to the shared caches."""
        if self._history is None:
            return
        if not kv_cache.has_length(self.cache, len(self.tokens)):  # a failed pass left rows behind
            self.reset()
        history, self._history = self.history, None
        history.reserved, history.pending = 0, []
        mx.async_eval(kv_cache.own_states(history.cache))
        self.caches.release(history)

    @property
    def history(self) -> TokenHistory:
        if self._history is None:
            self.reset()
        assert self._history is not None
        return self._history

    @history.setter
    def history(self, history: TokenHistory) -> None:
        self.caches.in_use = [*self.caches.others(self._history), history]
        self._history = history

    @property
    def cache(self) -> kv_cache.Cache:
        return self.history.cache

    @property
    def tokens(self) -> list[int]:
        """The tokens in the cache."""
        return self.history.tokens

    @property
    def pending(self) -> list[int]:
        """The known tokens after them; see `TokenHistory`."""
        return self.history.pending

    @property
    def prompt_tail(self) -> int:
        """Maximum number of prompt tokens left to the answer's first pass.

        If rollback needs checkpoints, one must precede the template's answer header, which the next
        prompt may change.
        """
        return 1 + (_TEMPLATE_TAIL if self.history.needs_checkpoints else 0)

    def forward(self, tokens: mx.array) -> mx.array:
        """Run `tokens` [rows] after the cached ones. Returns lazy logits [rows, vocab]."""
        part = Part(tokens, self.cache, followers=self.followers)
        return batched_pass.run(self.model, [part])[0]

    def part(self, tokens: mx.array, draft: Sequence[int]) -> Part:
        """Return the part in a pass that runs `tokens`, the last of them `draft`."""
        tree = draft if isinstance(draft, TokenTree) else None
        return Part(tokens, self.cache, 1 + len(draft), self.followers, tree)

    def prefill(self, tokens: mx.array) -> None:
        """Run a pass without logits; evaluate `kv_cache.states` afterwards."""
        if isinstance(self.cache, kv_cache.SharedCache):
            self.model.prefill(tokens[None], self.cache)
        else:
            self.forward(tokens)

    def pause_workers(self) -> None:
        """Let the worker processes of other hosts sleep until the next pass."""
        if isinstance(self.cache, kv_cache.SharedCache):
            self.model.pause_workers()

    def to_sample(
        self, logits: mx.array, tokens: mx.array, drafted: Sequence[int], *, ahead: bool = False
    ) -> RowsToSample:
        """Return the last drafted + 1 rows of a pass over `tokens`, to sample from.

        logits: of these rows, [drafted + 1, vocab]. ahead: the pass follows an uncollected one.
        """
        wanted = 1 + len(drafted)
        known, count, window = self.tokens, len(self.tokens), self.sampler.window
        if ahead:
            known, count = [*known[-window - 1 :], *self.pending], count + len(self.pending)
        self.vocabulary = logits.shape[-1]
        if self.constraint is not None and not self.constraint.free:
            mx.async_eval(logits)  # the masks are made meanwhile
            logits = self.constraint.masked(logits, drafted)
        before = mx.concatenate([mx.array(known[-window:], mx.int32), tokens]) if window else tokens
        position = count + tokens.shape[0] - wanted + 1
        depths = [0, *drafted.depths] if isinstance(drafted, TokenTree) else ()
        return RowsToSample(self.sampler, logits, before, position, depths)

    def sample_draft(
        self, logits: mx.array, known: Sequence[int], others: int = 0
    ) -> list[tuple[int, float]]:
        """Sample after `known` from another model's logits; see `Sampler.sample_draft`."""
        if self.constraint is not None:
            logits = self.constraint.masked_ahead(logits)
        before = mx.array(known[-max(1, self.sampler.window) :], mx.int32)
        return self.sampler.sample_draft(logits, before, len(known), others)

    @staticmethod
    def clock() -> float:
        return time.perf_counter()

    def move_rows(self, written: int, rows: Sequence[int]) -> None:
        """Move `rows` of the last pass to its first of `written` rows, also for its followers."""
        kv_cache.move_rows(self.cache, written, rows)
        for each in self.followers:
            each.move_rows(rows)

    def commit(self, sampled: Sequence[int], kept: int) -> None:
        """Record that the cache holds the first `kept` of the pending and sampled tokens."""
        known = [*self.pending, *sampled]
        self.history.tokens += known[:kept]
        self.history.pending = known[kept:]

    def keep(self, length: int) -> None:
        """Drop the tokens after the first `length`, and more where a checkpoint is missing."""
        reached = self.history.reach(min(length, len(self.tokens)))
        if reached:
            self.history.truncate(reached)
        else:
            self.reset()

    def reuse_prefix(
        self, prompt: Sequence[int], needed: int = 0, stable: int | None = None
    ) -> Reuse:
        """Continue the history that leaves the least of `prompt` to prefill.

        The rest becomes pending, at least the last token. A history that would lose much is copied
        instead, if memory allows. needed: bytes to reserve for prompt and answer. stable: length of
        the prefix that the next prompt will share, if known.
        """
        assert kv_cache.has_length(self.cache, len(self.tokens)), "the cache is not what was booked"
        others = self.caches.others(self.history)
        histories = [self.history, *self.caches.histories(), *others]
        shared = [shared_prefix(each.tokens, prompt) for each in histories]
        reached = [each.reach(tokens) for each, tokens in zip(histories, shared, strict=True)]
        for index in range(len(histories) - len(others), len(histories)):
            reached[index] *= reached[index] >= MIN_CACHED  # fewer are not worth a copy
        best = max(range(len(histories)), key=reached.__getitem__)
        reuse = self._reuse(prompt, reached[best], max(shared))
        if shared[best] == len(histories[best].tokens):
            histories[best].checkpoint()
        self._continue(histories[best], reached[best], needed)
        self.history.pending = list(prompt[reached[best] :])
        if self.history.needs_checkpoints:  # where requests parted once they will again
            self.history.marks = frozenset({shared[best], stable or 0} - {reached[best]})
        return reuse

    def find_concurrent_prefill(self, prompt: Sequence[int]) -> Callable[[], bool] | None:
        """Return a check whether another target still prefills a prefix worth waiting for."""
        known, _ = self.caches.best(prompt, in_use=True)
        for other in self.caches.others(self.history):
            whole = [*other.tokens, *other.pending]
            coming = min(common_prefix(whole, prompt), len(prompt) - 1)
            coming = min(coming, len(whole) - self.prompt_tail)
            if coming >= known + _WORTH_WAITING and coming > len(other.tokens):
                if other.needs_checkpoints:
                    other.marks |= {coming}
                return partial(self._is_prefilling, other, coming)
        return None

    def _is_prefilling(self, other: TokenHistory, end: int) -> bool:
        in_use = any(each is other for each in self.caches.others(self.history))
        return in_use and bool(other.pending) and len(other.tokens) < end

    def _continue(self, history: TokenHistory, length: int, needed: int) -> None:
        behind = len(history.tokens) - length
        others = any(each is history for each in self.caches.others(self.history))
        self.caches.add(self.history)
        self.caches.reserve(needed, self.history, history)
        fits = needed + history.nbytes <= self.caches.limit
        copies = others or (behind >= MIN_CACHED and fits)
        if not copies:
            self.caches.take(history)
            if behind >= MIN_CACHED:
                self.caches.record_eviction(history)
        if behind and not length:
            self.reset()
        elif copies:
            self.history = history.branch(length, self.owner)
        else:
            self.history = history
            history.truncate(length)
        self.history.owner = self.owner
        self.history.reserved = needed

    def _reuse(self, prompt: Sequence[int], cached: int, shared: int) -> Reuse:
        """Return the cached prefix and why it is not longer. shared: longest one of any history."""
        last = len(prompt) - 1
        lost = max((common_prefix(each, prompt) for each in self.caches.evicted), default=0)
        known = max(cached, shared, min(lost, last))
        if known > max(cached, shared):
            return Reuse(cached, known, "evicted")
        if known > cached:
            return Reuse(cached, known, "no checkpoint")
        others = [*self.caches.in_use, *self.caches.histories()]
        ended = any(len(each.tokens) == known for each in others)
        return Reuse(cached, known, "changed" if known and not ended and known < last else "")
