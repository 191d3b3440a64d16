"""`akunu bench speed`: tokens per second, compared with other loops in one process.

The runners take turns in each repetition, in a rotating order, so that a machine that slows down
slows all of them. Tokens per second exclude the prefill. Tests of given lengths are those of
llama-bench: random tokens, no stop tokens, no drafting.
"""

import argparse
import itertools
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import cast

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.arguments import check_hosts
from akunu_py.bench import command
from akunu_py.bench.command import FULL, MEMORY, QUICK
from akunu_py.bench.curve import CONTEXT, measure_curve
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
from akunu_py.bench.runners import (
    OFF,
    PLAIN,
    Akunu,
    Conditions,
    MlxLm,
    MlxLmDraftModel,
    Run,
    Runner,
)
from akunu_py.bench.tables import result_markdown, result_text
from akunu_py.bench.workloads import Workload, load_workloads
from akunu_py.engine import kv_cache
from akunu_py.engine.drafters.drafter import check_mode
from akunu_py.engine.engine import Engine
from akunu_py.engine.load import load_engine
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model.drafters import DraftModel
from akunu_py.engine.model.token_ids import common_prefix
from akunu_py.errors import INTERRUPTED, HostLost, UsageError
from akunu_py.ngram.answer_cache import CAPACITY_BITS, AnswerCache
from akunu_py.ngram.cost import CostCurve
from akunu_py.types import DEFAULT_DRAFT_TOKENS, DraftMode, GenerateOptions, LoadOptions

CURVE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
OURS = "akunu"
_CURVE_REPEATS = 7
_CURVE_OBSERVATIONS = 3  # of each measured cost, so that it outweighs the prior
_MIN_BITS = 12
_WARM_UP_TOKENS = 16


def run(options: argparse.Namespace) -> int:
    by_length = any(options.n_prompt) or any(options.n_gen)
    scope = FULL if options.full else QUICK
    names = options.workload or (["none"] if by_length else scope.workloads)
    workloads = [] if names == ["none"] else load_workloads(names)
    if not workloads and not by_length:
        raise UsageError("nothing to measure: choose a workload, or lengths with -p and -n")
    check_hosts(options.hosts, options.draft or (), draft_model=options.draft_model)
    loading = LoadOptions(options.weights, hosts=options.hosts, draft_model=options.draft_model)
    engine = load_engine(options.model, loading)
    plan = SpeedPlan(
        workloads,
        options.temperature or [0.0],
        options.max_tokens or scope.max_tokens,
        options.repeats,
        modes=options.draft or scope.modes,
        draft_tokens=options.draft_tokens,
        draft_model=options.draft_model,
        prompts=options.n_prompt,
        generates=options.n_gen,
        depths=options.n_depth,
    )
    result = run_speed(engine, plan, options.command_line)
    if options.output:
        result.save(options.output)
    if options.format == "json":
        print(result.to_json(), end="")
    else:
        print(result_markdown(result) if options.format == "md" else result_text(result))
    if workloads and not options.full:
        command.print_line("to measure all workloads and draft modes, run: akunu bench --full")
    if result.lost:
        raise HostLost(result.lost)
    if result.complete:
        return 0
    command.print_line("interrupted: only the results measured so far are shown")
    return INTERRUPTED


@dataclass(frozen=True, slots=True)
class SpeedPlan:
    """What to measure; lengths are in tokens."""

    workloads: Sequence[Workload]
    temperatures: Sequence[float]
    max_tokens: int  # of an answer; a workload may have a lower limit
    repeats: int
    modes: Sequence[str] = ()  # draft modes and `MEMORY`
    draft_tokens: int = DEFAULT_DRAFT_TOKENS  # of `fixed`
    draft_model: str | None = None  # the name of the engine's, if it was chosen for this run
    prompts: Sequence[int] = ()
    generates: Sequence[int] = ()
    depths: Sequence[int] = (0,)  # of each prompt and generation


