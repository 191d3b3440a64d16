"""Token histories cached in memory within a limit, and their eviction order.

Evicts the fewest tokens to prefill again per byte, times the chance of reuse. That chance falls as
1 / n with the requests since; for histories used once it is the share of texts with a similar
beginning that were continued. Where possible only the end is evicted; see docs/caches.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from akunu_py.engine.histories.history import TokenHistory
from akunu_py.engine.model.token_ids import common_prefix, shared_prefix

MIN_CACHED = 64  # tokens; shorter histories are not worth keeping
MAX_HISTORIES = 16  # maximum number of histories
_MAX_EVICTED = 32  # evicted histories, to explain cache misses


@dataclass(slots=True)
class _CachedHistory:
    history: TokenHistory
    nbytes: int  # of the history; counting them visits every array
    last_request: int  # number of the request that used it last
    prefixes: dict[int, int]  # tokens shared with each other entry, by id of its history


class PromptCaches:
    """Token histories in use, and kept for later requests."""

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes of all histories, also those in use. A larger one stays until the next."""
        self.limit = limit
        self.in_use: list[TokenHistory] = []
        self.spare: TokenHistory | None = None  # the last one in use, if it was not cached
        self._last: Callable[[], TokenHistory | None] = lambda: None
        self.evicted: list[list[int]] = []  # tokens of the last evicted histories, oldest first
        self._cached: list[_CachedHistory] = []
        self._requests = 0
        self._prefix_stats = PrefixStats()

    @property
    def nbytes(self) -> int:
        spare = 0 if self.spare is None else self.spare.nbytes
        return spare + sum(each.nbytes for each in self._cached)

    @property
    def last(self) -> TokenHistory | None:
        """The history that was released last, None if it was evicted."""
        return self._last()

    def histories(self) -> list[TokenHistory]:
        """Return the histories not in use."""
        spare = [] if self.spare is None else [self.spare]
        return [*spare, *(each.history for each in self._cached)]

    def best(
        self, prompt: Sequence[int], *, in_use: bool = False
    ) -> tuple[int, TokenHistory | None]:
        """Return how many tokens of `prompt` need no prefill, and the history that has them.

        in_use: count also the histories in use.
        """
        histories = [*self.histories(), *(self.in_use if in_use else ())]
        found = [(each.reach(shared_prefix(each.tokens, prompt)), each) for each in histories]
        return max(found, key=lambda each: each[0], default=(0, None))

    def add(self, history: TokenHistory) -> None:
        """Cache a history after use, if not too short. If `limit` is 0, record its eviction."""
        if not self.limit:
            self.record_eviction(history)
        elif len(history.tokens) >= MIN_CACHED:
            history.uses += 1
            self._requests += 1
            if history.uses <= 2:
                self._prefix_stats.add(history.tokens, continued=history.uses == 2)
            # Compared now, so that evicting needs no comparison.
            prefixes = dict[int, int]()
            for each in self._cached:
                length = common_prefix(each.history.tokens, history.tokens)
                prefixes[id(each.history)] = each.prefixes[id(history)] = length
            entry = _CachedHistory(history, history.nbytes, self._requests, prefixes)
            self._cached.append(entry)

    def _remove(self, entry: _CachedHistory) -> None:
        self._cached.remove(entry)
        for each in self._cached:
            del each.prefixes[id(entry.history)]

    def record_eviction(self, history: TokenHistory) -> None:
        """Record the tokens of a history that is evicted or shortened."""
        if len(history.tokens) >= MIN_CACHED:
            self.evicted = [*self.evicted[1 - _MAX_EVICTED :], list(history.tokens)]

    def release(self, history: TokenHistory) -> None:
        """Cache a history that its request no longer needs, or keep it as the spare one."""
        self.in_use = self.others(history)
        self._last = weakref.ref(history)
        if len(history.tokens) >= MIN_CACHED and history.nbytes <= self.limit:
            self.add(history)
            self.make_room(self._reserved_by_others(None))
        elif history.tokens:
            if self.spare is not None:
                self.record_eviction(self.spare)
            self.spare = history

    def take(self, history: TokenHistory) -> None:
        """Remove a history from those not in use."""
        if history is self.spare:
            self.spare = None
        for entry in self._cached:
            if entry.history is history:
                self._remove(entry)
                return

    def others(self, history: TokenHistory | None) -> list[TokenHistory]:
        """Return the histories in use except `history`."""
        return [each for each in self.in_use if each is not history]

    def has_room(self, needed: int, history: TokenHistory) -> bool:
        """Return whether `history`, in use, may grow to `needed` bytes.

        Evicts cached histories for it. The only history in use may always grow.
        """
        others = self._reserved_by_others(history)
        return not others or others + needed <= self.limit

    def reserve(
        self, needed: int, history: TokenHistory, protected: TokenHistory | None = None
    ) -> None:
        """Reserve `needed` bytes in all for `history`, in use; evict others, not `protected`."""
        self.make_room(self._reserved_by_others(history) + needed, protected)
        history.reserved = needed

    def make_room(self, needed: int, protected: TokenHistory | None = None) -> None:
        """Evict histories or their ends until `needed` more bytes fit, but not `protected`."""
        over = self.nbytes + needed - self.limit
        if self.spare is not None and self.spare is not protected and over > 0:
            self.record_eviction(self.spare)
            self.spare = None
        while victims := [each for each in self._cached if each.history is not protected]:
            over = self.nbytes + needed - self.limit
            if over <= 0 and len(self._cached) <= MAX_HISTORIES:
                return
            self._evict(min(victims, key=self._value_per_byte), over)

    def _evict(self, entry: _CachedHistory, nbytes: int) -> None:
        self.record_eviction(entry.history)
        if len(self._cached) > MAX_HISTORIES or not entry.history.shorten(nbytes):
            self._remove(entry)
        else:
            entry.nbytes = entry.history.nbytes

    def _reserved_by_others(self, history: TokenHistory | None) -> int:
        return sum(
            max(each.reserved, each.nbytes) for each in self.others(history) if each.reserved
        )

    def _value_per_byte(self, entry: _CachedHistory) -> float:
        """Return the value of one byte: tokens to prefill again times chance of reuse."""
        tokens = entry.history.tokens
        others = (each.history for each in self._cached if each is not entry)
        # Both histories may be shorter than when they were compared.
        shared = (min(entry.prefixes[id(each)], len(each.tokens)) for each in others)
        unique = max(0, len(tokens) - max(shared, default=0))
        chance = 1.0 if entry.history.uses > 1 else self._prefix_stats.chance(tokens)
        chance /= 1 + self._requests - entry.last_request
        return chance * unique / max(1, entry.nbytes)


