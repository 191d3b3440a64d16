"""Prefill: make room for a prompt, and run it in chunks sized by the measured speed."""

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.engine import Engine
from akunu_py.engine.histories.history import (
    CHECKPOINT_EVERY,
    MAX_CHECKPOINT_BYTES,
    MAX_CHECKPOINTS,
)
from akunu_py.engine.histories.memory import MIN_CACHED, PromptCaches
from akunu_py.engine.model import device
from akunu_py.engine.target import Target
from akunu_py.errors import DoesNotFit
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.ngram.cost import CostCurve
from akunu_py.text import human_size

_PATIENCE = 1.0  # seconds that cancelling may wait for chunks in flight
_TILE = 64  # rows per kernel tile
_FIRST_SLICE = 64  # tokens of a timed chunk before the speed is known
_LEAST_SLICE = 16
_BUFFERS, _MIN_BUFFERS = 0.1, 64 << 20  # unused ones to keep: share of the used ones, bytes
_LEAST_ANSWER = 256  # answer tokens that must fit; the rest may never be generated
_STEP = 256  # growth of caches in tokens
_MARKS = 2  # checkpoints of a short prompt
INDEX_BYTES = 360  # of the n-gram drafter per token; measured on 100,000 tokens


@dataclass(slots=True)
class ChunkSizes:
    """Sizes of prefill chunks."""

    costs: CostCurve = field(default_factory=CostCurve)  # learns the prefill rate
    largest: int = PREFILL_ROWS  # limit by memory
    # Time of a chunk, exceeded where passes have high fixed costs. None: the fastest size that
    # stops soon.
    seconds: float | None = None
    least: int = PREFILL_ROWS  # size without a time limit until the speed is known, and at least

    def next(self) -> int:
        """Return the number of tokens of the next chunk."""
        rate = self.costs.prefill_rate
        if self.seconds is not None:
            size = self.costs.slices.tokens_in(self.seconds)
            if size is None:
                size = int(rate * self.seconds) if rate else _FIRST_SLICE
            return max(_LEAST_SLICE, min(size, self.largest))
        size = int(rate * _PATIENCE) if rate else 0
        return max(min(self.least, self.largest), min(size - size % _TILE, self.largest))

    def may_follow(self, under_way: int, size: int) -> bool:
        """Return whether a chunk may be launched while one of `under_way` tokens runs."""
        rate = self.costs.prefill_rate
        return self.seconds is None and rate is not None and under_way + size <= rate * _PATIENCE

    def observe(self, tokens: int, seconds: float, *, last: bool) -> None:
        """Record a chunk's time. A prompt's last chunk is short, so it may be slow."""
        if seconds > 0 and self.seconds is not None:
            self.costs.slices.observe(tokens, seconds)
        if seconds > 0 and (tokens >= _LEAST_SLICE or not last):
            rate, known = tokens / seconds, self.costs.prefill_rate
            self.costs.prefill_rate = max(rate, known) if last and known else rate


@dataclass(slots=True)
class _Chunk:
    tokens: int
    done: mx.array  # evaluated when the chunk is done
    last: bool


def prefill(
    target: Target, sizes: ChunkSizes, meanwhile: Callable[[int], None] = lambda launched: None
) -> Generator[int]:
    """Prefill the pending tokens except `target.prompt_tail`, with checkpoints.

    Yields the number of prefilled tokens before each chunk and at the end; closing the generator
    keeps them. `sizes.seconds` may change between yields; while it is set, no chunk is running at a
    yield. meanwhile: called during a chunk with the number of tokens up to its end.
    """
    read = launched = timed = 0
    under_way: _Chunk | None = None
    started = 0.0
    while True:
        size = _next_size(target, sizes)
        if under_way and not (size and sizes.may_follow(under_way.tokens, size)):
            _wait(target, under_way, sizes, read - timed, started)
            read, under_way = read + under_way.tokens, None
            continue
        yield read
        size = _next_size(target, sizes)
        if under_way and not sizes.may_follow(under_way.tokens, size):
            continue
        length, history = len(target.tokens), target.history
        is_due = length >= history.last_checkpoint + CHECKPOINT_EVERY
        if not size or length in history.marks or is_due:
            history.checkpoint()
        if not size:
            return
        before = under_way
        if not before:
            started, timed = target.clock(), read
        under_way = _launch(target, size)
        launched += size
        meanwhile(launched)
        if before:
            _wait(target, before, sizes, read - timed, started)
            read += before.tokens


def _next_size(target: Target, sizes: ChunkSizes) -> int:
    """Return the number of tokens of the next chunk, 0 if only the tail is left."""
    left, length = max(0, len(target.pending) - target.prompt_tail), len(target.tokens)
    to_marks = (mark - length for mark in target.history.marks if mark > length)
    return min(left, sizes.next(), *to_marks)


