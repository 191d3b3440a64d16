"""What only the machine itself can show, measured in minutes and judged line by line.

Most of what is promised is tested wherever the tests run; how Metal's kernels round, what their
passes cost, and what the system does with memory is not. How MLX multiplies by a quantized matrix
depends on the rows, the matrix and the chip (mlx/backend/metal/quantized.cpp): a few rows one by
one, since M3 up to five together; many, which begin between 6 (M1) and 32 (Ultra), in tiles of 32.
Attention changes above 8 rows, and where rows times the heads that share their keys exceed 32. So
each number of rows from 1 to 33 is held against one.
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from akunu_py.bench.chat import DECODING, GOAL_MS, GOAL_RATIO, ChatBench, ChatOptions, ChatResult
from akunu_py.bench.curve import measure_curve
from akunu_py.bench.result import CHECK_FORMAT, Result, describe_machine, median, today
from akunu_py.bench.runners import PLAIN
from akunu_py.bench.speed import OURS, Plan, Setup, run_speed
from akunu_py.bench.workloads import load_workloads
from akunu_py.decoding import device
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.load import load_found
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import AkunuError
from akunu_py.models import store
from akunu_py.types import DEFAULT_MODEL, GenerateOptions, LoadOptions, Message

Verdict = Literal["pass", "FAIL", "not measured", "not on this machine"]

MOST_ROWS = 33  # one more than a draft and its token ever have, and than a tile
ROUNDING = 16  # steps of the format, relative to the typical output; a wrong kernel is far outside
NEAR_TIE = 0.5  # logits: two roundings of bfloat16 where logits are 32 to 64
OFF, AUTO, PROMPT = 0.98, 0.99, 0.95  # times mlx-lm's speed; medians of three vary by a hundredth
COST_PER_ROW = 0.5  # of 32 rows, in plain steps: above that no draft is worth its pass
MEMORY = 1.1  # times the estimate
WARM_S, IDLE_S = 0.15, 0.1  # TTFT of a prompt that is known, and how much an idle time may add
START_S, AGAIN_S, LOAD_RATE = 4.0, 3.0, 1e9  # a process to its first token, and bytes a second
_SPEEDS = (("off", PLAIN, OFF), ("auto", PLAIN, AUTO), ("auto", "off", AUTO))
_LARGEST = 3.5e9  # bytes of a model that ten minutes are enough for
_BIT_WIDTHS, _FORMATS = (4, 8), (mx.bfloat16, mx.float16)
_GROUP, _GROUPS, _KV_HEADS, _HEAD = 64, (4, 8), 2, 64


@dataclass(frozen=True, slots=True)
class Line:
    """One promise. about: the model, or what else it is of. value: as measured, None where it was
    not. limit: the largest value that passes, with `least` the smallest. here: whether this machine
    can say; what holds of Metal is measured elsewhere too, and says nothing there."""

    about: str
    name: str
    value: float | None
    limit: float
    unit: str = ""
    least: bool = False
    here: bool = True
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Judged by three digits, which are what is shown."""
        if not self.here:
            return "not on this machine"
        if self.value is None:
            return "not measured"
        shown = float(f"{self.value:.3g}")
        return "pass" if (shown >= self.limit if self.least else shown <= self.limit) else "FAIL"


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """How much is measured of each model. kernels: (inputs, outputs) of matrices; depths:
    tokens behind the rows of attention. chats: answers in the chat; keys: typed into each."""

    workloads: Sequence[str] | None = None
    repeats: int = 3
    max_tokens: int = 96
    prompts: Sequence[int] = (512, 2048)
    contexts: Sequence[int] = (0, 4096, 16384)
    rows: Sequence[int] = (1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 14, 16, 18, 24, 32, 33)
    curve_repeats: int = 3
    kernels: Sequence[tuple[int, int]] = ((2048, 2048), (4096, 4096), (2560, 9728))
    depths: Sequence[int] = (512, 4096)
    chats: int = 2
    keys: int = 24
    idle_s: float = 5.0


@dataclass(slots=True)
class Check:
    """Everything that one run found, as far as it went. figures: behind the lines, by model or
    `kernels`. results: of the speed bench, one for each model."""

    command: str = ""
    complete: bool = False
    lines: list[Line] = field(default_factory=list)
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(line.verdict == "FAIL" for line in self.lines)

    def add(self, about: str, name: str, value: float | None, limit: float, *, unit: str = "",
            least: bool = False, here: bool = True, note: str = "") -> None:  # fmt: skip
        """Adds a line; see `Line`."""
        self.lines.append(Line(about, name, value, limit, unit, least, here, note))

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
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