def run_speed(engine: Engine, plan: SpeedPlan, command_line: str) -> Result:
    """Measure everything in `plan`.

    After Ctrl-C or the loss of a host the result is partial and marked as not complete. Raises
    UsageError before it measures anything.
    """
    load_s, described = round(engine.load_s, 3), describe_model(engine)
    result = Result(command_line, today(), described, describe_machine(), load_s=load_s)
    result.curve_context = CONTEXT
    tests = make_tests(engine, plan.prompts, plan.generates, plan.depths)
    curve, memories = CostCurve(), dict[str, AnswerCache]()
    runners = make_runners(engine, plan, curve, memories)
    try:
        run_tests(engine, tests, plan.repeats, result.throughput)
        if plan.workloads:
            result.curve_s = measure_curve(engine, CURVE_ROWS, _CURVE_REPEATS)
            for rows, seconds in [*result.curve_s.items()] * _CURVE_OBSERVATIONS:
                curve.observe(rows, seconds, 0)  # the planner's start; it keeps learning
            if MEMORY in plan.modes:
                memories |= make_memories(engine, plan)
            measure(engine, runners, plan, result.runs)
        result.complete = True
    except (KeyboardInterrupt, HostLost, RuntimeError) as error:
        result.lost = _lost_host(engine, error)
        result.runs = [series for series in result.runs if series.repeats or series.failed]
        result.throughput = [test for test in result.throughput if test.rates]
    command.progress("")
    return result


def _lost_host(engine: Engine, error: BaseException) -> str:
    """Return the message about a lost host, "" for an interruption. Raises any other `error`."""
    if not isinstance(error, RuntimeError):
        return str(error)
    if engine.host_group is None or (lost := engine.host_group.explain(error)) is None:
        raise error
    return str(lost)


def make_runners(
    engine: Engine, plan: SpeedPlan, curve: CostCurve, memories: Mapping[str, AnswerCache]
) -> list[Runner]:
    """Return all runners, without mlx-lm's plain loop for a model split over hosts.

    Our runners share `curve` and read `memories`. Raises UsageError if a mode is not available.
    """
    modes = list(plan.modes)
    runners: list[Runner] = [MlxLm(engine)]
    if engine.host_group is not None:
        runners, modes = [], [OFF, *(mode for mode in modes if mode != OFF)]
    if plan.draft_model:
        runners += _drafted_runners(engine, plan.draft_model, curve)
        if engine.draft_model is None:  # the draft model is an MTP head
            why = "the model is measured without the head of --draft-model"
            engine = replace(engine, mtp_head=None, no_mtp_head_reason=why)
        engine = replace(engine, draft_model=None)
    for mode in modes:
        memory = memories if mode == MEMORY else None
        named = cast(DraftMode, "auto" if mode == MEMORY else mode)
        check_mode(engine, named)
        draft_tokens = plan.draft_tokens if mode == "fixed" else None
        runners.append(Akunu(engine, named, curve, draft_tokens=draft_tokens, memory=memory))
    return runners


def _drafted_runners(engine: Engine, drafter: str, curve: CostCurve) -> list[Runner]:
    mode: DraftMode = "model" if engine.draft_model else "mtp"
    runners: list[Runner] = [
        Akunu(engine, mode, curve, name="draft model"),
        Akunu(engine, "auto", curve, name="auto + draft model"),
    ]
    if isinstance(engine.draft_model, DraftModel):
        return [MlxLmDraftModel(engine, engine.draft_model), *runners]
    why = f"{drafter} is a drafter, which cannot answer alone"
    command.print_line(f"{MlxLmDraftModel.name} is not measured: {why}")
    return runners


def make_memories(engine: Engine, plan: SpeedPlan) -> dict[str, AnswerCache]:
    """Return an answer cache by workload, of the answers to the other workloads."""
    plain = Akunu(engine, "off", CostCurve())
    outputs: dict[str, list[list[int]]] = {}
    for workload in plan.workloads:
        command.progress(f"answer for the memory: {workload.name}")
        run = plain.run(workload, Conditions(min(plan.max_tokens, workload.max_tokens)))
        outputs[workload.name] = [output for _, output in run.turns]
    memories = {}
    for workload in plan.workloads:
        others = [each for name in outputs if name != workload.name for each in outputs[name]]
        # Small, because each workload has its own.
        bits = sum(len(tokens) + 1 for tokens in others).bit_length()
        memory = memories[workload.name] = AnswerCache(min(CAPACITY_BITS, max(_MIN_BITS, bits)))
        for tokens in others:
            memory.learn(tokens)
    return memories


