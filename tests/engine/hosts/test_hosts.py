"""Several hosts in one process: hostfiles, splits, fingerprints, and the messages of rank 0."""

import gc
import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from akunu_py.engine import kv_cache
from akunu_py.engine.histories.memory import PromptCaches
from akunu_py.engine.hosts import partition, passes
from akunu_py.engine.hosts.hostfile import read_hosts
from akunu_py.engine.hosts.passes import MESSAGE_LENGTH, Coordinator, PartitionRunner
from akunu_py.engine.hosts.process import first_difference, host_fingerprint
from akunu_py.engine.target import Target
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.models.store.model_store import StoredModel
from tests.support.command import assert_one_line_error, run_here
from tests.support.families import build, families_of_each_kind
from tests.support.hosts import write_named
from tests.support.targets import answer, fresh, some
from tests.support.tiny import write_tiny_llama

_TWO = [{"ssh": "a.local", "ips": ["10.0.0.1"]}, {"ssh": "b.local", "ips": ["10.0.0.2"]}]


def test_local_processes_bind_to_loopback_only() -> None:
    hosts = read_hosts("3")
    nodes = json.loads(hosts.files["MLX_HOSTFILE"])
    assert hosts.names == ("127.0.0.1",) * 3
    assert len({node for each in nodes for node in each}) == 3
    assert all(node.startswith("127.0.0.1:") for each in nodes for node in each)


def test_hostfile_addresses_get_ports(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps({"backend": "ring", "envs": ["A=b=c"], "hosts": _TWO}))
    hosts = read_hosts(str(file))
    assert json.loads(hosts.files["MLX_HOSTFILE"]) == [["10.0.0.1:32323"], ["10.0.0.2:32324"]]
    assert hosts.env == {"A": "b=c"}
    rdma = [[None, "rdma_en2"], ["rdma_en2", None]]
    jaccl = [each | {"rdma": way} for each, way in zip(_TWO, rdma, strict=True)]
    file.write_text(json.dumps({"backend": "jaccl", "hosts": jaccl}))
    hosts = read_hosts(str(file))
    assert json.loads(hosts.files["MLX_IBV_DEVICES"]) == rdma
    assert hosts.env["MLX_JACCL_COORDINATOR"].startswith("10.0.0.1:")


@pytest.mark.parametrize("content", [
    None, "{", _TWO[:1], [{"ips": ["10.0.0.1"]}] * 2, [{"ssh": "a"}, {"ssh": "b"}],
    [{"ssh": "a", "ips": ["not an address"]}] * 2,
    [{"ssh": "-oProxyCommand=x", "ips": ["10.0.0.1"]}] * 2, {"backend": "mpi", "hosts": _TWO},
    {"envs": ["no value"], "hosts": _TWO},
])  # fmt: skip
def test_invalid_hosts_are_refused(tmp_path: Path, content: Any) -> None:
    """Without content, the value of --hosts is a number or a missing file."""
    file = tmp_path / "hosts.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    for value in ["0", "1", "65", str(file)] if content is None else [str(file)]:
        with pytest.raises(UsageError, match="--hosts"):
            read_hosts(value)


def test_the_split_follows_the_number_of_heads(tmp_path: Path) -> None:
    for name in ("llama", "qwen2"):
        (tmp_path / name).mkdir()
        write_named(tmp_path / name, name)
        for size in (2, 4):
            assert partition.choose_split(tmp_path / name, "tiny", size) == "shard"
    assert partition.choose_split(tmp_path / "qwen2", "tiny", 3) == "pipeline"
    with pytest.raises(UnsupportedModel, match="do not divide by 3; mlx-lm does not pipeline"):
        partition.choose_split(tmp_path / "llama", "tiny", 3)
    done = run_here("run", "--raw", "--hosts", "3", "--model", str(tmp_path / "llama"), "1 2")
    assert_one_line_error(done, 1, "cannot be divided among 3 hosts")


