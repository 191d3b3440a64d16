"""The processes of a distributed model: `--hosts`, a number or an mlx.launch hostfile."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from akunu_py.errors import UsageError, one_line

LOCALHOST = "127.0.0.1"  # mlx.launch starts processes of this host without ssh
SSH_FAILED = 255  # ssh's exit code, also if a signal killed the remote command
MAX_HOSTS = 64
_FIRST_PORT = 32323  # of mlx.launch
_BACKENDS = ("ring", "jaccl", "jaccl-ring")


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
    return _over_jaccl(names, addresses[0][0], [host.rdma for host in found.hosts], backend, env)


def _over_ring(names: Sequence[str], ips: Sequence[Sequence[str]], env: dict[str, str]) -> Hosts:
    """Assign a port to each address as mlx.launch does; free ports on loopback."""
    count = sum(len(each) for each in ips)
    if all(name == LOCALHOST for name in names):
        ports = _free_ports(count)
    else:
        ports = list(range(_FIRST_PORT, _FIRST_PORT + count))
    left = iter(ports)
    nodes = [[f"{ip}:{next(left)}" for ip in each] for each in ips]
    return Hosts(tuple(names), "ring", {"MLX_HOSTFILE": json.dumps(nodes)}, env)


def _over_jaccl(
    names: Sequence[str], coordinator: str, rdma: list[Any], backend: str, env: dict[str, str]
) -> Hosts:
    more = {"MLX_JACCL_COORDINATOR": f"{coordinator}:{_FIRST_PORT}"}
    if backend == "jaccl-ring":
        more["MLX_JACCL_RING"] = "1"
    return Hosts(tuple(names), "jaccl", {"MLX_IBV_DEVICES": json.dumps(rdma)}, more | env)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [int(each.getsockname()[1]) for each in sockets]
