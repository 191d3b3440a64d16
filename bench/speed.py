"""Tokens per second, side by side in one process.

The runners take turns on each workload, repetition by repetition and each time in another order,
so that a machine that slows down slows all of them. Times are wall times; the prompt is not counted
in tokens per second. Every repetition is kept.

Tests of given lengths are llama-bench's: pp512, tg128, at chosen depths. Their tokens are random,
as there, and stop tokens stop nothing. Drafting is off: what it is worth depends on the text, which
is what the workloads are for.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.bench.curve import CONTEXT, measure_curve
from akunu_py.bench.fidelity import first_divergence
from akunu_py.bench.result import (
    Repeat,
    Result,
    Series,
    Throughput,
    describe_machine,
    describe_model,
    loop_start,
    today,
)
from akunu_py.bench.runners import PLAIN, Conditions, Run, Runner, peers
from akunu_py.bench.runners.akunu import OFF, Akunu
from akunu_py.bench.runners.mlx_lm import MlxLm, MlxLmDraftModel
from akunu_py.bench.trace import Trace, load_trace
from akunu_py.bench.workloads import Workload
from akunu_py.decoding.drafting.drafter import check_mode
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import HostLost, UsageError
from akunu_py.ngram.cost import CostCurve
from akunu_py.ngram.memory import CAPACITY_BITS, Memory
from akunu_py.types import DraftMode, GenerateOptions

CURVE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MEMORY = "memory"
OURS = "akunu"
_CURVE_REPEATS = 7
_CURVE_OBSERVATIONS = 3  # of each measured cost, so that it outweighs the prior
_LEAST_BITS = 12
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """Which runners there are. modes: of ours, and memory, which is auto with one. draft_tokens: of
    fixed, which runs once for each. The others are None to leave them out."""

    modes: Sequence[str]
    draft_tokens: Sequence[int]
    draft_model: Engine | None = None
    llama_cpp: Path | None = None
    transformers: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. max_tokens: of an answer, where the workload's own limit is not lower.
    prompts, generates, depths: lengths in tokens, each pair at each depth. memory_from: a trace
    file whose answers the memory has too."""

    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    max_tokens: int
    repeats: int
    prompts: Sequence[int] = ()
    generates: Sequence[int] = ()
    depths: Sequence[int] = (0,)
    memory_from: Path | None = None


def run_speed(
    engine: Engine, setup: Setup, plan: Plan, command: str, progress: Callable[[str], None]
) -> Result:
    """Measures it all. After an interruption (KeyboardInterrupt), or where another host of the
    model was lost, the result holds what was measured, and is marked as not complete.

    Raises UsageError for what cannot be measured, before anything is.
    """
    result = Result(
        command=command,
        date=today(),
        model=describe_model(engine),
        machine=describe_machine(),
        load_s=round(engine.load_s, 3),
        curve_context=CONTEXT,
    )
    tests = make_tests(engine, plan.prompts, plan.generates, plan.depths)
    trace = load_trace(plan.memory_from) if plan.memory_from else None
    curve, memories = CostCurve(), dict[str, Memory]()
    runners = make_runners(engine, setup, curve, memories)
    try:
        run_tests(engine, tests, plan.repeats, result.throughput, progress)
        if plan.workloads:
            progress("cost curve")
            result.curve_s = measure_curve(engine, CURVE_ROWS, _CURVE_REPEATS)
            _seed_curve(curve, result.curve_s)
            if MEMORY in setup.modes:
                memories |= make_memories(engine, plan, trace, progress)
            measure(engine, runners, plan, result.runs, progress)
        result.complete = True
    except (KeyboardInterrupt, HostLost, RuntimeError) as error:
        result.lost = _why_ended(engine, error)
        result.runs = [series for series in result.runs if series.repeats or series.failed]
        result.throughput = [test for test in result.throughput if test.rates]
    progress("")
    return result


def _why_ended(engine: Engine, error: BaseException) -> str:
    """Which other host was lost, "" for an interruption. Raises `error` where it is neither."""
    if not isinstance(error, RuntimeError):
        return str(error)
    lost = engine.ring.explain(error) if engine.ring else None
    if lost is None:
        raise error
    return str(lost)


