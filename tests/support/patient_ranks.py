"""Ranks whose connections block: `python -m tests.support.patient_ranks JSON` is a follower so.

The threads of MLX's ring ask their sockets again and again until something comes. Where there are
more ranks than cores each of them takes the time of the one that it waits for. What is sent, and in
which order, stays the same.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from mlx._distributed_utils.launch import RemoteProcess

from akunu_py.decoding.hosts import host_group, partition, partition_worker, process

_ROOT = Path(__file__).parents[2]


@contextmanager
def patient_ranks() -> Iterator[None]:
    """In here, rings that this process makes have them; all ranks."""

    def start(*args: Any) -> Any:
        *others, command = args
        return RemoteProcess(
            *others, [each if each != partition_worker.__name__ else __name__ for each in command]
        )

    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    with (
        mock.patch.dict(os.environ, PYTHONPATH=path),
        mock.patch.object(process, "RemoteProcess", start),
        mock.patch.object(host_group, "connect", _connect),
    ):
        yield


def _connect(backend: str, others: Sequence[int]) -> Any:
    group = _impatient(backend, others)
    for fd in [int(each) for each in os.listdir("/dev/fd")]:
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                connection.getpeername()
                if connection.family == socket.AF_INET:
                    os.set_blocking(fd, True)
        except OSError:  # no socket, or one without a peer
            continue
    return group


_impatient = partition.connect

if __name__ == "__main__":
    sys.modules["tests.support.patient_ranks"] = sys.modules[__name__]
    with mock.patch.object(partition, "connect", _connect):
        partition_worker.main()
