"""Tokens per second, side by side in one process.

The contestants take turns on each workload, repetition by repetition and each time in another
order, so that a machine that slows down slows all of them. Times are wall times; the prompt is not
counted in tokens per second. Every repetition is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean

import mlx.core as mx
from mlx_lm.generate import generation_stream

from akunu_py.bench.divergence import first_difference
from akunu_py.bench.loops import loop_start
from akunu_py.bench.result import Repeat, Series
from akunu_py.bench.runners.ours import PLAIN, Conditions, Contestant, Run
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.engine import Engine

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. max_tokens: of an answer, where the workload's own limit is not lower."""

    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    max_tokens: int
    repeats: int


def measure(
    engine: Engine,
    contestants: Sequence[Contestant],
    plan: Plan,
    runs: list[Series],
    progress: Callable[[str], None],
) -> None:
    """Appends to `runs` a series for each workload, temperature and contestant, in this order.

    They grow while it measures: what is in them is valid whenever it is interrupted. A foreign
    contestant that fails is left out from then on; its series say why.
    """
    fit = list(contestants)
    for workload in plan.workloads:
        for temperature in plan.temperatures:
            group = [
                Series(
                    workload.name,
                    temperature,
                    contestant.name,
                    contestant.baseline,
                    _present(contestant.reference(temperature), contestants),
                )
                for contestant in fit
            ]
            runs += group
            limit = min(plan.max_tokens, workload.max_tokens)
            # The round before the first warms up, and its seed is nobody's.
            for repeat in range(-1, plan.repeats):
                progress(_line(workload, temperature, repeat, plan.repeats))
                conditions = Conditions(limit, temperature, repeat + 1)
                if repeat < 0:
                    conditions = replace(conditions, max_tokens=min(limit, _WARM_UP_TOKENS))
                said = _round(list(zip(fit, group, strict=True)), workload, conditions, repeat)
                if repeat >= 0:
                    _compare(engine, group, said)
                    _note(engine, group, said)
                alive = [c for c, s in zip(fit, group, strict=True) if s.failed is None]
                group = [series for series in group if series.failed is None]
                fit = alive


def _round(
    field: list[tuple[Contestant, Series]], workload: Workload, conditions: Conditions, repeat: int
) -> dict[str, Run]:
    """One answer of each, by name; those that fail have none."""
    first = max(repeat, 0) % len(field) if field else 0
    said: dict[str, Run] = {}
    for contestant, series in [*field[first:], *field[:first]]:
        try:
            run = contestant.run(workload, conditions)
        except Exception as error:
            if not contestant.foreign:
                raise
            series.failed = f"{type(error).__name__}: {error}"
            continue
        said[contestant.name] = run
        # A step that runs ahead must not run into the time of whoever comes next.
        mx.synchronize(generation_stream)
        mx.clear_cache()
        if repeat >= 0:
            series.repeats.append(
                Repeat(run.decoded, run.decode_s, fmean(run.ttft_s), run.peak_bytes)
            )
    return said


def _compare(engine: Engine, group: Sequence[Series], said: dict[str, Run]) -> None:
    """Notes who said the same tokens as its reference in this round."""
    for series in group:
        run, reference = said.get(series.contestant), said.get(series.reference or "")
        if run is None or reference is None:
            continue
        same_weights = series.baseline == PLAIN
        difference = first_difference(engine if same_weights else None, reference.turns, run.turns)
        series.identical = series.identical is not False and difference is None
        if difference is not None and series.difference is None:
            series.difference = asdict(difference)


def _note(engine: Engine, group: Sequence[Series], said: dict[str, Run]) -> None:
    """Keeps what the last repetition said, and how."""
    for series in group:
        run = said.get(series.contestant)
        if run is None:
            continue
        series.prompt_tokens = sum(len(prompt) for prompt, _ in run.turns)
        series.drafted, series.accepted = run.passes.drafted, run.passes.accepted
        series.evidence, series.draft_s = run.passes.evidence, run.passes.draft_s
        series.loop = loop_start(run.turns[-1][1])
        series.answer = run.text


def _present(name: str | None, contestants: Sequence[Contestant]) -> str | None:
    return name if any(contestant.name == name for contestant in contestants) else None


def _line(workload: Workload, temperature: float, repeat: int, repeats: int) -> str:
    what = "warming up" if repeat < 0 else f"repetition {repeat + 1} of {repeats}"
    return f"{workload.name}, temperature {temperature:g}: {what}"
