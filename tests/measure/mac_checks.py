"""Measurements behind single lines of `python -m tests.measure.check`."""

import gc
import random
import threading
import time
import timeit
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from akunu_py.bench.result import median
from akunu_py.engine.engine import Engine
from akunu_py.engine.events import Failed
from akunu_py.engine.host import ModelHost
from akunu_py.engine.loop import StepLoop
from akunu_py.engine.prefill import unused_limit
from akunu_py.kernels import probe
from akunu_py.kernels.probe import Probe
from akunu_py.kernels.row_kernels import ROWS, mlx_product
from akunu_py.types import GenerateOptions
from tests.support.jobs import end_of, submit, text_job

_REPEATS = 5


def measured_bandwidth(nbytes: int) -> float:
    """Return the GB/s of a sum over an array of `nbytes` bytes, the median."""
    array = mx.ones((nbytes // 4,), mx.float32)
    mx.eval(array, array.sum())
    seconds = timeit.repeat(lambda: mx.eval(array.sum()), number=1, repeat=_REPEATS)
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
    counted = sum(each.nbytes for each in loop.runner.caches.histories())
    return held / counted, mx.get_cache_memory() / unused_limit()


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
            end = end_of(submit(host, text_job(tokens, options)))
            if isinstance(end, Failed):
                found.error = end.error
            found.requests += 1
            found.prompt_tokens += len(tokens)
            if time.monotonic() >= started + seconds:
                return

    threads = [threading.Thread(target=stream, args=(n,), daemon=True) for n in range(_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.seconds = time.monotonic() - started
    host.close()
    return found


def row_kernels(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Probe akunu's kernels for a few rows on each matrix shape; see `probe.Probe`.

    "mlx_equal" has the numbers of rows that have the bits of each row alone in MLX.
    """
    found: dict[str, dict[str, Any]] = {}
    for shape, layers in probe.layers_by_shape(model).items():
        x = mx.random.normal((max(ROWS), shape.inputs), shape.kind, key=mx.random.key(1))
        alone = mx.concatenate([mlx_product(layers[0], row[None]) for row in x])
        equal = [
            rows for rows in ROWS if probe.same_bits(mlx_product(layers[0], x[:rows]), alone[:rows])
        ]
        why = probe.why_off()  # such as an M5, where the kernel may stall
        probed = Probe(error=why) if why else probe.probe(layers, shape)
        found[str(shape)] = asdict(probed) | {"mlx_equal": equal}
    return found
