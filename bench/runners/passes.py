"""What each pass drafted and what became of it, watched from beside the drafter.

Owns the records of passes. Refuses to take part: the watched drafter is told and asked exactly what
it would be without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.fixed import FixedDrafter
from akunu_py.ngram.predictor import LONGEST_CONTEXT, ORDERS, Predictor, fnv1a
from akunu_py.types import Drafter


@dataclass(slots=True)
class Passes:
    """The passes of one answer, or of several in turn.

    drafted, accepted: tokens, by pass. evidence: what drafted tokens rested on -> [how many were
    tested, how many accepted]; a token behind a rejected one is not tested.
    draft_s: seconds spent in the drafter, from pass to pass: without learning a prompt.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    evidence: dict[str, list[int]] = field(default_factory=dict)
    draft_s: float = 0.0

    def watch(self, drafter: Drafter) -> Drafter:
        """`drafter`, with each of its passes recorded here."""
        return _Watched(drafter, self)


class _Watched:
    """A `Drafter` that does what another one does, and takes notes."""

    def __init__(self, drafter: Drafter, passes: Passes) -> None:
        self._drafter = drafter
        self._passes = passes
        self._draft: list[int] = []
        self._evidence: list[str] = []
        self._passed = False  # whether what it is told next is what a pass yielded

    def extend(self, tokens: Sequence[int]) -> None:
        started = time.perf_counter()
        self._drafter.extend(tokens)
        if self._passed:
            self._passes.draft_s += time.perf_counter() - started
        self._passed = False

    def propose(self, limit: int) -> list[int]:
        started = time.perf_counter()
        self._draft = self._drafter.propose(limit)
        self._passes.draft_s += time.perf_counter() - started
        self._evidence = _evidence(self._drafter, self._draft)
        return self._draft

    def observe(self, accepted: int, rows: int, seconds: float) -> None:
        started = time.perf_counter()
        self._drafter.observe(accepted, rows, seconds)
        self._passed = True
        passes = self._passes
        passes.draft_s += time.perf_counter() - started
        passes.drafted.append(len(self._draft))
        passes.accepted.append(accepted)
        for index, name in enumerate(self._evidence[: accepted + 1]):
            counts = passes.evidence.setdefault(name, [0, 0])
            counts[0] += 1
            counts[1] += index < accepted


def _evidence(drafter: Drafter, draft: Sequence[int]) -> list[str]:
    """What each token of `draft` rests on; for a match with the class of its order."""
    if isinstance(drafter, AutoDrafter):
        return [f"match {_class(order)}" if order else name for name, order in drafter.sources]
    if isinstance(drafter, FixedDrafter):
        return _ngram_orders(drafter.predictor, draft)
    return []


def _class(order: int) -> str:
    for low, high in ((4, 5), (6, 7), (8, 15), (16, 31)):
        if low <= order <= high:
            return f"{low}-{high}"
    return str(order)


def _ngram_orders(predictor: Predictor, draft: Sequence[int]) -> list[str]:
    names = []
    context = [*predictor.history[-LONGEST_CONTEXT:], *draft]
    for end in range(len(context) - len(draft), len(context)):
        known = (
            order - 1
            for order in reversed(ORDERS)
            if end >= order - 1 and fnv1a(context[end - order + 1 : end]) in predictor.tables[order]
        )
        names.append(f"match {next(known, 0)}")
    return names