def measure(engine: Engine, runners: Sequence[Runner], plan: SpeedPlan, runs: list[Series]) -> None:
    """Append to `runs` a series for each workload, temperature and runner, in this order.

    The series are valid at any interruption. A foreign runner that fails does not run again.
    """
    active, names = list(runners), {runner.name for runner in runners}
    groups = list(itertools.product(plan.workloads, plan.temperatures))
    for number, (workload, temperature) in enumerate(groups):
        pairs = []
        for runner in active:
            series = Series(workload.name, temperature, runner.name, runner.baseline)
            if (reference := runner.reference(temperature)) in names:
                series.reference = reference
            pairs.append((runner, series))
        runs += [series for _, series in pairs]
        limit = min(plan.max_tokens, workload.max_tokens)
        # Round -1 warms up, with its own seed.
        for repeat in range(-1, plan.repeats):
            what = "warming up" if repeat < 0 else f"repetition {repeat + 1} of {plan.repeats}"
            done = (number * (plan.repeats + 1) + repeat + 1) / (len(groups) * (plan.repeats + 1))
            command.progress(f"{done:4.0%} {workload.name}, temperature {temperature:g}: {what}")
            conditions = Conditions(limit, temperature, repeat + 1)
            if repeat < 0:
                conditions = replace(conditions, max_tokens=min(limit, _WARM_UP_TOKENS))
            answers = _run_round(pairs, workload, conditions, repeat)
            pairs = [(runner, series) for runner, series in pairs if series.failed is None]
            if repeat >= 0:
                _record_round(engine, [series for _, series in pairs], answers)
        active = [runner for runner, _ in pairs]


def _run_round(
    pairs: list[tuple[Runner, Series]], workload: Workload, conditions: Conditions, repeat: int
) -> dict[str, Run]:
    first = max(repeat, 0) % len(pairs) if pairs else 0
    answers: dict[str, Run] = {}
    for runner, series in [*pairs[first:], *pairs[:first]]:
        try:
            run = runner.run(workload, conditions)
        except Exception as error:  # a foreign runner's code raises anything
            if not runner.foreign:
                raise
            series.failed = f"{type(error).__name__}: {error}"
            continue
        answers[runner.name] = run
        _synchronize()
        if repeat >= 0:
            series.repeats.append(
                Repeat(run.decoded, run.decode_s, fmean(run.ttft_s), run.peak_bytes)
            )
    return answers


def _record_round(engine: Engine, group: Sequence[Series], answers: dict[str, Run]) -> None:
    for series in group:
        run, reference = answers[series.runner], answers.get(series.reference or "")
        if reference is not None:
            weights = engine if series.baseline in (PLAIN, OFF) else None
            divergence = first_divergence(weights, reference.turns, run.turns)
            series.identical = series.identical is not False and divergence is None
            if divergence is not None and series.difference is None:
                series.difference = asdict(divergence)
        series.prompt_tokens = sum(len(prompt) for prompt, _ in run.turns)
        series.drafted, series.accepted = run.drafted, run.accepted
        series.loop = loop_start(run.turns[-1][1])
        series.answer = run.text


Turns = Sequence[tuple[list[int], list[int]]]
"""The (prompt, output) of each turn of a conversation, as token ids."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two conversations."""

    turn: int
    position: int  # in the answer of this turn, in tokens
    expected: int  # token id, -1 for the end of an answer
    found: int
    margin: float | None  # of the two highest logits; None without a model or if prompts differ


def first_divergence(engine: Engine | None, expected: Turns, found: Turns) -> Divergence | None:
    """Return the first difference of two conversations, if any. engine: computes the margin."""
    for turn, ((prompt, left), (other, right)) in enumerate(zip(expected, found, strict=True)):
        if prompt != other:
            return Divergence(turn, 0, -1, -1, None)
        if left != right:
            at = common_prefix(left, right)
            margin = top_two_margin(next_logits(engine, [*prompt, *left[:at]])) if engine else None
            ours, theirs = (side[at] if at < len(side) else -1 for side in (left, right))
            return Divergence(turn, at, ours, theirs, margin)
    return None


