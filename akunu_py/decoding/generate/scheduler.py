"""Which requests take part in the next step.

Prefill gets at most as much time as decoding. Requests that can share a pass decode together; the
others take turns with equal time (stride scheduling: Waldspurger and Weihl, 1995). The shortest
remaining prompt is prefilled first, with a bound on waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from akunu_py.ngram.cost import PRIOR_PREFILL_RATE

_CHUNK_S = 0.2  # prefill time per step while another answer decodes,
_CHUNK_PASSES = 2.0  # in passes of that answer,
_PATIENCE_S = 1.0  # and while another prompt waits
_SHORT_WEIGHT = 4.0  # a short job's share of time
_LATE_S, _LATE = 2.0, 2.0  # a prompt waits for shorter ones this long, plus times its prefill time
# Limits of the prompt tokens in a shared pass, which takes about _CHUNK_S.
_LEAST_JOINING, _MOST_JOINING = 64, 256


@dataclass(slots=True, eq=False)
class Slot:
    """What the scheduler knows of a running request."""

    short: bool  # small prompt and few tokens
    since: float  # when it began
    spent: float  # weighted decode time, starting at the others' minimum
    begun: bool = False
    cancelled: bool = False
    can_share: bool = False  # its next decode pass may be shared
    is_running: bool = False  # has launched a pass
    prompt_tokens_left: int = 0
    joining_tokens: int = 0  # prompt tokens that run in its first decode pass
    stepped_s: float = 0.0  # all time given since `since`
    pass_s: float = 0.0  # time of its last pass

    @property
    def decodes(self) -> bool:
        """Whether its prompt is prefilled."""
        return self.begun and self.prompt_tokens_left == 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step: a prefill chunk or decode pass of one request, or a shared decode pass."""

    slots: Sequence[Slot]  # several share a pass
    alone: bool  # no request outside it is ready
    chunk: bool  # it begins a request or prefills
    mixed: bool  # some requests prefill while others decode
    chunk_seconds: float | None  # time limit of a prefill chunk; None: the fastest size


class Scheduler:
    """Plans one step after the other. Knows nothing of models."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        chunk_s: float = _CHUNK_S,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """chunk_s: time of a prefill chunk while others decode. patience_s: its upper bound."""
        self._clock = clock
        self._chunk_s, self._patience_s = chunk_s, patience_s
        self._prefill_ahead_s = 0.0  # prefill time minus decode time

    def schedule(self, ready: Sequence[Slot], prefill_rate: float | None) -> StepPlan:
        """Return the next step. ready: at least one slot. prefill_rate: tokens per second."""
        chosen = self._choose(ready, prefill_rate or PRIOR_PREFILL_RATE)
        shared = self._sharing(ready, chosen, prefill_rate or PRIOR_PREFILL_RATE)
        slots = shared if chosen in shared else [chosen]
        alone, chunk = len(slots) == len(ready), not chosen.decodes
        mixed = chunk in [each.decodes for each in ready if each not in slots]
        seconds = None if alone else self._chunk_seconds(ready, chosen)
        return StepPlan(slots, alone, chunk, mixed, seconds)

    def charge(self, plan: StepPlan, seconds: float) -> None:
        """Record the time of the last step."""
        chunk = plan.chunk
        first = plan.slots[0]
        weighed = seconds / (_SHORT_WEIGHT if first.short and len(plan.slots) == 1 else 1.0)
        for each in plan.slots:
            each.stepped_s += seconds
            if not chunk:
                each.spent += weighed / len(plan.slots)
                each.pass_s = seconds
        if plan.mixed:
            self._prefill_ahead_s += weighed if chunk else -seconds
        else:
            self._prefill_ahead_s = 0.0

    def _sharing(self, ready: Sequence[Slot], chosen: Slot, rate: float) -> list[Slot]:
        """Return the slots that can share a pass, with as many joining prompts as fit.

        If `chosen` joins, its prompt always fits.
        """
        room = min(max(_LEAST_JOINING, rate * self._chunk_s), _MOST_JOINING)
        shared = [each for each in ready if each.can_share and each.decodes]
        for each in sorted(shared, key=lambda each: (each is not chosen, each.joining_tokens)):
            room -= each.joining_tokens
            if room < 0 and each is not chosen and each.joining_tokens:
                shared.remove(each)
        return shared

    def _choose(self, ready: Sequence[Slot], rate: float) -> Slot:
        for each in ready:
            if each.is_running:  # its pass is collected first
                return each
        for each in ready:
            if each.cancelled or not each.begun:  # nearly free
                return each
        decoding = [each for each in ready if each.decodes]
        prefilling = [each for each in ready if not each.decodes]
        if prefilling and (not decoding or self._prefill_ahead_s <= 0.0):
            return self._shortest(prefilling, rate)
        return min(decoding, key=lambda each: each.spent)

    def _shortest(self, prefilling: Sequence[Slot], rate: float) -> Slot:
        """Return the slot with the least prompt left, or one that waited too long."""
        now = self._clock()
        waited = {id(each): now - each.since - each.stepped_s for each in prefilling}
        late = [
            each
            for each in prefilling
            if waited[id(each)] > _LATE_S + _LATE * each.prompt_tokens_left / rate
        ]
        if late:
            return max(late, key=lambda each: waited[id(each)])
        return min(prefilling, key=lambda each: each.prompt_tokens_left)

    def _chunk_seconds(self, ready: Sequence[Slot], chosen: Slot) -> float:
        """Return the time limit of a prefill chunk: short, or a few passes of other answers."""
        passes = [each.pass_s for each in ready if each.decodes and each is not chosen]
        most = _CHUNK_PASSES * max(passes, default=self._patience_s)
        return min(self._patience_s, max(self._chunk_s, most))