def choose_models(named: Sequence[str]) -> list[store.StoredModel]:
    """The starter and those that were named; for none the largest 4-bit model of the store that is
    small enough for ten minutes, if there is one."""
    models = [store.resolve(name) for name in (DEFAULT_MODEL, *named)]
    if not named:
        there = [
            each
            for each in store.list_models()
            if each.quantization.startswith("4-bit") and not each.damaged and each.size < _LARGEST
        ]
        models += sorted(there, key=lambda each: each.size)[-1:]
    for each in models:
        store.check(each)
    return list({each.path: each for each in models}.values())


def default_plan() -> CheckPlan:
    """A processor's half-precision kernels take minutes for matrices of a real model's size, and
    what they show is not of Metal."""
    return CheckPlan() if device.on_metal() else CheckPlan(kernels=((64, 64),))


def run_check(
    models: Sequence[store.StoredModel],
    plan: CheckPlan,
    check: Check,
    progress: Callable[[str], None],
) -> None:
    """Fills `check`, which is valid whenever this is interrupted."""
    parts: list[tuple[str, Callable[[], None]]] = [("kernels", partial(check_kernels, plan, check))]
    parts += [(each.name, partial(check_model, each, plan, check, progress)) for each in models]
    for about, measure in parts:
        progress(about)
        try:
            measure()
        except (AkunuError, RuntimeError, OSError) as error:  # MLX's are RuntimeErrors
            why = f"{type(error).__name__}: {error}"
            check.add(about, "checked to its end", 0, 1, least=True, note=why)
    check.complete = True


# Kernels


def check_kernels(plan: CheckPlan, check: Check) -> None:
    """Passes over 1 to 33 rows against one row at a time."""
    for kind in _FORMATS:
        name = str(kind).removeprefix("mlx.core.")
        for bits in _BIT_WIDTHS:
            found = [quantized_rows(bits, kind, *sizes) for sizes in plan.kernels]
            _add_rows(check, f"{bits}-bit matrices, {name}", kind, found)
        attention = [attention_rows(kind, n, heads) for n in plan.depths for heads in _GROUPS]
        _add_rows(check, f"attention, {name}", kind, attention)


def _add_rows(
    check: Check, name: str, kind: mx.Dtype, found: Sequence[dict[str, list[float]]]
) -> None:
    check.figures.setdefault("kernels", {})[name] = found
    least = [min(rates) for rates in zip(*(each["identical"] for each in found), strict=True)]
    exact = next((rows for rows, rate in enumerate(least) if rate < 1), len(least))
    check.add(
        "kernels",
        f"{name}: 1 to {MOST_ROWS} rows differ from one by",
        max(max(each["difference"]) for each in found),
        ROUNDING * mx.finfo(kind).eps,
        here=device.on_metal(),
        note=f"identical up to {exact} rows"
        + (f", {min(least):.1%} of values beyond, at least" if exact < len(least) else ""),
    )


def quantized_rows(bits: int, kind: mx.Dtype, inputs: int, outputs: int) -> dict[str, list[float]]:
    """A product with a quantized matrix, [rows, inputs] -> [rows, outputs]; see `_compare_rows`."""
    mx.random.seed(bits)
    rows = mx.random.normal((MOST_ROWS, inputs)).astype(kind)
    weight = mx.quantize(
        mx.random.normal((outputs, inputs)).astype(kind), group_size=_GROUP, bits=bits
    )

    def product(start: int, stop: int) -> mx.array:
        return mx.quantized_matmul(
            rows[start:stop], *weight, transpose=True, group_size=_GROUP, bits=bits
        )

    return _compare_rows(product)


def attention_rows(kind: mx.Dtype, context: int, group: int) -> dict[str, list[float]]:
    """Causal attention of the last rows, as in a pass behind `context` tokens, where `group` heads
    share their keys; see `_compare_rows`."""
    mx.random.seed(0)
    queries, keys, values = (
        mx.random.normal((1, heads, context + MOST_ROWS, _HEAD)).astype(kind)
        for heads in (_KV_HEADS * group, _KV_HEADS, _KV_HEADS)
    )

    def attend(start: int, stop: int) -> mx.array:
        mask = "causal" if stop - start > 1 else None  # as mlx-lm asks for it
        end = context + stop
        out = mx.fast.scaled_dot_product_attention(
            queries[:, :, context + start : end], keys[:, :, :end], values[:, :, :end],
            scale=_HEAD**-0.5, mask=mask,
        )  # fmt: skip
        return out[0].swapaxes(0, 1).flatten(1)  # [rows, heads x head]

    return _compare_rows(attend)


