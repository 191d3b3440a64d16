"""Measurements behind single lines of `akunu bench check`."""

from __future__ import annotations

import json
import time

import mlx.core as mx

from akunu_py.bench.result import median
from akunu_py.decoding import chips, device
from akunu_py.decoding.constraint.answer_limits import compile_rules
from akunu_py.decoding.generate.session import Session
from akunu_py.decoding.model.engine import Engine
from akunu_py.errors import UsageError
from akunu_py.types import Constraint, GenerateOptions, Message, SamplingOptions

_REPEATS = 5


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


_PROPERTIES = 300


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
