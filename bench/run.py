"""One run of the speed bench: what was asked for, in order, and what became of it.

Owns the order and the interruption: what was measured until then is a valid result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.bench import machine
from akunu_py.bench.curve import CONTEXT, measure_curve
from akunu_py.bench.replay.trace import load_trace
from akunu_py.bench.result import Result
from akunu_py.bench.runners.setup import MEMORY, Asked, make_contestants, make_memories, tell
from akunu_py.bench.speed import Plan, measure
from akunu_py.bench.throughput import make_tests, run_tests
from akunu_py.decoding.engine import Engine
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.memory import Memory

_CURVE_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Request:
    """What to measure: `prompts`, `generates` and `depths` in tokens, and texts."""

    plan: Plan
    asked: Asked
    prompts: Sequence[int] = ()
    generates: Sequence[int] = ()
    depths: Sequence[int] = (0,)
    curve_rows: Sequence[int] = ()
    memory_from: Path | None = None


def run_speed(
    engine: Engine, request: Request, command: str, progress: Callable[[str], None]
) -> Result:
    """Measures it all. After an interruption (KeyboardInterrupt) the result holds what was
    measured, and says that it is not complete.

    Raises UsageError for what cannot be measured, before anything is.
    """
    result = Result(
        command=command,
        date=machine.today(),
        model=machine.describe_model(engine),
        machine=machine.describe_machine(),
        load_s=round(engine.load_s, 3),
        curve_context=CONTEXT,
    )
    tests = make_tests(engine, request.prompts, request.generates, request.depths)
    trace = load_trace(request.memory_from) if request.memory_from else None
    plan = request.plan
    curve, memories = CostCurve(), dict[str, Memory]()
    field = make_contestants(engine, request.asked, curve, memories)
    try:
        run_tests(engine, tests, plan.repeats, result.throughput, progress)
        if plan.workloads:
            progress("cost curve")
            result.curve_s = measure_curve(engine, request.curve_rows, _CURVE_REPEATS)
            tell(curve, result.curve_s)
            if MEMORY in request.asked.modes:
                memories |= make_memories(engine, plan, trace, progress)
            measure(engine, field, plan, result.runs, progress)
        result.complete = True
    except KeyboardInterrupt:
        result.runs = [series for series in result.runs if series.repeats or series.failed]
        result.throughput = [test for test in result.throughput if test.rates]
    progress("")
    return result
