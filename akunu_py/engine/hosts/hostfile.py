"""The hosts of a distributed model (`--hosts`), and pulls on the other hosts over SSH."""

import contextlib
import ipaddress
import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from akunu_py.errors import FetchError, UsageError, one_line
from akunu_py.models.store.model_store import StoredModel
from akunu_py.text import say

LOCALHOST = "127.0.0.1"  # mlx.launch starts processes of this host without ssh
SSH_FAILED = 255  # ssh's exit code, also if a signal killed the remote command
MAX_HOSTS = 64
_FIRST_PORT = 32323  # of mlx.launch
_BACKENDS = ("ring", "jaccl", "jaccl-ring")
# Never asks for a password, and detects a lost network within a minute.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_COMMAND_NOT_FOUND = (126, 127)  # exit codes of a shell


@dataclass(frozen=True, slots=True)
class Hosts:
    """All hosts by rank."""

    names: tuple[str, ...]  # by rank, as ssh knows them; the first is this machine
    backend: str  # of mx.distributed
    files: dict[str, str]  # contents by the variable that names the file
    env: dict[str, str]  # of all processes

    @property
    def size(self) -> int:
        return len(self.names)

    def label(self, rank: int) -> str:
        return f"rank {rank} on {self.names[rank]}"


def read_hosts(option: str) -> Hosts:
    """Parse --hosts: a number of local processes, or a hostfile's path. Raises UsageError."""
    if option.isdecimal():
        count = int(option)
        if not 2 <= count <= MAX_HOSTS:
            raise UsageError(
                f"--hosts: expected 2 to {MAX_HOSTS} processes or a hostfile, got {option}"
            )
        return _over_ring([LOCALHOST] * count, [[LOCALHOST]] * count, {})
    return _read_hostfile(Path(option))


def _read_hostfile(path: Path) -> Hosts:
    """Parse a hostfile of mlx.launch. Raises UsageError."""
    from mlx._distributed_utils.common import Hostfile

    try:
        found = Hostfile.from_file(path)
        names = [host.ssh_hostname for host in found.hosts]
        addresses = [[str(ipaddress.ip_address(ip)) for ip in host.ips] for host in found.hosts]
        env = dict(each.split("=", maxsplit=1) for each in found.envs)
        backend = found.backend or "ring"
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise UsageError(f"--hosts: {path} is not a hostfile: {one_line(error)}") from error
    named = all(isinstance(name, str) and name for name in names)
    if not named or not 2 <= len(names) <= MAX_HOSTS:
        raise UsageError(f"--hosts: {path} names {len(names)} hosts, expected 2 to {MAX_HOSTS}")
    if any(name.startswith("-") for name in names):
        raise UsageError(f"--hosts: {path}: a host's name begins with a dash")
    if backend not in _BACKENDS:
        raise UsageError(
            f"--hosts: {path} requests the backend {backend!r:.40}, expected one of "
            f"{', '.join(_BACKENDS)}"
        )
    if not addresses[0] or (backend == "ring" and not all(addresses)):
        raise UsageError(f"--hosts: {path} gives no IP address for a host that needs one")
    if backend == "ring":
        return _over_ring(names, addresses, env)
    more = {"MLX_JACCL_COORDINATOR": f"{addresses[0][0]}:{_FIRST_PORT}"}
    if backend == "jaccl-ring":
        more["MLX_JACCL_RING"] = "1"
    devices = json.dumps([host.rdma for host in found.hosts])
    return Hosts(tuple(names), "jaccl", {"MLX_IBV_DEVICES": devices}, more | env)


def _over_ring(names: Sequence[str], ips: Sequence[Sequence[str]], env: dict[str, str]) -> Hosts:
    """Assign a port to each address as mlx.launch does; free ports on loopback."""
    count = sum(len(each) for each in ips)
    local = all(name == LOCALHOST for name in names)
    left = iter(_free_ports(count) if local else range(_FIRST_PORT, _FIRST_PORT + count))
    nodes = [[f"{ip}:{next(left)}" for ip in each] for each in ips]
    return Hosts(tuple(names), "ring", {"MLX_HOSTFILE": json.dumps(nodes)}, env)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]


def pull_on_hosts(hosts: Hosts, model: StoredModel) -> None:
    """Pull the same revision of `model` on each other host in turn. Raises FetchError."""
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
    message = last or f"code {code}"
    if code == SSH_FAILED:
        return f"cannot be reached: {message}"
    if code in _COMMAND_NOT_FOUND or "No module named" in message:
        return (
            f"{python} has no akunu of this version ({message}); install it, or set AKUNU_PYTHON "
            "in the hostfile's envs"
        )
    return message
