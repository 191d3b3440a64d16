"""Verify on this machine what the documentation promises, one line each.

The promises cover the rounding of Metal's kernels, the cost of passes, and memory.
"""

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from akunu_py.bench.command import FAILED, progress, show
from akunu_py.bench.curve import measure_curve
from akunu_py.bench.result import (
    CHECK_FORMAT,
    Result,
    describe_machine,
    json_text,
    median,
    today,
    write_text,
)
from akunu_py.bench.runners import PLAIN
from akunu_py.bench.speed import OURS, SpeedPlan, run_speed
from akunu_py.bench.tables import to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.engine.engine import Engine
from akunu_py.engine.load import load_stored
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.model import device, wired
from akunu_py.errors import INTERRUPTED, AkunuError, one_line
from akunu_py.kernels import probe
from akunu_py.models.store import model_store
from akunu_py.models.store.model_store import StoredModel
from akunu_py.parser import add_format, number
from akunu_py.types import DEFAULT_MODEL, GenerateOptions, LoadOptions, Message
from tests.measure import mac_checks
from tests.measure.tool import run_akunu, run_tool, was_interrupted

ROUNDING = 16  # steps of the format, relative to the typical output; a wrong kernel exceeds it
NEAR_TIE = 0.5  # logits: two roundings of bfloat16 for logits of 32 to 64
MIN_OFF, MIN_AUTO, MIN_PREFILL = 0.98, 0.99, 0.95  # of mlx-lm's speed; medians vary by 1 %
COST_PER_ROW = 0.5  # of 32 rows, in plain steps; above it no draft saves time
MAX_UNCOUNTED = 1.05
MAX_WIRED = 1.1  # times the weights; more can panic macOS
MAX_MEMORY = 1.1  # times the estimate
MAX_BANDWIDTH = 1.6  # ratio of assumed to measured bandwidth, or its inverse; sums reach 80 %
MAX_WARM_S, MAX_IDLE_S = 0.15, 0.1  # first token of a cached prompt; what an idle time may add
MAX_START_S = {"the first time": 4.0, "again": 3.0}  # process start to first token
LOAD_RATE = 1e9  # bytes/s, which add to it
_SPEEDS = (("off", PLAIN, MIN_OFF), ("auto", PLAIN, MIN_AUTO), ("auto", "off", MIN_AUTO))
_MAX_SOAK = 24 * 60  # minutes
_MAX_SIZE = 3.5e9  # bytes; the check of a larger model takes more than ten minutes
_BIT_WIDTHS, _GROUP_SIZES = (4, 8), (4, 8)  # of quantized matrices; query heads per KV head


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise of the documentation, with the measured value."""

    about: str  # the model, or "kernels"
    name: str
    value: float | None  # None if not measured
    limit: float  # the largest value that passes, or the smallest
    unit: str = ""
    least: bool = False  # True if the limit is the smallest value
    here: bool = True  # False for a promise about Metal on another machine
    note: str = ""

    @property
    def verdict(self) -> Literal["pass", "FAIL", "not measured", "not on this machine"]:
        """Judge the value as shown, rounded to three digits."""
        if not self.here:
            return "not on this machine"
        if self.value is None:
            return "not measured"
        shown = float(f"{self.value:.3g}")
        return "pass" if (shown >= self.limit if self.least else shown <= self.limit) else "FAIL"


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """The amount of measurements of each model."""

    workloads: Sequence[str] | None = None
    repeats: int = 3
    max_tokens: int = 96
    prompts: Sequence[int] = (512, 2048)
    contexts: Sequence[int] = (0, 4096, 16384)
    rows: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 18, 24, 32, 33)
    curve_repeats: int = 3
    kernels: Sequence[tuple[int, int]] = ((2048, 2048), (4096, 4096), (2560, 9728))  # matrices
    depths: Sequence[int] = (512, 4096)  # cached tokens in the test of attention
    idle_s: float = 5.0
    bandwidth_bytes: int = 1 << 30
    soak_tokens: int = 14_000  # of a prompt
    starts: int = 2  # of a process


# Enough to run every line. On a CPU half precision takes minutes, so the matrices are small.
QUICK = CheckPlan(
    ["chat"], 1, 8, (16, 64), (0, 64, 100_000), (1, 2, 32, 33), 1, ((64, 64),), (16,),
    idle_s=0.0, bandwidth_bytes=1 << 16, soak_tokens=80, starts=1,
)  # fmt: skip


@dataclass(slots=True)
class Check:
    """The results of one run; valid at any interruption."""

    plan: CheckPlan
    command: str = ""
    complete: bool = False
    lines: list[Promise] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by model or `kernels`
    results: list[Result] = field(default_factory=list)  # of the speed bench, by model

    @property
    def failed(self) -> bool:
        return any(line.verdict == "FAIL" for line in self.lines)

    def add(self, about: str, name: str, value: float | None, limit: float, **more: Any) -> None:
        """Add a promise; `more` are its other fields."""
        self.lines.append(Promise(about, name, value, limit, **more))

    def as_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {
            "format": CHECK_FORMAT, "command": self.command, "date": today(),
            "machine": describe_machine(), "complete": self.complete,
            "lines": [asdict(line) | {"verdict": line.verdict} for line in self.lines],
            "figures": self.figures, "results": [result.as_dict() for result in self.results],
        }  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", action="append", metavar="NAME_OR_PATH",
        help="Model to check besides the starter; repeatable (default: the largest installed "
        "4-bit model up to 3.5 GB)")  # fmt: skip
    add("-o", "--output", type=Path, default=Path("akunu-check.json"), metavar="FILE.json",
        help="Result file with all figures")  # fmt: skip
    add("--soak", type=_minutes, default=0.0, metavar="MINUTES",
        help="Then run two streams of requests with evictions for this long. This has panicked "
        "macOS with other wired limits: save your work first (default: 0)")  # fmt: skip
    add("--quick", action="store_true", help="Check only the named models, and hardly measure")
    add_format(parser)


def _minutes(text: str) -> float:
    return number(text, lambda value: 0 <= value <= _MAX_SOAK, f"0 to {_MAX_SOAK} minutes")


def run(options: argparse.Namespace) -> int:
    models = choose_models(options.model or [], with_starter=not options.quick)
    plan = QUICK if options.quick else CheckPlan()
    if not device.on_metal():
        plan = replace(plan, kernels=QUICK.kernels)
    check = Check(plan, options.command_line)
    interrupted = was_interrupted(lambda: run_parts(models, check))
    write_text(options.output, json_text(check.as_dict()))
    if options.soak and not interrupted:
        os.sync()  # the machine may not survive
        seconds = 60 * options.soak
        interrupted = was_interrupted(lambda: check_soak(models[-1], seconds, check))
        write_text(options.output, json_text(check.as_dict()))
    show(options, check.as_dict(), lambda: print_check(check))
    print(f"{options.output}: all figures", file=sys.stderr)
    return INTERRUPTED if interrupted else FAILED * check.failed


def choose_models(named: Sequence[str], *, with_starter: bool) -> list[StoredModel]:
    """Return the starter and the named models; for no names a large one, too."""
    names = (DEFAULT_MODEL, *named) if with_starter else named
    models = [model_store.resolve(name) for name in names]
    if not named:
        fitting = [
            each
            for each in model_store.list_models()
            if each.quantization.startswith("4-bit") and not each.damaged and each.size < _MAX_SIZE
        ]
        models += sorted(fitting, key=lambda each: each.size)[-1:]
    for each in models:
        model_store.check(each)
    return list({each.path: each for each in models}.values())


def run_parts(models: Sequence[StoredModel], check: Check) -> None:
    """Check kernels, device and models; an error becomes a failing line."""
    parts = {"kernels": partial(check_kernels, check), "device": partial(check_device, check)}
    for about, measure in (
        *parts.items(),
        *((each.name, partial(check_model, each, check)) for each in models),
    ):
        progress(about)
        try:
            measure()
        except (AkunuError, RuntimeError, OSError) as error:  # MLX's are RuntimeErrors
            why = f"{type(error).__name__}: {error}"
            check.add(about, "checked completely", 0, 1, least=True, note=why)
    check.complete = True


def check_kernels(check: Check) -> None:
    """Compare passes over 1 to 33 rows with one row at a time."""
    plan, figures = check.plan, check.figures.setdefault("kernels", {})
    for kind in mac_checks.FORMATS:
        kernels = {
            f"{bits}-bit matrices": [
                mac_checks.quantized_rows(bits, kind, *sizes) for sizes in plan.kernels
            ]
            for bits in _BIT_WIDTHS
        }
        kernels["attention"] = [
            mac_checks.attention_rows(kind, depth, group)
            for depth in plan.depths
            for group in _GROUP_SIZES
        ]
        for name, found in kernels.items():
            name = f"{name}, {_format_name(kind)}"
            figures[name] = found
            check.lines.append(rows_promise(name, kind, found, here=device.on_metal()))


def rows_promise(
    name: str, kind: mx.Dtype, found: Sequence[dict[str, list[float]]], *, here: bool
) -> Promise:
    """Return the line of a kernel. found: of `mac_checks.compare_rows`."""
    least = [min(rates) for rates in zip(*(each["identical"] for each in found), strict=True)]
    exact = next((rows for rows, rate in enumerate(least) if rate < 1), len(least))
    note = f"identical up to {exact} rows"
    if exact < len(least):
        note += f", {min(least):.1%} of values beyond, at least"
    worst = max(max(each["difference"]) for each in found)
    name = f"{name}: 1 to {len(least)} rows differ from one by"
    limit = ROUNDING * mx.finfo(kind).eps
    return Promise("kernels", name, worst, limit, here=here, note=note)


def _format_name(kind: mx.Dtype) -> str:
    return str(kind).removeprefix("mlx.core.")


def check_device(check: Check) -> None:
    """Compare what akunu assumes of this chip with a measurement."""
    ratio, note, here = None, "", device.on_metal()
    if here:
        assumed = device.machine().bandwidth / 1e9
        measured = mac_checks.measured_bandwidth(check.plan.bandwidth_bytes)
        ratio = max(assumed / measured, measured / assumed)
        note = f"{assumed:.0f} GB/s assumed, {measured:.0f} here"
    name = "assumed memory bandwidth compared with the measured one"
    check.add("device", name, ratio, MAX_BANDWIDTH, unit="x", here=here, note=note)


def check_model(model: StoredModel, check: Check) -> None:
    """Check one model."""
    plan = check.plan
    check.figures[model.name] = {}
    _check_start(model, check)  # before this process loads a model
    progress(f"{model.name}: loading")
    before = mx.get_active_memory()
    engine = load_stored(model, LoadOptions())
    workloads = load_workloads(plan.workloads)
    prompts = [length for length in plan.prompts if length + 2 <= engine.plan.context_length]
    modes = ["off", "auto"]
    speed = SpeedPlan(workloads, [0.0], plan.max_tokens, plan.repeats, modes, prompts=prompts)
    result = run_speed(engine, speed, check.command)
    check.results.append(result)
    if not result.complete:
        raise KeyboardInterrupt
    check_speed(model.name, result, check)
    _check_curves(engine, check, before)
    _check_row_kernels(engine, check)
    _check_memory(engine, check)
    progress(f"{model.name}: idle")
    _check_idle(engine, check)


def _check_start(model: StoredModel, check: Check) -> None:
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        for when, limit in list(MAX_START_S.items())[: check.plan.starts]:
            name = f"akunu run to its first token, {when}"
            progress(f"{model.name}: {name}")
            started = time.perf_counter()
            path = str(model.path.absolute())
            words = ["run", "hello", "--model", path, "--max-tokens", "1", "--no-answer-cache"]
            run_akunu(words, directory)
            seconds = time.perf_counter() - started
            check.add(model.name, name, seconds, limit + model.size / LOAD_RATE, unit="s")


def check_speed(about: str, result: Result, check: Check) -> None:
    """Check off and auto against mlx-lm, auto against off, the answers, and prefill."""
    by_test = {(series.workload, series.runner): series for series in result.runs}
    for workload in dict.fromkeys(series.workload for series in result.runs):
        for runner, other, limit in _SPEEDS:
            ours, theirs = by_test[workload, runner], by_test[workload, other]
            note = f"{ours.tokens_per_s:.1f} ± {ours.spread:.1f} t/s"
            note += "; the answer ends in a loop" if ours.loop is not None else ""
            rate = ours.tokens_per_s / theirs.tokens_per_s if theirs.tokens_per_s else None
            name = f"{workload}: {runner} compared with {other}"
            check.add(about, name, rate, limit, unit="x", least=True, note=note)
    compared = [series for series in result.runs if series.identical is not None]
    different = [series.difference for series in compared if series.difference]
    # Without a margin the prompts differ, which is no tie.
    margins = [math.inf if d["margin"] is None else d["margin"] for d in different]
    note = f"{len(compared) - len(different)} of {len(compared)} answers are identical"
    name = "largest margin where answers differ from mlx-lm's"
    check.add(about, name, max(margins, default=0.0), NEAR_TIE, unit="logits", note=note)
    rates: dict[str, dict[str, float]] = {}
    for test in result.throughput:
        rates.setdefault(test.test, {})[test.runner] = median(test.rates)
    for name, by_runner in rates.items():
        rate, note = by_runner[OURS] / by_runner[PLAIN], f"{by_runner[OURS]:.0f} t/s"
        name = f"prefill, {name}, compared with {PLAIN}"
        check.add(about, name, rate, MIN_PREFILL, unit="x", least=True, note=note)


def _check_curves(engine: Engine, check: Check, before: int) -> None:
    """Check the cost of passes and the memory for short and long contexts.

    before: active memory of MLX before the model was loaded, in bytes.
    """
    plan, curves = check.plan, check.figures[engine.name].setdefault("curves_s", {})
    for context in plan.contexts:
        cost, note = None, f"the context ends at {engine.plan.context_length:,} tokens"
        if context + max(plan.rows) < engine.plan.context_length:
            progress(f"{engine.name}: cost curve after {context:,} tokens")
            gc.collect()  # frees the caches of earlier sessions
            mx.reset_peak_memory()
            costs = measure_curve(engine, plan.rows, plan.curve_repeats, context)
            peak, estimate = mx.get_peak_memory() - before, engine.plan.fit.at(context).total
            curves[str(context)] = {str(rows): seconds for rows, seconds in costs.items()}
            cost = costs[32] / costs[1] / 32
            note = ", ".join(f"{rows}: {costs[rows] / costs[1]:.2f}" for rows in costs)
            if context:
                name = f"memory at {context:,} tokens, of the estimate"
                size = f"{peak / 2**30:.2f} GiB"
                check.add(engine.name, name, peak / estimate, MAX_MEMORY, unit="x", note=size)
        name = f"each of 32 rows after {context:,} tokens"
        here = device.on_metal()
        check.add(engine.name, name, cost, COST_PER_ROW, unit="steps", here=here, note=note)


def _check_row_kernels(engine: Engine, check: Check) -> None:
    """Check akunu's kernel for a few rows on each matrix shape."""
    about, here = engine.name, not probe.why_off()
    progress(f"{about}: kernels for a few rows")
    found = mac_checks.row_kernels(engine.model)
    wrong = [shape for shape, each in found.items() if not each["equal"]]
    note = f"{len(found)} shapes"
    name = "matrix shapes where the kernel for a few rows has no equal rows"
    check.add(about, name, len(wrong), 0, here=here, note=note)
    check.figures[about]["row_kernels"] = found


