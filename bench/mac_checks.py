"""Measurements behind single lines of `akunu bench check`."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import dataclass

import mlx.core as mx
from mlx.utils import tree_flatten

from akunu_py.bench.result import median
from akunu_py.decoding import chips, device, kv_cache
from akunu_py.decoding.constraint.answer_limits import compile_rules
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.history import MAX_CHECKPOINTS
from akunu_py.decoding.prompt_cache.memory import MAX_HISTORIES
from akunu_py.errors import UsageError
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions

_REPEATS = 5
TIE_ROWS = 5  # of a pass with a draft of four tokens


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


def bandwidth_line(nbytes: int) -> tuple[float | None, str]:
    """Return how far the assumed bandwidth is from the measured one, as a ratio, and a note."""
    if not device.on_metal():
        return None, ""
    chip, measured = device.chip(), measured_bandwidth(nbytes) / 1e9
    source = "estimated" if chip.estimated else "known"
    note = f"{chips.gpu_cores()} GPU cores, {chip.gb_per_s:.0f} GB/s {source}, {measured:.0f} here"
    return max(chip.gb_per_s / measured, measured / chip.gb_per_s), note


def logprobs_speed(engine: Engine, max_tokens: int) -> float | None:
    """Return the speed of decoding with logprobs, relative to decoding without them."""
    prompt = engine.tokens.encode_chat([Message("user", "Count from 1 to 100.")])

    def seconds(logprobs: int | None) -> float:
        sampling = SamplingOptions(logprobs=logprobs)
        options = GenerateOptions(max_tokens, draft="off", may_store=False, sampling=sampling)
        stats = Session(engine).generate(prompt, options).answer().stats
        return stats.decode_s / max(1, stats.generated_tokens - 1)

    plain, asked = ([seconds(each) for _ in range(_REPEATS)] for each in (None, 1))
    return median(plain) / median(asked) if median(asked) else None


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


def counted_memory(engine: Engine, length: int) -> float | None:
    """Return MLX's memory for a prompt of `length` tokens, relative to the bytes counted."""
    length = min(length, engine.plan.context_length - 2)
    gc.collect()
    mx.clear_cache()
    before, session = mx.get_active_memory(), Session(engine)
    prompt = [number % engine.tokens.vocabulary for number in range(length)]
    options = GenerateOptions(1, draft="off", may_store=False)
    session.generate(prompt, options).answer()
    held = mx.get_active_memory() - before
    return held / session.target.history.nbytes


def metal_buffers(engine: Engine) -> int:
    """Return the most buffers of the weights and of all prompt caches in memory.

    At its limit Metal's allocator in MLX frees every unused buffer, so only live ones count.
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
