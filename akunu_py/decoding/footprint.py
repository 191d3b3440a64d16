"""What a model takes in memory: its weights, and every kind of KV cache, before it is loaded.

One pass of two rows is built and never evaluated, and the shapes of what it would write show what
each further token costs. So any architecture that mlx-lm has is covered, without a formula for
each. Whether that fits is for `akunu_py.models.load.fit` to say.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from akunu_py.decoding import device, kvcache
from akunu_py.errors import UnsupportedModel, UsageError, one_line
from akunu_py.models.load.fit import Growth, Needs, activations_from
from akunu_py.types import WeightMode

_UNKNOWN_CONTEXT = 4096
_TRIALS = (256, 512)  # rows, to see how a kind of cache grows that is not known here


def needs(
    model: Any, config: dict[str, Any], context: int, mode: WeightMode, kv_bits: int | None
) -> Needs:
    """What `model`, lazily loaded, will take once its weights are laid out as `mode` says.

    context: tokens it was made for. Raises UsageError where `kv_bits` is impossible.
    """
    plain = device.plain_format(model, mode)
    wide = plain is not None and plain == mx.float32
    activations = activations_from(
        config,
        on_metal=device.on_metal() and kv_bits is None,  # no kernel reads a quantized cache
        itemsize=4 if wide else 2,
    )
    return Needs(
        weights=device.weight_bytes(model, plain),
        cache=growth(model, kv_bits, wide=wide),
        activations=activations,
        context=context,
    )


def own_context(config: dict[str, Any]) -> int:
    """Tokens that a model was made for."""
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("max_position_embeddings")
    return found if isinstance(found, int) and found > 0 else _UNKNOWN_CONTEXT


def needs_with_8_bits(
    model: Any, config: dict[str, Any], context: int, mode: WeightMode
) -> Needs | None:
    """The same with an 8-bit cache, None where the model can have none."""
    try:
        return needs(model, config, context, mode, 8)
    except UsageError:
        return None


def growth(model: Any, kv_bits: int | None = None, *, wide: bool = False) -> Growth:
    """What the KV cache of `model` takes. wide: its floats will be float32 by the time it runs.

    Raises UsageError where `kv_bits` is impossible, UnsupportedModel where the model cannot run.
    """
    per_token = fixed = 0
    windows: dict[int, int] = {}
    unknown = []
    for index, entry in enumerate(_written(model, kv_bits, rows=2)):
        if type(entry) in kvcache.GROWING:
            per_token += bytes_per_row(entry, wide)
        elif type(entry) is RotatingKVCache or type(entry) is ChunkedKVCache:
            rotating = type(entry) is RotatingKVCache
            size = entry.max_size if rotating else entry.chunk_size + entry.step
            windows[size] = windows.get(size, 0) + bytes_per_row(entry, wide)
        elif type(entry) is ArraysCache:
            fixed += _nbytes(entry.cache, wide)
        else:
            unknown.append(index)
    if unknown:
        few, many = (
            sum(_nbytes(vars(entry), wide) for at, entry in enumerate(entries) if at in unknown)
            for entries in (_written(model, kv_bits, rows) for rows in _TRIALS)
        )
        slope = (many - few) // (_TRIALS[1] - _TRIALS[0])
        per_token, fixed = per_token + slope, fixed + max(0, few - slope * _TRIALS[0])
    return Growth(per_token, tuple(sorted(windows.items())), fixed)


def _written(model: Any, kv_bits: int | None, rows: int) -> list[Any]:
    """The entries of a new cache as a pass over `rows` tokens would leave them. Nothing runs."""
    cache = kvcache.new_cache(model, kv_bits)
    try:
        model(mx.zeros((1, rows), mx.int32), cache=cache)
    except Exception as error:  # model classes raise whatever Python raises
        raise UnsupportedModel(
            f"mlx-lm cannot run this model on text: {one_line(error)}"
        ) from error
    return kvcache.leaves(cache)


def bytes_per_row(entry: Any, wide: bool) -> int:
    """Bytes of keys and values of one position; none where a layer uses another's."""
    parts = [part for _, part in tree_flatten([entry.keys, entry.values]) if part is not None]
    return sum(_nbytes(part, wide) // part.shape[-2] for part in parts)


def _nbytes(tree: Any, wide: bool) -> int:
    arrays = [part for _, part in tree_flatten(tree) if isinstance(part, mx.array)]
    halves = (mx.float16, mx.bfloat16)
    return sum(a.nbytes * 2 if wide and a.dtype in halves else a.nbytes for a in arrays)
