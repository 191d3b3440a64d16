"""Runs the decode passes of several requests as one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import blas_threads
from akunu_py.decoding.generate import batched_pass
from akunu_py.decoding.generate.session import Request, Step
from akunu_py.decoding.model.engine import Engine
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.planner import JointPlanner, SharedPass, best_draft


class ModelRunner:
    """Plans and runs passes over the rows of several requests to one model."""

    def __init__(self, engine: Engine, curve: CostCurve) -> None:
        """curve: costs of passes for one request, the first estimate for those of several."""
        self._engine = engine
        self._curve = curve
        self._planner: JointPlanner | None = None
        self.not_batched: str | None = None  # why requests take turns, once `can_batch` was called
        self._last = 0.0  # end of the previous pass, or start of this one
        self._drafts_pay = False  # the next pass waits for the launched one, to have drafts
        self.passes = self.requests = 0  # shared passes so far, and the requests in them

    def can_batch(self) -> bool:
        """Return whether requests can share passes. Runs a trial once: about eight passes."""
        if self._planner is None:
            model, kv_bits = self._engine.model, self._engine.plan.kv_bits
            self.not_batched = batched_pass.why_not_batched(model, kv_bits)
            known = self._curve.table(0)
            costs = CostCurve({rows: known[rows - 1] for rows in range(1, MAX_ROWS + 1)})
            costs.preset = False
            self._planner = JointPlanner(costs)
        return self.not_batched is None

    def prefers_alone(self, request: Request, sharing: int) -> bool:
        """Return whether a separate pass with a draft is faster than a shared pass without drafts.

        Recurrent layers accept one row per request, so shared passes of recurrent models cannot
        verify drafts. sharing: number of requests that share the pass.
        """
        if self._planner is None or not self._engine.recurrent:
            return False
        context = len(request.target.tokens)
        shared, own = self._planner.curve.table(context), self._curve.table(context)
        rate = sharing * shared[0] / shared[sharing - 1]  # tokens per plain step
        costs = [cost / own[0] for cost in own]
        offer = request.decoding.offer()
        length, values = best_draft(offer, costs, rate, len(offer), rerun_on_reject=True)
        return length > 0 and values[0] > 0

    def run(self, requests: Sequence[Request], *, ahead: bool) -> list[list[Step] | Exception]:
        """Run one pass over all requests, which must satisfy `can_share`; return their results.

        If a pass was already launched, collect only the results of its requests. ahead: no other
        request is ready, so that the next plain pass can be launched before this one is read.
        """
        blas_threads.adapt()
        running = [each for each in requests if each.is_running]
        try:
            if not running:
                self._last = time.perf_counter()
                self._launch(requests, self._plan(requests, ahead=ahead))
                running = list(requests)
            continues = ahead and not self._drafts_pay
            if continues and all(each.decoding.can_continue for each in running):
                behind = [each for each in requests if each.decoding.limit > each.is_running]
                if behind:
                    self._launch(behind)
            for each in running:
                each.decoding.wait()
            started, self._last = self._last, time.perf_counter()
            results = self._collect(requests, running, self._last - started)
            left = [each for each in requests if each.is_running]
            self._drafts_pay = bool(left) and self._waiting_pays(left, ahead=ahead)
        except Exception as error:  # noqa: BLE001 - every request reports it
            return [each.fail(error) for each in requests]
        return results

    def _waiting_pays(self, requests: Sequence[Request], *, ahead: bool) -> bool:
        """Return whether the next pass should wait for the tokens of this one, to have drafts."""
        alone = (self.prefers_alone(each, len(requests)) for each in requests)
        return any(self._plan(requests, ahead=ahead)) or any(alone)

    def _plan(self, requests: Sequence[Request], *, ahead: bool) -> list[int]:
        """Return the number of draft tokens for each request."""
        assert self._planner is not None
        offers = [[] if self._engine.recurrent else each.decoding.offer() for each in requests]
        rows = sum(len(each.target.pending) for each in requests)
        pipelined = ahead and all(each.target.constraint is None for each in requests)
        return self._planner.lengths(offers, rows, _context(requests), pipelined=pipelined)

    def _launch(self, requests: Sequence[Request], lengths: Sequence[int] | None = None) -> None:
        """Launch a pass with that many draft tokens; None: a plain one behind a running pass."""
        decodings = [each.decoding for each in requests]
        passes = [
            each.next_row() if each.is_running else each.rows(length)
            for each, length in zip(decodings, lengths or [0] * len(requests), strict=True)
        ]
        parts = [
            batched_pass.Part(each.rows, request.target.cache, 1 + len(each.drafted))
            for each, request in zip(passes, requests, strict=True)
        ]
        logits = batched_pass.run(self._engine.model, parts)
        sampled = [
            request.target.sample(part, each.rows, each.drafted, ahead=request.is_running)
            for request, part, each in zip(requests, logits, passes, strict=True)
        ]
        mx.async_eval(sampled)
        shared = SharedPass(
            len(requests),
            sum(each.rows.size for each in passes),
            sum(len(each.drafted) for each in passes),
            _context(requests),
            pipelined=lengths is None,
            joined=any(each.joining_tokens for each in requests),
        )
        for decoding, each, tokens in zip(decodings, passes, sampled, strict=True):
            decoding.launched(each, tokens, shared)

    def _collect(
        self, requests: Sequence[Request], running: Sequence[Request], seconds: float
    ) -> list[list[Step] | Exception]:
        """Return the results of the running requests' pass, and learn its cost."""
        passes = {each.decoding.shared for each in running}
        before = sum(len(each.tokens) for each in running)
        results = [each.collect(seconds) if each in running else [] for each in requests]
        tokens = sum(len(each.tokens) for each in running) - before
        shared = passes.pop()
        if shared is not None and not passes and shared.requests == len(running):
            self.passes, self.requests = self.passes + 1, self.requests + len(running)
            assert self._planner is not None
            self._planner.observe(shared, tokens, seconds)
        return results


def _context(requests: Sequence[Request]) -> int:
    """Return the mean number of cached tokens."""
    return sum(len(each.target.tokens) for each in requests) // len(requests)