def _compare_rows(compute: Callable[[int, int], mx.array]) -> dict[str, list[float]]:
    """By the number of rows, from 1: the share of values that are identical to those of one row at
    a time, and the largest difference, as a share of the typical value.

    compute: the output of rows from start to stop, [stop - start, outputs].
    """
    alone = mx.concatenate([compute(row, row + 1) for row in range(MOST_ROWS)])
    typical = mx.sqrt(mx.mean(mx.square(alone.astype(mx.float32)))).item()
    identical, difference = [], []
    for count in range(1, MOST_ROWS + 1):
        together, expected = compute(0, count), alone[:count]
        apart = mx.abs(together.astype(mx.float32) - expected.astype(mx.float32))
        identical.append(mx.mean(together == expected).item())
        worst = mx.max(apart).item() / typical if mx.all(mx.isfinite(apart)).item() else math.inf
        difference.append(worst)
    return {"identical": identical, "difference": difference}


# A model


def check_model(
    model: store.StoredModel, plan: CheckPlan, check: Check, progress: Callable[[str], None]
) -> None:
    """Programs first, while this one holds no model."""

    def show(what: str) -> None:
        progress(f"{model.name}: {what}" if what else "")

    check.figures[model.name] = {}
    with tempfile.TemporaryDirectory(prefix="akunu-bench-") as directory:
        prompt = load_workloads(["chat"])[0].turns[-1].user
        options = ChatOptions(
            model.path.absolute(), prompt, plan.chats, plan.max_tokens, plan.keys,
            long=False, draft="auto", weights="auto", force=False,
        )  # fmt: skip
        bench = ChatBench(options, Path(directory), show)
        _check_start(model, bench, check, show)
        _check_chat(model, bench, check)
    show("loading")
    before = mx.get_active_memory()
    engine = load_found(model, LoadOptions())
    workloads = load_workloads(plan.workloads)
    prompts = [length for length in plan.prompts if length + 2 <= engine.plan.context_length]
    speed = Plan(workloads, [0.0], plan.max_tokens, plan.repeats, prompts)
    result = run_speed(engine, Setup(["off", "auto"], ()), speed, check.command, show)
    check.results.append(result)
    if not result.complete:
        raise KeyboardInterrupt
    judge_speed(model.name, result, check)
    _check_curves(engine, plan, check, before, show)
    show("idle")
    _check_idle(engine, plan, check)


def _check_start(
    model: store.StoredModel, bench: ChatBench, check: Check, show: Callable[[str], None]
) -> None:
    for when, limit in (("the first time", START_S), ("again", AGAIN_S)):
        show(f"a process to its first token, {when}")
        started = time.perf_counter()
        bench.run_alone(1)
        seconds = time.perf_counter() - started
        limit += model.size / LOAD_RATE
        check.add(model.name, f"akunu run to its first token, {when}", seconds, limit, unit="s")


def _check_chat(model: store.StoredModel, bench: ChatBench, check: Check) -> None:
    result = ChatResult()
    bench.measure(result)
    check.figures[model.name]["chat"] = result.as_dict()
    keys = result.keys[DECODING]
    key_ms = 1e3 * keys.median if keys.seconds else None
    late = f"95 % within {1e3 * keys.p95:.1f} ms, {keys.lost} lost"
    name, ratio = "the chat's speed beside akunu run's", result.ratio
    check.add(model.name, "a key while decoding", key_ms, GOAL_MS, unit="ms", note=late)
    spread = f"± {result.spread:.3f}"
    check.add(model.name, name, ratio, GOAL_RATIO, unit="x", least=True, note=spread)