def _check_memory(engine: Engine, check: Check) -> None:
    """Check the memory of a cached prompt."""
    about = engine.name
    progress(f"{about}: memory")
    counted, unused = mac_checks.counted_memory(engine, max(check.plan.prompts))
    name = "memory of a cached prompt, of the bytes that akunu counts"
    check.add(about, name, counted, MAX_UNCOUNTED, unit="x")
    name = "freed buffers that MLX keeps after a prompt, of their limit"
    check.add(about, name, unused, 1, unit="x")


def _check_idle(engine: Engine, check: Check) -> None:
    """Check a cached prompt, at once and after an idle time, and the wired limit."""
    loop = StepLoop(engine)
    prompt = engine.tokens.encode_chat([Message("user", "hi")])
    options = GenerateOptions(max_tokens=1, draft="off", may_store=False)

    def first_token_s() -> float:
        return loop.answer(prompt, options).stats.prefill_s

    warm = median([first_token_s() for _ in range(6)][1:])
    time.sleep(check.plan.idle_s)
    idle = first_token_s()
    here, about = device.on_metal(), engine.name
    check.add(about, "first token of a cached prompt", warm, MAX_WARM_S, unit="s")
    name = f"added to it by {check.plan.idle_s:g} s of idling"
    check.add(about, name, idle - warm, MAX_IDLE_S, unit="s", here=here)
    mx.synchronize()
    limit = int(mx.set_wired_limit(wired._limit or 0))  # as before: changes nothing
    weights = device.weight_bytes(engine.model)
    name = "wired memory compared with the weights"
    note = f"{limit / 2**30:.2f} GiB of {device.working_set() / 2**30:.2f} recommended"
    check.add(about, name, limit / weights, MAX_WIRED, unit="x", here=here, note=note)


