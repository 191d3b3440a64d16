"""Token histories kept in memory within a limit, and their eviction order.

Evicts the fewest tokens to prefill again per byte, times the chance of reuse. That chance falls as
1 / n with the requests since; for histories used once it is the share of texts with a similar
beginning that were continued. Where possible only the end is evicted. docs/caches.md compares
GreedyDual-Size-Frequency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.token_ids import common_prefix

LEAST = 64  # tokens; shorter histories are not worth keeping
_MOST = 16  # maximum number of histories
_REMEMBERED = 32  # evicted histories, to explain cache misses


@dataclass(slots=True)
class _CachedHistory:
    """since: how many requests there had been when it was used last."""

    history: TokenHistory
    since: int


class PromptCaches:
    """Token histories that are kept for later or in use."""

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes for all histories including those in use; 0 keeps none."""
        self.limit = limit
        self.in_use: list[TokenHistory] = []
        self.lost: list[list[int]] = []  # the tokens of the last ones, the latest last
        self._kept: list[_CachedHistory] = []
        self._requests = 0
        self._beginnings = PrefixStats()

    @property
    def nbytes(self) -> int:
        return sum(each.history.nbytes for each in self._kept)

    def histories(self) -> list[TokenHistory]:
        return [each.history for each in self._kept]

    def allows(self, nbytes: int) -> bool:
        """Return whether histories of `nbytes` bytes may be kept."""
        return 0 < nbytes <= self.limit

    def add(self, history: TokenHistory) -> None:
        """Keep a history that is no longer in use, if worthwhile."""
        if not self.limit:
            self.note_lost(history)
        elif len(history.tokens) >= LEAST:
            history.uses += 1
            self._requests += 1
            if history.uses <= 2:
                self._beginnings.add(history.tokens, again=history.uses == 2)
            self._kept.append(_CachedHistory(history, self._requests))

    def note_lost(self, history: TokenHistory) -> None:
        """Remember the tokens of a history that loses at least its end."""
        if len(history.tokens) >= LEAST:
            self.lost = [*self.lost[1 - _REMEMBERED :], list(history.tokens)]

    def take(self, history: TokenHistory) -> None:
        """Remove a history from the kept ones."""
        self._kept = [kept for kept in self._kept if kept.history is not history]

    def exchange(self, old: TokenHistory | None, new: TokenHistory) -> None:
        """Replace the history of a target that is in use."""
        self.in_use = [each for each in self.in_use if each is not old] + [new]

    def others(self, history: TokenHistory | None) -> list[TokenHistory]:
        """Return the histories in use except `history`."""
        return [each for each in self.in_use if each is not history]

    def has_room(self, needed: int, history: TokenHistory) -> bool:
        """Return whether `history`, in use, may grow to `needed` bytes.

        Kept histories are evicted for it. The only history in use always may.
        """
        others = self._taken_by_others(history)
        return not others or others + needed <= self.limit

    def reserve(
        self, needed: int, history: TokenHistory, asked_for: TokenHistory | None = None
    ) -> None:
        """Reserve `needed` bytes in all for `history`, in use; see `make_room`."""
        self.make_room(self._taken_by_others(history) + needed, asked_for)
        history.reserved = needed

    def make_room(self, needed: int, asked_for: TokenHistory | None = None) -> None:
        """Evict histories or their ends until `needed` more bytes fit, but not `asked_for`."""
        while victims := [each for each in self._kept if each.history is not asked_for]:
            over = self.nbytes + needed - self.limit
            if over <= 0 and len(self._kept) <= _MOST:
                return
            self._lose(min(victims, key=self._value), over)

    def _lose(self, kept: _CachedHistory, nbytes: int) -> None:
        """Evict a history, or `nbytes` bytes of its end."""
        self.note_lost(kept.history)
        if len(self._kept) > _MOST or not kept.history.shorten(nbytes):
            self._kept.remove(kept)

    def _taken_by_others(self, history: TokenHistory | None) -> int:
        """Return the bytes reserved by histories in use except `history`."""
        return sum(
            max(each.reserved, each.nbytes) for each in self.others(history) if each.reserved
        )

    def _value(self, kept: _CachedHistory) -> float:
        """Return the value of one byte: tokens to prefill again times chance of reuse."""
        tokens = kept.history.tokens
        others = (each.history.tokens for each in self._kept if each is not kept)
        alone = len(tokens) - max((common_prefix(tokens, other) for other in others), default=0)
        likely = 1.0 if kept.history.uses > 1 else self._beginnings.chance(tokens)
        likely /= 1 + self._requests - kept.since
        return likely * alone / max(1, kept.history.nbytes)


_BEGINNING = 64  # tokens of a beginning
_BEGINNINGS = 64  # beginnings
_OF_ALL = 0.5  # texts that the share of all counts for
_CONTINUED = 2  # texts that are taken for continued before there were any


class PrefixStats:
    """How often texts with each beginning were started and continued."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], tuple[int, int]] = {}  # the latest last

    def add(self, tokens: Sequence[int], *, again: bool) -> None:
        """Count a text: started, or continued for the first time (`again`)."""
        key = tuple(tokens[:_BEGINNING])
        begun, continued = self._counts.pop(key, (0, 0))
        self._counts[key] = (begun + (not again), continued + again)
        if len(self._counts) > _BEGINNINGS:
            del self._counts[next(iter(self._counts))]

    def chance(self, tokens: Sequence[int]) -> float:
        """Return the chance that a text is continued, which was added once."""
        key = tuple(tokens[:_BEGINNING])
        others = [
            (common_prefix(each, key), begun - (each == key), continued)
            for each, (begun, continued) in self._counts.items()
        ]
        nearest = max((shared for shared, begun, _ in others if begun), default=0)
        near = [each for each in others if 2 * each[0] >= nearest]
        of_all = _share(others, _CONTINUED, 1.0)
        return _share(near, _OF_ALL, of_all)


def _share(texts: Sequence[tuple[int, int, int]], weight: float, prior: float) -> float:
    begun, continued = (sum(each[at] for each in texts) for at in (1, 2))
    return (continued + weight * prior) / (max(begun, continued) + weight)