def next_logits(engine: Engine, tokens: Sequence[int]) -> mx.array:
    """Return the logits of the next token, [vocab] of float32."""
    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    return engine.model(mx.array(tokens)[None], cache=cache)[0, -1].astype(mx.float32)


def top_two_margin(scores: mx.array) -> float:
    """Return the difference of the two highest of `scores`, [vocab]."""
    second, first = mx.sort(scores)[-2:].tolist()
    return float(first - second)


@dataclass(frozen=True, slots=True)
class LengthTest:
    """Prefill `prompt` tokens or generate `generate` tokens (one is 0) after `depth` tokens."""

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
    """Return each length above 0 at each depth. Raises UsageError if one exceeds the context."""
    tests = [
        *(LengthTest(prompt, 0, depth) for depth in depths for prompt in prompts if prompt),
        *(LengthTest(0, generate, depth) for depth in depths for generate in generates if generate),
    ]
    for test in tests:
        if (needed := test.depth + test.prompt + test.generate + 2) > engine.plan.context_length:
            raise UsageError(
                f"{test.name} needs a context of {needed} tokens, "
                f"{engine.name} has {engine.plan.context_length}; lower -p, -n or -d"
            )
    return tests


def run_tests(
    engine: Engine, tests: Sequence[LengthTest], repeats: int, into: list[Throughput]
) -> None:
    """Append two series for each test to `into`; they are valid at any interruption."""
    no_stop = replace(engine, tokens=replace(engine.tokens, stop_tokens=frozenset()))
    loops = {PLAIN: _time_mlx_lm, OURS: _time_akunu}
    if engine.host_group is not None:
        del loops[PLAIN]  # it cannot run a model split over hosts
    for test in tests:
        rows = {name: Throughput(test.name, name) for name in loops}
        into += rows.values()
        for repeat in range(-1, repeats):  # the first round warms up
            round_ = "warming up" if repeat < 0 else f"{repeat + 1}/{repeats}"
            command.progress(f"{test.name}: {round_}")
            tokens = _random_tokens(engine, test.depth + max(1, test.prompt), repeat)
            for name, loop in loops.items():
                seconds = loop(no_stop, test, tokens)
                _synchronize()
                if repeat >= 0:
                    rows[name].rates.append((test.prompt or test.generate) / seconds)


def _synchronize() -> None:
    """Wait for passes launched ahead, which would count in the next runner's time."""
    mx.synchronize(generation_stream)
    mx.clear_cache()


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    special = set(engine.tokens.tokenizer.all_special_ids)
    ordinary = [token for token in range(len(engine.tokens.tokenizer)) if token not in special]
    return draw.choices(ordinary, k=count)


def _time_mlx_lm(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    cache = make_prompt_cache(engine.model)
    prompt = mx.array(tokens)
    if test.prompt and test.depth:
        cached, prompt = prompt[: test.depth], prompt[test.depth :]
        list(generate_step(cached, engine.model, max_tokens=0, prompt_cache=cache))  # prefill only
    started = time.perf_counter()
    steps = generate_step(prompt, engine.model, max_tokens=1 + test.generate, prompt_cache=cache)
    next(steps)
    if test.generate:
        started = time.perf_counter()
        for _ in steps:
            pass
    elapsed = time.perf_counter() - started
    steps.close()
    return elapsed


def _time_akunu(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    """Return the duration of the test in our plain loop.

    Scaled to `test.prompt` tokens, because a cache that cannot be trimmed prefills more.
    """
    loop = StepLoop(engine)
    if test.prompt and test.depth:
        loop.answer(tokens[: test.depth], GenerateOptions(max_tokens=1, draft="off"))
    options = GenerateOptions(max_tokens=1 + test.generate, draft="off")
    stats = loop.answer(tokens, options).stats
    if test.generate:
        return stats.decode_s
    return stats.prefill_s * test.prompt / (stats.prompt_tokens - stats.cached_tokens)
