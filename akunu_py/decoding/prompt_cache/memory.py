"""Token histories that are kept for later within a limit of bytes, and which of them go first.

A history that was asked for is the longest one that a prompt can continue. What is lost first is
what is cheapest to read again for the memory that it takes: GreedyDual-Size-Frequency (Cherkasova,
"Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", 1998), with the
tokens that no other history has as the cost. So one-off requests go before a conversation that was
continued, a twin before the only one of its kind, and in the end what nobody asks for any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.token_ids import common_prefix

LEAST = 64  # tokens: what is shorter is read again in no time
_MOST = 16  # histories, however small they are
_REMEMBERED = 32  # of those that were lost, to say why a prompt is read again


@dataclass(slots=True)
class _Kept:
    """clock: the value of what was lost last when it was used last."""

    history: TokenHistory
    clock: float


class PromptCaches:
    """Token histories that are not in use."""

    def __init__(self, limit: int = 0) -> None:
        """limit: bytes for all of them and the one that is in use; with 0 none is kept."""
        self.limit = limit
        self.lost: list[list[int]] = []  # the tokens of the last ones, the latest last
        self._kept: list[_Kept] = []
        self._clock = 0.0

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
        if len(history.tokens) >= LEAST and self.limit:
            history.uses += 1
            self._kept.append(_Kept(history, self._clock))

    def take(self, history: TokenHistory) -> None:
        """Gives one of them out, if it is there; whoever has it adds it again."""
        self._kept = [kept for kept in self._kept if kept.history is not history]

    def make_room(self, needed: int, asked_for: TokenHistory | None = None) -> None:
        """Drops histories until `needed` bytes beside them are within the limit.

        asked_for: one that is not dropped; what others share with it costs nothing to read again.
        """
        while (victims := [each for each in self._kept if each.history is not asked_for]) and (
            self.nbytes + needed > self.limit or len(self._kept) > _MOST
        ):
            self._drop(min(victims, key=self._value))

    def _drop(self, kept: _Kept) -> None:
        self._clock = self._value(kept)
        self._kept.remove(kept)
        self.lost = [*self.lost[1 - _REMEMBERED :], kept.history.tokens]

    def _value(self, kept: _Kept) -> float:
        """What it is worth: the clock of its last use, and tokens to read again for each byte."""
        tokens = kept.history.tokens
        others = (each.history.tokens for each in self._kept if each is not kept)
        alone = len(tokens) - max((common_prefix(tokens, other) for other in others), default=0)
        return kept.clock + kept.history.uses * alone / max(1, kept.history.nbytes)
