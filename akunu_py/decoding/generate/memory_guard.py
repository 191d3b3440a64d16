"""Check and make room in memory before a prompt is prefilled."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import mlx.core as mx

from akunu_py.decoding import device
from akunu_py.decoding.load_plan import growth
from akunu_py.decoding.model.engine import Engine
from akunu_py.decoding.prompt_cache.history import (
    CHECKPOINT_EVERY,
    MAX_CHECKPOINT_BYTES,
    MAX_CHECKPOINTS,
)
from akunu_py.decoding.prompt_cache.memory import MIN_CACHED, PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.errors import DoesNotFit, UsageError
from akunu_py.models.load.fit import CacheGrowth
from akunu_py.text import human_size

_LEAST_ANSWER = 256  # answer tokens that must fit; the rest may never be generated
_STEP = 256  # growth of caches in tokens
_MARKS = 2  # checkpoints of a short prompt
INDEX_BYTES = 360  # of the n-gram drafter per token; measured on 100,000 tokens


def release_under_pressure(caches: PromptCaches) -> None:
    """Release MLX's buffers, and unused prompt caches at critical pressure."""
    pressure = device.memory_pressure()
    if pressure == "critical":
        caches.make_room(caches.limit)
    if pressure != "normal":
        mx.clear_cache()


def make_room(engine: Engine, target: Target, prompt: Sequence[int], max_tokens: int) -> None:
    """Make room for the KV cache of `prompt` and an answer by evicting other histories.

    Raises DoesNotFit, with what would fit, if that is not enough and the engine is not forced.
    """
    caches = target.caches
    release_under_pressure(caches)
    context = engine.plan.context_length
    cached = target.reach(prompt)
    fewest = min(len(prompt) + min(max_tokens, _LEAST_ANSWER), context)
    least = _growth(engine, fewest, cached)
    longest = min(len(prompt) + max_tokens, context)
    most = _growth(engine, longest, cached) + checkpoint_bytes(engine, longest)
    if (left := device.memory_left(engine.plan.memory_limit)) >= most:
        return
    asked_for = target.best(prompt) if cached >= MIN_CACHED else None
    caches.make_room(max(0, caches.limit - caches.nbytes) + most - left, asked_for)
    mx.clear_cache()
    left = device.memory_left(engine.plan.memory_limit)
    if left >= least or engine.plan.forced:
        return
    held = target.history.nbytes + caches.nbytes
    if left + held < _growth(engine, fewest, 0):
        raise DoesNotFit(_refusal(engine, len(prompt), cached, least, left))
    caches.record_eviction(target.history)
    target.reset()  # it holds more besides the prompt than it shares with it
    caches.make_room(caches.limit)
    mx.clear_cache()


def needed(engine: Engine, tokens: int) -> int:
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


def _growth(engine: Engine, tokens: int, cached: int, cache: CacheGrowth | None = None) -> int:
    """Return the additional bytes for `tokens` tokens beyond the cached ones."""
    needs, rows = engine.plan.fit.needs, engine.plan.fit.prefill_rows
    cache = cache or needs.cache
    whole = cached - cached % _STEP
    held = cache.at(whole, rows) if whole else 0
    grown = max(0, cache.at(tokens, rows) - held)
    return grown + needs.activations.at(tokens, rows) + tokens * INDEX_BYTES


def _refusal(engine: Engine, prompt: int, cached: int, needed: int, left: int) -> str:
    steps = range(_STEP, engine.plan.context_length + 1, _STEP)
    fits = _STEP * bisect_right(steps, left, key=lambda tokens: _growth(engine, tokens, cached))
    ways = []
    if fits - _LEAST_ANSWER >= _STEP:
        ways.append(f"shorten it to {fits - _LEAST_ANSWER:,} tokens (--context {fits} holds)")
    if _fits_with_8_bits(engine, prompt, left):
        ways.append("--kv-bits 8")
    ways += ["a smaller model (akunu models recommend)", "close other programs"]
    return (
        f"a prompt of {prompt:,} tokens needs {human_size(needed)} more for {engine.name}, "
        f"{human_size(max(0, left))} are left; {', or '.join(ways)}; --force tries it anyway"
    )


def _fits_with_8_bits(engine: Engine, prompt: int, left: int) -> bool:
    if engine.plan.kv_bits is not None:
        return False
    try:
        cache = growth(engine.model, 8)
    except UsageError:
        return False
    for drafter in (engine.draft_model, engine.mtp_head):
        cache += drafter.needs.cache if drafter else CacheGrowth(0)
    tokens = min(prompt + _LEAST_ANSWER, engine.plan.context_length)
    return _growth(engine, tokens, 0, cache) <= left
