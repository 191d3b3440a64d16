"""Which drafters a trace can be replayed with, by name, and a whole trace replayed with one.

Owns the names and what each starts with. The passes are counted by `bench.replay`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from akunu_py.bench.replay.curves import Curve
from akunu_py.bench.replay.lookup import PromptLookupDrafter
from akunu_py.bench.replay.trace import Trace, TraceItem, replay
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.cost import MAX_ROWS, CostCurve
from akunu_py.ngram.fixed import FixedDrafter, NoDrafter
from akunu_py.ngram.memory import Memory
from akunu_py.types import DEFAULT_DRAFT_TOKENS, Drafter

COMPARED = ("fixed 4", "prompt lookup", "auto")


def replay_trace(
    trace: Trace,
    curve: Curve,
    drafter: str,
    *,
    workloads: Sequence[str] = (),
    draft_tokens: int = DEFAULT_DRAFT_TOKENS,
    memory: bool = False,
) -> dict[str, dict[str, Any]]:
    """Counts and rates by workload, as `replay` gives them; of all workloads where none is named.

    drafter: auto, fixed (of `draft_tokens`), off, or one of COMPARED. memory: auto learns from each
    item for those behind it in the workload.
    """
    return {
        name: _replay_items(trace.workloads[name], curve, drafter, draft_tokens, memory)
        for name in workloads or trace.workloads
    }


def _replay_items(
    items: Sequence[TraceItem], curve: Curve, drafter: str, draft_tokens: int, memory: bool
) -> dict[str, Any]:
    learned = Memory() if memory else None
    points = curve.table(MAX_ROWS)
    makers: dict[str, Callable[[], Drafter]] = {
        "auto": lambda: AutoDrafter(CostCurve(points), memory=learned),
        "fixed": lambda: FixedDrafter(draft_tokens),
        "off": NoDrafter,
        "fixed 4": lambda: FixedDrafter(4),
        "prompt lookup": PromptLookupDrafter,
    }
    learn = None if learned is None else (lambda item: learned.learn(item.output))
    return replay(items, makers[drafter], curve, learn)
