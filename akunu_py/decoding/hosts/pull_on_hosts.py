"""Pull a model on the other hosts of a hostfile, over SSH."""

from __future__ import annotations

import shlex
import subprocess
import sys

from akunu_py.decoding.hosts.hostfile import LOCALHOST, SSH_FAILED, Hosts
from akunu_py.errors import FetchError, one_line
from akunu_py.models.store.model_store import StoredModel
from akunu_py.text import say

# Never asks for a password, and detects a lost network within a minute.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_COMMAND_NOT_FOUND = (126, 127)  # exit codes of a shell


def pull_on_hosts(hosts: Hosts, model: StoredModel) -> None:
    """Pull the same revision of `model` on the other hosts in turn, as they share a network.

    Each host verifies the hashes. Raises FetchError with the hosts that failed and the reasons.
    """
    others = [name for name in dict.fromkeys(hosts.names[1:]) if name != LOCALHOST]
    if not others:
        say("all hosts are this machine; nothing to download", error=True)
    failures = []
    for host in others:
        if reason := _pull_on(host, hosts.env, model):
            failures.append(f"{host}: {reason}")
        else:
            say(f"{host} has the same files of {model.name}", error=True)
    if failures:
        raise FetchError("; ".join(failures))


def _pull_on(host: str, env: dict[str, str], model: StoredModel) -> str:
    """Pull and verify the model on `host`; return why that failed, "" if it did not."""
    python = env.get("AKUNU_PYTHON", sys.executable)
    variables = [f"{name}={value}" for name, value in env.items()]
    akunu = ["env", *variables, python, "-P", "-m", "akunu_py", "models"]
    what = [model.name]
    if model.repository:
        what = [f"{model.repository}@{model.commit}", "--name", model.name]
    commands = [*akunu, "pull", "--if-missing", *what], [*akunu, "verify", model.name]
    last = ""
    with subprocess.Popen(
        [*_SSH, host, " && ".join(map(shlex.join, commands))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in filter(None, map(str.strip, process.stderr)):
            last = one_line(line.removeprefix("akunu: "), 1000)
            say(f"{host}: {last}", error=True)
    return _failure_reason(process.returncode, python, last) if process.returncode else ""


def _failure_reason(code: int, python: str, last: str) -> str:
    """Return why the remote commands failed, by their exit code and last line on stderr."""
    message = last or f"code {code}"
    if code == SSH_FAILED:
        return f"cannot be reached: {message}"
    if code in _COMMAND_NOT_FOUND or "No module named" in message:
        return (
            f"{python} has no akunu of this version ({message}); install it, or set AKUNU_PYTHON "
            "in the hostfile's envs"
        )
    return message