def make_runners(
    engine: Engine, setup: Setup, curve: CostCurve, memories: Mapping[str, Memory]
) -> list[Runner]:
    """mlx-lm's plain loop first; of a divided model, which it cannot run, our own. Ours share
    `curve`, as they do in use, and read `memories`.

    A peer that is not installed is a runner that fails. Raises UsageError where the draft model
    does not go with the engine's.
    """
    modes = list(setup.modes)
    runners: list[Runner] = [MlxLm(engine)]
    if engine.ring is not None:
        runners, modes = [], [OFF, *(mode for mode in modes if mode != OFF)]
    if setup.draft_model is not None:
        runners.append(MlxLmDraftModel(engine, setup.draft_model))
        drafted = engine.drafted_by(setup.draft_model)
        runners += [
            Akunu(drafted, "model", curve, name="draft model"),
            Akunu(drafted, "auto", curve, name="auto + draft model"),
        ]
    for mode in modes:
        if mode == MEMORY:
            runners.append(Akunu(engine, "auto", curve, memory=memories))
        elif mode == "fixed":
            runners += [Akunu(engine, "fixed", curve, draft_tokens=n) for n in setup.draft_tokens]
        else:
            check_mode(engine, named := cast(DraftMode, mode))
            runners.append(Akunu(engine, named, curve))
    if setup.llama_cpp is not None:
        runners += peers.llama_cpp(engine, setup.llama_cpp)
    if setup.transformers is not None:
        runners += peers.transformers(engine, setup.transformers)
    return runners


def _seed_curve(curve: CostCurve, curve_s: Mapping[int, float]) -> None:
    """Lets a planner's curve start from the measured costs; it keeps learning."""
    for _ in range(_CURVE_OBSERVATIONS):
        for rows, seconds in curve_s.items():
            curve.observe(rows, seconds, 0)


def make_memories(
    engine: Engine, plan: Plan, trace: Trace | None, progress: Callable[[str], None]
) -> dict[str, Memory]:
    """For each workload a memory of the answers to the other ones, and of those in `trace`."""
    plain = Akunu(engine, "off", CostCurve())
    outputs: dict[str, list[list[int]]] = {}
    for workload in plan.workloads:
        progress(f"an answer for the memory: {workload.name}")
        run = plain.run(workload, Conditions(min(plan.max_tokens, workload.max_tokens)))
        outputs[workload.name] = [output for _, output in run.turns]
    recorded = (
        [item.output for items in trace.workloads.values() for item in items] if trace else []
    )
    memories = {}
    for workload in plan.workloads:
        others = (each for name in outputs if name != workload.name for each in outputs[name])
        known = [*recorded, *others]
        # No larger than it must be: there is one for each workload.
        bits = sum(len(tokens) + 1 for tokens in known).bit_length()
        memory = memories[workload.name] = Memory(min(CAPACITY_BITS, max(_LEAST_BITS, bits)))
        for tokens in known:
            memory.learn(tokens)
    return memories


# Workloads


def measure(
    engine: Engine,
    runners: Sequence[Runner],
    plan: Plan,
    runs: list[Series],
    progress: Callable[[str], None],
) -> None:
    """Appends to `runs` a series for each workload, temperature and runner, in this order.

    They grow while it measures: what is in them is valid whenever it is interrupted. A foreign
    runner that fails is left out from then on; its series say why.
    """
    working = list(runners)
    for workload in plan.workloads:
        for temperature in plan.temperatures:
            group = [
                Series(
                    workload.name,
                    temperature,
                    runner.name,
                    runner.baseline,
                    _if_present(runner.reference(temperature), runners),
                )
                for runner in working
            ]
            runs += group
            limit = min(plan.max_tokens, workload.max_tokens)
            # The round before the first warms up, and no other has its seed.
            for repeat in range(-1, plan.repeats):
                progress(_describe_round(workload, temperature, repeat, plan.repeats))
                conditions = Conditions(limit, temperature, repeat + 1)
                if repeat < 0:
                    conditions = replace(conditions, max_tokens=min(limit, _WARM_UP_TOKENS))
                pairs = list(zip(working, group, strict=True))
                answers = _run_round(pairs, workload, conditions, repeat)
                if repeat >= 0:
                    _compare_outputs(engine, group, answers)
                    _record_last(group, answers)
                working = [runner for runner, series in pairs if series.failed is None]
                group = [series for series in group if series.failed is None]


def _run_round(
    pairs: list[tuple[Runner, Series]], workload: Workload, conditions: Conditions, repeat: int
) -> dict[str, Run]:
    """One run of each, by the runner's name; those that fail have none."""
    first = max(repeat, 0) % len(pairs) if pairs else 0
    answers: dict[str, Run] = {}
    for runner, series in [*pairs[first:], *pairs[:first]]:
        try:
            run = runner.run(workload, conditions)
        except Exception as error:
            if not runner.foreign:
                raise
            series.failed = f"{type(error).__name__}: {error}"
            continue
        answers[runner.name] = run
        # A step that runs ahead must not run into the next runner's time.
        mx.synchronize(generation_stream)
        mx.clear_cache()
        if repeat >= 0:
            series.repeats.append(
                Repeat(run.decoded, run.decode_s, fmean(run.ttft_s), run.peak_bytes)
            )
    return answers


def _compare_outputs(engine: Engine, group: Sequence[Series], answers: dict[str, Run]) -> None:
    """Notes in each series whether its output was that of its reference in this round."""
    for series in group:
        run, reference = answers.get(series.runner), answers.get(series.reference or "")
        if run is None or reference is None:
            continue
        same_weights = series.baseline in (PLAIN, OFF)
        divergence = first_divergence(engine if same_weights else None, reference.turns, run.turns)
        series.identical = series.identical is not False and divergence is None
        if divergence is not None and series.difference is None:
            series.difference = asdict(divergence)


