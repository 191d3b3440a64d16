"""Token histories that are kept for later within a limit of bytes, and which of them go first.

A history that was asked for is the longest one that a prompt can continue. What is lost first is
what is cheapest to read again for the memory that it takes: the tokens that no other history has,
for each byte, times how likely it is that they are asked for. That falls with the requests since,
as 1 / n, and where it was asked for only once it is the share that was continued of the texts that
begin like it: so one-off requests go before conversations where there are any, twins before the
only one of their kind. And of what goes only the end is taken, as much as is needed, where its
cache allows that.
(GreedyDual-Size-Frequency, which came before, keeps finished conversations for their frequency;
docs/caches.md has the figures.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.token_ids import common_prefix

LEAST = 64  # tokens: what is shorter is read again in no time
_MOST = 16  # histories, however small they are
_REMEMBERED = 32  # of those that were lost, to say why a prompt is read again


@dataclass(slots=True)
class _Kept:
    """since: how many requests there had been when it was used last."""

    history: TokenHistory
    since: int


class PromptCaches:
    """Token histories that are not in use, to be taken, and those that are.

    in_use: of each target that shares these caches the one that it goes on with.
    """

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes for all of them and those that are in use; with 0 none is kept."""
        self.limit = limit
        self.in_use: list[TokenHistory] = []
        self.lost: list[list[int]] = []  # the tokens of the last ones, the latest last
        self._kept: list[_Kept] = []
        self._requests = 0
        self._beginnings = Beginnings()

    @property
    def nbytes(self) -> int:
        return sum(each.history.nbytes for each in self._kept)

    def histories(self) -> list[TokenHistory]:
        return [each.history for each in self._kept]

    def allows(self, nbytes: int) -> bool:
        """Whether histories of so many bytes may be kept."""
        return 0 < nbytes <= self.limit

    def add(self, history: TokenHistory) -> None:
        """Keeps a history that is not in use any more, if that is worth it."""
        if not self.limit:
            self.note_lost(history)
        elif len(history.tokens) >= LEAST:
            history.uses += 1
            self._requests += 1
            if history.uses <= 2:
                self._beginnings.add(history.tokens, again=history.uses == 2)
            self._kept.append(_Kept(history, self._requests))

    def note_lost(self, history: TokenHistory) -> None:
        """Its tokens were read once, and at least the last of them are given up now."""
        if len(history.tokens) >= LEAST:
            self.lost = [*self.lost[1 - _REMEMBERED :], list(history.tokens)]

    def take(self, history: TokenHistory) -> None:
        """Gives one of them out, if it is there; whoever has it adds it again."""
        self._kept = [kept for kept in self._kept if kept.history is not history]

    def exchange(self, old: TokenHistory | None, new: TokenHistory) -> None:
        """A target goes on with `new` now, not with `old`."""
        self.in_use = [each for each in self.in_use if each is not old] + [new]

    def beside(self, history: TokenHistory | None) -> list[TokenHistory]:
        """Those in use but `history`."""
        return [each for each in self.in_use if each is not history]

    def has_room(self, needed: int, history: TokenHistory) -> bool:
        """Whether `history`, which is in use, can come to take `needed` bytes: what is not in use
        goes for it, and the only one that is in use always can."""
        others = self._taken_beside(history)
        return not others or others + needed <= self.limit

    def reserve(
        self, needed: int, history: TokenHistory, asked_for: TokenHistory | None = None
    ) -> None:
        """Gives `history`, which is in use, room for `needed` bytes in all; see `make_room`."""
        self.make_room(self._taken_beside(history) + needed, asked_for)
        history.reserved = needed

    def make_room(self, needed: int, asked_for: TokenHistory | None = None) -> None:
        """Drops histories, or their ends, until `needed` bytes beside them are within the limit.

        asked_for: one that is not dropped; what others share with it costs nothing to read again.
        """
        while victims := [each for each in self._kept if each.history is not asked_for]:
            over = self.nbytes + needed - self.limit
            if over <= 0 and len(self._kept) <= _MOST:
                return
            self._lose(min(victims, key=self._value), over)

    def _lose(self, kept: _Kept, nbytes: int) -> None:
        """Gives up a history, or as much of its end as takes so many bytes."""
        self.note_lost(kept.history)
        if len(self._kept) > _MOST or not kept.history.shorten(nbytes):
            self._kept.remove(kept)

    def _taken_beside(self, history: TokenHistory | None) -> int:
        """Bytes that those in use but `history` take or may come to take."""
        return sum(
            max(each.reserved, each.nbytes) for each in self.beside(history) if each.reserved
        )

    def _value(self, kept: _Kept) -> float:
        """What a byte of it is worth: tokens to read again, by how likely they are asked for."""
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


class Beginnings:
    """How texts began, and how many of those that began so there were and were asked for again."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, ...], tuple[int, int]] = {}  # the latest last

    def add(self, tokens: Sequence[int], *, again: bool) -> None:
        """A text was asked for: for the first time, or `again`, which is told once."""
        key = tuple(tokens[:_BEGINNING])
        begun, continued = self._counts.pop(key, (0, 0))
        self._counts[key] = (begun + (not again), continued + again)
        if len(self._counts) > _BEGINNINGS:
            del self._counts[next(iter(self._counts))]

    def chance(self, tokens: Sequence[int]) -> float:
        """How likely a text is continued that was added, and not again yet."""
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
