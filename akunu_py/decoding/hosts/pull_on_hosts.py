"""Download a model on the other hosts of a hostfile, over SSH."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO

from akunu_py.decoding.hosts.hostfile import LOCALHOST, SSH_FAILED, Hosts
from akunu_py.errors import FetchError, one_line
from akunu_py.models.pull.remote import LINE_PREFIX
from akunu_py.models.store.model_store import StoredModel
from akunu_py.models.store.progress import ProgressCallback
from akunu_py.text import say

# Never asks for a password, and detects a lost network within a minute.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_COMMAND_NOT_FOUND = (126, 127)  # exit codes of a shell


def pull_on_hosts(hosts: Hosts, model: StoredModel, progress: ProgressCallback) -> None:
    """Download `model` on the other hosts in turn, as they share a network, and compare hashes.

    Raises FetchError, which names the hosts that failed, with the reasons.
    """
    others = [name for name in dict.fromkeys(hosts.names[1:]) if name != LOCALHOST]
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
    """Download the model on `host` over SSH, and compare its files with those here."""
    assert model.manifest is not None
    reference = f"{model.repository}@{model.commit}" if model.repository else model.name
    request = {"reference": reference, "name": model.name if model.repository else None}
    python = env.get("AKUNU_PYTHON", sys.executable)
    environment = [f"{name}={value}" for name, value in env.items()]
    command = [python, "-P", "-m", "akunu_py.models.pull.remote", json.dumps(request)]
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [*_SSH, host, shlex.join(["env", *environment, *command])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        try:
            remote = _follow(process, lambda phase, *n: progress(f"{host}: {phase}", *n))
            code = process.wait()
        finally:
            process.kill()  # the remote process ends when its stdin closes
        if remote is None:
            errors.seek(0)
            raise FetchError(_failure_reason(code, python, errors))
    local = {name: record.sha256 for name, record in model.manifest.files.items()}
    if differing := sorted(name for name in local | remote if local.get(name) != remote.get(name)):
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
        if not text.startswith(LINE_PREFIX):
            continue
        message = json.loads(text.removeprefix(LINE_PREFIX))
        if "progress" in message:
            progress(*message["progress"])
        if "error" in message:
            raise FetchError(message["error"])
        if "files" in message:
            return dict(message["files"])
    return None


def _failure_reason(code: int, python: str, errors: IO[bytes]) -> str:
    """Return why the remote process failed."""
    lines = errors.read().decode(errors="replace").split("\n")
    message = one_line(next((line for line in reversed(lines) if line.strip()), f"code {code}"))
    if code == SSH_FAILED:
        return f"cannot be reached: {message}"
    if code in _COMMAND_NOT_FOUND or "No module named" in message:
        return (
            f"{python} has no akunu of this version ({message}); install it, or set AKUNU_PYTHON "
            "in the hostfile's envs"
        )
    return message