def _launch(target: Target, count: int) -> _Chunk:
    target.prefill(mx.array(target.pending[:count]))
    kv_cache.own_states(target.cache)
    arrays = kv_cache.state_arrays(target.cache)  # the logits are never computed
    # The next chunk overwrites the cache's arrays, so wait for a separate one.
    done = arrays[-1][(0,) * arrays[-1].ndim] == 0
    mx.async_eval([*arrays, done])
    target.commit((), count)
    return _Chunk(count, done, len(target.pending) <= target.prompt_tail)


def _wait(target: Target, chunk: _Chunk, sizes: ChunkSizes, before: int, started: float) -> None:
    """Wait for a chunk and record the time since `started`, for `before` tokens and this chunk.

    A single pipelined chunk cannot be timed, because launching may wait too.
    """
    mx.eval(chunk.done)
    sizes.observe(before + chunk.tokens, target.clock() - started, last=chunk.last)
    if mx.get_cache_memory() > unused_limit():
        mx.clear_cache()  # by need only: requests that are decoding use the same buffers


def unused_limit() -> int:
    """Return the bytes of unused buffers that MLX may keep between two chunks."""
    return max(_MIN_BUFFERS, int(_BUFFERS * mx.get_active_memory()))


def release_under_pressure(caches: PromptCaches) -> None:
    """Release MLX's buffers, and at critical pressure all prompt caches but the last one."""
    pressure = device.memory_pressure()
    if pressure == "critical":
        caches.make_room(caches.limit, caches.last)
    if pressure != "normal":
        mx.clear_cache()


def make_room(engine: Engine, caches: PromptCaches, prompt: Sequence[int], max_tokens: int) -> None:
    """Evict histories to fit `prompt` and an answer. Raises DoesNotFit, unless forced."""
    release_under_pressure(caches)
    context = engine.plan.context_length
    cached, best = caches.best(prompt)
    fewest = min(len(prompt) + min(max_tokens, _LEAST_ANSWER), context)
    least = _growth(engine, fewest, cached)
    longest = min(len(prompt) + max_tokens, context)
    most = _growth(engine, longest, cached) + checkpoint_bytes(engine, longest)
    if (left := device.memory_left(engine.plan.memory_limit)) >= most:
        return
    protected = best if cached >= MIN_CACHED else None
    caches.make_room(max(0, caches.limit - caches.nbytes) + most - left, protected)
    mx.clear_cache()
    left = device.memory_left(engine.plan.memory_limit)
    if left >= least or engine.plan.forced:
        return
    if left + caches.nbytes < _growth(engine, fewest, 0):
        raise DoesNotFit(_refusal(engine, len(prompt), cached, least, left))
    caches.make_room(caches.limit)  # the best history has more other tokens than it shares
    mx.clear_cache()


def history_bytes(engine: Engine, tokens: int) -> int:
    """Return the bytes of a history of `tokens` tokens, with its checkpoints."""
    return engine.plan.fit.needs.cache.at(tokens) + checkpoint_bytes(engine, tokens)


def checkpoint_bytes(engine: Engine, tokens: int) -> int:
    """Return the bytes of the checkpoints in a history of `tokens` tokens."""
    if not engine.needs_checkpoints:
        return 0
    cache = engine.plan.fit.needs.cache
    each = cache.fixed + sum(min(tokens, size) * width for size, width in cache.windows)
    count = min(MAX_CHECKPOINTS, _MARKS + tokens // CHECKPOINT_EVERY)
    return max(each, min(count * each, MAX_CHECKPOINT_BYTES))


def _growth(engine: Engine, tokens: int, cached: int) -> int:
    """Return the additional bytes for `tokens` tokens beyond the cached ones."""
    needs, rows = engine.plan.fit.needs, engine.plan.fit.prefill_rows
    whole = cached - cached % _STEP
    held = needs.cache.at(whole, rows) if whole else 0
    grown = max(0, needs.cache.at(tokens, rows) - held)
    return grown + needs.activations.at(tokens, rows) + tokens * INDEX_BYTES


def _refusal(engine: Engine, prompt: int, cached: int, needed: int, left: int) -> str:
    steps = range(_STEP, engine.plan.context_length + 1, _STEP)
    fits = _STEP * bisect_right(steps, left, key=lambda tokens: _growth(engine, tokens, cached))
    ways = []
    if fits - _LEAST_ANSWER >= _STEP:
        ways.append(f"shorten it to {fits - _LEAST_ANSWER:,} tokens (--context {fits} holds)")
    ways += ["a smaller model (akunu models recommend)", "close other programs"]
    return (
        f"a prompt of {prompt:,} tokens needs {human_size(needed)} more for {engine.name}, "
        f"{human_size(max(0, left))} are left; {', or '.join(ways)}; --force tries it anyway"
    )
