"""`akunu bench check`: verify on this machine what the documentation promises, one line each.

The promises cover the rounding of Metal's kernels, the cost of passes, and memory.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from akunu_py.bench import mac_checks
from akunu_py.bench.command import FAILED, exit_code, progress, show, was_interrupted
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
from akunu_py.bench.tables import Table, to_text
from akunu_py.bench.workloads import load_workloads
from akunu_py.decoding import device, wired
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_stored
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError, one_line
from akunu_py.models.store import model_store
from akunu_py.parser import add_format, number
from akunu_py.types import DEFAULT_MODEL, GenerateOptions, LoadOptions, Message, SamplingOptions

Verdict = Literal["pass", "FAIL", "not measured", "not on this machine"]

ROUNDING = 16  # steps of the format, relative to the typical output; a wrong kernel exceeds it
NEAR_TIE = 0.5  # logits: two roundings of bfloat16 for logits of 32 to 64
MIN_OFF, MIN_AUTO, MIN_PREFILL = 0.98, 0.99, 0.95  # of mlx-lm's speed; medians vary by 1 %
COST_PER_ROW = 0.5  # of 32 rows, in plain steps; above it no draft saves time
MIN_SAMPLING = 0.9  # of the speed without logprobs or top-p
MAX_IDENTITY_S = 1.0
MAX_SCHEMA_S = 0.05
MAX_FLIPPED = 0.02  # of the tokens
MAX_UNCOUNTED = 1.05
METAL_BUFFERS = 499_000  # of a process; macOS has no larger limit
MAX_WIRED = 1.1  # times the weights; more can panic macOS
MAX_MEMORY = 1.1  # times the estimate
MAX_BANDWIDTH = 1.6  # ratio of assumed to measured bandwidth, or its inverse; sums reach 80 %
MAX_WARM_S, MAX_IDLE_S = 0.15, 0.1  # first token of a cached prompt; what an idle time may add
MAX_START_S, MAX_AGAIN_S, LOAD_RATE = 4.0, 3.0, 1e9  # process start to first token; bytes/s
_SPEEDS = (("off", PLAIN, MIN_OFF), ("auto", PLAIN, MIN_AUTO), ("auto", "off", MIN_AUTO))
_SAMPLED = SamplingOptions(temperature=0.8, seed=0)
_SAMPLING = (
    ("logprobs", SamplingOptions(), SamplingOptions(logprobs=1)),
    ("top-p", _SAMPLED, replace(_SAMPLED, top_p=0.95)),
)
_MAX_SOAK = 24 * 60  # minutes
_MAX_SIZE = 3.5e9  # bytes; the check of a larger model takes more than ten minutes
_BIT_WIDTHS, _GROUP_SIZES = (4, 8), (4, 8)  # of quantized matrices; query heads per KV head


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME_OR_PATH",
        help="Model to check besides the starter; repeatable (default: the largest installed "
        "4-bit model up to 3.5 GB)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=_json_file,
        default="akunu-check.json",
        metavar="FILE.json",
        help="Result file with all figures",
    )
    parser.add_argument(
        "--soak",
        type=_minutes,
        default=0.0,
        metavar="MINUTES",
        help="Then run two streams of requests with evictions for this long. This has panicked "
        "macOS with other wired limits: save your work first (default: 0)",
    )
    add_format(parser)


def run(options: argparse.Namespace) -> int:
    models = choose_models(options.model or [])
    check = Check(default_plan(), options.command_line)
    interrupted = was_interrupted(lambda: run_check(models, check))
    write_text(options.output, json_text(check.as_dict()))
    if options.soak and not interrupted:
        os.sync()  # the machine may not survive
        seconds = 60 * options.soak
        interrupted = was_interrupted(lambda: check_soak(models[-1], seconds, check))
        write_text(options.output, json_text(check.as_dict()))
    show(options, check.as_dict(), lambda: print_check(check))
    print(f"{options.output}: all figures", file=sys.stderr)
    return exit_code(interrupted, "checked") or FAILED * check.failed


def _minutes(text: str) -> float:
    return number(text, lambda value: 0 <= value <= _MAX_SOAK, f"0 to {_MAX_SOAK} minutes")


def _json_file(text: str) -> Path:
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"expected a file name ending in .json, got {text!r}")
    return Path(text)


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
    def verdict(self) -> Verdict:
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
    tie_positions: int = 500
    soak_tokens: int = 14_000  # of a prompt


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
            "format": CHECK_FORMAT,
            "command": self.command,
            "date": today(),
            "machine": describe_machine(),
            "complete": self.complete,
            "lines": [asdict(line) | {"verdict": line.verdict} for line in self.lines],
            "figures": self.figures,
            "results": [result.as_dict() for result in self.results],
        }


def choose_models(named: Sequence[str]) -> list[model_store.StoredModel]:
    """Return the starter and the named models; for none the largest 4-bit model up to _MAX_SIZE."""
    models = [model_store.resolve(name) for name in (DEFAULT_MODEL, *named)]
    if not named:
        candidates = [
            each
            for each in model_store.list_models()
            if each.quantization.startswith("4-bit") and not each.damaged and each.size < _MAX_SIZE
        ]
        models += sorted(candidates, key=lambda each: each.size)[-1:]
    for each in models:
        model_store.check(each)
    return list({each.path: each for each in models}.values())


def default_plan() -> CheckPlan:
    """Return the plan: small matrices on a CPU, where half precision takes minutes."""
    return CheckPlan() if device.on_metal() else CheckPlan(kernels=((64, 64),))


def run_check(models: Sequence[model_store.StoredModel], check: Check) -> None:
    """Fill `check`."""
    parts: list[tuple[str, Callable[[], None]]] = [
        ("kernels", partial(check_kernels, check)),
        ("device", partial(check_device, check)),
    ]
    parts += [(each.name, partial(check_model, each, check)) for each in models]
    for about, measure in parts:
        progress(about)
        try:
            measure()
        except (AkunuError, RuntimeError, OSError) as error:  # MLX's are RuntimeErrors
            why = f"{type(error).__name__}: {error}"
            check.add(about, "checked completely", 0, 1, least=True, note=why)
    check.complete = True


def check_kernels(check: Check) -> None:
    """Compare passes over 1 to 33 rows with one row at a time."""
    plan = check.plan
    for kind in FORMATS:
        name = str(kind).removeprefix("mlx.core.")
        for bits in _BIT_WIDTHS:
            found = [quantized_rows(bits, kind, *sizes) for sizes in plan.kernels]
            _add_rows(check, f"{bits}-bit matrices, {name}", kind, found)
        attention = [attention_rows(kind, n, heads) for n in plan.depths for heads in _GROUP_SIZES]
        _add_rows(check, f"attention, {name}", kind, attention)


def check_device(check: Check) -> None:
    """Compare what akunu assumes of this chip with a measurement."""
    ratio, note = mac_checks.bandwidth_line(check.plan.bandwidth_bytes)
    name, here = "assumed memory bandwidth compared with the measured one", device.on_metal()
    check.add("device", name, ratio, MAX_BANDWIDTH, unit="x", here=here, note=note)


def _add_rows(
    check: Check, name: str, kind: mx.Dtype, found: Sequence[dict[str, list[float]]]
) -> None:
    check.figures.setdefault("kernels", {})[name] = found
    least = [min(rates) for rates in zip(*(each["identical"] for each in found), strict=True)]
    exact = next((rows for rows, rate in enumerate(least) if rate < 1), len(least))
    check.add(
        "kernels",
        f"{name}: 1 to {len(least)} rows differ from one by",
        max(max(each["difference"]) for each in found),
        ROUNDING * mx.finfo(kind).eps,
        here=device.on_metal(),
        note=f"identical up to {exact} rows"
        + (f", {min(least):.1%} of values beyond, at least" if exact < len(least) else ""),
    )


def check_model(model: model_store.StoredModel, check: Check) -> None:
    """Check one model."""
    plan = check.plan
    check.figures[model.name] = {}
    _time_start(model, check)  # before this process loads a model
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
    _check_sampling(engine, check)
    _check_ties(engine, check)
    progress(f"{model.name}: memory")
    counted, unused = mac_checks.counted_memory(engine, max(plan.prompts[:2]))
    tied = mac_checks.identity_s(engine)
    for name, value, limit, unit in (
        ("memory of a cached prompt, of the bytes that akunu counts", counted, MAX_UNCOUNTED, "x"),
        ("freed buffers that MLX keeps after a prompt, of their limit", unused, 1, "x"),
        ("time to identify the model for its prompt caches", tied, MAX_IDENTITY_S, "s"),
    ):
        check.add(model.name, name, value, limit, unit=unit)
    most = int(mx.device_info().get("resource_limit") or METAL_BUFFERS)
    name, here = "Metal buffers of the weights and 16 prompt caches", device.on_metal()
    check.add(model.name, name, mac_checks.metal_buffers(engine), most // 2, here=here)
    progress(f"{model.name}: schema")
    again, note = mac_checks.schema_line(engine)
    name = "compiling a schema of 300 properties again"
    check.add(model.name, name, again, MAX_SCHEMA_S, unit="s", note=note)
    progress(f"{model.name}: idle")
    _check_idle(engine, check)


def _check_sampling(engine: Engine, check: Check) -> None:
    """Check the cost of logprobs and top-p, and the output head after a prompt."""
    for name, plain, changed in _SAMPLING:
        progress(f"{engine.name}: {name}")
        rate = mac_checks.sampling_speed(engine, check.plan.max_tokens, plain, changed)
        name = f"decoding speed with {name}, of the speed without"
        check.add(engine.name, name, rate, MIN_SAMPLING, unit="x", least=True)
    name = f"logit rows computed for the last {mac_checks.HEAD_ROWS} prompt tokens"
    check.add(engine.name, name, mac_checks.head_rows(engine), 1)


def _check_ties(engine: Engine, check: Check) -> None:
    """Check how often the number of rows changes the most likely token, by format."""
    for kind in FORMATS:
        name = str(kind).removeprefix("mlx.core.")
        progress(f"{engine.name}: near-ties in {name}")
        found = mac_checks.near_ties(engine, kind, check.plan.tie_positions)
        note = f"{found.flipped} of {found.positions} tokens; {found.close} are near-ties"
        name = f"tokens that {mac_checks.TIE_ROWS} rows change, {name}"
        check.add(engine.name, name, found.rate, MAX_FLIPPED, here=device.on_metal(), note=note)


def _time_start(model: model_store.StoredModel, check: Check) -> None:
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        for when, limit in (("the first time", MAX_START_S), ("again", MAX_AGAIN_S)):
            name = f"akunu run to its first token, {when}"
            progress(f"{model.name}: {name}")
            started = time.perf_counter()
            run_process(model.path.absolute(), directory)
            seconds = time.perf_counter() - started
            limit += model.size / LOAD_RATE
            check.add(model.name, name, seconds, limit, unit="s")


def run_process(model: Path, directory: str) -> None:
    """Run `akunu run` for one token, with its data in `directory`. Raises AkunuError."""
    directories = {f"XDG_{name}_HOME": directory for name in ("DATA", "CACHE", "CONFIG")}
    words = "--max-tokens 1 --no-answer-cache"
    done = subprocess.run(
        [sys.executable, "-m", "akunu_py", "run", "hello", "--model", str(model), *words.split()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | directories,
        start_new_session=True,  # Ctrl-C ends only this process
    )
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip()
        raise AkunuError(f"akunu run ended with exit code {done.returncode}: {why}")


def check_speed(about: str, result: Result, check: Check) -> None:
    """Check off and auto against mlx-lm, auto against off, the answers, and prefill."""
    by_test = {(series.workload, series.runner): series for series in result.runs}
    for workload in dict.fromkeys(series.workload for series in result.runs):
        for runner, other, limit in _SPEEDS:
            ours, theirs = by_test[workload, runner], by_test[workload, other]
            note = f"{ours.tokens_per_s:.1f} ± {ours.spread:.1f} t/s"
            if ours.loop is not None:
                note += "; the answer ends in a loop"
            rate = _ratio(ours.tokens_per_s, theirs.tokens_per_s)
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
        rate, note = _ratio(by_runner[OURS], by_runner[PLAIN]), f"{by_runner[OURS]:.0f} t/s"
        name = f"prefill, {name}, compared with {PLAIN}"
        check.add(about, name, rate, MIN_PREFILL, unit="x", least=True, note=note)


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


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


def _check_idle(engine: Engine, check: Check) -> None:
    """Check a cached prompt, at once and after an idle time, and the wired limit."""
    session = Session(engine)
    prompt = engine.tokens.encode_chat([Message("user", "hi")])
    options = GenerateOptions(max_tokens=1, draft="off", may_store=False)

    def first_token_s() -> float:
        return session.generate(prompt, options).answer().stats.prefill_s

    warm = median([first_token_s() for _ in range(6)][1:])
    time.sleep(check.plan.idle_s)
    idle = first_token_s()
    here, about = device.on_metal(), engine.name
    check.add(about, "first token of a cached prompt", warm, MAX_WARM_S, unit="s")
    name = f"added to it by {check.plan.idle_s:g} s of idling"
    check.add(about, name, idle - warm, MAX_IDLE_S, unit="s", here=here)
    limit, weights = wired_limit(), device.weight_bytes(engine.model)
    name = "wired memory compared with the weights"
    note = f"{limit / 2**30:.2f} GiB of {device.working_set() / 2**30:.2f} recommended"
    check.add(about, name, limit / weights, MAX_WIRED, unit="x", here=here, note=note)


def check_soak(model: model_store.StoredModel, seconds: float, check: Check) -> None:
    """Run two streams of requests with evictions, and record the minutes that they ran."""
    progress(f"{model.name}: two streams for {seconds / 60:g} minutes")
    found = mac_checks.run_soak(load_stored(model, LoadOptions()), seconds, check.plan.soak_tokens)
    note = f"{found.requests} requests, {found.prompt_tokens:,} prompt tokens"
    note += f"; {one_line(found.error)}" if found.error else ""
    minutes = 0.0 if found.error else found.seconds / 60
    name = "two streams with evictions"
    check.add(model.name, name, minutes, seconds / 60, unit="min", least=True, note=note)


def wired_limit() -> int:
    """Return MLX's wired limit in bytes. Setting the same limit again changes nothing."""
    mx.synchronize()
    return int(mx.set_wired_limit(wired.wired_limit() or 0))


