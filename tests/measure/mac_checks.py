"""Measurements behind single lines of `python -m tests.measure.check`."""

import gc
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from akunu_py.bench.result import median
from akunu_py.engine.answer import text_job
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Event, Failed, Finished
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.prefill import unused_limit
from akunu_py.kernels import probe
from akunu_py.kernels.probe import Probe
from akunu_py.kernels.quantized_rows import ROWS
from akunu_py.types import GenerateOptions

_REPEATS = 5


def measured_bandwidth(nbytes: int) -> float:
    """Return the GB/s of a sum over an array of `nbytes` bytes, the median."""
    array = mx.ones((nbytes // 4,), mx.float32)
    mx.eval(array, array.sum())
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        mx.eval(array.sum())
        seconds.append(time.perf_counter() - started)
    return nbytes / median(seconds) / 1e9


def counted_memory(engine: Engine, length: int) -> tuple[float, float]:
    """Measure the memory of a prompt of `length` tokens.

    Returns MLX's memory relative to the bytes that akunu counts, and the unused buffers that MLX
    keeps afterwards relative to their limit.
    """
    length = min(length, engine.plan.context_length - 2)
    gc.collect()
    mx.clear_cache()
    before, loop = mx.get_active_memory(), StepLoop(engine)
    prompt = [number % engine.tokens.vocabulary for number in range(length)]
    options = GenerateOptions(1, draft="off", may_store=False)
    loop.answer(prompt, options)
    held = mx.get_active_memory() - before
    return held / sum(
        each.nbytes for each in loop.runner.caches.histories()
    ), mx.get_cache_memory() / unused_limit()


# Unique prompts of 12,000 to 16,000 tokens and answers of mixed lengths overflowed the prompt
# caches of a server with too much wired memory, and the kernel of macOS panicked after 102 to 108
# seconds. Source: mlx issue 3186.
_STREAMS = 2
_ANSWERS = 8, 200  # tokens
_CACHED_PROMPTS = 2  # that fit into the prompt caches


@dataclass(slots=True)
class Soak:
    """Totals of the two streams of requests."""

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    error: Exception | None = None


def run_soak(engine: Engine, seconds: float, length: int) -> Soak:
    """Send prompts of up to `length` tokens in two streams for that many seconds."""
    length = max(2, min(length, engine.plan.context_length - max(_ANSWERS) - 1))

    def load() -> StepLoop:
        loop = StepLoop(engine)
        prompt = engine.plan.fit.needs.cache.at(length)
        loop.runner.caches.limit = (_STREAMS + _CACHED_PROMPTS) * prompt
        return loop

    found, started, host = Soak(), time.monotonic(), ModelHost(load)
    host.start()

    def stream(seed: int) -> None:
        dice = random.Random(seed)
        while found.error is None:
            tokens = dice.choices(
                range(engine.tokens.vocabulary), k=dice.randint(length // 2, length)
            )
            options = GenerateOptions(dice.choice(_ANSWERS), may_store=False)
            events: queue.SimpleQueue[Event] = queue.SimpleQueue()
            host.submit(text_job(tokens, options), events.put)
            while not isinstance(end := events.get(), Finished | Failed):
                pass
            if isinstance(end, Failed):
                found.error = end.error
            found.requests += 1
            found.prompt_tokens += len(tokens)
            if time.monotonic() >= started + seconds:
                return

    threads = [
        threading.Thread(target=stream, args=(seed,), daemon=True) for seed in range(_STREAMS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.monotonic() - started
    host.close()
    return found


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


def row_kernels(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Probe akunu's kernel for a few rows on each matrix shape; see `probe.Probe`.

    "mlx_equal" has the numbers of rows that have the bits of each row alone in MLX.
    """
    found: dict[str, dict[str, Any]] = {}
    for shape, layers in probe.layers_by_shape(model).items():
        x = mx.random.normal((max(ROWS), shape.inputs), key=mx.random.key(1))
        x = x.astype(layers[0]["scales"].dtype)
        alone = mx.concatenate([probe.mlx_product(layers[0], row[None]) for row in x])
        equal = [
            rows
            for rows in ROWS
            if probe.same_bits(probe.mlx_product(layers[0], x[:rows]), alone[:rows])
        ]
        why = probe.why_off()  # such as an M5, where the kernel may stall
        probed = Probe(error=why) if why else probe.probe(layers, shape)
        found[str(shape)] = asdict(probed) | {"mlx_equal": equal}
    return found


def kernel_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of a matrix shape: rows, whether both are equal, milliseconds of both."""
    rows = []
    for count, times in (found["times"] or {0: ()}).items():
        equal = ["yes" if count in found[name] else "no" for name in ("mlx_equal", "equal")]
        rows.append([str(count), *equal, *(f"{1e3 * each:.3f}" for each in times)])
    return rows if found["times"] else [["", "", found["error"], "", ""]]


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
