"""Memory estimates: does a model fit, and with how much context.

The estimate is weights + KV cache + working space. Imports neither MLX nor numpy.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.errors import DoesNotFit, UsageError
from akunu_py.models.load.model_files import text_config
from akunu_py.text import human_size

GIB = 1 << 30
CATALOG_CONTEXT = 8192  # tokens, for the catalog's figures
MIN_CONTEXT = 2048  # tokens; a chat needs at least these
_STEP = 256  # tokens by which mlx-lm's caches grow
# Prompt tokens per forward pass: for any machine, and (mlx-lm's default) for fused attention with
# enough memory, where Metal is a fifth faster.
PREFILL_ROWS, WIDE_PREFILL_ROWS = 512, 2048
_DECODE_ROWS = 64  # at most, in a decode step of all requests: `MAX_ROWS` of `akunu_py.ngram.cost`
_SOFT_LIMIT = 0.9  # share of the limit above which the system evicts other programs
# Head sizes with fused prefill attention on Metal; others keep all scores in memory.
_FUSED_HEADS = (64, 80, 128)


@dataclass(frozen=True, slots=True)
class CacheGrowth:
    """Size of a KV cache in bytes."""

    per_token: int  # of layers that keep every token
    windows: tuple[tuple[int, int], ...] = ()  # layers with a window: (tokens, bytes per token)
    fixed: int = 0  # recurrent state, independent of the context

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> int:
        """Return the bytes for `context` tokens, prefilled in steps of `prefill_rows`."""
        rounded = math.ceil(context / _STEP) * _STEP
        # During prefill, a window also stores the rows of the current pass.
        windowed = sum(
            min(context, size + min(context, prefill_rows) - 1) * each
            for size, each in self.windows
        )
        return rounded * self.per_token + windowed + self.fixed

    def __add__(self, other: CacheGrowth) -> CacheGrowth:
        return CacheGrowth(
            self.per_token + other.per_token, self.windows + other.windows, self.fixed + other.fixed
        )


@dataclass(frozen=True, slots=True)
class Activations:
    """Working memory of a forward pass, in values per row."""

    per_row: int
    heads: int  # attention scores per token of context, 0 with fused attention
    vocabulary: int  # logits
    itemsize: int  # bytes per value

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> int:
        """Return the bytes at `context` tokens, for prefill or the widest decode step."""
        rows = min(context, prefill_rows)
        prefill = rows * (self.per_row + self.heads * context) * self.itemsize
        # Logits, filtered logits and probabilities, in float32.
        decode = _DECODE_ROWS * self.vocabulary * 4 * 3
        return max(prefill, decode)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected memory of a model at `context` tokens, in bytes."""

    weights: int
    cache: int
    working: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Memory requirements of a model."""

    weights: int  # bytes
    cache: CacheGrowth
    activations: Activations
    context: int  # the model's own maximum, in tokens

    def with_draft(self, draft: MemoryNeeds) -> MemoryNeeds:
        """Return the requirements with a draft model. Passes alternate: activations stay."""
        weights, cache = self.weights + draft.weights, self.cache + draft.cache
        return replace(self, weights=weights, cache=cache)

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> Estimate:
        cache = self.cache.at(context, prefill_rows)
        return Estimate(self.weights, cache, self.activations.at(context, prefill_rows), context)


@dataclass(frozen=True, slots=True)
class FittedContext:
    """The context that a model gets within a memory limit."""

    needs: MemoryNeeds
    context: int  # tokens
    limit: int  # bytes
    note: str = ""  # a warning for the user, if any

    @property
    def prefill_rows(self) -> int:
        """Maximum prompt tokens per forward pass."""
        wide = self.needs.at(self.context, WIDE_PREFILL_ROWS).total <= soft_limit(self.limit)
        return WIDE_PREFILL_ROWS if wide and not self.needs.activations.heads else PREFILL_ROWS

    @property
    def estimate(self) -> Estimate:
        """The estimate at the full context."""
        return self.at(self.context)

    def at(self, tokens: int) -> Estimate:
        """Return the estimate at `tokens` of context."""
        return self.needs.at(tokens, self.prefill_rows)

    @property
    def prompt_cache_memory(self) -> int:
        """Bytes for all KV caches: a full context, and a quarter of the remaining memory."""
        left = soft_limit(self.limit) - self.estimate.total
        return self.estimate.cache + max(0, left // 4)


def activations_from(config: dict[str, Any], *, on_metal: bool, itemsize: int) -> Activations:
    """Estimate working memory from config.json. Missing fields count as 0."""
    fields = config | text_config(config)

    def number(*names: str) -> int:
        values = (fields.get(name) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), 0)

    hidden, heads = number("hidden_size", "n_embd"), number("num_attention_heads", "n_head")
    inner = number("intermediate_size", "block_ff_dim", "ffn_hidden_size") or 4 * hidden
    experts = number("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if experts:
        inner = max(inner, experts * number("moe_intermediate_size", "intermediate_size"))
    head = number("head_dim") or (hidden // heads if heads else 0)
    fused = on_metal and head in _FUSED_HEADS
    # Gate, up, their product and one temporary; eight rows of the residual stream with queries,
    # keys and values. tests/models/test_fit.py compares this with measured peaks.
    return Activations(
        4 * inner + 8 * hidden, 0 if fused else heads, number("vocab_size"), itemsize
    )


def choose_context(
    name: str,
    needs: MemoryNeeds,
    limit: int,
    *,
    requested: int | None = None,
    force: bool = False,
    with_8_bits: Callable[[], MemoryNeeds | None] = lambda: None,
) -> FittedContext:
    """Choose the context of the model `name` within `limit` bytes.

    requested: the user's context; None: the largest that fits, up to the model's own. force: skip
    the check. with_8_bits: returns the requirements with an 8-bit cache, if supported; called only
    if the model does not fit. Raises UsageError for a context beyond the model's own, and
    DoesNotFit if the requested context, or a useful context, does not fit.
    """
    if requested is not None and requested > needs.context:
        raise UsageError(
            f"{name} supports {needs.context} tokens of context, --context is {requested}; use at "
            f"most {needs.context}"
        )
    context = requested or needs.context
    estimate = needs.at(context)
    described = _describe(name, estimate, limit)
    if estimate.total <= limit:
        tight = requested and estimate.total > soft_limit(limit)
        note = f"{described}: close other programs if it gets slow" if tight else ""
        return FittedContext(needs, context, limit, note)
    if force:
        return FittedContext(needs, context, limit, f"{described}; --force ignores this")
    quantized = with_8_bits()
    best = largest_context(needs, limit)
    bigger = largest_context(quantized, limit) if quantized else 0
    if requested is not None or best < min(MIN_CONTEXT, needs.context):
        smallest = needs.at(requested or min(MIN_CONTEXT, needs.context))
        raise DoesNotFit(f"{_describe(name, smallest, limit)}; {_advice(best, bigger)}")
    note = (
        f"{name} gets {best:,} of its {needs.context:,} tokens of context: all of them would need "
        f"{human_size(estimate.total)}, this machine has {human_size(limit)} available"
    )
    if bigger > best:
        note += f"; with --kv-bits 8 it gets {bigger:,}"
    return FittedContext(needs, best, limit, note)


def largest_context(needs: MemoryNeeds, limit: int) -> int:
    """Return the largest context within `limit` bytes, a multiple of 256, or 0."""
    if needs.at(needs.context).total <= limit:
        return needs.context
    steps = range(1, needs.context // _STEP + 1)
    return _STEP * bisect_right(steps, limit, key=lambda step: needs.at(step * _STEP).total)


def soft_limit(memory: int) -> int:
    """Return the part of `memory` bytes to use, so that other programs have enough."""
    return int(memory * _SOFT_LIMIT)


def usable_memory(installed: int) -> int:
    """Return the maximum GPU memory of a Mac with `installed` bytes, by default.

    This is macOS's recommendedMaxWorkingSetSize: two thirds up to 32 GiB, three quarters from 36
    GiB (source in docs/models.md).
    """
    return installed * 2 // 3 if installed < 36 * GIB else installed * 3 // 4


def _describe(name: str, estimate: Estimate, limit: int) -> str:
    parts = (estimate.total, estimate.weights, estimate.cache, estimate.working, limit)
    total, weights, cache, working, available = map(human_size, parts)
    return (
        f"{name} needs about {total} for {estimate.context:,} tokens of context "
        f"({weights} weights, {cache} KV cache, {working} working space), this machine has "
        f"{available} available"
    )


def _advice(best: int, bigger: int) -> str:
    """Return how to make a model fit. bigger: the largest context with an 8-bit cache."""
    suggestions = []
    if best >= _STEP:
        suggestions.append(f"--context {best}")
    if bigger > max(best, _STEP - 1):
        suggestions.append(f"--kv-bits 8 --context {bigger}")
    suggestions.append("a smaller model (akunu models recommend)")
    return f"try {', or '.join(suggestions)}; --force loads it anyway"
