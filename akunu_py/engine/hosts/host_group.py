"""Start, load, watch and stop the other ranks of a model."""

import atexit
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from akunu_py.engine.hosts.hostfile import Hosts
from akunu_py.engine.hosts.partition import choose_split, connect, keep_partition
from akunu_py.engine.hosts.passes import Coordinator
from akunu_py.engine.hosts.process import RankProcess, first_difference, host_fingerprint
from akunu_py.engine.model import device
from akunu_py.errors import AkunuError, HostLost, UsageError, one_line
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.load.mlx_loader import open_directory
from akunu_py.models.store.model_store import StoredModel
from akunu_py.text import print_warnings
from akunu_py.types import LoadOptions, WeightMode
from akunu_py.workarounds.ring_output import drop_ring_lines

# All in seconds:
HEARTBEAT_TIMEOUT = 7.0  # without a heartbeat a rank counts as hung
_START_TIMEOUT = 60.0  # time limit for the first message
_POLL = 0.1  # polling interval
_SUSPENSION = 2.0  # a longer interval means that this process was suspended
_NOTICE_TIMEOUT = 2.0  # time for a waiting pass to notice a lost rank
_EXIT_TIMEOUT = 1.0  # grace period for ranks to exit
_RETRY_HINT = "the answer is correct so far; ask again"