def judge_speed(about: str, result: Result, check: Check) -> None:
    """off and auto against mlx-lm's loop, auto against off, the answers, and reading prompts."""
    by_test = {(series.workload, series.runner): series for series in result.runs}
    for workload in dict.fromkeys(series.workload for series in result.runs):
        for runner, other, limit in _SPEEDS:
            ours, theirs = by_test[workload, runner], by_test[workload, other]
            note = f"{ours.tokens_per_s:.1f} ± {ours.spread:.1f} t/s"
            if ours.loop is not None:
                note += "; the answer ends in a loop"
            rate = _ratio(ours.tokens_per_s, theirs.tokens_per_s)
            name = f"{workload}: {runner} beside {other}"
            check.add(about, name, rate, limit, unit="x", least=True, note=note)
    compared = [series for series in result.runs if series.identical is not None]
    different = [series.difference for series in compared if series.difference]
    # Without a margin the prompts differed, which is no tie.
    margins = [math.inf if d["margin"] is None else d["margin"] for d in different]
    note = f"{len(compared) - len(different)} of {len(compared)} answers are the same"
    name = "ties at which answers are not mlx-lm's"
    check.add(about, name, max(margins, default=0.0), NEAR_TIE, unit="logits", note=note)
    rates: dict[str, dict[str, float]] = {}
    for test in result.throughput:
        rates.setdefault(test.test, {})[test.runner] = median(test.rates)
    for name, by_runner in rates.items():
        rate, note = _ratio(by_runner[OURS], by_runner[PLAIN]), f"{by_runner[OURS]:.0f} t/s"
        name = f"reading a prompt, {name}, beside {PLAIN}"
        check.add(about, name, rate, PROMPT, unit="x", least=True, note=note)


def _ratio(ours: float, theirs: float) -> float | None:
    return ours / theirs if theirs else None


def _check_curves(
    engine: Engine, plan: CheckPlan, check: Check, before: int, show: Callable[[str], None]
) -> None:
    """What passes cost behind short and long contexts, and the memory that those take.

    before: bytes that MLX held before the model was loaded.
    """
    curves = check.figures[engine.name]["curves_s"] = {}
    for context in plan.contexts:
        cost, note = None, f"the context ends at {engine.plan.context_length:,} tokens"
        if context + MOST_ROWS < engine.plan.context_length:
            show(f"cost curve behind {context:,} tokens")
            gc.collect()  # sessions that are done with hold their caches
            mx.reset_peak_memory()
            costs = measure_curve(engine, plan.rows, plan.curve_repeats, context)
            peak, estimate = mx.get_peak_memory() - before, engine.plan.fit.at(context).total
            curves[str(context)] = {str(rows): seconds for rows, seconds in costs.items()}
            cost = costs[32] / costs[1] / 32
            note = ", ".join(f"{rows}: {costs[rows] / costs[1]:.2f}" for rows in costs)
            if context:
                name = f"memory at {context:,} tokens, of the estimate"
                size = f"{peak / 2**30:.2f} GiB"
                check.add(engine.name, name, peak / estimate, MEMORY, unit="x", note=size)
        name = f"each of 32 rows behind {context:,} tokens"
        here = device.on_metal()
        check.add(engine.name, name, cost, COST_PER_ROW, unit="steps", here=here, note=note)


def _check_idle(engine: Engine, plan: CheckPlan, check: Check) -> None:
    """A prompt that is known already, at once and after an idle time; and the wired limit."""
    session = Session(engine)
    prompt = engine.tokens.encode_chat([Message("user", "hi")])
    options = GenerateOptions(max_tokens=1, draft="off", remember=False)

    def first_token_s() -> float:
        return session.generate(prompt, options).answer().stats.prefill_s

    warm = median([first_token_s() for _ in range(6)][1:])
    time.sleep(plan.idle_s)
    idle = first_token_s()
    here, about = device.on_metal(), engine.name
    check.add(about, "first token of a prompt that is known", warm, WARM_S, unit="s")
    name = f"what {plan.idle_s:g} s of idling add to it"
    check.add(about, name, idle - warm, IDLE_S, unit="s", here=here)
    wired, wanted = wired_limit() / 2**30, _recommended() / 2**30
    name = "wired limit while a model is loaded"
    check.add(about, name, wired, wanted, unit="GiB", least=True, here=here)


def wired_limit() -> int:
    """Bytes that MLX may keep wired. There is no other way to ask than to set it."""
    mx.synchronize()
    limit = mx.set_wired_limit(_recommended())
    mx.set_wired_limit(limit)
    return int(limit)


def _recommended() -> int:
    """Bytes that macOS recommends to hold at most, 0 elsewhere."""
    return int(mx.device_info().get("max_recommended_working_set_size", 0))
