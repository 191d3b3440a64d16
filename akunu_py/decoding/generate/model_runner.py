"""Runs the decode passes of several requests as one."""

from __future__ import annotations

import time
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding.generate import batched_pass
from akunu_py.decoding.generate.decode import SharedRows
from akunu_py.decoding.generate.session import Request, Step
from akunu_py.decoding.model.engine import Engine
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.joint_plan import JointPlanner


class ModelRunner:
    """Plans and runs passes over the rows of several requests to one model."""

    def __init__(self, engine: Engine, curve: CostCurve) -> None:
        """curve: costs of passes for one request, the first estimate for those of several."""
        self._engine = engine
        self._curve = curve
        self._planner: JointPlanner | None = None
        self._why_not: str | None = None  # valid once there is a planner
        self.passes = self.requests = 0  # shared passes so far, and the requests in them

    @property
    def why_not_batched(self) -> str | None:
        """Why every request has passes of its own, None if they are shared. Runs a trial once."""
        if self._planner is None:
            model, kv_bits = self._engine.model, self._engine.plan.kv_bits
            self._why_not = batched_pass.why_not_batched(model, kv_bits)
            known = self._curve.table(0)
            costs = CostCurve({rows: known[rows - 1] for rows in range(1, MAX_ROWS + 1)})
            costs.preset = False
            self._planner = JointPlanner(costs)
        return self._why_not

    def run(self, requests: Sequence[Request]) -> list[list[Step] | Exception]:
        """Run one pass over all requests, which `can_share` it; return the results of each."""
        assert self._planner is not None
        started = time.perf_counter()
        decodings = [request.decoding for request in requests]
        pending = sum(len(request.target.pending) for request in requests)
        context = sum(len(request.target.tokens) for request in requests) // len(requests)
        try:
            offers = [decoding.offer() for decoding in decodings]
            lengths = self._planner.lengths(offers, pending, context)
            rows = [each.take(length) for each, length in zip(decodings, lengths, strict=True)]
            sampled = self._run(requests, rows)
        except Exception as error:  # noqa: BLE001 - every request reports it
            return [request.fail(error) for request in requests]
        seconds = time.perf_counter() - started
        self.passes, self.requests = self.passes + 1, self.requests + len(requests)
        before = sum(len(request.tokens) for request in requests)
        results = [
            request.finish_pass(each, tokens, seconds)
            for request, each, tokens in zip(requests, rows, sampled, strict=True)
        ]
        tokens = sum(len(request.tokens) for request in requests) - before
        self._planner.observe(len(requests), pending + sum(lengths), tokens, seconds, context)
        return results

    def _run(self, requests: Sequence[Request], rows: Sequence[SharedRows]) -> list[list[int]]:
        """Return the sampled tokens of each request."""
        parts = [
            batched_pass.Part(each.tokens, request.target.cache)
            for each, request in zip(rows, requests, strict=True)
        ]
        logits = batched_pass.run(self._engine.model, parts)
        mx.async_eval(logits)  # drafts are checked against grammars meanwhile
        sampled = [
            request.target.sample(part, each.tokens, each.drafted)
            for request, part, each in zip(requests, logits, rows, strict=True)
        ]
        mx.async_eval(sampled)
        return [request.target.read(each) for request, each in zip(requests, sampled, strict=True)]
