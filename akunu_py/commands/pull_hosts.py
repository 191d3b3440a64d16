"""`akunu models pull --hosts`: a model that is here, at the same revision on other hosts."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from akunu_py.decoding.hosts.hostfile import HERE, NOT_REACHED, Hosts
from akunu_py.errors import FetchError, one_line
from akunu_py.models.pull.there import SIGN
from akunu_py.models.store.progress import ProgressCallback
from akunu_py.models.store.store import StoredModel
from akunu_py.text import say

# Nobody is asked for a password; a network that is gone is noticed within a minute.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_NO_PROGRAM = (126, 127)  # a shell's


def pull_on_hosts(hosts: Hosts, model: StoredModel, progress: ProgressCallback) -> None:
    """Has each host but this one fetch `model` and check every byte, one after the other, as they
    share the way to the hub; then compares their files with those here.

    Raises FetchError, which names the hosts that have it not, and why.
    """
    others = [name for name in dict.fromkeys(hosts.names[1:]) if name != HERE]
    if not others:
        say("all hosts are this machine; nothing is to be fetched for them", error=True)
    failures = []
    for host in others:
        try:
            _pull_on(host, hosts.env, model, progress)
        except FetchError as error:
            failures.append(f"{host}: {error}")
        else:
            say(f"{host} has {model.name}, the same files as here", error=True)
    if failures:
        raise FetchError("; ".join(failures))


def _pull_on(
    host: str, env: dict[str, str], model: StoredModel, progress: ProgressCallback
) -> None:
    assert model.manifest is not None
    reference = f"{model.repository}@{model.commit}" if model.repository else model.name
    wanted = {"reference": reference, "name": model.name if model.repository else None}
    python = env.get("AKUNU_PYTHON", sys.executable)
    given = [f"{name}={value}" for name, value in env.items()]
    command = [python, "-P", "-m", "akunu_py.models.pull.there", json.dumps(wanted)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [*_SSH, host, shlex.join(["env", *given, *command])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        try:
            there = _follow(process, lambda phase, *n: progress(f"{host}: {phase}", *n))
            code = process.wait()
        finally:
            process.kill()  # the other side ends with its input
        if there is None:
            errors.seek(0)
            raise FetchError(_why(code, python, errors))
    here = {name: record.sha256 for name, record in model.manifest.files.items()}
    if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
        raise FetchError(
            f"{differing[0]} is not that of this host; run on both: akunu models verify "
            f"{model.name}"
        )


def _follow(
    process: subprocess.Popen[bytes], progress: Callable[[str, int, int], None]
) -> dict[str, str] | None:
    """The files that are there at the end; None where it ended without a word about them."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if not text.startswith(SIGN):
            continue
        told = json.loads(text.removeprefix(SIGN))
        if "progress" in told:
            progress(*told["progress"])
        if "error" in told:
            raise FetchError(told["error"])
        if "files" in told:
            return dict(told["files"])
    return None


def _why(code: int, python: str, errors: IO[bytes]) -> str:
    """Why there was no word of akunu's."""
    lines = errors.read().decode(errors="replace").split("\n")
    said = one_line(next((line for line in reversed(lines) if line.strip()), f"code {code}"))
    if code == NOT_REACHED:
        return f"cannot be reached: {said}"
    if code in _NO_PROGRAM or "No module named" in said:
        return (
            f"no akunu of this version for {python} there ({said}); install it, or name its "
            "Python: AKUNU_PYTHON in the hostfile's envs"
        )
    return said
