"""The other ranks of a model: started, loaded, watched, ended."""

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
from akunu_py.decoding.hosts import division
from akunu_py.decoding.hosts.division import connect, take
from akunu_py.decoding.hosts.hostfile import Hosts
from akunu_py.decoding.hosts.passes import Leader
from akunu_py.decoding.hosts.process import RankProcess, difference, likeness
from akunu_py.errors import AkunuError, HostLost, UsageError, one_line
from akunu_py.interrupts import exit_without_teardown
from akunu_py.models.load.mlx_loader import open_model
from akunu_py.models.store.store import StoredModel
from akunu_py.text import print_warnings
from akunu_py.types import LoadOptions, WeightMode
from akunu_py.workarounds.ring_output import drop_ring_lines

SILENCE = 7.0  # seconds without a sign of life, after which a rank is taken for hung
_START = 60.0  # seconds until a process must have said something
_LOOK = 0.1  # seconds between two looks at the processes
_PAUSE = 2.0  # seconds between two looks that say that we were asleep
_NOTICE = 2.0  # seconds that what waits for a rank that is gone may take to notice
_END = 1.0  # seconds that ranks may take to end by themselves
_ASK_AGAIN = "what was said until then is right; ask again"


class Ring:
    """The ranks beside this process, which is rank 0. `close` ends them, and so does the end of
    this process, whatever that is.

    hosts: all ranks. division: how the model is divided. weights: their format, one for all. holds:
    what each rank holds, in words. on_lost: called in a thread of its own when a rank is gone, with
    what is to be said of it, and whether the pass that waited for it ended; it may wait for ever.
    None ends the process then.
    """

    def __init__(self, hosts: Hosts, found: StoredModel, options: LoadOptions) -> None:
        """Starts the processes and connects them. Raises UnsupportedModel where the model cannot be
        divided, before that, HostLost, and UsageError where hosts differ."""
        self.on_lost: Callable[[HostLost, bool], None] | None = None
        self.hosts = hosts
        self.holds: list[str] = []
        self._path = found.path
        self.weights = _decided(found.path, options.weights)
        self._stand_ins: list[Any] = []
        self._group: Any = None
        self._leader: Leader | None = None
        self._failure = ""
        self._noticed = threading.Event()
        self._closed = threading.Event()
        self.division = division.choose(found.path, found.name, hosts.size)
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
        """Leave in `model`, lazily loaded, what this rank holds; see `device.convert_weights`."""
        self._stand_ins, holds, itemsize = take(model, self.division, self._group, self.weights)
        self.holds.append(holds)
        return itemsize

    def lead(self, model: Any, context: int) -> tuple[Leader, int]:
        """Have all ranks read their weights.

        context: tokens that there is memory for here. Returns what runs the model on all ranks, and
        the tokens that there is memory for everywhere.
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
        self._leader = Leader(model, self._stand_ins, self._send, self._wake, self.check)
        return self._leader, context

    @property
    def messages(self) -> int:
        """How many rank 0 has sent."""
        return self._leader.messages if self._leader else 0

    def counts(self) -> list[dict[str, Any]]:
        """What each rank but the first has done and holds, once they rest."""
        return [self._answer(each, "counts") for each in self._processes]

    def as_dict(self) -> dict[str, Any]:
        """What was sent, and what each rank has done, after an answer."""
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
        """Raises HostLost where a rank is gone."""
        if self._failure:
            self._noticed.set()
            raise HostLost(f"{self._failure}; {_ASK_AGAIN}")

    def explain(self, error: RuntimeError) -> AkunuError | None:
        """Why a pass failed, where that was another rank's end."""
        ends = time.monotonic() + _NOTICE
        while not self._failure and "[ring]" in str(error) and time.monotonic() < ends:
            time.sleep(_LOOK)
        self._noticed.set()
        if self._failure or "[ring]" in str(error):
            lost = self._failure or f"the other hosts cannot be reached: {one_line(error)}"
            return HostLost(f"{lost}; {_ASK_AGAIN}")
        return None

    def close(self) -> None:
        """Ends all other ranks."""
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
            "memory": options.memory,
        }

    def _compare(self, here: dict[str, str], each: RankProcess) -> None:
        there = self._answer(each, "likeness")["likeness"]
        if differs := difference(here, there):
            raise UsageError(
                f"{each.label} differs from this host: {differs}; "
                "have the same akunu and the same model on all of them"
            )

    def _answer(self, each: RankProcess, key: str) -> dict[str, Any]:
        """What a rank says next; raises HostLost where it says nothing more."""
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
        # At once, so that it goes before all that the pass itself sends.
        mx.async_eval(mx.distributed.all_sum(part, group=self._group))

    def _wake(self) -> None:
        for each in self._processes:
            each.tell(wake=True)

    def _watch(self) -> None:
        """Ends all ranks where one of them ended, or says nothing any more: whoever waits for it is
        told by mx.distributed then. Where that does not tell, the process ends."""
        looked = time.monotonic()
        while not self._closed.wait(_LOOK):
            now = time.monotonic()
            if now - looked > _PAUSE:  # this process was stopped, and the others perhaps with it
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
                return f"{each.label} was not heard of for {SILENCE:.0f} seconds"
        return ""


def _decided(path: Path, weights: WeightMode) -> WeightMode:
    """The format of the weights, which must be one everywhere."""
    plain = device.plain_format(open_model(path).model, weights)
    if plain is None:
        return "keep"
    return "float32" if "float32" in str(plain) else "bfloat16"