@pytest.mark.parametrize(("last", "why"), [
    ("echo No route >&2; exit 255", "cannot be reached: No route"),
    ("echo id; kill -9 $$", "was killed by SIGKILL"),
    ("echo id; exit 255", "was killed, or the network is gone"),
    ("echo id; echo .; echo No module x; exit 1", "ended with code 1: No module x"),
])  # fmt: skip
def test_errors_name_the_failed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str, why: str
) -> None:
    (tmp_path / "ssh").write_text(f"#!/bin/sh\n{last}\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "hosts.json").write_text(json.dumps({"hosts": _TWO}))
    write_named(tmp_path, "llama")
    options = ["--hosts", str(tmp_path / "hosts.json"), "--model", str(tmp_path)]
    done = run_here("run", "--raw", *options, "1 2")
    assert_one_line_error(done, 1, f"rank 1 on b.local {why}")


def test_options_that_hosts_exclude(tmp_path: Path) -> None:
    write_named(tmp_path, "llama")
    options = ["--kv-bits 8", "--draft-model x", "--draft mtp", "--draft model", "--draft exit"]
    commands = [f"run --raw {option} 1" for option in (*options, "--prompt-cache y")]
    commands += [f"serve {option}" for option in options]
    for command in commands:
        name, *more = command.split()
        done = run_here(name, "--hosts", "2", "--model", str(tmp_path), *more)
        assert done.returncode == 2
        assert "cannot be combined with --hosts" in done.stderr
        assert "holds" not in done.stderr


def test_fingerprints_differ_with_model_files(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    model = StoredModel("x", tmp_path)
    before = host_fingerprint(model)
    assert first_difference(before, host_fingerprint(model)) == ""
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "the model's files" in first_difference(before, host_fingerprint(model))
    assert "akunu: 1 here, 2 there" in first_difference({"akunu": "1"}, {"akunu": "2"})


_QUICK = ("llama", "llama-sliding", "llama4", "deepseek_v41", "qwen3_next")


@given(
    st.lists(st.tuples(*[st.integers(0, 1 << 30)] * 4), max_size=80),
    st.lists(st.integers(0, 200_000), max_size=600),
)
def test_a_decoded_message_equals_the_encoded_one(
    commands: list[tuple[int, ...]], tokens: list[int]
) -> None:
    parts = [part.tolist() for part in passes.encode(commands, mx.array(tokens, mx.int32))]
    assert len(parts[0]) == MESSAGE_LENGTH
    assert passes.remaining_length(parts[0]) == sum(len(part) for part in parts[1:])
    assert passes.decode([each for part in parts for each in part]) == (commands, tokens)


class _Pair:
    """A model as rank 0 has it, and a worker with the same model, in one process."""

    def __init__(self, model: Any) -> None:
        self.sent: deque[list[int]] = deque()
        self.coordinator = Coordinator(
            model, [], lambda part: self.sent.append(part.tolist()), lambda: None, lambda: None
        )
        self.worker = PartitionRunner(model, [], self._receive)

    def _receive(self, length: int) -> list[int]:
        part = self.sent.popleft()
        assert len(part) == length
        return part

    def assert_alike(self) -> None:
        gc.collect()
        # A pass, so that the commands since the last one are sent, too.
        self.coordinator(mx.array([[1]]), self.coordinator.make_cache())
        gc.collect()
        self.coordinator.pause_workers()
        self.worker.run_until_idle()
        assert not self.sent
        assert set(self.coordinator.caches) == set(self.worker.caches)
        for key, cache in self.coordinator.caches.items():
            other = self.worker.caches[key]
            assert kv_cache.row_count(cache) == kv_cache.row_count(other)
            for here, there in zip(
                kv_cache.state_arrays(cache), kv_cache.state_arrays(other), strict=True
            ):
                assert mx.array_equal(here, there), key
        assert len(self.worker.checkpoints) == len(self.coordinator.checkpoints)


@pytest.mark.long
@families_of_each_kind("llama-kv8", "llama-kv4", quick=_QUICK)
def test_workers_cache_the_same_as_rank_0(name: str) -> None:
    """Answers roll back often; prompts share prefixes, so histories are cut, copied and cached."""
    pair = _Pair(build(name))
    target = Target(pair.coordinator, caches=PromptCaches(limit=1 << 30))
    first = some(90, 1)
    for prompt in ([*first, *some(70, 2)], [*first, *some(9, 3)], first[:70], first):
        truth = fresh(name, prompt, 12)
        target.reuse_prefix(prompt)
        assert answer(target, prompt, truth, 12) == truth
        pair.assert_alike()
    target.history.shorten(1)
    pair.assert_alike()
    del target
    pair.assert_alike()
    assert not pair.worker.caches


def test_a_worker_reports_a_cache_mismatch() -> None:
    pair = _Pair(build("llama"))
    cache = pair.coordinator.make_cache()
    pair.coordinator(mx.array([some(4, 1)]), cache)
    kv_cache.trim(cache.own, 1)  # without a message to the worker
    pair.coordinator(mx.array([some(4, 1)]), cache)
    assert len(pair.sent) == 2  # one message a pass
    with pytest.raises(RuntimeError, match="holds 4 tokens, that of rank 0 3"):
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