def check_soak(model: StoredModel, seconds: float, check: Check) -> None:
    """Run two streams of requests with evictions, and record the minutes that they ran."""
    progress(f"{model.name}: two streams for {seconds / 60:g} minutes")
    found = mac_checks.run_soak(load_stored(model, LoadOptions()), seconds, check.plan.soak_tokens)
    note = f"{found.requests} requests, {found.prompt_tokens:,} prompt tokens"
    note += f"; {one_line(found.error)}" if found.error else ""
    minutes = 0.0 if found.error else found.seconds / 60
    name = "two streams with evictions"
    check.add(model.name, name, minutes, seconds / 60, unit="min", least=True, note=note)


def print_check(check: Check) -> None:
    """Print the promises with their verdicts; the result file has all figures."""
    cells = []
    for line in check.lines:
        figure = "" if line.value is None else f"{line.value:.3g} {line.unit}".strip()
        limit = f"{'at least' if line.least else 'at most'} {line.limit:.3g} {line.unit}".strip()
        cells.append([line.about, line.name, figure, limit, line.verdict, line.note])
    print(to_text((["of", "promise", "measured", "must be", "verdict", ""], cells)))
    for about, figures in check.figures.items():
        rows = [
            [shape, *values]
            for shape, each in figures.get("row_kernels", {}).items()
            for values in mac_checks.kernel_rows(each)
        ]
        if rows:
            columns = ["matrix", "rows", "MLX equal", "ours equal", "MLX ms", "ours ms"]
            print(to_text(([f"{about}: {columns[0]}", *columns[1:]], rows)))
    verdicts = Counter(line.verdict for line in check.lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


main = partial(run_tool, "check", "Check speed, numerics and memory on this machine; exit code 1 "
               "if a check fails", add_options, run)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
