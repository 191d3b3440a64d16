"""Messages of rank 0 keep the caches of the workers equal to its own."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.decoding import kv_cache
from akunu_py.decoding.hosts import partition
from akunu_py.decoding.hosts.passes import (
    MESSAGE_LENGTH,
    CacheMismatch,
    Coordinator,
    HostCommand,
    PartitionRunner,
    encode,
    remaining_length,
)
from akunu_py.decoding.hosts.passes import decode as decoded
from akunu_py.decoding.prompt_cache.memory import PromptCaches
from akunu_py.decoding.target import Target
from akunu_py.ngram.auto import AutoDrafter
from akunu_py.ngram.fixed import NoDrafter
from tests.support.decoding import decode
from tests.support.families import build, families_of_each_kind
from tests.support.targets import Timeless, answer, fresh, read, some
from tests.support.tiny import VOCABULARY

_COMMANDS = st.lists(st.tuples(*[st.integers(0, 1 << 30)] * 4), max_size=80)
_QUICK = ("llama", "llama-sliding", "llama4", "deepseek_v41", "qwen3_next")
_TOKENS = st.lists(st.integers(0, 200_000), max_size=600)


@pytest.mark.long
@given(_COMMANDS, _TOKENS)
def test_a_decoded_message_equals_the_encoded_one(
    commands: list[tuple[int, ...]], tokens: list[int]
) -> None:
    parts = [part.tolist() for part in encode(commands, mx.array(tokens, mx.int32))]
    assert len(parts[0]) == MESSAGE_LENGTH
    assert remaining_length(parts[0]) == sum(len(part) for part in parts[1:])
    assert decoded([each for part in parts for each in part]) == (commands, tokens)


class _Pair:
    """A model as rank 0 has it, and a worker with the same model, in one process."""

    def __init__(self, model: Any, stand_ins: Any = ()) -> None:
        self.sent: deque[list[int]] = deque()
        self.coordinator = Coordinator(
            model,
            list(stand_ins),
            lambda part: self.sent.append(part.tolist()),
            lambda: None,
            lambda: None,
        )
        self.worker = PartitionRunner(model, list(stand_ins), self._receive)

    def _receive(self, length: int) -> list[int]:
        part = self.sent.popleft()
        assert len(part) == length
        return part

    def assert_alike(self) -> None:
        gc.collect()
        self.coordinator.queue(HostCommand.IDLE)  # with the commands since the last pass
        self.coordinator._send(None)
        self.coordinator._idle = True
        self.worker.run_until_idle()
        assert not self.sent
        assert set(self.coordinator.caches) == set(self.worker._caches)
        for key, cache in self.coordinator.caches.items():
            other = self.worker._caches[key]
            assert kv_cache.row_count(cache) == kv_cache.row_count(other)
            for here, there in zip(
                kv_cache.state_arrays(cache), kv_cache.state_arrays(other), strict=True
            ):
                assert mx.array_equal(here, there), key
        assert self.worker.counts.checkpoints == len(self.coordinator._checkpoints)


@pytest.mark.long
@families_of_each_kind("llama-kv8", "llama-kv4", quick=_QUICK)
def test_workers_cache_the_same_as_rank_0(name: str) -> None:
    """Answers roll back often; prompts share prefixes, so histories are cut, copied and cached."""
    pair = _Pair(build(name))
    target = Target(pair.coordinator, caches=PromptCaches(limit=1 << 30))
    first = some(90, 1)
    for prompt in ([*first, *some(150, 2)], [*first, *some(9, 3)], first[:70], first):
        truth = fresh(name, prompt, 12)
        target.reuse_prefix(prompt)
        assert answer(target, prompt, truth, 12) == truth
        pair.assert_alike()
    target.history.shorten(1)
    pair.assert_alike()
    del target
    pair.assert_alike()
    assert not pair.worker._caches


@pytest.mark.long
def test_each_pass_needs_one_message() -> None:
    prompt, count = some(30, 1), 120
    truth: list[int] = []
    drafter: Any
    for drafter, most in ((NoDrafter(), 1.0), (AutoDrafter(), 0.2)):
        pair = _Pair(build("llama"))
        target = Timeless(pair.coordinator)
        target.reuse_prefix(prompt)
        read(target)
        text = [token if at % 40 else (token + 1) % VOCABULARY for at, token in enumerate(truth)]
        drafter.extend([*text, *prompt])
        before = pair.coordinator.messages
        pieces = list(decode(target, drafter, count, ()))
        tokens = [token for piece in pieces for token in piece.tokens]
        truth = truth or tokens
        assert tokens == truth
        assert len(pieces) <= pair.coordinator.messages - before <= most * count
        pair.assert_alike()


def test_a_worker_reports_a_cache_mismatch() -> None:
    pair = _Pair(build("llama"))
    cache = pair.coordinator.make_cache()
    pair.coordinator(mx.array([some(4, 1)]), cache)
    kv_cache._trim_all(cache, 1)  # without a message to the worker
    pair.coordinator(mx.array([some(4, 1)]), cache)
    with pytest.raises(CacheMismatch, match="holds 4 tokens, that of rank 0 3"):
        pair.worker.run_until_idle()


@pytest.mark.parametrize("name", ["qwen3_next", "gear", "llama-sliding", "llama4"])
def test_all_ranks_agree_on_what_can_be_rolled_back(name: str) -> None:
    """A rank with attention layers only, another with the layers that return to checkpoints."""
    model = build(name)
    whole = kv_cache.new_cache(model)
    rows = mx.array([some(70, 1)])
    model(rows, cache=whole)
    for own in ([0], [1], [len(whole) - 1]):
        held = {partition._kind_of_entry(whole[at]) for at in own}
        missing = [e for e in kv_cache.new_cache(model) if partition._kind_of_entry(e) not in held]
        part = kv_cache.SharedCache([whole[at] for at in own], missing)
        part.write_stand_ins(70)
        assert kv_cache.is_recurrent(part) == kv_cache.is_recurrent(whole)
        assert kv_cache.needs_checkpoints(part) == kv_cache.needs_checkpoints(whole)
        for count in (0, 1, 30, 70):
            assert kv_cache.can_trim(part, count) == kv_cache.can_trim(whole, count), count
