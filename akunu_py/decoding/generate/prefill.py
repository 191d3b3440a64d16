"""Prefill: run a prompt through the model in chunks sized by the measured speed."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.decoding.prompt_cache.history import CHECKPOINT_EVERY, TokenHistory
from akunu_py.decoding.target import Target
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.ngram.cost import CostCurve

_PATIENCE = 1.0  # seconds that cancelling may wait for chunks in flight
_TILE = 64  # rows per kernel tile
_FIRST_SLICE = 64  # tokens of a timed chunk before the speed is known
_LEAST_SLICE = 16
_BUFFERS, _MIN_BUFFERS = 0.1, 64 << 20  # unused ones to keep: share of the used ones, bytes


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
    """A launched chunk."""

    tokens: int
    done: mx.array  # evaluated when the chunk is done
    last: bool


def prefill(
    target: Target,
    sizes: ChunkSizes | None = None,
    meanwhile: Callable[[int], None] = lambda launched: None,
) -> Generator[int]:
    """Prefill the pending tokens except `target.prompt_tail`, with checkpoints.

    Yields the number of prefilled tokens before each chunk and at the end; closing the generator
    keeps them. `sizes.seconds` may change between yields; while it is set, no chunk is running at a
    yield. meanwhile: called during a chunk with the number of tokens up to its end.
    """
    sizes = sizes or ChunkSizes()
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
        if not size or _is_place(target.history):
            target.history.checkpoint()
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
    left = max(0, len(target.pending) - target.prompt_tail)
    mark = target.history.to_next_mark
    return min(left, sizes.next(), left if mark is None else mark)


def _is_place(history: TokenHistory) -> bool:
    """Return whether a checkpoint is due here."""
    length = len(history.tokens)
    return length in history.marks or length >= history.last_checkpoint + CHECKPOINT_EVERY


def _launch(target: Target, count: int) -> _Chunk:
    """Launch a pass over the next `count` pending tokens and record them."""
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
