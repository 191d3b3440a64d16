"""Rolling back, kind by kind: a cache sees what it would see had it only read what was kept."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from akunu_py.decoding import kv_cache
from akunu_py.errors import UsageError
from tests.support.families import build

WINDOW = 7


def write(entry: Any, tokens: list[int]) -> list[list[int]]:
    """Writes a row per token, as a model's layer does. Returns which tokens each row sees."""
    count = len(tokens)
    if isinstance(entry, ChunkedKVCache):
        entry.maybe_trim_front()
        mask: Any = "causal"
    else:
        mask = entry.make_mask(count, window_size=None, return_array=False)
    # A row of one value survives quantization.
    rows = mx.repeat(mx.array(tokens, mx.float32).reshape(1, 1, count, 1), 32, axis=-1)
    keys, values = entry.update_and_fetch(rows, -rows)
    if isinstance(entry, QuantizedKVCache):
        keys, values = (mx.dequantize(*held, group_size=32, bits=8) for held in (keys, values))
    assert mx.array_equal(values, -keys)
    held = [round(key) for key in keys[0, 0, :, 0].tolist()]
    if isinstance(mask, mx.array):
        seen = [[held[i] for i, sees in enumerate(row) if sees] for row in mask.tolist()]
    else:
        seen = [held[: len(held) - count + 1 + row] for row in range(count)]
    return [sorted(row) for row in seen]


def expected(entry: Any, before: list[int], tokens: list[int]) -> list[list[int]]:
    """The same by brute force; the tokens ascend."""
    known = [*before, *tokens]
    ends = range(len(before) + 1, len(known) + 1)
    window = WINDOW if isinstance(entry, RotatingKVCache) else len(known)
    start = entry.start_position if isinstance(entry, ChunkedKVCache) else 0
    return [known[max(start, end - window) : end] for end in ends]


def make(kind: str) -> Any:
    return {
        "plain": KVCache,
        "concatenate": ConcatenateKVCache,
        "quantized": lambda: QuantizedKVCache(group_size=32, bits=8),
        "rotating": lambda: RotatingKVCache(max_size=WINDOW),
        "chunked": lambda: ChunkedKVCache(WINDOW),
    }[kind]()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("kind", ["plain", "concatenate", "quantized", "rotating", "chunked"])
@pytest.mark.parametrize("seed", range(8))
def test_rejected_tokens_leave_no_trace(kind: str, recurrent: bool, seed: int) -> None:
    """With recurrent state, a layer is rolled back whole, and accepted tokens are rerun."""
    randomly = random.Random(seed)
    entry, state = make(kind), ArraysCache(1)
    cache = [CacheList(entry, state)] if recurrent else [entry]
    kept: list[int] = []  # ascending, so that the order in a ring can be checked
    pending: list[int] = []
    for _ in range(60):
        fresh = pending[-1] if pending else (kept or [0])[-1]
        count = randomly.choice([1, 1, 2, 3, 5, 12])
        tokens = pending + sorted(randomly.sample(range(fresh + 1, fresh + 30), count))
        before = kv_cache.pass_state(cache)
        state[0] = mx.array([*kept, *tokens])
        assert write(entry, tokens) == expected(entry, kept, tokens)
        keep = randomly.randint(max(1, len(pending)), len(tokens))
        holds = len(tokens)
        if keep < len(tokens):
            holds = kv_cache.roll_back(cache, before, len(tokens), keep)
            assert holds == (0 if recurrent else keep)
        # Now and then the conversation continues otherwise, with a pass of one row perhaps.
        pending = tokens[holds:keep] if randomly.random() < 0.7 else []
        kept += tokens[:holds]
        assert entry.offset == len(kept)
        if recurrent and kept:
            assert state[0].tolist() == kept
        # Going back for good, where that is possible.
        back = randomly.randint(0, 3)
        if not pending and back < len(kept) and kv_cache.can_trim(cache, back):
            kv_cache.trim(cache, back)
            del kept[len(kept) - back :]


def test_a_window_can_only_be_trimmed_until_it_is_full() -> None:
    entry = make("rotating")
    write(entry, list(range(1, WINDOW + 1)))
    assert kv_cache.can_trim([entry], 3)
    assert kv_cache.can_trim([entry], WINDOW)
    assert not kv_cache.can_trim([entry], WINDOW + 1)
    write(entry, [WINDOW + 1])
    assert not kv_cache.can_trim([entry], 1)
    assert kv_cache.can_trim([entry], 0)


def test_a_trimmed_window_starts_over() -> None:
    entry = make("rotating")
    write(entry, [1, 2, 3])
    kv_cache.trim([entry], 3)
    assert entry.empty()
    assert write(entry, [4]) == [[4]]
    assert write(entry, [5, 6]) == [[4, 5], [4, 5, 6]]


def test_a_chunk_can_only_be_trimmed_to_where_it_begins() -> None:
    entry = make("chunked")
    for token in range(1, 2 * WINDOW + 4):
        write(entry, [token])
    # The last trim kept one chunk's worth: back to the second chunk's start, not into the first.
    assert entry.start_position == WINDOW + 2
    assert kv_cache.can_trim([entry], 3)
    assert not kv_cache.can_trim([entry], 4)
    assert not kv_cache.can_trim([entry], 2 * WINDOW + 3)


def test_recurrent_state_cannot_be_trimmed_only_rolled_back() -> None:
    cache = [CacheList(ArraysCache(1), KVCache())]
    assert kv_cache.is_recurrent(cache)
    assert not kv_cache.can_trim(cache, 1)
    assert kv_cache.can_trim(cache, 0)
    assert not kv_cache.is_recurrent([CacheList(KVCache(), KVCache()), make("rotating")])


def test_an_unknown_cache_kind_is_named_and_does_not_draft() -> None:
    class MyCache(KVCache):  # type: ignore[misc]
        """May keep state of its own."""

    class LayerCache(KVCache):  # type: ignore[misc]
        """Only by name the one that is known."""

    known = [KVCache(), CacheList(ArraysCache(2), make("rotating"))]
    assert kv_cache.no_rollback_reason(known) is None
    reason = kv_cache.no_rollback_reason(
        [*known, CacheList(MyCache()), BatchKVCache([0]), LayerCache()]
    )
    assert reason == "its cache (BatchKVCache, LayerCache, MyCache) cannot be rolled back"


@pytest.mark.parametrize(
    ("name", "bits", "reason"),
    [
        ("llama", 8, "heads of 8"),
        ("llama-kv8", 3, "must be 4 or 8, got 3"),
    ],
)
def test_a_cache_that_cannot_be_quantized_is_refused(name: str, bits: int, reason: str) -> None:
    model = build(name)
    with pytest.raises(UsageError, match=reason):
        kv_cache.new_cache(getattr(model, "model", model) if "kv8" in name else model, bits)
