"""The download process: parallel files, Xet, and exits of the process or its parent."""

import json
import os
import random
import subprocess
import sys
from collections import deque
from hashlib import sha256
from pathlib import Path

import pytest
from huggingface_hub import constants

from akunu_py.errors import Cancelled, FetchError
from akunu_py.models.pull import pull as pull_module
from akunu_py.models.pull.pull import pull
from akunu_py.models.store import model_store
from akunu_py.models.store.progress import Progress
from tests.support.command import run_here, until
from tests.support.hosts import all_gone, workers
from tests.support.hub_home import NAME, WEIGHTS, everything, partials
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Fault, Hub
from tests.support.paths import ROOT

WORKER = "akunu_py.models.pull.worker"
_LARGE = [f"mtp-{number}.safetensors" for number in range(6)]


def _add_large_files(server: Hub) -> None:
    size = 300_000
    for number, name in enumerate(_LARGE):
        tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
        header = json.dumps({f"unused.{number}": tensor}).encode()
        content = random.Random(number).randbytes(size)
        server.files[name] = len(header).to_bytes(8, "little") + header + content


@pytest.mark.long
def test_files_are_fetched_at_once(server: Hub) -> None:
    _add_large_files(server)
    server.faults |= {name: deque([Fault(together=6)]) for name in _LARGE}
    model_store.verify(pull(REPOSITORY))
    assert server.most_sending >= 6


@pytest.mark.long
def test_xet_is_used_where_the_repository_has_it(server: Hub, tmp_path: Path) -> None:
    _upload_to_xet(server, tmp_path)
    seen: list[Progress] = []
    model_store.verify(pull(REPOSITORY, seen.append))
    assert server.requested(WEIGHTS) == []
    last = [each for each in seen if each.phase == "download"][-1]
    assert last.done == last.total


def _upload_to_xet(server: Hub, tmp_path: Path) -> None:
    from hf_xet import XetSession  # type: ignore[import-untyped]

    server.xet_storage = f"local://{tmp_path / 'xet'}"
    (tmp_path / "xet").mkdir()
    session = XetSession()
    with session.new_upload_commit(
        endpoint=server.xet_storage, token="token", token_expiry_unix_secs=99999999999
    ) as commit:
        upload = commit.start_upload_bytes(server.files[WEIGHTS], name=WEIGHTS)
    server.xet[WEIGHTS] = upload.result().xet_info.hash


@pytest.mark.long
def test_cancelled_pull_keeps_received_bytes(server: Hub, home: Path) -> None:
    """Finished files are not fetched again; partial files are continued."""
    _add_large_files(server)
    server.rate = 200_000

    def on_progress(progress: Progress) -> None:
        if progress.phase == "download" and progress.share > 0.6:
            raise Cancelled

    with pytest.raises(Cancelled):
        pull(REPOSITORY, on_progress)
    assert workers(os.getpid(), WORKER) == []
    assert model_store.list_models() == []
    kept = everything(home / "hub")
    digests = {name: sha256(server.files[name]).hexdigest() for name in _LARGE}
    finished = {name for name in _LARGE if digests[name] in kept}
    begun = {path.name.partition(".")[0]: path.stat().st_size for path in partials(home)}
    assert finished or any(begun.values())
    server.requests.clear()
    server.rate = 0.0
    model_store.verify(pull(REPOSITORY))
    requested = {name: wanted for name, wanted, _ in server.requests if name in _LARGE}
    assert not set(requested) & finished
    assert all(wanted for name, wanted in requested.items() if begun.get(digests[name]))
    assert partials(home) == []


@pytest.mark.long
def test_the_worker_ends_with_a_killed_parent(server: Hub, home: Path) -> None:
    server.faults[WEIGHTS].append(Fault(pause=0.5))
    command = [sys.executable, "-m", "akunu_py", "models", "pull", REPOSITORY]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        until(lambda: workers(process.pid, WORKER))
        found = workers(process.pid, WORKER)
        process.kill()
    assert all_gone(found, 60)
    server.faults.clear()
    assert pull(REPOSITORY).name == NAME


@pytest.mark.long
def test_hub_that_ignores_ranges_and_cuts_at_the_same_place_is_given_up(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_module, "_STALLED_S", 2.5)
    monkeypatch.setattr(pull_module, "_ATTEMPTS", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    server.faults[WEIGHTS].extend([Fault(cut=30_000, no_range=True)] * 100)
    with pytest.raises(FetchError, match=r"stalled.*2 tries brought less than 1 MiB"):
        pull(REPOSITORY)
    assert len(server.requested(WEIGHTS)) < 10
    server.faults.clear()
    monkeypatch.setattr(pull_module, "_STALLED_S", 60.0)
    assert pull(REPOSITORY)
    assert server.requested(WEIGHTS)[-1] == "bytes=30000-"


def test_a_worker_that_cannot_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(FetchError, match="the download process ended"):
        pull(REPOSITORY)


_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = gone.local ] && echo "ssh: connect to host gone.local: Connection refused" >&2 && exit 255
export XDG_DATA_HOME={home}/$1/data HF_HUB_CACHE={home}/$1/hub
echo Welcome to $1
exec sh -c "$2"
"""


def _hosts(home: Path, *names: str, **env: str) -> list[str]:
    hosts = [{"ssh": name, "ips": ["10.0.0.1"]} for name in ("here.local", *names)]
    envs = [f"{name}={value}" for name, value in env.items()]
    (home / "hosts.json").write_text(json.dumps({"hosts": hosts, "envs": envs}))
    return ["models", "pull", REPOSITORY, "--hosts", str(home / "hosts.json")]


@pytest.mark.e2e
def test_model_is_pulled_on_other_hosts_and_compared(
    server: Hub, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "bin").mkdir()
    (home / "bin" / "ssh").write_text(_SSH.format(home=home))
    (home / "bin" / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = run_here(*_hosts(home, "b.local", "gone.local", HF_ENDPOINT=server.url))
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert last == (
        "akunu: gone.local: cannot be reached: ssh: connect to host gone.local: Connection refused"
    )
    assert f"b.local has the same files of {NAME}" in done.stderr
    assert "b.local: download ..." in done.stderr
    (there,) = (home / "b.local").rglob(f"snapshots/{server.commit}")
    weights = (there / WEIGHTS).resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    done = run_here(*_hosts(home, "b.local", HF_ENDPOINT=server.url))
    assert done.returncode == 1
    assert f"b.local: model {NAME!r} is damaged: {WEIGHTS} was altered" in done.stderr
