"""Reading and saying so many tokens, in llama-bench's manner: pp512, tg128, at chosen depths.

The tokens are random, as there; stop tokens stop nothing. Drafting is off: what it is worth depends
on the text, which is what the workloads are for. Owns the two loops, mlx-lm's and ours, one test
each; `run_tests` interleaves them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

from akunu_py.bench.result import Throughput
from akunu_py.bench.runners.ours import PLAIN
from akunu_py.decoding.engine import Engine
from akunu_py.decoding.session import Session
from akunu_py.errors import UsageError
from akunu_py.types import GenerateOptions

OURS = "akunu"


@dataclass(frozen=True, slots=True)
class LengthTest:
    """Read `prompt` tokens, or say `generate` of them (one of the two is 0), behind `depth`."""

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
    """Each length at each depth; lengths of 0 are left out, as in llama-bench.

    Raises UsageError where one does not fit the model's context.
    """
    tests = [
        *(LengthTest(prompt, 0, depth) for depth in depths for prompt in prompts if prompt),
        *(LengthTest(0, generate, depth) for depth in depths for generate in generates if generate),
    ]
    for test in tests:
        if (needed := test.depth + test.prompt + test.generate + 2) > engine.context_length:
            raise UsageError(
                f"{test.name} needs a context of {needed} tokens, "
                f"{engine.name} has {engine.context_length}; choose less with -p, -n or -d"
            )
    return tests


def run_tests(
    engine: Engine,
    tests: Sequence[LengthTest],
    repeats: int,
    into: list[Throughput],
    progress: Callable[[str], None],
) -> None:
    """Appends two series for each test to `into`; they grow while it measures."""
    endless = replace(engine, stop_tokens=frozenset())
    loops = {PLAIN: _mlx_lm, OURS: _ours}
    for test in tests:
        rows = {name: Throughput(test.name, name) for name in loops}
        into += rows.values()
        for repeat in range(-1, repeats):  # the first round warms up
            progress(f"{test.name}: {'warming up' if repeat < 0 else f'{repeat + 1}/{repeats}'}")
            tokens = _random_tokens(engine, test.depth + max(1, test.prompt), repeat)
            for name, loop in loops.items():
                seconds = loop(endless, test, tokens)
                mx.synchronize(generation_stream)
                mx.clear_cache()
                if repeat >= 0:
                    rows[name].rates.append((test.prompt or test.generate) / seconds)


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    special = set(engine.tokenizer.all_special_ids)
    usual = [token for token in range(len(engine.tokenizer)) if token not in special]
    return draw.choices(usual, k=count)


def _mlx_lm(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    """Seconds of the test in mlx-lm's loop."""
    cache = make_prompt_cache(engine.model)
    if test.prompt and test.depth:  # max_tokens 0: reads the prompt, says nothing
        list(generate_step(mx.array(tokens[: test.depth]), engine.model, max_tokens=0,
                           prompt_cache=cache))  # fmt: skip
    read = tokens[test.depth :] if test.prompt else tokens
    started = time.perf_counter()
    steps = generate_step(
        mx.array(read), engine.model, max_tokens=1 + test.generate, prompt_cache=cache
    )
    next(steps)
    if test.generate:
        started = time.perf_counter()
        for _ in steps:
            pass
    elapsed = time.perf_counter() - started
    steps.close()
    return elapsed


def _ours(engine: Engine, test: LengthTest, tokens: list[int]) -> float:
    """Seconds of the test in our plain loop, scaled to `test.prompt` tokens where a cache that
    cannot be trimmed had more to read than those."""
    session = Session(engine)
    if test.prompt and test.depth:
        session.generate(tokens[: test.depth], GenerateOptions(max_tokens=1, draft="off")).answer()
    options = GenerateOptions(max_tokens=1 + test.generate, draft="off")
    stats = session.generate(tokens, options).answer().stats
    if test.generate:
        return stats.decode_s
    return stats.prefill_s * test.prompt / (stats.prompt_tokens - stats.cached_tokens)
