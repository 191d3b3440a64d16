"""Draft lengths for several requests in one pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from akunu_py.ngram.cost import MAX_ROWS, CostCurve

_RATE_DECAY, _RATE_PRIOR = 0.97, 6.0  # of the running gain, per pass and in passes
_NEGLIGIBLE = 0.01  # chance of a draft token
_PLAIN_EVERY = 8  # passes between two plain ones whose cost is not measured yet


class JointPlanner:
    """Plans the draft tokens of all requests, and learns the costs of their passes."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve  # costs by the rows of all requests; keeps learning
        self._earned = self._spent = _RATE_PRIOR
        self._since_plain = _PLAIN_EVERY  # passes since one without drafts

    def lengths(self, offers: Sequence[Sequence[float]], rows: int, context: int) -> list[int]:
        """Return the number of draft tokens for each request.

        Adds the most probable draft token of any request, one at a time, and keeps the number where
        the expected tokens exceed their cost most. The cost is the added time, counted in tokens at
        the recent rate: the rule of `planner.best_draft`, over the sum of the rows. Now and then it
        is 0 for all, until the plain pass is timed: only that shows what drafts gain.

        offers: acceptance chances by request, each given the ones before it. rows: without drafts.
        context: mean tokens per request.
        """
        lengths, best = [0] * len(offers), [0] * len(offers)
        if not self.curve.measured(rows) and self._since_plain >= _PLAIN_EVERY:
            return best
        costs = self.curve.table(context)
        first = costs[min(rows, MAX_ROWS) - 1]
        rate = max(self._earned / self._spent, 1.0) * len(offers) / first
        queue = [(-offer[0], index) for index, offer in enumerate(offers) if offer]
        heapq.heapify(queue)
        gained = highest = 0.0
        while queue and rows < MAX_ROWS:
            chance, index = heapq.heappop(queue)
            gained -= chance
            rows += 1
            lengths[index] += 1
            value = gained - rate * (costs[rows - 1] - first)
            if value > highest:
                highest, best = value, list(lengths)
            offer, length = offers[index], lengths[index]
            if length < len(offer) and chance * offer[length] < -_NEGLIGIBLE:
                heapq.heappush(queue, (chance * offer[length], index))
        return best

    def observe(self, requests: int, rows: int, tokens: int, seconds: float, context: int) -> None:
        """Record a pass over `rows` rows that yielded `tokens` tokens in all."""
        self._since_plain = 0 if rows == requests else self._since_plain + 1
        if not self.curve.first_use(rows):  # devices compile kernels then
            self.curve.observe(rows, seconds, context)
        costs = self.curve.table(context)
        plain = costs[min(requests, MAX_ROWS) - 1] / requests
        self._earned = self._earned * _RATE_DECAY + tokens
        self._spent = self._spent * _RATE_DECAY + costs[min(rows, MAX_ROWS) - 1] / plain
