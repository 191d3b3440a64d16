"""Tokens per second, side by side in one process on the same weights.

The contestants take turns on each prompt, repetition by repetition, so that a machine that slows
down slows all of them. The yardstick is mlx-lm's own `generate_step`. Times are wall times from
the first token to the last, detokenising included for ours; the prompt is not counted.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx_lm.generate import generate_step

from akunu_py.bench.workloads import Workload
from akunu_py.engine import Engine
from akunu_py.experience import Experience
from akunu_py.session import Session
from akunu_py.types import DraftMode, GenerateOptions, Message, Stats

BASELINE = "mlx-lm"


@dataclass(slots=True)
class Series:
    """All repetitions of one contestant on one workload. Times in seconds."""

    workload: str
    contestant: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    tokens_per_pass: float = 1.0
    acceptance_rate: float = 0.0
    identical: bool = True

    @property
    def tokens_per_s(self) -> float:
        """The median over the repetitions; the first token belongs to the prefill."""
        if len(self.tokens) < 2:
            return 0.0
        return (len(self.tokens) - 1) / statistics.median(self.decode_s)


def measure(
    engine: Engine,
    experience: Experience,
    workloads: Sequence[Workload],
    modes: Sequence[DraftMode],
    *,
    max_tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> Iterator[list[Series]]:
    """Yields, per workload, the series of mlx-lm and of each mode, in this order.

    `experience`: with a memory, answers to the same prompt would be known after the first one.
    """
    for workload in workloads:
        prompt = engine.encode_chat([Message("user", workload.prompt)])
        names = [BASELINE, *modes]
        rows = [Series(workload.name, name, len(prompt)) for name in names]
        for repeat in range(-1, repeats):  # the first round warms up
            for row, mode in zip(rows, [None, *modes], strict=True):
                progress(f"{workload.name}: {row.contestant}, {max(repeat, 0) + 1}/{repeats}")
                tokens, stats = (
                    run_baseline(engine, prompt, max_tokens)
                    if mode is None
                    else run_ours(engine, experience, prompt, max_tokens, mode)
                )
                row.tokens = tokens
                row.identical = row.identical and tokens == rows[0].tokens
                if repeat >= 0:
                    row.prefill_s.append(stats.prefill_s)
                    row.decode_s.append(stats.decode_s)
                if mode is not None:
                    row.tokens_per_pass = stats.tokens_per_pass
                    row.acceptance_rate = stats.acceptance_rate
        yield rows


def run_baseline(engine: Engine, prompt: list[int], max_tokens: int) -> tuple[list[int], Stats]:
    """mlx-lm's plain greedy loop."""
    stats = Stats(prompt_tokens=len(prompt))
    tokens: list[int] = []
    started = first = time.perf_counter()
    steps = generate_step(mx.array(prompt), engine.model, max_tokens=max_tokens)
    with contextlib.closing(steps):
        for token, _ in steps:
            tokens.append(int(token))
            if len(tokens) == 1:
                first = time.perf_counter()
            if token in engine.stop_tokens:
                break
    stats.prefill_s, stats.decode_s = first - started, time.perf_counter() - first
    stats.generated_tokens = len(tokens)
    return tokens, stats


def run_ours(
    engine: Engine, experience: Experience, prompt: list[int], max_tokens: int, mode: DraftMode
) -> tuple[list[int], Stats]:
    """Our engine in a fresh session."""
    options = GenerateOptions(max_tokens=max_tokens, draft=mode)
    answer = Session(engine, experience).generate(prompt, options).answer()
    return list(answer.tokens), answer.stats
