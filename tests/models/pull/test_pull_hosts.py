"""`akunu models pull --hosts`: with an ssh that runs what it is told here, at home elsewhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.command import run_here
from tests.support.hub_home import NAME, WEIGHTS
from tests.support.hub_home import files as files  # fixtures
from tests.support.hub_home import home as home
from tests.support.hub_home import server as server
from tests.support.hub_server import REPOSITORY, Hub

_SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
[ "$1" = gone.local ] && echo "ssh: connect to host gone.local: Connection refused" >&2 && exit 255
export XDG_DATA_HOME={home}/$1/data HF_HOME={home}/$1/hf
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
    there = home / "b.local" / "data" / "akunu" / "models" / NAME
    assert json.loads((there / "akunu.json").read_text())["commit"] == server.commit

    weights = (there / WEIGHTS).resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(data)
    done = run_here(*_hosts(home, "b.local", HF_ENDPOINT=server.url))
    assert done.returncode == 1
    assert f"b.local: model {NAME!r} is damaged: {WEIGHTS} was altered" in done.stderr

    done = run_here(*_hosts(home, "b.local", AKUNU_PYTHON="/none/python"))
    assert done.returncode == 1
    assert "b.local: /none/python has no akunu of this version" in done.stderr
    assert "No such file" in done.stderr


def test_local_hosts_need_no_pull(home: Path) -> None:
    done = run_here(*_hosts(home, "127.0.0.1")[:-1], "3")
    assert done.returncode == 0, done.stderr
    assert "all hosts are this machine" in done.stderr
    assert run_here(*_hosts(home)).returncode == 2
