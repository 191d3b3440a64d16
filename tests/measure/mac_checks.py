"""Measurements behind single lines of `python -m tests.measure.check`."""

from __future__ import annotations

import gc
import json
import math
import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.bench.result import median
from akunu_py.decoding import device, kv_cache, output_rows, wired
from akunu_py.decoding.constraint.answer_limits import compile_rules
from akunu_py.decoding.events import Event, Failed, Finished
from akunu_py.decoding.generate.answer_jobs import text_job
from akunu_py.decoding.generate.model_host import ModelHost
from akunu_py.decoding.generate.prefill import unused_limit
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.generate.step_loop import StepLoop
from akunu_py.decoding.model.engine import Engine, model_digest
from akunu_py.decoding.prompt_cache.history import MAX_CHECKPOINTS
from akunu_py.decoding.prompt_cache.memory import MAX_HISTORIES
from akunu_py.errors import UsageError
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions

_REPEATS = 5
TIE_ROWS = 5  # of a pass with a draft of four tokens
HEAD_ROWS = 17  # of a prompt's last pass


@dataclass(frozen=True, slots=True)
class NearTies:
    """Positions of a text where rounding may decide."""

    positions: int
    flipped: int  # another token is the most likely one in a pass of several rows
    close: int  # the two highest logits are within one step of the format

    @property
    def rate(self) -> float:
        return self.flipped / max(1, self.positions)


