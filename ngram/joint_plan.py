"""Draft lengths for several requests in one pass."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from akunu_py.ngram.cost import MAX_ROWS, CostCurve, RecentGain

_NEGLIGIBLE = 0.01  # chance of a draft token
_PLAIN_EVERY = 8  # passes between two plain ones whose cost is not measured yet
_HIDDEN_RATE, _MOST_HIDDEN = 0.1, 0.5  # learning rate and limit of `_hidden`


@dataclass(frozen=True, slots=True, eq=False)
class SharedPass:
    """A launched pass of several requests."""

    requests: int
    rows: int
    drafted: int  # tokens
    context: int  # mean tokens per request
    pipelined: bool  # launched while another pass was running
    joined: bool = False  # prompts are among the rows


class JointPlanner:
    """Plans the draft tokens of all requests, and learns the costs of their passes."""

    def __init__(self, curve: CostCurve) -> None:
        self.curve = curve  # costs by the rows of all requests; keeps learning
        self._gain = RecentGain()
        self._since_plain = _PLAIN_EVERY  # passes since one without drafts
        self._hidden = 0.0  # share of a plain pass that pipelining hides

    def lengths(
        self,
        offers: Sequence[Sequence[float]],
        rows: int,
        context: int,
        *,
        pipelined: bool = False,
    ) -> list[int]:
        """Return the number of draft tokens for each request.

        Adds the most probable draft token of any request, one at a time, and keeps the number where
        the expected tokens exceed their cost most. The cost is the added time, counted in tokens at
        the recent rate: the rule of `planner.best_draft`, over the sum of the rows. Now and then it
        is 0 for all, until the plain pass is timed: only that shows what drafts gain.

        offers: acceptance chances by request, each given the ones before it. rows: without drafts.
        context: mean tokens per request. pipelined: plain passes are launched ahead, which ends
        with a draft.
        """
        lengths, best = [0] * len(offers), [0] * len(offers)
        if not self.curve.measured(rows) and self._since_plain >= _PLAIN_EVERY:
            return best
        costs = self.curve.table(context)
        plain = costs[min(rows, MAX_ROWS) - 1] * (1.0 - self._hidden * pipelined)
        rate = self._gain.value * len(offers) / plain
        queue = [(-offer[0], index) for index, offer in enumerate(offers) if offer]
        heapq.heapify(queue)
        gained = highest = 0.0
        while queue and rows < MAX_ROWS:
            chance, index = heapq.heappop(queue)
            gained -= chance
            rows += 1
            lengths[index] += 1
            value = gained - rate * (costs[rows - 1] - plain)
            if value > highest:
                highest, best = value, list(lengths)
            offer, length = offers[index], lengths[index]
            if length < len(offer) and chance * offer[length] < -_NEGLIGIBLE:
                heapq.heappush(queue, (chance * offer[length], index))
        return best

    def observe(self, done: SharedPass, tokens: int, seconds: float) -> None:
        """Record a pass that yielded `tokens` tokens in all."""
        self._since_plain = self._since_plain + 1 if done.drafted else 0
        costs = self.curve.table(done.context)
        if done.pipelined:
            hidden = 1.0 - seconds / costs[min(done.rows, MAX_ROWS) - 1]
            hidden = min(max(hidden, 0.0), _MOST_HIDDEN)
            self._hidden += _HIDDEN_RATE * (hidden - self._hidden)
        elif not self.curve.first_use(done.rows):  # devices compile kernels then
            self.curve.observe(done.rows, seconds, done.context)
            costs = self.curve.table(done.context)
        if done.joined:
            return
        shown = 1.0 - self._hidden
        plain = costs[min(done.requests, MAX_ROWS) - 1] * shown / done.requests
        cost = costs[min(done.rows, MAX_ROWS) - 1] * (shown if done.pipelined else 1.0)
        self._gain.add(tokens, cost / plain)