class HostGroup:
    """The other ranks; this process is rank 0. They end with `close` or with this process."""

    def __init__(self, hosts: Hosts, stored: StoredModel, options: LoadOptions) -> None:
        """Start the processes. Raises UnsupportedModel, HostLost; UsageError if hosts differ."""
        # Called in a thread when a rank is lost, with whether the waiting pass ended; None: exit.
        self.on_lost: Callable[[HostLost, bool], None] | None = None
        self.hosts = hosts
        self.partitions: list[str] = []  # descriptions, by rank
        self.weights = _resolved_weights(stored.path, options.weights)
        self._stand_ins: list[Any] = []
        self._group: Any = None
        self._coordinator: Coordinator | None = None
        self._failure = ""
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self.split = choose_split(stored.path, stored.name, hosts.size)
        local = host_fingerprint(stored)
        self._processes: list[RankProcess] = []
        atexit.register(self.close)
        try:
            arguments = {
                "model": stored.reference,
                "split": self.split,
                "backend": hosts.backend,
                "files": list(hosts.files),
                "options": asdict(replace(options, weights=self.weights, kv_bits=None, reserved=0)),
            }
            for rank in range(1, hosts.size):
                self._processes.append(RankProcess(hosts, rank, arguments))
            for process in self._processes:
                remote = self._wait_for(process, "fingerprint")["fingerprint"]
                if differs := first_difference(local, remote):
                    raise UsageError(
                        f"{process.label} differs from this host: {differs}; "
                        "install the same akunu and the same model on all hosts"
                    )
            threading.Thread(target=self._watch, name="hosts", daemon=True).start()
            self._connect()
        except BaseException:
            self.close()
            raise

    def keep_partition(self, model: Any) -> int:
        """Keep only rank 0's partition of lazily loaded `model`; return its item size."""
        split = self.split, self._group, self.weights
        self._stand_ins, description, itemsize = keep_partition(model, *split)
        self.partitions.append(description)
        return itemsize

    def start(self, model: Any, context: int) -> tuple[Coordinator, int]:
        """Load the weights on all ranks; return the model and the context that fits on each."""
        for process in self._processes:
            reply = self._wait_for(process, "holds")
            self.partitions.append(reply["holds"])
            context = min(context, reply["context"])
        for process in self._processes:
            process.send(read=True)
        mx.eval(model.parameters())
        for process in self._processes:
            self._wait_for(process, "ready")
        self._coordinator = Coordinator(model, self._stand_ins, self._send, self._wake, self.check)
        return self._coordinator, context

    def check(self) -> None:
        """Raise HostLost if a rank is lost."""
        if self._failure:
            self._noticed.set()
            raise HostLost(f"{self._failure}; {_RETRY_HINT}")

    def explain(self, error: RuntimeError) -> AkunuError | None:
        """Return a HostLost if the loss of a host made a pass fail with `error`, else None."""
        # A hung rank counts as lost after `HEARTBEAT_TIMEOUT`.
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT + _NOTICE_TIMEOUT
        while not self._failure and "[ring]" in str(error) and time.monotonic() < deadline:
            time.sleep(_POLL)
        self._noticed.set()
        if self._failure or "[ring]" in str(error):
            lost = self._failure or f"the other hosts cannot be reached: {one_line(error)}"
            return HostLost(f"{lost}; {_RETRY_HINT}")
        return None

    def close(self) -> None:
        """Stop all other ranks."""
        atexit.unregister(self.close)
        self._closed.set()
        for process in self._processes:
            process.close()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for process in self._processes:
            if not process.wait(max(0.0, deadline - time.monotonic())):
                process.kill()
                process.wait(_EXIT_TIMEOUT)

    def _wait_for(self, process: RankProcess, key: str) -> dict[str, Any]:
        """Return a rank's next message with `key`. Raises HostLost."""
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            message = process.receive(_POLL)
            if message is not None and key in message:
                return message
            if message is None:
                self.check()
                if reason := process.exit_reason():
                    self._noticed.set()
                    raise HostLost(f"{process.label} {reason}")
                now = time.monotonic()
                if now > deadline and now - process.last_message_at > HEARTBEAT_TIMEOUT:
                    raise HostLost(f"{process.label} does not answer")

    def _connect(self) -> None:
        drop_ring_lines()
        os.environ.update(self.hosts.env)
        with tempfile.TemporaryDirectory() as directory:
            for name, content in self.hosts.files.items():
                path = Path(directory, name)
                path.write_text(content, "utf-8")
                os.environ[name] = str(path)
            os.environ["MLX_RANK"] = "0"
            for process in self._processes:
                process.send(connect=True)
            try:
                pids = [process.pid for process in self._processes]
                self._group = connect(self.hosts.backend, pids)
            except (RuntimeError, ValueError) as error:
                self.check()
                raise HostLost(f"the hosts cannot be connected: {one_line(error)}") from error

    def _send(self, part: mx.array) -> None:
        # Launched now, so that it precedes the pass's own messages.
        mx.async_eval(mx.distributed.all_sum(part, group=self._group))

    def _wake(self) -> None:
        for process in self._processes:
            process.send(wake=True)

    def _watch(self) -> None:
        """Kill all ranks if a rank ended or is silent, so that waiting passes raise."""
        last_poll = time.monotonic()
        while not self._closed.wait(_POLL):
            now = time.monotonic()
            if now - last_poll > _SUSPENSION:  # suspended, perhaps with the other ranks
                for process in self._processes:
                    process.last_message_at = now
            last_poll = now
            if failure := self._lost_rank():
                self._failure = failure
                for process in self._processes:
                    process.kill()
                self._report_loss()
                return

    def _report_loss(self) -> None:
        busy = self._group is None or (self._coordinator is not None and self._coordinator.busy)
        noticed = not busy or self._noticed.wait(_NOTICE_TIMEOUT)
        if self._closed.is_set():
            return
        lost = HostLost(f"{self._failure}; {_RETRY_HINT}")
        if self.on_lost is not None:
            self.on_lost(lost, noticed)
        elif not noticed:
            print_warnings([str(lost)])
            exit_without_teardown(1)

    def _lost_rank(self) -> str:
        now = time.monotonic()
        for process in self._processes:
            if reason := process.exit_reason():
                return f"{process.label} {reason}"
            if now - process.last_message_at > HEARTBEAT_TIMEOUT:
                return f"{process.label} sent nothing for {HEARTBEAT_TIMEOUT:.0f} seconds"
        return ""


def _resolved_weights(path: Path, weights: WeightMode) -> WeightMode:
    """Return the format of the weights, equal on all ranks."""
    plain = device.plain_format(open_directory(path).model, weights)
    if plain is None:
        return "keep"
    return "float32" if "float32" in str(plain) else "bfloat16"
