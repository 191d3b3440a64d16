"""Start, load, watch and stop the other ranks of a model."""

from __future__ import annotations

import atexit
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from akunu_py.decoding import device
from akunu_py.decoding.hosts import partition
from akunu_py.decoding.hosts.hostfile import Hosts
from akunu_py.decoding.hosts.partition import connect, take
from akunu_py.decoding.hosts.passes import Coordinator
from akunu_py.decoding.hosts.process import RankProcess, difference, likeness
from akunu_py.errors import AkunuError, HostLost, UsageError, one_line
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.load.mlx_loader import open_model
from akunu_py.models.store.model_store import StoredModel
from akunu_py.text import print_warnings
from akunu_py.types import LoadOptions, WeightMode
from akunu_py.workarounds.ring_output import drop_ring_lines

# All in seconds:
SILENCE = 7.0  # without a heartbeat a rank counts as hung
_START = 60.0  # time limit for the first message
_LOOK = 0.1  # polling interval
_PAUSE = 2.0  # a longer interval means that this process was suspended
_NOTICE = 2.0  # time for a waiting pass to notice a lost rank
_END = 1.0  # grace period for ranks to exit
_ASK_AGAIN = "the answer is correct so far; ask again"


class HostGroup:
    """The other ranks; this process is rank 0. They end with `close` or with this process."""

    def __init__(self, hosts: Hosts, found: StoredModel, options: LoadOptions) -> None:
        """Start and connect the processes.

        Raises UnsupportedModel if the model cannot be split, HostLost, and UsageError if hosts
        differ.
        """
        # Called in a thread when a rank is lost, with whether the waiting pass ended; None: exit.
        self.on_lost: Callable[[HostLost, bool], None] | None = None
        self.hosts = hosts
        self.holds: list[str] = []  # descriptions of the partitions
        self._path = found.path
        self.weights = _decided(found.path, options.weights)
        self._stand_ins: list[Any] = []
        self._group: Any = None
        self._leader: Coordinator | None = None
        self._failure = ""
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self.division = partition.choose(found.path, found.name, hosts.size)
        here = likeness(found.path)
        self._processes: list[RankProcess] = []
        atexit.register(self.close)
        try:
            arguments = self._arguments(found, options)
            for rank in range(1, hosts.size):
                self._processes.append(RankProcess(hosts, rank, arguments))
            for each in self._processes:
                self._compare(here, each)
            threading.Thread(target=self._watch, name="hosts", daemon=True).start()
            self._connect()
        except BaseException:
            self.close()
            raise

    def take_share(self, model: Any) -> int:
        """Keep rank 0's partition in lazily loaded `model`; see `device.convert_weights`."""
        self._stand_ins, holds, itemsize = take(model, self.division, self._group, self.weights)
        self.holds.append(holds)
        return itemsize

    def lead(self, model: Any, context: int) -> tuple[Coordinator, int]:
        """Have all ranks read their weights; return the distributed model and its context length.

        context: tokens that fit in this rank's memory.
        """
        for each in self._processes:
            share = self._answer(each, "holds")
            self.holds.append(share["holds"])
            context = min(context, share["context"])
        for each in self._processes:
            each.tell(read=True)
        mx.eval(model.parameters())
        for each in self._processes:
            self._answer(each, "ready")
        self._leader = Coordinator(model, self._stand_ins, self._send, self._wake, self.check)
        return self._leader, context

    @property
    def messages(self) -> int:
        """Number of messages sent by rank 0."""
        return self._leader.messages if self._leader else 0

    def counts(self) -> list[dict[str, Any]]:
        """Return the counters of each worker, once they rest."""
        return [self._answer(each, "counts") for each in self._processes]

    def as_dict(self) -> dict[str, Any]:
        """Return messages and counters after an answer, ready for JSON."""
        names = self.hosts.names
        ranks = [
            {"host": name, "holds": holds} for name, holds in zip(names, self.holds, strict=True)
        ]
        for rank, done in zip(ranks[1:], self.counts(), strict=True):
            rank |= done["counts"]
        return {"division": self.division, "messages": self.messages, "ranks": ranks}

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._processes]

    def check(self) -> None:
        """Raise HostLost if a rank is lost."""
        if self._failure:
            self._noticed.set()
            raise HostLost(f"{self._failure}; {_ASK_AGAIN}")

    def explain(self, error: RuntimeError) -> AkunuError | None:
        """Return the HostLost behind a failed pass, None if there is another reason."""
        ends = time.monotonic() + _NOTICE
        while not self._failure and "[ring]" in str(error) and time.monotonic() < ends:
            time.sleep(_LOOK)
        self._noticed.set()
        if self._failure or "[ring]" in str(error):
            lost = self._failure or f"the other hosts cannot be reached: {one_line(error)}"
            return HostLost(f"{lost}; {_ASK_AGAIN}")
        return None

    def close(self) -> None:
        """Stop all other ranks."""
        atexit.unregister(self.close)
        if self._closed.is_set():
            return
        self._closed.set()
        for each in self._processes:
            each.close()
        ends = time.monotonic() + _END
        for each in self._processes:
            if not each.wait(max(0.0, ends - time.monotonic())):
                each.kill()
                each.wait(_END)

    def _arguments(self, found: StoredModel, options: LoadOptions) -> dict[str, Any]:
        return {
            "model": found.name if found.manifest is not None else str(found.path.resolve()),
            "division": self.division,
            "backend": self.hosts.backend,
            "files": list(self.hosts.files),
            "weights": self.weights,
            "context": options.context,
            "force": options.force,
            "memory": options.memory_limit,
        }

    def _compare(self, here: dict[str, str], each: RankProcess) -> None:
        there = self._answer(each, "likeness")["likeness"]
        if differs := difference(here, there):
            raise UsageError(
                f"{each.label} differs from this host: {differs}; "
                "install the same akunu and the same model on all hosts"
            )

    def _answer(self, each: RankProcess, key: str) -> dict[str, Any]:
        """Return a rank's next message with `key`. Raises HostLost."""
        ends = time.monotonic() + _START
        while True:
            answer = each.take(_LOOK)
            if answer is not None and key in answer:
                return answer
            if answer is None:
                self.check()
                if how := each.ended():
                    self._noticed.set()
                    raise HostLost(f"{each.label} {how}")
                if time.monotonic() > ends and time.monotonic() - each.heard > SILENCE:
                    raise HostLost(f"{each.label} does not answer")

    def _connect(self) -> None:
        drop_ring_lines()
        os.environ.update(self.hosts.env)
        with tempfile.TemporaryDirectory() as directory:
            for name, content in self.hosts.files.items():
                path = Path(directory, name)
                path.write_text(content, "utf-8")
                os.environ[name] = str(path)
            os.environ["MLX_RANK"] = "0"
            for each in self._processes:
                each.tell(connect=True)
            try:
                self._group = connect(self.hosts.backend, self.pids)
            except (RuntimeError, ValueError) as error:
                self.check()
                raise HostLost(f"the hosts cannot be connected: {one_line(error)}") from error

    def _send(self, part: mx.array) -> None:
        # Launched now, so that it precedes the pass's own messages.
        mx.async_eval(mx.distributed.all_sum(part, group=self._group))

    def _wake(self) -> None:
        for each in self._processes:
            each.tell(wake=True)

    def _watch(self) -> None:
        """Kill all ranks if one ended or is silent, so that waiting passes raise."""
        looked = time.monotonic()
        while not self._closed.wait(_LOOK):
            now = time.monotonic()
            if now - looked > _PAUSE:  # suspended, perhaps with the other ranks
                for each in self._processes:
                    each.heard = now
            looked = now
            if found := self._lost():
                self._failure = found
                for each in self._processes:
                    each.kill()
                self._end_what_waits()
                return

    def _end_what_waits(self) -> None:
        busy = self._group is None or (self._leader is not None and self._leader.busy)
        told = not busy or self._noticed.wait(_NOTICE)
        if self._closed.is_set():
            return
        lost = HostLost(f"{self._failure}; {_ASK_AGAIN}")
        if self.on_lost is not None:
            self.on_lost(lost, told)
        elif not told:
            print_warnings([str(lost)])
            exit_without_teardown(1)

    def _lost(self) -> str:
        now = time.monotonic()
        for each in self._processes:
            if how := each.ended():
                return f"{each.label} {how}"
            if now - each.heard > SILENCE:
                return f"{each.label} sent nothing for {SILENCE:.0f} seconds"
        return ""


def _decided(path: Path, weights: WeightMode) -> WeightMode:
    """Return the format of the weights, equal on all ranks."""
    plain = device.plain_format(open_model(path).model, weights)
    if plain is None:
        return "keep"
    return "float32" if "float32" in str(plain) else "bfloat16"
