"""Who takes part: from what was asked for to the contestants, ready to run.

Owns what they know beforehand: the measured cost curve, and a memory that never heard the answer it
is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.bench.replay.trace import Trace
from akunu_py.bench.runners import peers
from akunu_py.bench.runners.ours import (
    Conditions,
    Contestant,
    MlxLm,
    MlxLmDraftModel,
    Ours,
)
from akunu_py.bench.speed import Plan
from akunu_py.decoding.engine import Engine
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.memory import CAPACITY_BITS, Memory

MEMORY = "memory"
_LEAST_BITS = 12
_TOLD = 3  # times that each measured cost is told to a curve, so that it outweighs the prior


@dataclass(frozen=True, slots=True)
class Asked:
    """modes: of ours: off, fixed, auto, and memory, which is auto with one. draft_tokens: of fixed,
    which takes part once for each. The others are None where they do not take part."""

    modes: Sequence[str]
    draft_tokens: Sequence[int]
    draft_model: Engine | None = None
    llama_cpp: Path | None = None
    transformers: Path | None = None


def make_contestants(
    engine: Engine, asked: Asked, curve: CostCurve, memories: Mapping[str, Memory]
) -> list[Contestant]:
    """mlx-lm's plain loop first. Ours share `curve`, as they do in use, and read `memories`.

    A peer that is not there takes part as one that fails. Raises UsageError where the draft model
    does not go with the engine's.
    """
    made: list[Contestant] = [MlxLm(engine)]
    if asked.draft_model is not None:
        made.append(MlxLmDraftModel(engine, asked.draft_model))
    for mode in asked.modes:
        if mode == MEMORY:
            made.append(Ours(engine, "auto", curve, memory=memories))
        elif mode == "fixed":
            made += [Ours(engine, "fixed", curve, draft_tokens=n) for n in asked.draft_tokens]
        else:
            made.append(Ours(engine, "auto" if mode == "auto" else "off", curve))
    if asked.llama_cpp is not None:
        made += peers.llama_cpp(engine, asked.llama_cpp)
    if asked.transformers is not None:
        made += peers.transformers(engine, asked.transformers)
    return made


def tell(curve: CostCurve, curve_s: Mapping[int, float]) -> None:
    """Tells a planner's curve what was measured; it goes on learning from there."""
    for _ in range(_TOLD):
        for rows, seconds in curve_s.items():
            curve.observe(rows, seconds, 0)


def make_memories(
    engine: Engine,
    plan: Plan,
    trace: Trace | None,
    progress: Callable[[str], None],
) -> dict[str, Memory]:
    """For each workload a memory of the answers to the other ones, and of those in `trace`."""
    plain = Ours(engine, "off", CostCurve())
    said: dict[str, list[list[int]]] = {}
    for workload in plan.workloads:
        progress(f"an answer for the memory: {workload.name}")
        run = plain.run(workload, Conditions(min(plan.max_tokens, workload.max_tokens)))
        said[workload.name] = [tokens for _, tokens in run.turns]
    recorded = (
        [item.output for items in trace.workloads.values() for item in items] if trace else []
    )
    memories = {}
    for workload in plan.workloads:
        known = [*recorded, *(t for name in said if name != workload.name for t in said[name])]
        # No larger than it must be: there is one for each workload.
        bits = sum(len(tokens) + 1 for tokens in known).bit_length()
        memory = memories[workload.name] = Memory(min(CAPACITY_BITS, max(_LEAST_BITS, bits)))
        for tokens in known:
            memory.learn(tokens)
    return memories
