"""`akunu models pull --hosts`: download the same revision of a model on other hosts."""

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

# Never asks for a password, and detects a lost network within a minute.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_NO_PROGRAM = (126, 127)  # exit codes of a shell


def pull_on_hosts(hosts: Hosts, model: StoredModel, progress: ProgressCallback) -> None:
    """Download `model` on the other hosts in turn, as they share a network, and compare hashes.

    Raises FetchError, which names the hosts that failed, with the reasons.
    """
    others = [name for name in dict.fromkeys(hosts.names[1:]) if name != HERE]
    if not others:
        say("all hosts are this machine; nothing to download", error=True)
    failures = []
    for host in others:
        try:
            _pull_on(host, hosts.env, model, progress)
        except FetchError as error:
            failures.append(f"{host}: {error}")
        else:
            say(f"{host} has the same files of {model.name}", error=True)
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
            process.kill()  # the remote process ends when its stdin closes
        if there is None:
            errors.seek(0)
            raise FetchError(_why(code, python, errors))
    here = {name: record.sha256 for name, record in model.manifest.files.items()}
    if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
        raise FetchError(
            f"{differing[0]} differs from the file on this host; run on both: akunu models verify "
            f"{model.name}"
        )


def _follow(
    process: subprocess.Popen[bytes], progress: Callable[[str, int, int], None]
) -> dict[str, str] | None:
    """Return the hashes by file name, or None if the process reported none. Raises FetchError."""
    assert process.stdout is not None
    for line in process.stdout:
        text = line.decode(errors="replace").strip()
        if not text.startswith(SIGN):
            continue
        message = json.loads(text.removeprefix(SIGN))
        if "progress" in message:
            progress(*message["progress"])
        if "error" in message:
            raise FetchError(message["error"])
        if "files" in message:
            return dict(message["files"])
    return None


def _why(code: int, python: str, errors: IO[bytes]) -> str:
    """Return why the remote process failed."""
    lines = errors.read().decode(errors="replace").split("\n")
    said = one_line(next((line for line in reversed(lines) if line.strip()), f"code {code}"))
    if code == NOT_REACHED:
        return f"cannot be reached: {said}"
    if code in _NO_PROGRAM or "No module named" in said:
        return (
            f"{python} has no akunu of this version ({said}); install it, or set AKUNU_PYTHON in "
            "the hostfile's envs"
        )
    return said
