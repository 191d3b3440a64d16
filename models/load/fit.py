"""Will a model fit, and with how much context: arithmetic on bytes.

The estimate is weights + KV cache + working space. What a cache really takes is read off the model
by `decoding.plan`; what the machine can give comes from `decoding.device`. Imports neither MLX
nor numpy, so that the catalogue can be read without them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from akunu_py.errors import DoesNotFit, UsageError

GIB = 1 << 30
CATALOGUE_CONTEXT = 8192  # tokens that the catalogue's figures are for
MIN_CONTEXT = 2048  # tokens: with less a chat is over before it began
_STEP = 256  # tokens: mlx-lm's caches grow by as many
# Tokens of a prompt that one pass reads: what any machine can do, and where attention is fused and
# memory allows, which Metal is a fifth faster with (mlx-lm's default).
PREFILL_ROWS, WIDE_PREFILL_ROWS = 512, 2048
_DRAFT_ROWS = 33  # of the widest pass of an answer, the only ones that compute logits
_COMFORT = 0.9  # of the limit: beyond it other programs are pushed out of memory
# Metal's kernels for attention over a whole prompt; for other sizes all scores are in memory.
_FUSED_HEADS = (64, 80, 128)


@dataclass(frozen=True, slots=True)
class Growth:
    """What a KV cache takes, in bytes.

    per_token: of layers that keep every token. windows: of layers that keep the last tokens only,
    (how many, bytes a token). fixed: recurrent state, whatever the context.
    """

    per_token: int
    windows: tuple[tuple[int, int], ...] = ()
    fixed: int = 0

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> int:
        """Bytes for `context` tokens, read in passes over `prefill_rows`."""
        whole = math.ceil(context / _STEP) * _STEP
        # While a prompt is read, a window holds its rows of the pass as well.
        kept = sum(
            min(context, size + min(context, prefill_rows) - 1) * each
            for size, each in self.windows
        )
        return whole * self.per_token + kept + self.fixed

    def __add__(self, other: Growth) -> Growth:
        """Both caches together."""
        return Growth(
            self.per_token + other.per_token,
            self.windows + other.windows,
            self.fixed + other.fixed,
        )


@dataclass(frozen=True, slots=True)
class Activations:
    """What passes need beside weights and cache. wide: values of a row of a pass, heads: scores of
    a row for each token of the context (0 where the kernels keep none), vocabulary: logits of a
    row; itemsize: bytes of a value."""

    wide: int
    heads: int
    vocabulary: int
    itemsize: int

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> int:
        """Bytes at `context` tokens: reading a prompt or the widest pass of an answer."""
        rows = min(context, prefill_rows)
        prefill = rows * (self.wide + self.heads * context) * self.itemsize
        # Logits in float32: as computed, filtered, as probabilities.
        answer = _DRAFT_ROWS * self.vocabulary * 4 * 3
        return max(prefill, answer)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of memory that a model is expected to take at `context` tokens."""

    weights: int
    cache: int
    working: int
    context: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


@dataclass(frozen=True, slots=True)
class Needs:
    """All that is known of a model's memory: `weights` in bytes, `context` it was made for."""

    weights: int
    cache: Growth
    activations: Activations
    context: int

    def beside(self, draft: Needs) -> Needs:
        """With a draft model beside it, whose passes come between its own."""
        weights, cache = self.weights + draft.weights, self.cache + draft.cache
        return replace(self, weights=weights, cache=cache)

    def at(self, context: int, prefill_rows: int = PREFILL_ROWS) -> Estimate:
        cache = self.cache.at(context, prefill_rows)
        return Estimate(self.weights, cache, self.activations.at(context, prefill_rows), context)