def measured_bandwidth(nbytes: int) -> float:
    """Return the bytes per second of a sum over an array of `nbytes` bytes, the median."""
    array = mx.ones((nbytes // 4,), mx.float32)
    mx.eval(array, array.sum())
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        mx.eval(array.sum())
        seconds.append(time.perf_counter() - started)
    return nbytes / median(seconds)


def factor(left: float, right: float) -> float:
    """Return the ratio of two numbers, or its inverse if larger."""
    return max(left / right, right / left)


def bandwidth_line(nbytes: int) -> tuple[float | None, str]:
    """Return the factor between the assumed and the measured bandwidth, and a note."""
    if not device.on_metal():
        return None, ""
    chip, measured = device.chip(), measured_bandwidth(nbytes) / 1e9
    source = "estimated" if chip.estimated else "known"
    note = f"{device.gpu_cores()} GPU cores, {chip.gb_per_s:.0f} GB/s {source}, {measured:.0f} here"
    return factor(chip.gb_per_s, measured), note


def wired_limit() -> int:
    """Return MLX's wired limit in bytes. Setting the same limit again changes nothing."""
    mx.synchronize()
    return int(mx.set_wired_limit(wired.wired_limit() or 0))


def sampling_speed(
    engine: Engine, max_tokens: int, plain: SamplingOptions, changed: SamplingOptions
) -> float | None:
    """Return the decoding speed with the options `changed`, relative to `plain`."""
    prompt = engine.tokens.encode_chat([Message("user", "Count from 1 to 100.")])

    def seconds(sampling: SamplingOptions) -> float:
        options = GenerateOptions(max_tokens, draft="off", may_store=False, sampling=sampling)
        stats = Session(engine).generate(prompt, options).answer().stats
        return stats.decode_s / max(1, stats.generated_tokens - 1)

    before, after = ([seconds(each) for _ in range(_REPEATS)] for each in (plain, changed))
    return median(before) / median(after) if median(after) else None


def head_rows(engine: Engine) -> int:
    """Return the rows of logits that a pass over `HEAD_ROWS` tokens computes if one is needed."""
    widths = []

    def last(rows: mx.array) -> mx.array:
        widths.append(rows.shape[-1])
        return rows[:, -1:]

    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    vocabulary = output_rows.run(engine.model, mx.zeros((1, HEAD_ROWS), mx.int32), cache, last)
    return HEAD_ROWS if widths[-1] == vocabulary.shape[-1] else 1


def identity_s(engine: Engine) -> float:
    """Return the seconds to compute the digest that identifies a model's prompt caches."""
    started = time.perf_counter()
    model_digest(engine.plan.path, engine.plan.weights)
    return time.perf_counter() - started


def near_ties(engine: Engine, kind: mx.Dtype, positions: int) -> NearTies:
    """Compare the most likely tokens of passes of `TIE_ROWS` rows with one row at a time.

    kind: format of all values that are not quantized. The text is the model's own answer.
    """
    prompt = engine.tokens.encode_chat([Message("user", "Write a story about a lighthouse.")])
    options = GenerateOptions(positions, draft="off", may_store=False)
    text = [*prompt, *Session(engine).generate(prompt, options).answer().tokens]
    original = engine.model.parameters()
    engine.model.set_dtype(kind)
    try:
        single, together = (_logits(engine, text, len(prompt), rows) for rows in (1, TIE_ROWS))
    finally:
        engine.model.update(original)
    top = mx.sort(single, axis=-1)[:, -2:]
    close = top[:, 1] - top[:, 0] <= mx.finfo(kind).eps * mx.abs(top[:, 1])
    flipped = mx.argmax(single, axis=-1) != mx.argmax(together, axis=-1)
    return NearTies(len(flipped), int(flipped.sum().item()), int(close.sum().item()))


def _logits(engine: Engine, text: list[int], start: int, rows: int) -> mx.array:
    """Return the logits behind each token from `start` on, [tokens, vocab] of float32."""
    cache, found = kv_cache.new_cache(engine.model, engine.plan.kv_bits), []
    mx.eval(engine.model(mx.array([text[:start]]), cache=cache))
    for at in range(start, len(text), rows):
        found.append(engine.model(mx.array([text[at : at + rows]]), cache=cache)[0])
        mx.eval(found[-1])
    return mx.concatenate(found).astype(mx.float32)


_PROPERTIES = 300


def counted_memory(engine: Engine, length: int) -> tuple[float, float]:
    """Measure the memory of a prompt of `length` tokens.

    Returns MLX's memory relative to the bytes that akunu counts, and the unused buffers that MLX
    keeps afterwards relative to their limit.
    """
    length = min(length, engine.plan.context_length - 2)
    gc.collect()
    mx.clear_cache()
    before, session = mx.get_active_memory(), Session(engine)
    prompt = [number % engine.tokens.vocabulary for number in range(length)]
    options = GenerateOptions(1, draft="off", may_store=False)
    session.generate(prompt, options).answer()
    held = mx.get_active_memory() - before
    return held / session.target.history.nbytes, mx.get_cache_memory() / unused_limit()


def metal_buffers(engine: Engine) -> int:
    """Return the maximum number of Metal buffers: weights, and all prompt caches in memory.

    Buffers in use count: at its limit, MLX's allocator frees all others.
    """
    cache = kv_cache.new_cache(engine.model, engine.plan.kv_bits)
    mx.eval(engine.model(mx.array([[0]]), cache=cache))
    copies = 1 + MAX_CHECKPOINTS * engine.needs_checkpoints
    histories = MAX_HISTORIES * copies * len(kv_cache.state_arrays(cache))
    return len(tree_flatten(engine.model.parameters())) + histories


def schema_line(engine: Engine) -> tuple[float | None, str]:
    """Return the seconds to compile a schema of many properties again, and a note."""
    properties = {f"p{number}": {"type": "string"} for number in range(_PROPERTIES)}
    schema = json.dumps({"type": "object", "properties": properties})
    sampling = SamplingOptions(constraint=Constraint("json_schema", schema))
    options, seconds = GenerateOptions(sampling=sampling), []
    for _ in range(2):
        started = time.perf_counter()
        try:
            compile_rules(engine.tokens, options)
        except UsageError as error:  # a tokenizer without grammars
            return None, str(error)
        seconds.append(time.perf_counter() - started)
    return seconds[1], f"the first time {seconds[0]:.2f} s, in the thread of the request"


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
        session = Session(engine)
        prompt = engine.plan.fit.needs.cache.at(length)
        session.target.caches.limit = (_STREAMS + _CACHED_PROMPTS) * prompt
        return StepLoop(session)

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
