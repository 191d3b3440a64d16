"""Verify on this machine what the documentation promises, one line each.

The promises cover answers, the cost of passes, and memory. By default, two minutes check the
essential ones, which no other machine can show.
"""

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from akunu_py.bench.command import FAILED, print_line, progress, show
from akunu_py.bench.curve import Curve, measure_curve
from akunu_py.bench.replay import load_trace, replay_trace
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
from tests.support.paths import ROOT

_TRACES = ROOT / "bench/results/starter-traces.json.gz"
NEAR_TIE = 0.5  # logits: two roundings of bfloat16 for logits of 32 to 64; a bug exceeds it
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
_REPETITIVE = (
    "Write the words red, green, blue, red, green, blue again and again."  # n-grams draft it
)


@dataclass(frozen=True, slots=True)
class Promise:
    """A promise of the documentation, with the measured value."""

    about: str  # the model, or "device"
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
    """The amount of measurements of each model; by default all, in ten minutes."""

    seconds: float = math.inf  # after this time, no other step begins
    full: bool = True  # False: without memory and idle time
    workloads: Sequence[str] | None = None
    repeats: int = 3
    max_tokens: int = 96
    prompts: Sequence[int] = (512, 2048)
    contexts: Sequence[int] = (0, 4096, 16384)
    rows: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 18, 24, 32, 33)
    curve_repeats: int = 3
    idle_s: float = 5.0
    bandwidth_bytes: int = 1 << 30
    soak_tokens: int = 14_000  # of a prompt
    starts: int = 2  # of a process


# Counts for steps of a few seconds each, at most half a minute on an M1 with the largest model.
ESSENTIAL = CheckPlan(
    120.0, False, ["edit"], 1, 48, (), (0,), (1, 2, 3, 4, 5, 6, 8, 16, 32), 1, starts=0,
)  # fmt: skip

# Enough to run every line.
QUICK = CheckPlan(
    math.inf, True, ["chat"], 1, 8, (16, 64), (0, 64, 100_000), (1, 2, 32, 33), 1,
    idle_s=0.0, bandwidth_bytes=1 << 16, soak_tokens=80, starts=1,
)  # fmt: skip


@dataclass(slots=True)
class Check:
    """The results of one run; valid at any interruption."""

    plan: CheckPlan
    command: str = ""
    complete: bool = False
    lines: list[Promise] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)  # by model
    results: list[Result] = field(default_factory=list)  # of the speed bench, by model
    started: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return any(line.verdict == "FAIL" for line in self.lines)

    def add(self, about: str, name: str, value: float | None, limit: float, **more: Any) -> None:
        """Add a promise; `more` are its other fields."""
        self.lines.append(Promise(about, name, value, limit, **more))

    def seconds(self) -> float:
        return time.monotonic() - self.started

    def is_late(self, about: str) -> bool:
        """Return whether the time of the plan is over, and add a line about that."""
        late = self.seconds() > self.plan.seconds
        if late:
            name = f"other checks within {self.plan.seconds:g} s"
            self.add(about, name, None, 0, note="make check-mac FULL=1 takes the time")
        return late

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
    add("--full", action="store_true",
        help="Check everything, in ten minutes (default: the essential lines, in two)")  # fmt: skip
    add("--quick", action="store_true", help="Check only the named models, and hardly measure")
    add_format(parser)


def _minutes(text: str) -> float:
    return number(text, lambda value: 0 <= value <= _MAX_SOAK, f"0 to {_MAX_SOAK} minutes")


