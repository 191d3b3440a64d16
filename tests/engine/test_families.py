"""Every cache kind of mlx-lm has a tested family; trimming and quantization of caches.

tests/engine/test_identity.py compares the tokens of all families with those of mlx-lm's loop.
"""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from akunu_py.engine import kv_cache
from akunu_py.engine.batched_pass import Part, PassFollower, run, why_not_batched
from akunu_py.engine.model import output_rows
from akunu_py.errors import UsageError
from tests.support.families import build, families_of_each_kind, kinds
from tests.support.family_table import FAMILIES, ONE_OF_EACH_KIND
from tests.support.targets import Counting

# Classes of mlx-lm that no model makes for a single conversation.
NOT_FOR_US = {
    "BatchKVCache": "for several prompts at once",
    "BatchRotatingKVCache": "for several prompts at once",
    "LRUPromptCache": "keeps whole caches of other kinds, for a server",
}


@pytest.mark.long
def test_every_cache_class_of_mlx_lm_is_tested() -> None:
    tested = {kind for name in FAMILIES for kind in kinds(kv_cache.new_cache(build(name)))}
    missing = cache_classes() - tested - set(NOT_FOR_US)
    assert not missing, (
        "mlx-lm has cache classes that no family of tests/support/family_table.py uses: "
        f"{sorted(missing)}. "
        "Teach akunu_py/engine/kv_cache.py to roll them back and add a family, or say in "
        "NOT_FOR_US why no model can come with one."
    )


def test_there_is_one_of_each_kind() -> None:
    mixtures = [kinds(kv_cache.new_cache(build(name))) for name in ONE_OF_EACH_KIND]
    assert all(mixtures.count(mixture) == 1 for mixture in mixtures)
    assert all(kinds(kv_cache.new_cache(build(name))) in mixtures for name in FAMILIES)


# Quantization goes by groups of 32 values, so heads are as wide.
WIDE = {"num_attention_heads": 1, "num_key_value_heads": 1} | dict.fromkeys(
    ("head_dim", "index_head_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
     "v_head_dim"), 32,
)  # fmt: skip
QUANTIZED = ("llama-kv8", "llama-kv4")  # already
OWN_ATTENTION = (
    "gpt_oss", "iquestloopcoder", "deepseek_v3", "deepseek_v32", "longcat_flash_ngram",
    "bailing_hybrid", "kimi_k3", "minimax_m3_vl",
)  # fmt: skip
NOTHING_GROWS = ("llama-concatenate", "deepseek_v41", "mamba2", "rwkv7", "recurrent_gemma")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUANTIZED])
def test_growing_caches_are_quantized_or_refused(name: str) -> None:
    model = Counting(build(name, **WIDE))
    if name in (*OWN_ATTENTION, *NOTHING_GROWS):
        with pytest.raises(
            UsageError, match=r"cannot be quantized.*leave out --kv-bits"
        ) as refused:
            kv_cache.new_cache(model, 8)
        assert "whole groups" not in str(refused.value)
        assert ("nothing in it grows" in str(refused.value)) == (name in NOTHING_GROWS)
        return
    for bits in (4, 8):
        cache = kv_cache.leaves(kv_cache.new_cache(model, bits))
        found = [each for each in cache if isinstance(each, QuantizedKVCache)]
        assert {(each.bits, each.group_size, each.offset) for each in found} == {(bits, 32, 0)}
        assert "KVCache" not in kinds(cache)
    assert model.rows == 4  # of two trial passes for all caches


def cache_classes() -> set[str]:
    """The cache classes that mlx-lm defines, wherever it does."""
    return {
        node.name
        for source in Path(mlx_lm.models.__path__[0]).glob("*.py")
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and "Cache" in node.name and node.name[0] != "_"
    }


WINDOW = 7


def write(entry: Any, tokens: list[int]) -> list[float]:
    """Write a row per token, as a model's layer does. Return the rows that the last one sees."""
    if isinstance(entry, ChunkedKVCache):
        entry.maybe_trim_front()
    rows = mx.array(tokens, mx.float32).reshape(1, 1, len(tokens), 1)
    keys, _ = entry.update_and_fetch(rows, -rows)
    return sorted(keys.flatten().tolist())


