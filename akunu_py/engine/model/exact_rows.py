"""Row counts whose passes give every row the bits that it has alone, for `--exact`.

Kernels add in an order that depends on the number of rows and keys, so rounding may change tokens.
Measured, not assumed: whole passes of the model after a short context, and attention alone after
long ones. MLX's attention changes its kernel or its blocks only at certain numbers of keys (see
scaled_dot_product_attention.cpp), all of them multiples of 1,024. No draft crosses one.
"""

from bisect import bisect
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from akunu_py.engine import kv_cache
from akunu_py.engine.model import device
from akunu_py.kernels.probe import same_bits

MOST_ROWS = 8  # of MLX's attention kernel for few rows, and of our kernels
_MOST = 32  # rows times query heads per KV head, of the same kernel
_plain = mx.fast.scaled_dot_product_attention
_PREFIX = 40  # tokens before the measured passes
_STEP = 1024  # keys; every change of MLX's attention is at a multiple
_BANDS = (1024, 4096, 8192, 16384, 32768, 65536)  # keys at which it changes
# Query heads per KV head, width of queries and keys, width of values, type: they choose the kernel.
_AttentionShape = tuple[int, int, int, mx.Dtype]


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, *, mask: Any = None, **options: Any
) -> mx.array:
    """Call MLX's attention, twice for a causal pass of too many rows for its vector kernel.

    That kernel (mlx/backend/metal/scaled_dot_product_attention.cpp) computes each row alone. Other
    kernels add in another order.
    """
    rows, most = queries.shape[2], _MOST * keys.shape[1] // queries.shape[1]
    causal = isinstance(mask, str)  # MLX knows no other word than "causal"
    if not (causal and most < rows <= min(2 * most, MOST_ROWS)):
        return _plain(queries, keys, values, mask=mask, **options)
    half = -(-rows // 2)
    end = keys.shape[2] - (rows - half)  # the first rows attend to no later keys
    first = _plain(queries[:, :, :half], keys[:, :, :end], values[:, :, :end], mask=mask, **options)
    second = _plain(queries[:, :, half:], keys, values, mask=mask, **options)
    return mx.concatenate([first, second], axis=2)


class ExactRows:
    """The largest exact passes of a model."""

    def __init__(self, model: Any, kv_bits: int | None = None) -> None:
        """Runs about 50 passes of a few rows. On Metal, splits attention in this process."""
        if device.on_metal():
            setattr(mx.fast, "scaled_dot_product_attention", attend)  # noqa: B010
        cache = kv_cache.leaves(kv_cache.new_cache(model, kv_bits))
        # Beyond its window, a cache places the rows of a pass in another order than single rows.
        sizes = [getattr(each, name, 0) for each in cache for name in ("max_size", "chunk_size")]
        self._window = min(filter(None, sizes), default=None)
        self._attention: set[_AttentionShape] = set()
        self._known = {0: self._measure(model, kv_bits)}
        # Attention to a quantized cache has other kernels, which change with each number of keys.
        self._unknown = any(hasattr(entry, "bits") for entry in cache) or not self._attention

    def at(self, context: int) -> int:
        """Return the number of rows, at least 1, of a pass after `context` tokens."""
        if self._window is not None and context + MOST_ROWS >= self._window:
            return 1
        band = bisect(_BANDS, context)
        if band not in self._known:
            length = _BANDS[band - 1] * 3 // 2  # below the next band
            found = [_exact_attention(each, length) for each in self._attention]
            self._known[band] = 1 if self._unknown else min(self._known[0], *found)
        to_change = -(context + 1) % _STEP
        return max(1, min(self._known[band], to_change - 1))

    def _measure(self, model: Any, kv_bits: int | None) -> int:
        """Compare the logits of passes of two rows and more with those of one row at a time."""
        dice = mx.random.key(0)
        vocabulary = model(mx.array([[0]]), cache=kv_cache.new_cache(model, kv_bits)).shape[-1]
        tokens = mx.random.randint(0, vocabulary, (1, _PREFIX + 2 * MOST_ROWS), key=dice)

        def logits(rows: int, count: int) -> mx.array:
            cache, found = kv_cache.new_cache(model, kv_bits), []
            mx.eval(model(tokens[:, :_PREFIX], cache=cache))
            for at in range(_PREFIX, _PREFIX + count, rows):
                found.append(model(tokens[:, at : at + rows], cache=cache)[0])
                mx.eval(found[-1])
            return mx.concatenate(found)

        plain = mx.fast.scaled_dot_product_attention

        def noted(queries: mx.array, keys: mx.array, values: mx.array, **options: Any) -> mx.array:
            group = queries.shape[1] // keys.shape[1]
            self._attention.add((group, queries.shape[3], values.shape[3], queries.dtype))
            return plain(queries, keys, values, **options)

        setattr(mx.fast, "scaled_dot_product_attention", noted)  # noqa: B010 - of a C++ module
        try:
            alone = logits(1, 2 * MOST_ROWS)
        finally:
            setattr(mx.fast, "scaled_dot_product_attention", plain)  # noqa: B010
        # Two passes: the second one shows whether the first one left the same states.
        return _largest(lambda rows: same_bits(logits(rows, 2 * rows), alone[: 2 * rows]))


def _exact_attention(layer: _AttentionShape, length: int) -> int:
    """Compare attention of several rows to `length` keys with one row at a time."""
    group, width, value_width, kind = layer
    queries, keys, values = (
        mx.random.normal((1, *shape), key=mx.random.key(shape[2])).astype(kind)
        for shape in ((group, MOST_ROWS, width), (1, length, width), (1, length, value_width))
    )

    def attend(first: int, rows: int) -> mx.array:
        """Return the output of rows of which row `first` attends to all but the last keys."""
        end = length - MOST_ROWS + first + rows
        return mx.fast.scaled_dot_product_attention(
            queries[:, :, first : first + rows], keys[:, :, :end], values[:, :, :end],
            scale=width**-0.5, mask="causal" if rows > 1 else None,
        )  # fmt: skip

    alone = mx.concatenate([attend(row, 1) for row in range(MOST_ROWS)], axis=2)
    return _largest(lambda rows: same_bits(attend(0, rows), alone[:, :, :rows]))


def _largest(is_exact: Callable[[int], bool]) -> int:
    """Return the number of rows up to which all are exact."""
    return next((rows - 1 for rows in range(2, MOST_ROWS + 1) if not is_exact(rows)), MOST_ROWS)