@dataclass(frozen=True, slots=True)
class Fit:
    """How a model fits: `context` is what it gets, in tokens, `limit` in bytes. note: what the user
    should know, empty where everything is well."""

    needs: Needs
    context: int
    limit: int
    note: str = ""

    @property
    def prefill_rows(self) -> int:
        """Tokens of a prompt that one pass may read."""
        wide = self.needs.at(self.context, WIDE_PREFILL_ROWS).total <= comfortable(self.limit)
        return WIDE_PREFILL_ROWS if wide and not self.needs.activations.heads else PREFILL_ROWS

    @property
    def estimate(self) -> Estimate:
        """At that context."""
        return self.at(self.context)

    def at(self, tokens: int) -> Estimate:
        """At so many tokens."""
        return self.needs.at(tokens, self.prefill_rows)

    @property
    def cache_memory(self) -> int:
        """Bytes for the KV caches of several texts: that of a full context, and a quarter of what
        is left of the limit."""
        left = comfortable(self.limit) - self.estimate.total
        return self.estimate.cache + max(0, left // 4)


def activations_from(config: dict[str, Any], *, on_metal: bool, itemsize: int) -> Activations:
    """What passes take, from a model's config.json. Fields that are missing count for nothing."""
    text = config.get("text_config")
    fields = config | text if isinstance(text, dict) else config

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
    # Gate, up, their product and one more for what is being computed; eight rows of the stream
    # with queries, keys and values. Held against measured peaks in tests/models/test_fit.py.
    return Activations(
        4 * inner + 8 * hidden, 0 if fused else heads, number("vocab_size"), itemsize
    )


def choose_context(
    name: str,
    needs: Needs,
    limit: int,
    *,
    requested: int | None = None,
    force: bool = False,
    with_8_bits: Callable[[], Needs | None] = lambda: None,
) -> Fit:
    """Which context the model `name` gets within `limit` bytes.

    requested: the context that the user named; None: as much as fits, up to the model's own.
    force: the user wants it whatever the figures are. with_8_bits: returns the needs with an 8-bit
    cache where there can be one; called only when something has to give.
    Raises UsageError for a context beyond the model's own, DoesNotFit with the figures where the
    requested context, or a useful one, would not fit.
    """
    if requested is not None and requested > needs.context:
        raise UsageError(
            f"{name} was made for {needs.context} tokens of context, --context asks for "
            f"{requested}; ask for {needs.context} at most"
        )
    wanted = requested or needs.context
    estimate = needs.at(wanted)
    if estimate.total <= limit:
        tight = requested and estimate.total > comfortable(limit)
        note = f"{_figures(name, estimate, limit)}: close other programs if it gets slow"
        return Fit(needs, wanted, limit, note if tight else "")
    if force:
        return Fit(
            needs, wanted, limit, f"{_figures(name, estimate, limit)}; going on with --force"
        )
    most = largest_context(needs, limit)
    if requested is not None or most < min(MIN_CONTEXT, needs.context):
        smallest = needs.at(requested or min(MIN_CONTEXT, needs.context))
        raise DoesNotFit(f"{_figures(name, smallest, limit)}; {_way_out(limit, most, with_8_bits)}")
    note = (
        f"{name} gets {most:,} of its {needs.context:,} tokens of context: all of them would take "
        f"{_gb(estimate.total)}, this machine can give {_gb(limit)}"
    )
    if (bigger := _most_with(with_8_bits, limit)) > most:
        note += f"; --kv-bits 8 makes it {bigger:,}"
    return Fit(needs, most, limit, note)


def largest_context(needs: Needs, limit: int) -> int:
    """The most tokens of context, in steps of 256, that `limit` bytes allow; 0 where none do."""
    if needs.at(needs.context).total <= limit:
        return needs.context
    steps = range(1, needs.context // _STEP + 1)
    return _STEP * bisect_right(steps, limit, key=lambda step: needs.at(step * _STEP).total)


def comfortable(memory: int) -> int:
    """The part of `memory` bytes that a model may take with other programs still at ease."""
    return int(memory * _COMFORT)


def usable_memory(installed: int) -> int:
    """Bytes that the GPU of a Mac with `installed` bytes of memory takes at most, by default.

    What macOS reports as recommendedMaxWorkingSetSize: two thirds up to 32 GiB, three quarters
    from 36 GiB on (docs/models.md says where that is from).
    """
    return installed * 2 // 3 if installed < 36 * GIB else installed * 3 // 4


def _figures(name: str, estimate: Estimate, limit: int) -> str:
    return (
        f"{name} needs about {_gb(estimate.total)} for {estimate.context:,} tokens of context "
        f"({_gb(estimate.weights)} weights, {_gb(estimate.cache)} KV cache, "
        f"{_gb(estimate.working)} working space), this machine can give {_gb(limit)}"
    )


def _way_out(limit: int, most: int, with_8_bits: Callable[[], Needs | None]) -> str:
    ways = []
    if most >= _STEP:
        ways.append(f"--context {most}")
    if (bigger := _most_with(with_8_bits, limit)) > max(most, _STEP - 1):
        ways.append(f"--kv-bits 8 --context {bigger}")
    ways.append("a smaller model (akunu models recommend)")
    return f"try {', or '.join(ways)}; --force loads it anyway"


def _most_with(other: Callable[[], Needs | None], limit: int) -> int:
    """The largest context with other needs, 0 where there are none."""
    needs = other()
    return largest_context(needs, limit) if needs else 0


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