def test_a_window_can_only_be_trimmed_until_it_is_full() -> None:
    entry = RotatingKVCache(max_size=WINDOW)
    write(entry, list(range(1, WINDOW + 1)))
    assert kv_cache.can_trim([entry], 3)
    assert kv_cache.can_trim([entry], WINDOW)
    assert not kv_cache.can_trim([entry], WINDOW + 1)
    write(entry, [WINDOW + 1])
    assert not kv_cache.can_trim([entry], 1)
    assert kv_cache.can_trim([entry], 0)
    entry = RotatingKVCache(max_size=WINDOW)
    write(entry, [1, 2, 3])
    kv_cache.trim([entry], 3)
    assert entry.empty()
    assert write(entry, [4, 5]) == [4, 5]
    assert write(entry, [6]) == [4, 5, 6]


def test_a_chunk_can_only_be_trimmed_to_where_it_begins() -> None:
    entry = ChunkedKVCache(WINDOW)
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
    assert not kv_cache.is_recurrent(
        [CacheList(KVCache(), KVCache()), RotatingKVCache(max_size=WINDOW)]
    )


def test_an_unknown_cache_kind_is_named_and_does_not_draft() -> None:
    class MyCache(KVCache):  # type: ignore[misc]
        """May keep state besides the cache."""

    class LayerCache(KVCache):  # type: ignore[misc]
        """Only by name the one that is known."""

    known = [KVCache(), CacheList(ArraysCache(2), RotatingKVCache(max_size=WINDOW))]
    assert kv_cache.no_rollback_reason(known) is None
    reason = kv_cache.no_rollback_reason(
        [*known, CacheList(MyCache()), BatchKVCache([0]), LayerCache()]
    )
    assert reason == "its cache (BatchKVCache, LayerCache, MyCache) cannot be rolled back"


def test_narrow_heads_and_other_widths_are_not_quantized() -> None:
    with pytest.raises(UsageError, match="heads of 8"):
        kv_cache.new_cache(build("llama"), 8)
    with pytest.raises(UsageError, match="must be 4 or 8, got 3"):
        kv_cache.new_cache(build("llama", head_dim=32), 3)


class States(PassFollower):
    """Follows passes and keeps their hidden states."""

    def __init__(self, model: Any) -> None:
        count = len(model.layers)
        self.taps: Sequence[int] = (-1, 0, count - 1, count)
        self.kept: list[mx.array] = []

    def keep_states(self, hidden: mx.array) -> None:
        self.kept.append(hidden)


@families_of_each_kind("llama-kv8", "llama-kv4", "llama-concatenate")  # wrapped models
def test_hidden_states_do_not_depend_on_the_pass(name: str) -> None:
    """Passes that return them have the logits of plain passes, alone or shared."""
    model = build(name)
    why = output_rows.why_no_taps(model, States(model).taps)
    # Their layers pass on several streams, so no published drafter can use them.
    assert bool(why) == (name in ("gemma3n", "deepseek_v41", "iquestloopcoder"))
    if why:
        return

    def part(rows: mx.array) -> tuple[Part, States]:
        cache, follower = kv_cache.new_cache(model), States(model)
        mx.eval(model(mx.array([[1, 2, 3]]), cache=cache))
        return Part(rows, cache, followers=[follower]), follower

    recurrent = kv_cache.is_recurrent(kv_cache.new_cache(model))
    prompts = [mx.array(rows) for rows in ([[5], [7]] if recurrent else [[5, 3, 9], [7, 2]])]
    alone = []
    for rows in prompts:
        own, follower = part(rows)
        (logits,) = run(model, [own])
        assert mx.array_equal(logits, model(rows[None], cache=part(rows)[0].cache)[0])
        alone += follower.kept
    if why_not_batched(model):
        return
    parts, followers = zip(*map(part, prompts), strict=True)
    run(model, parts)
    for each, expected in zip(followers, alone, strict=True):
        assert mx.allclose(each.kept[0], expected, rtol=1e-3, atol=1e-3)