_PREFIX_LENGTH = 64  # tokens that identify a prefix
_MAX_PREFIXES = 64
_OVERALL_WEIGHT = 0.5  # weight of the overall share, in texts
_INITIAL_WEIGHT = 2  # texts assumed to be continued initially


class PrefixStats:
    """Counts of started and continued texts by their prefix."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], tuple[int, int]] = {}  # oldest first

    def add(self, tokens: Sequence[int], *, continued: bool) -> None:
        """Count a text: started, or continued for the first time (`continued`)."""
        key = tuple(tokens[:_PREFIX_LENGTH])
        starts, continuations = self._counts.pop(key, (0, 0))
        self._counts[key] = (starts + (not continued), continuations + continued)
        if len(self._counts) > _MAX_PREFIXES:
            del self._counts[next(iter(self._counts))]

    def chance(self, tokens: Sequence[int]) -> float:
        """Return the chance that a text added once is continued."""
        key = tuple(tokens[:_PREFIX_LENGTH])
        others = [
            (common_prefix(each, key), starts - (each == key), continuations)
            for each, (starts, continuations) in self._counts.items()
        ]
        nearest = max((shared for shared, starts, _ in others if starts), default=0)
        near = [each for each in others if 2 * each[0] >= nearest]
        overall = _smoothed_share(others, _INITIAL_WEIGHT, 1.0)
        return _smoothed_share(near, _OVERALL_WEIGHT, overall)


def _smoothed_share(texts: Sequence[tuple[int, int, int]], weight: float, prior: float) -> float:
    starts, continuations = (sum(each[at] for each in texts) for at in (1, 2))
    return (continuations + weight * prior) / (max(starts, continuations) + weight)
