"""The plan for loading a model: weight format, context, KV cache, memory.

The memory estimate needs no weights. A forward pass over two tokens is built but never evaluated;
the shapes in its KV cache show the cost of each token, for every architecture of mlx-lm.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, RotatingKVCache

from akunu_py.engine import kv_cache
from akunu_py.engine.model import device
from akunu_py.errors import DoesNotFit, MemoryInUse, UnsupportedModel, UsageError, one_line
from akunu_py.models.load.fit import (
    CacheGrowth,
    FittedContext,
    MemoryNeeds,
    activations_from,
    choose_context,
)
from akunu_py.models.load.mlx_loader import OpenModel
from akunu_py.models.load.model_files import context_length
from akunu_py.types import DEFAULT_WIRE, LoadOptions, WireMode

_UNKNOWN_CONTEXT = 4096
_TRIAL_ROWS = (256, 512)  # to measure the growth of an unknown kind of cache


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How to load a model, decided before its weights are read."""

    name: str
    path: Path
    weights: str  # format in memory, in words
    context_length: int  # maximum tokens of prompt and answer
    kv_bits: int | None  # of the KV cache; None: not quantized
    fit: FittedContext  # memory of the model and its drafters, with a note for the user
    prompt_cache_memory: int  # bytes for prompt caches
    memory_limit: int | None  # bytes for model and caches; None: all that the machine has
    forced: bool  # load even if memory is too small
    wire: WireMode  # memory that macOS must keep

    @property
    def memory(self) -> int:
        """The bytes that the model may use, with all its caches."""
        most = self.fit.estimate
        return most.weights + most.working + max(most.cache, self.prompt_cache_memory)


def make_plan(
    name: str,
    opened: OpenModel,
    target: MemoryNeeds,
    options: LoadOptions,
    drafters: Sequence[MemoryNeeds] = (),
    *,
    partitioned: bool = False,
) -> LoadPlan:
    """Plan how to load `opened`, whose weights are already converted but not read.

    target, drafters: needs of the model and of its neural drafters. partitioned: split over several
    hosts, where KV caches cannot be quantized. Raises UsageError if the context is too long,
    DoesNotFit if memory is too small, MemoryInUse if only the rest of it is.
    """

    def with_drafters(total: MemoryNeeds) -> MemoryNeeds:
        return reduce(MemoryNeeds.with_draft, drafters, total)

    def with_8_bits() -> MemoryNeeds | None:
        try:
            if options.kv_bits or partitioned:
                return None
            return with_drafters(needs(opened, 8, target.activations.itemsize))
        except UsageError:  # the model's cache cannot be quantized
            return None

    limit, total = memory_limit(options), with_drafters(target)
    fit = choose_context(
        name, total, limit, requested=options.context, force=options.force, with_8_bits=with_8_bits
    )
    if options.reserved:  # with the context that the model has alone
        try:
            shared = choose_context(name, total, limit - options.reserved, requested=fit.context)
        except DoesNotFit as error:
            raise MemoryInUse(str(error)) from error
        fit = replace(shared, note=fit.note)
    return LoadPlan(
        name=name,
        path=opened.files.path,
        weights=device.describe_format(opened.model),
        context_length=fit.context,
        kv_bits=options.kv_bits,
        fit=fit,
        prompt_cache_memory=fit.prompt_cache_memory
        if options.prompt_cache_memory is None
        else options.prompt_cache_memory,
        memory_limit=options.memory_limit,
        forced=options.force,
        wire=options.wire or DEFAULT_WIRE,
    )


def memory_limit(options: LoadOptions) -> int:
    """Return the maximum bytes for model and caches together."""
    if options.memory_limit is not None:
        return options.memory_limit
    if options.reserved:  # as if the other models were not loaded
        return device.memory_left() + mx.get_active_memory()
    return device.available_memory()


def needs(opened: OpenModel, kv_bits: int | None = None, itemsize: int = 2) -> MemoryNeeds:
    """Return the memory needs of a model. itemsize: bytes per activation. Errors: see `growth`."""
    fused = device.on_metal() and kv_bits is None  # no kernel reads a quantized cache
    return MemoryNeeds(
        weights=device.weight_bytes(opened.model),
        cache=growth(opened.model, kv_bits),
        activations=activations_from(opened.config, on_metal=fused, itemsize=itemsize),
        context=context_length(opened.files.config) or _UNKNOWN_CONTEXT,
    )


def growth(model: Any, kv_bits: int | None = None) -> CacheGrowth:
    """Return the memory of a model's KV cache. Raises UsageError (`kv_bits`), UnsupportedModel."""
    per_token = fixed = 0
    windows: dict[int, int] = {}
    unknown = []
    for index, entry in enumerate(_filled_cache(model, kv_bits, rows=2)):
        if type(entry) in kv_cache.GROWING:
            per_token += bytes_per_row(entry)
        elif type(entry) is RotatingKVCache or type(entry) is ChunkedKVCache:
            rotating = type(entry) is RotatingKVCache
            size = entry.max_size if rotating else entry.chunk_size + 1
            windows[size] = windows.get(size, 0) + bytes_per_row(entry)
        elif type(entry) is ArraysCache:
            fixed += kv_cache.nbytes([entry])
        else:
            unknown.append(index)
    if unknown:
        few, many = (
            kv_cache.nbytes([entries[at] for at in unknown])
            for entries in (_filled_cache(model, kv_bits, rows) for rows in _TRIAL_ROWS)
        )
        slope = (many - few) // (_TRIAL_ROWS[1] - _TRIAL_ROWS[0])
        per_token, fixed = per_token + slope, fixed + max(0, few - slope * _TRIAL_ROWS[0])
    return CacheGrowth(per_token, tuple(sorted(windows.items())), fixed)


def _filled_cache(model: Any, kv_bits: int | None, rows: int) -> list[Any]:
    """Return the entries of a new cache after a lazy pass over `rows` tokens; nothing runs."""
    cache = kv_cache.new_cache(model, kv_bits)
    try:
        model(mx.zeros((1, rows), mx.int32), cache=cache)
    except Exception as error:  # model classes raise any exception
        reason = f"mlx-lm cannot run this model on text: {one_line(error)}"
        raise UnsupportedModel(reason) from error
    return kv_cache.leaves(cache)


def bytes_per_row(entry: Any) -> int:
    """Return the bytes of one position's keys and values; 0 if the layer uses another layer's."""
    parts = kv_cache.arrays_in([entry.keys, entry.values])
    return sum(part.nbytes // part.shape[-2] for part in parts)
