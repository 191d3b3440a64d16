"""Drafters of tests in shared passes."""

from __future__ import annotations


class OffersAll:
    """Base of drafters that offer every token of `propose` as certain."""

    _offered: list[int]

    def propose(self, limit: int, *, ahead: bool = False) -> list[int]:
        raise NotImplementedError

    def offer(self, limit: int) -> list[float]:
        self._offered = self.propose(limit)
        return [1.0] * len(self._offered)

    def take(self, count: int) -> list[int]:
        return self._offered[:count]