def _record_last(group: Sequence[Series], answers: dict[str, Run]) -> None:
    """Keeps the text and the passes of the last repetition."""
    for series in group:
        run = answers.get(series.runner)
        if run is None:
            continue
        series.prompt_tokens = sum(len(prompt) for prompt, _ in run.turns)
        series.drafted, series.accepted = run.passes.drafted, run.passes.accepted
        series.sources, series.draft_s = run.passes.sources, run.passes.draft_s
        series.loop = loop_start(run.turns[-1][1])
        series.answer = run.text


def _if_present(name: str | None, runners: Sequence[Runner]) -> str | None:
    return name if any(runner.name == name for runner in runners) else None


def _describe_round(workload: Workload, temperature: float, repeat: int, repeats: int) -> str:
    what = "warming up" if repeat < 0 else f"repetition {repeat + 1} of {repeats}"
    return f"{workload.name}, temperature {temperature:g}: {what}"


# Given lengths


@dataclass(frozen=True, slots=True)
class LengthTest:
    """Read `prompt` tokens, or generate `generate` (one of the two is 0), behind `depth`."""

    prompt: int
    generate: int
    depth: int

    @property
    def name(self) -> str:
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{what} @ d{self.depth}" if self.depth else what


def make_tests(
    engine: Engine, prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int]
) -> list[LengthTest]:
    """Each length at each depth; lengths of 0 are left out, as in llama-bench.

    Raises UsageError where one does not fit the model's context.
    """
    tests = [
        *(LengthTest(prompt, 0, depth) for depth in depths for prompt in prompts if prompt),
        *(LengthTest(0, generate, depth) for depth in depths for generate in generates if generate),
    ]
    for test in tests:
        if (needed := test.depth + test.prompt + test.generate + 2) > engine.plan.context_length:
            raise UsageError(
                f"{test.name} needs a context of {needed} tokens, "
                f"{engine.name} has {engine.plan.context_length}; choose less with -p, -n or -d"
            )
    return tests


def run_tests(
    engine: Engine,
    tests: Sequence[LengthTest],
    repeats: int,
    into: list[Throughput],
    progress: Callable[[str], None],
) -> None:
    """Appends two series for each test to `into`; they grow while it measures."""
    endless = replace(engine, tokens=replace(engine.tokens, stop_tokens=frozenset()))
    loops = {PLAIN: _time_mlx_lm, OURS: _time_akunu}
    if engine.ring is not None:
        del loops[PLAIN]  # which cannot run a divided model
    for test in tests:
        rows = {name: Throughput(test.name, name) for name in loops}
        into += rows.values()
        for repeat in range(-1, repeats):  # the first round warms up
            progress(f"{test.name}: {'warming up' if repeat < 0 else f'{repeat + 1}/{repeats}'}")
            tokens = _random_tokens(engine, test.depth + max(1, test.prompt), repeat)
            for name, loop in loops.items():
                seconds = loop(endless, test, tokens)
                mx.synchronize(generation_stream)
                mx.clear_cache()
                if repeat >= 0:
                    rows[name].rates.append((test.prompt or test.generate) / seconds)


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    special = set(engine.tokens.tokenizer.all_special_ids)
    usual = [token for token in range(len(engine.tokens.tokenizer)) if token not in special]
    return draw.choices(usual, k=count)


def _time_mlx_lm(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    """Seconds of the test in mlx-lm's loop."""
    cache = make_prompt_cache(engine.model)
    if test.prompt and test.depth:  # max_tokens 0: reads the prompt, generates nothing
        list(generate_step(mx.array(tokens[: test.depth]), engine.model, max_tokens=0,
                           prompt_cache=cache))  # fmt: skip
    read = tokens[test.depth :] if test.prompt else tokens
    started = time.perf_counter()
    steps = generate_step(
        mx.array(read), engine.model, max_tokens=1 + test.generate, prompt_cache=cache
    )
    next(steps)
    if test.generate:
        started = time.perf_counter()
        for _ in steps:
            pass
    elapsed = time.perf_counter() - started
    steps.close()
    return elapsed


def _time_akunu(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    """Seconds of the test in our plain loop, scaled to `test.prompt` tokens where a cache that
    cannot be trimmed had more to read than those."""
    session = Session(engine)
    if test.prompt and test.depth:
        session.generate(tokens[: test.depth], GenerateOptions(max_tokens=1, draft="off")).answer()
    options = GenerateOptions(max_tokens=1 + test.generate, draft="off")
    stats = session.generate(tokens, options).answer().stats
    if test.generate:
        return stats.decode_s
    return stats.prefill_s * test.prompt / (stats.prompt_tokens - stats.cached_tokens)