def run(options: argparse.Namespace) -> int:
    models = choose_models(options.model or [], with_starter=not options.quick)
    plan = QUICK if options.quick else CheckPlan() if options.full else ESSENTIAL
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
    if plan.seconds < math.inf:
        print(f"These were the essential checks, in {check.seconds():.0f} s. The others take ten "
              "minutes: make check-mac FULL=1", file=sys.stderr)  # fmt: skip
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
    """Check the device and the models; an error becomes a failing line."""
    parts = [("device", partial(check_device, check))]
    parts += [(each.name, partial(check_model, each, check)) for each in models]
    for about, measure in parts:
        if check.is_late(about):
            continue
        progress(about)
        try:
            measure()
        except (AkunuError, RuntimeError, OSError) as error:  # MLX's are RuntimeErrors
            why = f"{type(error).__name__}: {error}"
            check.add(about, "checked completely", 0, 1, least=True, note=why)
    check.complete = True


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
    """Check one model. The steps that only a Mac can show come first."""
    check.figures[model.name] = {}
    _check_start(model, check)  # before this process loads a model
    _check_exact(model, check)
    progress(f"{model.name}: loading")
    before = mx.get_active_memory()
    engine = load_stored(model, LoadOptions())
    steps: list[Callable[[Engine, Check], None]] = [
        _check_row_kernels, partial(_check_curves, before=before), _check_answers,
    ]  # fmt: skip
    if check.plan.full:
        steps += [_check_memory, _check_idle]
    for step in steps:
        if check.is_late(model.name):
            break
        step(engine, check)


def _check_exact(model: StoredModel, check: Check) -> None:
    """Check that drafts do not change an answer with `--exact`."""
    progress(f"{model.name}: --exact")
    found = {}
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        for draft in ("off", "fixed"):
            words = ["run", _REPETITIVE, "--model", str(model.path.absolute()), "--exact",
                     "--draft", draft, "--max-tokens", str(check.plan.max_tokens),
                     "--no-answer-cache", "--format", "json"]  # fmt: skip
            found[draft] = json.loads(run_akunu(words, directory))
    differs = int(found["off"]["tokens"] != found["fixed"]["tokens"])
    note = f"{found['fixed']['stats']['accepted']} draft tokens accepted"
    check.add(model.name, "answers that drafts change with --exact", differs, 0, note=note)


def _check_answers(engine: Engine, check: Check) -> None:
    """Measure the speed of answers and prefill, and check them."""
    plan = check.plan
    workloads = load_workloads(plan.workloads)
    prompts = [length for length in plan.prompts if length + 2 <= engine.plan.context_length]
    modes = ["off", "auto"]
    speed = SpeedPlan(workloads, [0.0], plan.max_tokens, plan.repeats, modes, prompts=prompts)
    result = run_speed(engine, speed, check.command)
    check.results.append(result)
    if not result.complete:
        raise KeyboardInterrupt
    check_speed(engine.name, result, check)


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


def _check_curves(engine: Engine, check: Check, *, before: int) -> None:
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
            curve = Curve({rows: seconds / costs[1] for rows, seconds in costs.items()})
            note = ", ".join(f"{rows}: {share:.2f}" for rows, share in curve.points.items())
            replayed = replay_trace(load_trace(_TRACES), curve, "auto")
            scores = [f"{name} {row['score']:.2f}" for name, row in replayed.items()]
            print_line(f"scores of the starter's traces at these costs: {', '.join(scores)}")
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
    for shape, each in found.items():
        gains = {rows: round(theirs / ours, 2) for rows, (theirs, ours) in each["times"].items()}
        print_line(f"{shape}: equal rows {each['equal']}, times as fast as MLX {gains}")
    note = f"{len(found)} shapes; {mx.device_info().get('architecture')}, with NAX from g17 on"
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
    progress(f"{engine.name}: idle")
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
        shapes = figures.get("row_kernels", {}).items()
        rows = [[shape, *values] for shape, found in shapes for values in kernel_rows(found)]
        if rows:
            columns = ["matrix", "rows", "MLX equal", "ours equal", "MLX ms", "ours ms"]
            print(to_text(([f"{about}: {columns[0]}", *columns[1:]], rows)))
    verdicts = Counter(line.verdict for line in check.lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


def kernel_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a matrix shape: rows, whether both are equal, milliseconds of both."""
    if not found["times"]:
        return [["", "", found["error"], "", ""]]
    return [
        [str(rows), *("yes" if rows in found[name] else "no" for name in ("mlx_equal", "equal")),
         *(f"{1e3 * seconds:.3f}" for seconds in times)]
        for rows, times in found["times"].items()
    ]  # fmt: skip


main = partial(run_tool, "check", __doc__, add_options, run)

if __name__ == "__main__":
    sys.exit(main())