def check_table(lines: Sequence[Promise]) -> Table:
    """Return the promises with their values, limits and verdicts."""
    cells = []
    for line in lines:
        figure = "" if line.value is None else f"{line.value:.3g} {line.unit}".strip()
        limit = f"{'at least' if line.least else 'at most'} {line.limit:.3g} {line.unit}".strip()
        cells.append([line.about, line.name, figure, limit, line.verdict, line.note])
    return ["of", "promise", "measured", "must be", "verdict", ""], cells


def print_check(check: Check) -> None:
    """Print the verdicts; the result file has all figures."""
    print(to_text(check_table(check.lines)))
    verdicts = Counter(line.verdict for line in check.lines)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))


# mlx/backend/metal/quantized.cpp chooses the kernel of a quantized matrix by rows, matrix and chip.
# Few rows run one by one, or up to five together since M3; from 6 rows (M1) to 32 (Ultra) on, in
# tiles of 32. The attention kernel changes above 8 rows, or 32 rows x query heads per KV head.
MOST_ROWS = 33  # more than a tile, and than the longest draft with its token
FORMATS = (mx.bfloat16, mx.float16)
_WEIGHT_GROUP, _KV_HEADS, _HEAD = 64, 2, 64


def quantized_rows(bits: int, kind: mx.Dtype, inputs: int, outputs: int) -> dict[str, list[float]]:
    """Compare products with a quantized matrix, [rows, inputs] -> [rows, outputs]."""
    mx.random.seed(bits)
    rows = mx.random.normal((MOST_ROWS, inputs)).astype(kind)
    weight = mx.quantize(
        mx.random.normal((outputs, inputs)).astype(kind), group_size=_WEIGHT_GROUP, bits=bits
    )

    def product(start: int, stop: int) -> mx.array:
        return mx.quantized_matmul(
            rows[start:stop], *weight, transpose=True, group_size=_WEIGHT_GROUP, bits=bits
        )

    return compare_rows(product)


