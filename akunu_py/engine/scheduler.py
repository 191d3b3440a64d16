"""Which requests take part in the next step.

Prefill gets at most as much time as decoding. Requests that can share a pass decode together; the
others take turns with equal time (stride scheduling: Waldspurger and Weihl, 1995). The shortest
remaining prompt is prefilled first, with a bound on waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from akunu_py.ngram.cost import PRIOR_PREFILL_RATE

if TYPE_CHECKING:  # plain fields, no MLX
    from akunu_py.engine.request import Request

_CHUNK_PASSES = 2.0  # prefill time of a step while another answer decodes, in its passes
_SHORT_WEIGHT = 4.0  # a short job's share of time
# A prompt waits for shorter ones this many seconds, plus this multiple of its prefill time.
_LATE_S, _LATE = 2.0, 2.0
# Limits of the prompt tokens in a shared pass, which takes about `chunk_s`.
_LEAST_JOINING, _MOST_JOINING = 64, 256


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step: a prefill chunk or decode pass of one request, or a shared decode pass."""

    requests: Sequence[Request]  # several share a pass
    alone: bool = True  # no request outside it is ready
    chunk: bool = False  # it begins a request or prefills
    mixed: bool = False  # some requests prefill while others decode
    chunk_seconds: float | None = None  # time limit of a prefill chunk; None: the fastest size


@dataclass(eq=False)
class Scheduler:
    """Plans one step after the other. Knows nothing of models."""

    clock: Callable[[], float] = time.perf_counter
    # Time of a prefill chunk while others decode: at least, at most.
    chunk_s: float = 0.2
    patience_s: float = 1.0
    _prefill_excess_s: float = 0.0  # prefill time minus decode time

    def schedule(
        self, ready: Sequence[Request], sharing: Sequence[Request], prefill_rate: float | None
    ) -> StepPlan:
        """Return the next step. sharing: can share a decode pass. prefill_rate: tokens/s."""
        rate = prefill_rate or PRIOR_PREFILL_RATE
        chosen = self._choose(ready, rate)
        shared = self._fitting(sharing, chosen, rate)
        requests = shared if chosen in shared else [chosen]
        alone, chunk = len(requests) == len(ready), not chosen.decodes
        mixed = any(each.decodes == chunk for each in ready if each not in requests)
        seconds = None if alone else self._chunk_seconds(ready, chosen)
        return StepPlan(requests, alone, chunk, mixed, seconds)

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Record the time of the last step."""
        chunk, requests = plan.chunk, plan.requests
        weighed = seconds / (_SHORT_WEIGHT if requests[0].short and len(requests) == 1 else 1.0)
        for each in requests:
            each.stepped_s += seconds
            if not chunk:
                each.spent += weighed / len(requests)
                each.pass_s = seconds
        if plan.mixed:
            self._prefill_excess_s += weighed if chunk else -seconds
        else:
            self._prefill_excess_s = 0.0

    def _fitting(self, sharing: Sequence[Request], chosen: Request, rate: float) -> list[Request]:
        """Return the requests that share a pass: `chosen`, then the shortest joining prompts."""
        room = min(max(_LEAST_JOINING, rate * self.chunk_s), _MOST_JOINING)
        shared = [each for each in sharing if each.decodes]
        for each in sorted(shared, key=lambda each: (each is not chosen, each.joining_tokens)):
            room -= each.joining_tokens
            if room < 0 and each is not chosen and each.joining_tokens:
                shared.remove(each)
        return shared

    def _choose(self, ready: Sequence[Request], rate: float) -> Request:
        for each in ready:
            if each.is_running:  # its pass is collected first
                return each
        for each in ready:
            if each.cancelled or not each.begun:  # nearly free
                return each
        decoding = [each for each in ready if each.decodes]
        prefilling = [each for each in ready if not each.decodes]
        if prefilling and (not decoding or self._prefill_excess_s <= 0.0):
            return self._shortest(prefilling, rate)
        return min(decoding, key=lambda each: each.spent)

    def _shortest(self, prefilling: Sequence[Request], rate: float) -> Request:
        """Return the request with the least prompt left, or one that waited too long."""
        now = self.clock()

        def waited(each: Request) -> float:
            return now - each.since - each.stepped_s

        def is_late(each: Request) -> bool:
            return waited(each) > _LATE_S + _LATE * each.prompt_tokens_left / rate

        shortest = min(prefilling, key=lambda each: each.prompt_tokens_left)
        return max(filter(is_late, prefilling), key=waited, default=shortest)

    def _chunk_seconds(self, ready: Sequence[Request], chosen: Request) -> float:
        """Return the time limit of a prefill chunk: short, or a few passes of other answers."""
        passes = [each.pass_s for each in ready if each.decodes and each is not chosen]
        most = _CHUNK_PASSES * max(passes, default=self.patience_s)
        return min(self.patience_s, max(self.chunk_s, most))
