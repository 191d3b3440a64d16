"""Values of `--hosts`, and which models can be split, before anything is started or loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from akunu_py.decoding.hosts import partition
from akunu_py.decoding.hosts.hostfile import read_hosts
from akunu_py.decoding.hosts.process import first_difference, host_fingerprint
from akunu_py.errors import UnsupportedModel, UsageError
from akunu_py.models.manifest import Manifest, record_files, write_manifest
from tests.support.command import assert_one_line_error, run_here
from tests.support.host_models import write_named
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


@pytest.mark.parametrize(
    "content",
    [
        "{",
        [],
        _TWO[:1],
        [{"ips": ["10.0.0.1"]}] * 2,
        [{"ssh": "a"}, {"ssh": "b"}],
        [{"ssh": "a", "ips": ["not an address"]}] * 2,
        [{"ssh": "-oProxyCommand=x", "ips": ["10.0.0.1"]}] * 2,
        {"backend": "mpi", "hosts": _TWO},
        {"envs": ["no value"], "hosts": _TWO},
    ],
)
def test_invalid_hostfiles_are_refused(tmp_path: Path, content: Any) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(str(file))


@pytest.mark.parametrize("given", ["0", "1", "65", "missing.json"])
def test_invalid_numbers_and_missing_files_are_refused(given: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        read_hosts(given)


def test_models_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    write_named(tmp_path, "llama")
    assert (
        partition.choose_split(tmp_path, "tiny", 2)
        == partition.choose_split(tmp_path, "tiny", 4)
        == "shard"
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_key_value_heads"] == 4
    with pytest.raises(
        UnsupportedModel, match="heads do not divide by 3; mlx-lm does not pipeline"
    ):
        partition.choose_split(tmp_path, "tiny", 3)
    done = run_here("run", "--raw", "--hosts", "3", "--model", str(tmp_path), "1 2")
    assert done.returncode == 1
    assert "cannot be divided among 3 hosts" in done.stderr


def test_models_with_indivisible_heads_are_pipelined(tmp_path: Path) -> None:
    write_named(tmp_path, "qwen2")
    assert partition.choose_split(tmp_path, "tiny", 2) == "shard"
    assert partition.choose_split(tmp_path, "tiny", 3) == "pipeline"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("echo No route >&2; exit 255", "cannot be reached: No route"),
        ("echo id; kill -9 $$", "was killed by SIGKILL"),
        ("echo id; exit 255", "was killed, or the network is gone"),
        ("echo id; echo .; echo No module x; exit 1", "ended with code 1: No module x"),
    ],
)
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
    before = host_fingerprint(tmp_path)
    assert first_difference(before, host_fingerprint(tmp_path)) == ""
    (tmp_path / "akunu.json").write_text("{}")
    assert first_difference(before, host_fingerprint(tmp_path)) == ""
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "the model's files" in first_difference(before, host_fingerprint(tmp_path))
    assert "akunu: 1 here, 2 there" in first_difference({"akunu": "1"}, {"akunu": "2"})


def test_fingerprints_of_large_files_use_recorded_hashes(tmp_path: Path) -> None:
    found = []
    for byte in (0, 1):
        weights = bytearray(5 << 20)
        weights[70_000] = byte  # outside the sampled pieces
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.append(host_fingerprint(tmp_path))
        facts = {"source": "", "context_length": 1, "parameters": 1, "quantization": ""}
        manifest = Manifest(name="x", created="", files=record_files(tmp_path), **facts)  # type: ignore[arg-type]
        write_manifest(tmp_path, manifest)
        found.append(host_fingerprint(tmp_path))
        (tmp_path / "akunu.json").unlink()
    assert first_difference(found[0], found[2]) == ""
    assert "the model's files" in first_difference(found[1], found[3])