def attention_rows(kind: mx.Dtype, context: int, group: int) -> dict[str, list[float]]:
    """Compare causal attention in a pass after `context` tokens. group: query heads per KV head."""
    mx.random.seed(0)
    queries, keys, values = (
        mx.random.normal((1, heads, context + MOST_ROWS, _HEAD)).astype(kind)
        for heads in (_KV_HEADS * group, _KV_HEADS, _KV_HEADS)
    )

    def attend(start: int, stop: int) -> mx.array:
        mask = "causal" if stop - start > 1 else None  # as in mlx-lm
        end = context + stop
        out = mx.fast.scaled_dot_product_attention(
            queries[:, :, context + start : end], keys[:, :, :end], values[:, :, :end],
            scale=_HEAD**-0.5, mask=mask,
        )  # fmt: skip
        return out[0].swapaxes(0, 1).flatten(1)  # [rows, heads x head]

    return compare_rows(attend)


def compare_rows(compute: Callable[[int, int], mx.array]) -> dict[str, list[float]]:
    """Compare the output for 1, 2, ... rows with the output for one row at a time.

    Returns lists by the number of rows: the share of identical values, and the largest difference
    relative to the typical value. compute: (start, stop) -> output, [stop - start, outputs].
    """
    single = mx.concatenate([compute(row, row + 1) for row in range(MOST_ROWS)])
    typical = mx.sqrt(mx.mean(mx.square(single.astype(mx.float32)))).item()
    identical, difference = [], []
    for count in range(1, MOST_ROWS + 1):
        together, expected = compute(0, count), single[:count]
        error = mx.abs(together.astype(mx.float32) - expected.astype(mx.float32))
        identical.append(mx.mean(together == expected).item())
        worst = mx.max(error).item() / typical if mx.all(mx.isfinite(error)).item() else math.inf
        difference.append(worst)
    return {"identical": identical, "difference": difference}
