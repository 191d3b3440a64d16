"""Reads a prompt into the KV cache, a chunk at a time; how long a chunk is depends on how fast
earlier ones were."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import mlx.core as mx

from akunu_py.decoding import kv_cache
from akunu_py.decoding.prompt_cache.history import TokenHistory
from akunu_py.decoding.target import Target
from akunu_py.models.load.fit import PREFILL_ROWS
from akunu_py.ngram.cost import CostCurve

# Seconds that reading goes on at most when it is to stop, as far as chunks of PREFILL_ROWS allow.
_PATIENCE = 1.0
_TILE = 64  # rows; kernels compute whole tiles of as many
_FIRST_SLICE = 64  # tokens that are read where chunks are to be short and the speed is not known
_LEAST_SLICE = 16
_CHECKPOINT_EVERY = 2048  # tokens of a long prompt between two checkpoints


@dataclass(slots=True)
class ChunkSizes:
    """How many tokens of a prompt are read at once.

    costs: keeps how fast prompts are read here, for the next one too. largest: what memory allows.
    seconds: how long a chunk may take; None for what reads fastest and still stops soon.
    """

    costs: CostCurve = field(default_factory=CostCurve)
    largest: int = PREFILL_ROWS
    seconds: float | None = None

    def next(self) -> int:
        """Tokens of the next chunk."""
        rate = self.costs.prefill_rate
        if self.seconds is not None:
            size = int(rate * self.seconds) if rate else _FIRST_SLICE
            return max(_LEAST_SLICE, min(size, self.largest))
        size = int(rate * _PATIENCE) if rate else 0
        return max(min(PREFILL_ROWS, self.largest), min(size - size % _TILE, self.largest))

    def may_follow(self, under_way: int, size: int) -> bool:
        """Whether a chunk is launched behind one of `under_way` tokens before that is read."""
        rate = self.costs.prefill_rate
        return self.seconds is None and rate is not None and under_way + size <= rate * _PATIENCE

    def observe(self, tokens: int, seconds: float, *, last: bool) -> None:
        """A chunk was read. The last one of a prompt is short, so it may be slow for that alone."""
        if seconds > 0 and (tokens >= _LEAST_SLICE or not last):
            rate, known = tokens / seconds, self.costs.prefill_rate
            self.costs.prefill_rate = max(rate, known) if last and known else rate


@dataclass(slots=True)
class _Chunk:
    """A chunk that was launched. done: an array that is there when the chunk has been read."""

    tokens: int
    done: mx.array
    last: bool


def prefill(
    target: Target,
    sizes: ChunkSizes | None = None,
    meanwhile: Callable[[int], None] = lambda launched: None,
) -> Generator[int]:
    """Reads the pending tokens into the cache, and sets checkpoints at the marks and at the end.

    Yields the number of tokens read, before each chunk and at the end; who leaves there stops the
    reading, and what was read is kept. `sizes.seconds` may be changed meanwhile: while it is set,
    nothing is under way when a number is yielded. The last `target.prompt_tail` tokens are left to
    be the first rows of the next pass. `meanwhile` is called while a chunk is read, with the number
    of tokens up to its end.
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
    """Tokens of the next chunk, 0 where only the tail is left."""
    left = max(0, len(target.pending) - target.prompt_tail)
    mark = target.history.to_next_mark
    return min(left, sizes.next(), left if mark is None else mark)


def _is_place(history: TokenHistory) -> bool:
    """Whether a prompt that is being read gets a checkpoint here."""
    length = len(history.tokens)
    return length in history.marks or length >= history.last_checkpoint + _CHECKPOINT_EVERY


def _launch(target: Target, count: int) -> _Chunk:
    """Starts to read the next `count` pending tokens, and books them."""
    target.fill(mx.array(target.pending[:count]))
    # Only the cache is evaluated: the logits of a prompt are never computed.
    arrays = kv_cache.states(target.cache)
    # The next chunk is written into the cache's own arrays, so none of them can be waited for.
    done = arrays[-1][(0,) * arrays[-1].ndim] == 0
    mx.async_eval([*arrays, done])
    target.commit((), count)
    return _Chunk(count, done, len(target.pending) <= target.prompt_tail)


def _wait(target: Target, chunk: _Chunk, sizes: ChunkSizes, before: int, started: float) -> None:
    """Waits for a chunk. How long one takes that was launched behind another cannot be told, as
    launching may wait too; so time is taken from where the first of them was begun, at `started`.
    before: tokens read since then."""
    mx.eval(chunk.done)
    sizes.observe(before + chunk.tokens, target.clock() - started, last=chunk.last)
    mx.clear_cache()
